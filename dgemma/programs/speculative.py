"""Speculative AR: drafted tokens are verified by one causal pass of the same weights.

A draft comes from the text so far (prompt lookup: what followed the last tokens when they occurred
before) or from a canvas of a few denoising steps. One pass commits the draft and returns the
likeliest token at each position; the draft is kept up to the first token that the rule does not
accept, which is replaced by the likeliest one, and the KV cache is truncated there.

`strict` accepts the likeliest token alone, so the reply is that of greedy AR, token for token in
float32; in 16 bits a pass of several tokens may round ties differently. `loose` accepts a token
whose probability is at least min(0.09, 0.3 · the likeliest one's): the canvas decides among likely
tokens, and the causal mode only refuses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dgemma.backends.base import ForwardInput, ForwardOutput
from dgemma.diffusion.denoise import CanvasState
from dgemma.engine.canvas_policy import CanvasPolicy, CanvasPreset
from dgemma.engine.events import Done
from dgemma.engine.generation import FAULT, Generation
from dgemma.engine.params import SamplingParams, require_denoiser
from dgemma.errors import UsageError, require
from dgemma.text.chat import Prompt

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

Drafter = Literal["ngram", "canvas"]
Acceptance = Literal["strict", "loose"]
MAX_NGRAM = 3  # tokens that are looked up, then fewer
MIN_PROBABILITY, MIN_RATIO = 0.09, 0.3  # of a token that the loose rule accepts
CANVAS_DRAFT_STEPS = 4
MAX_LENGTH = 256  # of a draft: the KV cache is truncated by so many tokens at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeParams:
    """Parameters of drafts and of their verification."""

    drafter: Drafter = "ngram"
    accept: Acceptance = "strict"
    length: int = 0  # tokens of a draft; 0: 10 of n-grams, 32 of a canvas
    steps: int = CANVAS_DRAFT_STEPS  # of a canvas

    def __post_init__(self) -> None:
        if self.drafter not in ("ngram", "canvas") or self.accept not in ("strict", "loose"):
            raise UsageError(
                f"draft {self.drafter!r} verified {self.accept!r} is not known; use ngram or "
                "canvas, and strict or loose"
            )
        require(0 <= self.length <= MAX_LENGTH, "draft length", self.length, f"0 to {MAX_LENGTH}")
        require(self.steps >= 1, "draft steps", self.steps, "1 or more")

    @property
    def num_tokens(self) -> int:
        return self.length or (10 if self.drafter == "ngram" else 32)


def speculative(
    engine: "Engine",
    prompt: str | Prompt,
    params: SamplingParams | None = None,
    drafting: SpeculativeParams | None = None,
) -> Done:
    """Answer a prompt in AR with drafts; `tokens_per_step` is the tokens per pass."""
    task = speculative_task(engine, prompt, params, drafting)
    done: Done = engine.run_all([task])[0]
    return done


def speculative_task(
    engine: "Engine",
    prompt: str | Prompt,
    params: SamplingParams | None = None,
    drafting: SpeculativeParams | None = None,
) -> "SpeculativeReply":
    """Check a request and return its task."""
    drafting = drafting or SpeculativeParams()
    params = replace(params or SamplingParams(), mode="ar")
    if params.temperature or params.constraint is not None or params.committed:
        raise UsageError(
            "drafts are verified against greedy AR: leave out temperature, constraints and what "
            "another engine has committed"
        )
    if drafting.drafter == "canvas":
        require_denoiser(engine.model.config, "it cannot draft on a canvas; use ngram")
        longest = engine.model.config.canvas_length
        require(drafting.length <= longest, "draft length", drafting.length, f"0 to {longest}")
    plain = engine.generation(prompt, params)
    return SpeculativeReply(engine, plain, drafting)


class SpeculativeReply(Generation):
    """An AR reply that commits several tokens per pass where its drafts are accepted."""

    def __init__(self, engine: "Engine", plain: Generation, drafting: SpeculativeParams) -> None:
        super().__init__(engine, plain.prompt, plain.params, plain.limits)
        self.drafting, self.sampler = drafting, engine.sampler
        self.canvas_length = engine.model.config.canvas_length
        self.draft: tuple[int, ...] | None = None  # to be verified in the next pass

    def inputs(self) -> list[ForwardInput]:
        if self.sequence.has_long_commit:
            return super().inputs()
        sequence = self.sequence
        if self.draft is None and self.drafting.drafter == "ngram":
            self.draft = lookup(sequence.ids, self._num_drafted())
        if self.draft is None:
            if self._num_drafted() == 0:
                self.draft = ()
            else:
                tokens = sequence.next_tokens()
                self.state = self.state or self._new_canvas()
                return [ForwardInput(cache=sequence.cache, tokens=tokens, state=self.state)]
        if not sequence.next_tokens():  # committed with the canvas's first step
            sequence.cache.truncate(len(sequence.ids) - 1)
            sequence.num_committed = sequence.cache.length
        tokens = (*sequence.next_tokens(), *self.draft)
        # The last position's target is not known; its likeliest token is what is asked for.
        return [ForwardInput(cache=sequence.cache, tokens=tokens, targets=(*self.draft, 0))]

    def _num_drafted(self) -> int:
        """Tokens of the next draft: the pass adds one more, and both count."""
        return min(self.drafting.num_tokens, self.limits.max_tokens - len(self.reader.ids) - 1)

    def _new_canvas(self) -> CanvasState:
        length = min(self._num_drafted(), self.canvas_length)
        sampler = replace(self.sampler, max_denoising_steps=self.drafting.steps)
        self.policy = CanvasPolicy(CanvasPreset(length, sampler))
        return self._new_state()

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        (given,), (output,) = inputs, outputs
        if given.targets:
            self._verify(given, output)
        elif output.state is not None:
            self.sequence.commit(len(given.tokens))
            self.progress.steps += 1
            self.state = output.state
            if output.state.is_done:
                self.draft, self.state = tuple(output.state.canvas.guess_L.tolist()), None
                self.progress.blocks += 1
        else:
            self.sequence.commit(len(given.tokens))
        if not self.is_done and self._is_over_budget():
            self._finish("budget")

    def _verify(self, given: ForwardInput, output: ForwardOutput) -> None:
        """Commit what is accepted of the draft and one more token; drop the rest."""
        draft, self.draft, sequence = self.draft or (), None, self.sequence
        num_before = len(given.tokens) - len(draft)
        self.progress.steps += 1
        accepted = 0
        for position, (best, best_logprob) in enumerate(output.best):
            logprob = output.logprobs[position]
            if math.isnan(best_logprob):
                self._fail("not a number", FAULT)
                return
            is_accepted = position < len(draft) and self._accepts(
                draft[position] == best, logprob, best_logprob
            )
            token = draft[position] if is_accepted else best
            chosen = logprob if is_accepted else best_logprob
            if position == 0:
                sequence.commit(num_before)
            self._commit_token(self._new_commit([token], logprob=chosen))
            accepted += is_accepted
            if self.is_done or not is_accepted:
                break
        # Tokens of the draft that were kept are in the cache; the last token chosen is not.
        sequence.num_committed += accepted
        if not self.is_done and sequence.cache.length > sequence.num_committed:
            sequence.cache.truncate(sequence.num_committed)

    def _accepts(self, is_best: bool, logprob: float, best_logprob: float) -> bool:
        if is_best or self.drafting.accept == "strict":
            return is_best
        return math.exp(logprob) >= min(MIN_PROBABILITY, MIN_RATIO * math.exp(best_logprob))


def lookup(ids: Sequence[int], count: int) -> tuple[int, ...]:
    """Return what followed the last tokens where they occurred last before; empty if nowhere."""
    for size in range(min(MAX_NGRAM, len(ids) - 1), 0, -1):
        tail = list(ids[-size:])
        for start in range(len(ids) - size - 1, -1, -1):
            if list(ids[start : start + size]) == tail:
                return tuple(ids[start + size : start + size + count]) if count > 0 else ()
    return ()
