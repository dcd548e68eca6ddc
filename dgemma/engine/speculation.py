"""Speculative decoding: tokens drafted on a canvas or from the text, verified by the causal mode.

A draft comes from the text so far (prompt lookup: what followed the last tokens when they occurred
before), from a canvas: what one denoising step over noise expects after the last tokens, or from a
Gemma 4 assistant, which reads hidden state and keys of the last pass. One pass commits the draft
and chooses a token at each position as AR would, the likeliest or drawn at the temperature; the
draft is kept up to the first token that the rule does not accept, which is replaced by the chosen
one, and the KV cache is truncated there. The same pass steps the next canvas, in a cache of its own
without drafts. It does not see what the pass chooses, so the next draft is the part of it after the
chosen tokens.

`strict` accepts the chosen token alone, so the reply is that of AR with the same seed, token for
token in float32; in 16 bits a pass of several tokens may round otherwise. `loose`, without a
temperature, accepts a token whose probability is at least min(0.09, 0.3 · the likeliest one's): the
canvas decides among likely tokens, and the causal mode only refuses.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from dgemma.backends.base import ForwardInput, ForwardOutput
from dgemma.config import LongReply
from dgemma.diffusion import denoise
from dgemma.diffusion.canvas import NO_PINS, Canvas
from dgemma.engine.events import Committed, Done, Draft
from dgemma.engine.generation import FAULT, Generation
from dgemma.engine.params import SamplingParams, require_denoiser
from dgemma.engine.scoring import ONE_STEP
from dgemma.errors import UsageError, require
from dgemma.model.assistant import Assistant
from dgemma.model.kv_cache import KVCache
from dgemma.text.chat import Prompt

if TYPE_CHECKING:
    from dgemma.engine.core import EngineCore
    from dgemma.engine.engine import Engine

Drafter = Literal["ngram", "canvas", "assistant"]
Acceptance = Literal["strict", "loose"]
MAX_NGRAM = 3  # tokens that are looked up, then fewer
MIN_PROBABILITY, MIN_RATIO = 0.09, 0.3  # of a token that the loose rule accepts
NGRAM_DRAFT = 10  # tokens
CANVAS_LENGTH, CANVAS_DRAFT = 32, 4  # of a canvas, and its first tokens that are the draft
MAX_LENGTH = 256  # of a draft: the KV cache is truncated by so many tokens at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeParams:
    """Parameters of drafts and of their verification."""

    drafter: Drafter = "ngram"
    accept: Acceptance = "strict"
    # Tokens of a draft; 0: 10 of n-grams, 4 of an assistant, and of a canvas those of the model's
    # preset for long replies, or 4.
    length: int = 0
    canvas_length: int = 0  # whose first tokens are the draft; 0: that of the same preset, or 32
    assistant: Assistant | None = None  # for the drafter of this name, by `load_assistant`

    def __post_init__(self) -> None:
        if self.drafter not in get_args(Drafter) or self.accept not in get_args(Acceptance):
            raise UsageError(
                f"draft {self.drafter!r} verified {self.accept!r} is not known; use ngram, canvas "
                "or assistant, and strict or loose"
            )
        require(0 <= self.length <= MAX_LENGTH, "draft length", self.length, f"0 to {MAX_LENGTH}")

    def resolved(self, long: LongReply | None) -> "SpeculativeParams":
        """Fill in lengths that are 0."""
        if self.drafter == "ngram":
            return replace(self, length=self.length or NGRAM_DRAFT)
        lengths = CANVAS_DRAFT, CANVAS_LENGTH
        if self.drafter == "canvas" and long is not None and long.draft_length:
            lengths = long.draft_length, long.canvas_length
        length, canvas_length = self.length or lengths[0], self.canvas_length or lengths[1]
        return replace(self, length=length, canvas_length=max(length, canvas_length))


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
    if params.constraint is not None or params.committed:
        raise UsageError(
            "drafts are verified against AR: leave out constraints and what another engine has "
            "committed"
        )
    if params.temperature and drafting.accept == "loose":
        raise UsageError("loose verification is greedy; leave out the temperature, or use strict")
    if (drafting.drafter == "assistant") != (drafting.assistant is not None):
        raise UsageError("the drafter assistant needs its model, and no other has one")
    if drafting.drafter == "canvas":
        require_denoiser(engine.model.config, "it cannot draft on a canvas; use ngram")
        longest = engine.model.config.canvas_length
        require(drafting.length <= longest, "draft length", drafting.length, f"0 to {longest}")
    plain = engine.generation(prompt, params)
    return SpeculativeReply(engine, plain, drafting)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens to be verified in the next pass, and how many canvases were stepped to find some."""

    tokens: tuple[int, ...] = ()
    num_canvases: int = 0  # this indexes their noise


