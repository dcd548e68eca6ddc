"""Speculative decoding: draft tokens for AR, verified by one causal pass of the same weights.

Draft tokens come from one of three drafters:
- `ngram`, prompt lookup: the tokens that followed the last n tokens where these occurred before;
- `canvas`: the argmax of one denoising step over noise after the last tokens;
- `assistant`: a Gemma 4 assistant model, which reads hidden states and keys of the last pass.

One pass commits the draft tokens and chooses a token at each position as AR would: the argmax, or a
draw at the temperature. Draft tokens are accepted up to the first mismatch, where the chosen token
takes over and the KV cache is truncated. With the drafter `canvas` the same pass steps the next
canvas, in a KV cache that holds chosen tokens only. That canvas is stepped before the choices are
known, so the next draft is the part of it after the chosen tokens.

`strict` accepts only the chosen token, so the reply equals AR's with the same seed, token for token
in float32; in 16 bits a pass of several tokens may round differently. `loose`, at temperature 0,
accepts every token with probability of at least min(0.09, 0.3 * p_max).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from dgemma.backends.base import ForwardInput, ForwardOutput
from dgemma.config import LongReply
from dgemma.diffusion import denoise
from dgemma.diffusion.canvas import NO_PINS, Canvas
from dgemma.engine.events import Committed, Done, Draft
from dgemma.engine.generation import FAULT, Generation
from dgemma.engine.params import SamplingParams, require_denoiser
from dgemma.engine.request import ReplySpec
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
MAX_NGRAM = 3  # longest n-gram to look up
MIN_PROBABILITY, MIN_RATIO = 0.09, 0.3  # the loose rule's bounds: absolute, relative to p_max
NUM_TOKENS: Mapping[Drafter, int] = {"ngram": 10, "canvas": 4, "assistant": 4}  # per pass
CANVAS_LENGTH = 32  # its first tokens are the draft
MAX_DRAFT_TOKENS = 256  # the KV cache can be truncated by this many tokens


class DraftSizes(NamedTuple):
    """Draft tokens of a pass, and the length of the canvas they are on."""

    num_tokens: int
    canvas_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeParams:
    """Parameters of speculative decoding."""

    drafter: Drafter = "ngram"
    accept: Acceptance = "strict"
    # Per pass. None: 10 for ngram, 4 for assistant, and for canvas the model's long_reply, or 4.
    num_speculative_tokens: int | None = None
    canvas_length: int | None = None  # of drafts on canvases; None: by the same preset, or 32
    assistant: Assistant | None = None  # the drafter of that name; see `load_assistant`

    def __post_init__(self) -> None:
        if self.drafter not in get_args(Drafter) or self.accept not in get_args(Acceptance):
            raise UsageError(
                f"draft {self.drafter!r} verified {self.accept!r} is not known; use ngram, canvas "
                "or assistant, and strict or loose"
            )
        self.check_tokens(MAX_DRAFT_TOKENS)

    def check_tokens(self, most: int) -> None:
        """Refuse a number of draft tokens that a pass cannot verify."""
        num = self.num_speculative_tokens
        require(num is None or 1 <= num <= most, "number of draft tokens", num, f"1 to {most}")

    def sizes(self, long: LongReply | None) -> DraftSizes:
        """Return the sizes given, by default those of the drafter or of a preset."""
        num, length = NUM_TOKENS[self.drafter], CANVAS_LENGTH
        if self.drafter == "canvas" and long is not None and long.num_speculative_tokens:
            num, length = long.num_speculative_tokens, long.canvas_length
        num = num if self.num_speculative_tokens is None else self.num_speculative_tokens
        length = length if self.canvas_length is None else self.canvas_length
        return DraftSizes(num, max(num, length))


def speculative(
    engine: "Engine",
    prompt: str | Prompt,
    params: SamplingParams | None = None,
    speculation: SpeculativeParams | None = None,
) -> Done:
    """Answer a prompt by speculative decoding; `tokens_per_step` is tokens per pass."""
    task = speculative_task(engine, prompt, params, speculation)
    done: Done = engine.run_all([task])[0]
    return done


def speculative_task(
    engine: "Engine",
    prompt: str | Prompt,
    params: SamplingParams | None = None,
    speculation: SpeculativeParams | None = None,
) -> "SpeculativeReply":
    """Check a request and return its task."""
    speculation = speculation or SpeculativeParams()
    params = replace(params or SamplingParams(), mode="ar")
    if params.constraint is not None or params.committed:
        raise UsageError(
            "speculative decoding takes no constraint and no committed tokens of another engine; "
            "leave them out"
        )
    if params.temperature and speculation.accept == "loose":
        raise UsageError("loose verification is greedy; leave out the temperature, or use strict")
    if (speculation.drafter == "assistant") != (speculation.assistant is not None):
        raise UsageError("the drafter assistant needs an assistant model; other drafters take none")
    if speculation.drafter == "canvas":
        require_denoiser(engine.model.config, "it cannot draft on a canvas; use ngram")
        speculation.check_tokens(engine.model.config.canvas_length)
    return SpeculativeReply(engine, engine.reply_spec(prompt, params), speculation)


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Tokens to verify in the next pass, and the number of canvases stepped so far."""

    tokens: tuple[int, ...] = ()
    num_canvases: int = 0  # the index of the next canvas's noise