class SpeculativeReply(Generation):
    """An AR reply that commits several tokens per pass where its drafts are accepted.

    A reply in diffusion mode begins as any other; if the model's preset for long replies has
    drafts, it goes on with them once it is known to be long.
    """

    def __init__(self, engine: "Engine", plain: Generation, drafting: SpeculativeParams) -> None:
        super().__init__(
            engine, plain.prompt, plain.params, plain.limits, map_draft=plain.map_draft
        )
        self.model, self.config = engine.model, engine.model.config
        long = engine.generation_config.long_reply or self.config.long_reply
        self.drafting = drafting.resolved(long)
        self.proposal = Proposal()
        self.canvas_cache: KVCache | None = None  # of chosen tokens alone
        if drafting.drafter == "canvas":
            self.num_tokens *= 2

    @property
    def is_ar(self) -> bool:
        return self.block.is_long if self.policy.draft_length else super().is_ar

    @property
    def ar_temperature(self) -> float:
        given = self.params.temperature
        return self.policy.draft_temperature if given is None else given

    def _resume(self, commit: Committed) -> None:
        if self.policy.draft_length and commit.logprob is not None:
            self.block = replace(self.block, is_long=True)
        super()._resume(commit)

    def inputs(self) -> list[ForwardInput]:
        if self.sequence.has_long_commit or not self.is_ar:
            return super().inputs()
        if self.drafting.drafter == "ngram":
            self._propose(lookup(self.sequence.ids, self._num_drafted()))
        is_scored = self.drafting.assistant is not None and not self.sequence.next_images()
        # Scoring returns the hidden states that an assistant needs.
        if self.proposal.tokens or is_scored:
            return [self._verification(), *self._canvas()]
        return [*super().inputs(), *self._canvas()]

    def _propose(self, tokens: tuple[int, ...]) -> None:
        self.proposal = replace(self.proposal, tokens=tokens)

    def _num_drafted(self) -> int:
        """Tokens of the next draft: the pass adds one more, and both count."""
        return min(self.drafting.length, self.limits.max_tokens - len(self.reader.ids) - 1)

    def _verification(self) -> ForwardInput:
        draft = self.proposal.tokens
        tokens = (*self.sequence.next_tokens(), *draft)
        num_draws = len(draft) + 1 if self.ar_temperature else 0  # none: the likeliest
        draws = tuple(self._token_draw(offset) for offset in range(num_draws))
        # The last position's target is not known; the token chosen there is what is asked for.
        targets = (*draft, 0)
        return ForwardInput(cache=self.sequence.cache, tokens=tokens, targets=targets, draws=draws)

    def _canvas(self) -> list[ForwardInput]:
        """Return a fresh canvas after the tokens chosen so far, for the draft after the next."""
        sequence, config = self.sequence, self.config
        if self.drafting.drafter != "canvas" or not sequence.is_prefilled:
            return []
        if self._num_drafted() < 1:
            return []
        if self.canvas_cache is None:
            self.canvas_cache = sequence.cache.copy(sequence.num_committed)
        cache, num_free = self.canvas_cache, config.max_position_embeddings - len(sequence.ids)
        length = min(self.drafting.canvas_length, config.canvas_length, num_free)
        number = self.proposal.num_canvases
        noise = self.noise.block(number, 1, length, config.vocab_size, cache.device)
        tokens = tuple(sequence.ids[cache.length :])
        return [
            ForwardInput(cache=cache, tokens=tokens, state=denoise.start(ONE_STEP, noise, NO_PINS))
        ]

    def process(self, inputs: Sequence[ForwardInput], outputs: Sequence[ForwardOutput]) -> None:
        if not self.is_ar:
            super().process(inputs, outputs)
            return
        num_before, canvases = len(self.sequence.ids), outputs[1:]
        if inputs[0].targets:
            if not self.sequence.is_prefilled:
                self.progress.prefilled_at = time.monotonic()
            self._verify(inputs[0], outputs[0])
            if not self.is_done and self._is_over_budget():
                self._end("budget")
        else:
            super().process(inputs[:1], outputs[:1])
        self._propose(())
        assistant, hidden_ND = self.drafting.assistant, outputs[0].hidden_ND
        if assistant is not None and hidden_ND is not None and not self.is_done:
            chosen = len(self.sequence.ids) - num_before - 1  # position that chose the last token
            last, cache = self.sequence.ids[-1], self.sequence.cache
            hidden_1D = hidden_ND[chosen : chosen + 1]
            count = self._num_drafted()
            self._propose(assistant.draft(self.model, cache, last, hidden_1D, count))
        if canvases and not self.is_done:
            assert canvases[0].state is not None
            canvas = _after(canvases[0].state.canvas, len(self.sequence.ids) - num_before)
            guess = canvas.guess_L[: self._num_drafted()]
            self.proposal = Proposal(tuple(guess.tolist()), self.proposal.num_canvases + 1)
            if self.params.drafts:
                self.events.append(Draft.of(canvas, self.progress.blocks, self.tokenizer))

    def close(self, engine: "EngineCore") -> None:
        self.canvas_cache = None
        super().close(engine)

    def _verify(self, given: ForwardInput, output: ForwardOutput) -> None:
        """Commit what is accepted of the draft and one more token; drop the rest."""
        draft, sequence = self.proposal.tokens, self.sequence
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
        # Tokens of the draft that were kept are in the cache; the last token chosen is not, and one
        # that ends the reply is no part of the sequence.
        sequence.num_committed = min(sequence.num_committed + accepted, len(sequence.ids))
        if sequence.cache.length > sequence.num_committed:
            sequence.cache.truncate(sequence.num_committed)

    def _accepts(self, is_best: bool, logprob: float, best_logprob: float) -> bool:
        if is_best or self.drafting.accept == "strict":
            return is_best
        return math.exp(logprob) >= min(MIN_PROBABILITY, MIN_RATIO * math.exp(best_logprob))


def _after(canvas: Canvas, begin: int) -> Canvas:
    """Return what a canvas expects from a position on, as its tokens."""
    guess_L = canvas.guess_L[begin:]
    return replace(
        canvas,
        tokens_L=guess_L,
        guess_L=guess_L,
        pinned_L=canvas.pinned_L[begin:],
        kept_L=canvas.kept_L[begin:],
        entropy_L=canvas.entropy_L[begin:],
    )


def lookup(ids: Sequence[int], count: int) -> tuple[int, ...]:
    """Return what followed the last tokens where they occurred last before; empty if nowhere."""
    for size in range(min(MAX_NGRAM, len(ids) - 1), 0, -1):
        tail = list(ids[-size:])
        for start in range(len(ids) - size - 1, -1, -1):
            if list(ids[start : start + size]) == tail:
                return tuple(ids[start + size : start + size + count]) if count > 0 else ()
    return ()