class SpeculativeReply(Generation):
    """An AR reply that commits several tokens per pass where draft tokens are accepted.

    A reply in diffusion mode starts with canvases. If the model's preset for long replies has draft
    tokens, it continues with them once it is known to be long.
    """

    def __init__(self, engine: "Engine", spec: ReplySpec, speculation: SpeculativeParams) -> None:
        super().__init__(engine, spec)
        self.model, self.config = engine.model, engine.model.config
        long = engine.generation_config.long_reply or self.config.long_reply
        self.speculation, self.sizes = speculation, speculation.sizes(long)
        self.draft = DraftTokens()
        self.canvas_cache: KVCache | None = None  # holds chosen tokens only
        if speculation.drafter == "canvas":
            self.num_tokens *= 2

    @property
    def is_ar(self) -> bool:
        return self.block.is_long if self.policy.num_speculative_tokens else super().is_ar

    @property
    def ar_temperature(self) -> float:
        given = self.params.temperature
        return self.policy.speculative_temperature if given is None else given

    def _resume(self, commit: Committed) -> None:
        if self.policy.num_speculative_tokens and commit.logprob is not None:
            self.block = replace(self.block, is_long=True)
        super()._resume(commit)

    def inputs(self) -> list[ForwardInput]:
        if self.sequence.has_long_commit or not self.is_ar:
            return super().inputs()
        if self.speculation.drafter == "ngram":
            self._set_draft(prompt_lookup(self.sequence.ids, self._num_draft_tokens()))
        is_scored = self.speculation.assistant is not None and not self.sequence.next_images()
        # Scoring returns the hidden states that an assistant needs.
        if self.draft.tokens or is_scored:
            return [self._verification(), *self._canvas()]
        return [*super().inputs(), *self._canvas()]

    def _set_draft(self, tokens: tuple[int, ...]) -> None:
        self.draft = replace(self.draft, tokens=tokens)

    def _num_draft_tokens(self) -> int:
        """Return how many tokens to draft: the pass itself adds one more to the reply."""
        return min(self.sizes.num_tokens, self.limits.max_tokens - len(self.reader.ids) - 1)

    def _verification(self) -> ForwardInput:
        draft = self.draft.tokens
        tokens = (*self.sequence.next_tokens(), *draft)
        num_draws = len(draft) + 1 if self.ar_temperature else 0  # 0: greedy
        draws = tuple(self._token_draw(offset) for offset in range(num_draws))
        # The target of the last position is unknown; only the token chosen there is needed.
        targets = (*draft, 0)
        return ForwardInput(cache=self.sequence.cache, tokens=tokens, targets=targets, draws=draws)

    def _canvas(self) -> list[ForwardInput]:
        """Return a new canvas after the tokens chosen so far; the draft after the next is on it."""
        sequence, config = self.sequence, self.config
        if self.speculation.drafter != "canvas" or not sequence.is_prefilled:
            return []
        if self._num_draft_tokens() < 1:
            return []
        if self.canvas_cache is None:
            self.canvas_cache = sequence.cache.copy(sequence.num_committed)
        cache, num_free = self.canvas_cache, config.max_position_embeddings - len(sequence.ids)
        length = min(self.sizes.canvas_length, config.canvas_length, num_free)
        number = self.draft.num_canvases
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
        self._set_draft(())
        assistant, hidden_ND = self.speculation.assistant, outputs[0].hidden_ND
        if assistant is not None and hidden_ND is not None and not self.is_done:
            chosen = len(self.sequence.ids) - num_before - 1  # where the last token was chosen
            last, cache = self.sequence.ids[-1], self.sequence.cache
            hidden_1D = hidden_ND[chosen : chosen + 1]
            count = self._num_draft_tokens()
            self._set_draft(assistant.draft(self.model, cache, last, hidden_1D, count))
        if canvases and not self.is_done:
            assert canvases[0].state is not None
            canvas = _after(canvases[0].state.canvas, len(self.sequence.ids) - num_before)
            guess = canvas.guess_L[: self._num_draft_tokens()]
            self.draft = DraftTokens(tuple(guess.tolist()), self.draft.num_canvases + 1)
            if self.params.drafts:
                self.events.append(Draft.of(canvas, self.progress.blocks, self.tokenizer))

    def close(self, engine: "EngineCore") -> None:
        self.canvas_cache = None
        super().close(engine)

    def _verify(self, verified: ForwardInput, output: ForwardOutput) -> None:
        """Commit the accepted draft tokens and one chosen token; truncate the rest."""
        draft, sequence = self.draft.tokens, self.sequence
        num_before = len(verified.tokens) - len(draft)
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
        sequence.accept(accepted)

    def _accepts(self, is_best: bool, logprob: float, best_logprob: float) -> bool:
        if is_best or self.speculation.accept == "strict":
            return is_best
        return math.exp(logprob) >= min(MIN_PROBABILITY, MIN_RATIO * math.exp(best_logprob))


def _after(canvas: Canvas, begin: int) -> Canvas:
    """Return the part of a canvas from a position on, with its argmax as tokens."""
    guess_L = canvas.guess_L[begin:]
    return replace(
        canvas,
        tokens_L=guess_L,
        guess_L=guess_L,
        pinned_L=canvas.pinned_L[begin:],
        accepted_L=canvas.accepted_L[begin:],
        entropy_L=canvas.entropy_L[begin:],
    )


def prompt_lookup(ids: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the tokens that followed the latest earlier match of the last n-gram, if any."""
    ids_N = np.fromiter(ids, dtype=np.int64, count=len(ids))
    ends_M = np.flatnonzero(ids_N[:-1] == ids_N[-1:])  # of matches, here of the last token alone
    for offset in range(1, min(MAX_NGRAM, len(ids) - 1)):
        ends_K = ends_M[ends_M >= offset]
        ends_K = ends_K[ids_N[ends_K - offset] == ids_N[-1 - offset]]
        if not len(ends_K):
            break
        ends_M = ends_K
    if not len(ends_M):
        return ()
    begin = int(ends_M[-1]) + 1
    return tuple(ids[begin : begin + max(count, 0)])
