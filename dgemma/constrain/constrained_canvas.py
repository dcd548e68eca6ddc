"""Constrains the canvases of a request to a grammar, from left to right, during denoising.

After each step the constrained prefix grows: tokens forced by the grammar are pinned at once, then,
position by position, the most likely allowed token, as long as the model is confident in it. It
stops where the model is undecided, so that the next step is conditioned on the new pins. Positions
after the prefix are unconstrained.

Only tokens that the matcher has consumed are committed. A completion that fits the token budget is
always known, so the text can be closed at any time.

L canvas length, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dgemma.constrain.matcher import (
    Completion,
    Constraint,
    ConstraintFault,
    mask_logits,
    most_likely,
    path_through_pins,
)
from dgemma.diffusion.canvas import Canvas, Pins
from dgemma.diffusion.logit_stats import HostStats
from dgemma.diffusion.sampler import StepView

MAX_DRAWS = 8  # AR: draws without a completion that fits, before the known one is followed
LOGIT_POSITIONS = 16  # positions read together when a canvas must be finished
CONFIDENT = 0.7  # a token with at least this probability is pinned at once
PATIENCE = 1  # steps without progress before a token is pinned regardless
EXPECTED_SECONDS = 0.02  # assumed for the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class TextState:
    """A constrained text between two steps. A step replaces it, so that it can be undone."""

    completion: Completion | None  # the shortest known completion
    budget: int = 0  # tokens left for the text at the start of the block
    num_tokens: int = 0  # tokens of earlier blocks
    block: tuple[int, ...] = ()  # the constrained prefix of the current canvas
    pins: Mapping[int, int] = field(default_factory=dict)  # pinned tokens by position
    path: tuple[int, ...] = ()  # tokens from the end of the prefix to the last pin
    max_steps: int = 0  # step limit of the canvas
    is_complete: bool = False
    is_closing: bool = False  # the known completion is the shortest
    forced_from: int | None = None  # number of tokens before the part forced by a limit
    stalled: int = 0  # consecutive steps without a new token
    step: int = 0  # number of the last step; a repeated step has the same number
    before: "TextState | None" = None  # state before that step
    seconds: float = EXPECTED_SECONDS  # duration of that step
    fault: str = ""  # why the text cannot continue
    error: Exception | None = None

    @property
    def tokens_left(self) -> int:
        """Tokens left for the text after the prefix."""
        return self.budget - len(self.block)


class ConstrainedCanvas:
    """The constrained text of one request: its state, replaced by each step, and its matcher."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint, self.vocabulary = constraint, constraint.vocabulary
        self.matcher = constraint.matcher()
        self.state = TextState(completion=constraint.shortest)
        self._at_start = self.state  # start of the block, restored if the canvas is retried

    def _change(self, **fields: Any) -> None:
        self.state = replace(self.state, **fields)

    def start(self, budget: int) -> None:
        """Start the text, with a budget of tokens."""
        completion, fault = self.state.completion, ""
        if completion is None:
            fault = "no text of this grammar was found that comes to an end"
        elif len(completion.tokens) > budget:
            fault = (
                f"the shortest text found for this grammar has {len(completion.tokens)} "
                f"tokens, but {budget} are left"
            )
        self._change(budget=budget, fault=fault or self.state.fault)

    def begin_block(self, pins: Pins, max_steps: int) -> None:
        """Start a canvas, or restart it after rolling back the last attempt."""
        state = self.state
        self.matcher.rollback(len(state.block))
        pairs = dict(zip(pins.positions, pins.tokens, strict=True))
        stops = [p for p, token in pairs.items() if token in self.vocabulary.stops]
        text = {p: t for p, t in pairs.items() if t not in self.vocabulary.stops}
        self.state = replace(
            self._at_start,
            budget=state.budget,
            num_tokens=state.num_tokens,
            pins=text,
            max_steps=max_steps,
            seconds=state.seconds,
            fault=state.fault,
            error=state.error,
        )
        if stops and min(stops) < max(text, default=-1):
            self._change(fault="a stop is pinned before text: constrained text ends there")
        elif stops:
            self.start(min(state.budget, *stops))

    def end_block(self) -> list[int]:
        """Return the tokens of the block to commit."""
        state, count = self.state, len(self.state.block)
        self._change(
            block=(), pins={}, budget=state.budget - count, num_tokens=state.num_tokens + count
        )
        self._at_start = TextState(completion=state.completion, forced_from=state.forced_from)
        return list(state.block)

    def close(self) -> list[int]:
        """Return the block with the shortest known completion of the text."""
        state = self.state
        if state.pins and len(state.block) + len(state.path) <= max(state.pins):
            raise ConstraintFault("there was no time to find a text that holds the pinned tokens")
        completion = () if state.is_complete else self._known_completion().tokens
        if not state.path:
            self._note_forced(completion)
        block = (*state.block, *state.path, *completion)
        self._change(block=block, path=(), is_complete=True)
        return self.end_block()

    def apply(self, canvas: Canvas, view: StepView) -> Canvas:
        """Extend the prefix after a step and pin it; errors are stored in the state, not raised.

        If a pass fails after this call, the same step is repeated, and the first attempt undone.
        """
        before, begin = self.state, time.perf_counter()
        if before.step == canvas.num_steps and before.before is not None:
            self.matcher.rollback(len(before.block) - len(before.before.block))
            before = before.before
        self.state = replace(before, step=canvas.num_steps, before=replace(before, before=None))
        try:
            if not self.state.fault:
                return self._apply(canvas, view)
        except ConstraintFault as fault:
            self._change(fault=str(fault))
        except Exception as error:
            self._change(error=error)
        finally:
            self._change(seconds=time.perf_counter() - begin)
        return replace(canvas, converged=torch.ones_like(canvas.converged))

    def next_token(self, logits_V: Tensor, draw: Callable[[Tensor], int]) -> int:
        """AR: draw the next allowed token; a stop id ends the text."""
        begin = time.perf_counter()
        token = self._next_token(logits_V, draw)
        self._change(seconds=time.perf_counter() - begin)
        self.end_block()
        return token

    def _next_token(self, logits_V: Tensor, draw: Callable[[Tensor], int]) -> int:
        if self._must_close():
            return self._next_of_completion()
        masked_V = mask_logits(logits_V, self.matcher.allowed())
        for _ in range(MAX_DRAWS):
            token = draw(masked_V)
            if token in self.vocabulary.stops:
                self._change(is_complete=True)
                return token
            if self.extend(self.consume([token])):
                return token
            masked_V[token] = -torch.inf
            if bool(masked_V.isinf().all()):
                break
        return self._next_of_completion()

    def consume(self, tokens: Sequence[int]) -> list[int]:
        """Consume tokens; return those that the grammar allows."""
        return list(tokens[: self.matcher.consume(list(tokens))])

    def extend(self, consumed: list[int]) -> list[int]:
        """Extend the prefix by consumed tokens; return those that leave room for a completion.

        The others are rolled back.
        """
        known = self.state.completion
        completion = self.matcher.complete(self.state.tokens_left - len(consumed), known)
        self._change(forced_from=None)  # the model decides again
        if completion is not None:
            self._append(consumed, completion)
            return consumed
        self.matcher.rollback(len(consumed))
        appended: list[int] = []
        for token in consumed:
            self.matcher.consume([token])
            completion = self.matcher.complete(self.state.tokens_left - 1, self.state.completion)
            if completion is None:
                self.matcher.rollback(1)
                break
            self._append([token], completion)
            appended.append(token)
        return appended

    def _append(self, tokens: Sequence[int], completion: Completion) -> None:
        block = (*self.state.block, *tokens)
        is_complete = self.matcher.is_complete or len(block) == self.state.budget
        self._change(block=block, completion=completion, is_complete=is_complete)

    def _known_completion(self) -> Completion:
        assert self.state.completion is not None, "a text without a completion is not started"
        return self.state.completion

    def _must_close(self) -> bool:
        """True if only the shortest completion fits. The known one may be longer."""
        is_tight = len(self._known_completion().tokens) >= self.state.tokens_left
        if not is_tight and not self.matcher.search_exhausted:
            return False
        shorter = None
        if not self.state.is_closing:
            shorter = self.matcher.complete(self.state.tokens_left - 1, is_brief=True)
        if shorter is None:
            self._change(is_closing=True)
        else:
            self._change(completion=shorter)
        return shorter is None

    def _next_of_completion(self) -> int:
        """Return the next token of the known completion, or a stop at the end of the text."""
        return next(iter(self._follow_completion(1)), self.vocabulary.stops[0])

    def _follow_completion(self, count: int) -> list[int]:
        """Extend the prefix along the known completion."""
        completion = self._known_completion().tokens
        tokens, rest = completion[:count], completion[count:]
        self._note_forced(completion)
        if self.matcher.consume(tokens) < len(tokens):
            raise ConstraintFault("the grammar refuses an end that it allowed")
        begin = self._known_completion().begin + len(self.vocabulary.split(tokens))
        self._append(tokens, Completion(rest, tuple(self.vocabulary.split(rest)), begin))
        if not rest:
            self._change(is_complete=True)
        return list(tokens)

    def _note_forced(self, completion: Sequence[int]) -> None:
        """Record where a limit starts to force the rest of the text."""
        if self.state.forced_from is None and completion:
            pairs = zip(completion, forced := self.matcher.forced(), strict=False)
            num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(forced))
            if num_same < len(completion):
                self._change(forced_from=self.state.num_tokens + len(self.state.block) + num_same)

    def _apply(self, canvas: Canvas, view: StepView) -> Canvas:
        stats = HostStats.read(view.stats)
        if math.isnan(sum(stats.entropy)):
            return replace(canvas, converged=torch.ones_like(canvas.converged))
        begin = len(self.state.block)
        step = _PrefixStep(self, stats, view, canvas.length - begin, self._min_tokens(canvas))
        if self.state.pins and begin <= max(self.state.pins):
            self._follow_path(step)
        elif self._must_close():
            self._follow_completion(canvas.length - begin)
        else:
            self._follow_model(step)
        self._change(stalled=0 if len(self.state.block) > begin else self.state.stalled + 1)
        return self._without_early_stops(self._pin_block(canvas, step.stop), view)

    def _min_tokens(self, canvas: Canvas) -> float:
        """Return how many tokens this step must add even if the model is not confident."""
        steps_left = self.state.max_steps - canvas.num_steps
        if steps_left <= 0:
            return math.inf
        if canvas.num_steps * 2 > self.state.max_steps:
            return math.ceil((canvas.length - len(self.state.block)) / (steps_left + 1))
        return 1 if self.state.stalled >= PATIENCE else 0

    def _follow_model(self, step: "_PrefixStep") -> None:
        step.run()
        appended = self.extend(step.consumed) if step.consumed else []
        if len(appended) < len(step.consumed):
            step.stop = None  # it was reached after tokens that are now rolled back
        if step.stop is not None:
            self._change(is_complete=True)
        if step.consumed and not appended:
            self._follow_completion(1)

    def _follow_path(self, step: "_PrefixStep") -> None:
        """Extend the prefix along a path through all later pins."""
        begin, last = len(self.state.block), max(self.state.pins)
        pins = [self.state.pins.get(position) for position in range(begin, last + 1)]
        path = path_through_pins(self.matcher, step.tops[begin:], pins, list(self.state.path))
        if path is not None:
            completion = self.matcher.complete(self.state.tokens_left - len(path))
            self.matcher.rollback(len(path))
            if completion is not None:
                self._change(path=tuple(path), completion=completion)
        if len(self.state.path) <= last - begin:
            raise ConstraintFault("no text of this grammar was found that holds the pinned tokens")
        tokens = step.confident_prefix(self.state.path, self.state.pins)
        self.matcher.consume(tokens)
        rest = self.state.path[len(tokens) :]
        self._change(
            block=(*self.state.block, *tokens),
            path=rest,
            is_complete=not rest and self.matcher.is_complete,
        )

    def _without_early_stops(self, canvas: Canvas, view: StepView) -> Canvas:
        """Renoise stops where the text cannot end yet, and drop their self-conditioning.

        Otherwise the model would take them for its end and condition earlier positions on it.
        """
        first_end = 0
        if not self.state.is_complete:
            first_end = len(self.state.block) + len(self._known_completion().tokens)
        position_L = torch.arange(canvas.length, device=canvas.tokens_L.device)
        stops = torch.tensor(self.vocabulary.stops, device=canvas.tokens_L.device)
        is_stop_L = torch.isin(view.stats.top_T, stops) | torch.isin(canvas.tokens_L, stops)
        open_L = is_stop_L & (position_L < first_end) & ~canvas.pinned_L
        return replace(
            canvas,
            tokens_L=torch.where(open_L, view.noise_L, canvas.tokens_L),
            accepted_L=canvas.accepted_L & ~open_L,
            reopened_L=open_L,
        )

    def _pin_block(self, canvas: Canvas, stop: int | None) -> Canvas:
        """Pin the block, followed by stops if the text has ended."""
        tokens = list(self.state.block[: canvas.length])
        if self.state.is_complete:
            padding = self.vocabulary.stops[0]
            tokens += [padding if stop is None else stop, *[padding] * canvas.length]
            tokens = tokens[: canvas.length]
        count, device = len(tokens), canvas.tokens_L.device
        in_block_L = torch.arange(canvas.length, device=device) < count
        tokens_L = canvas.tokens_L.clone()
        tokens_L[:count] = torch.tensor(tokens, dtype=tokens_L.dtype, device=device)
        has_converged = count == canvas.length and canvas.num_steps < self.state.max_steps
        return replace(
            canvas,
            tokens_L=tokens_L,
            pinned_L=canvas.pinned_L | in_block_L,
            accepted_L=canvas.accepted_L | in_block_L,
            guess_L=torch.where(in_block_L, tokens_L, canvas.guess_L),
            entropy_L=canvas.entropy_L.masked_fill(in_block_L, 0.0),
            converged=torch.full_like(canvas.converged, has_converged),
        )


class _PrefixStep:
    """Extends the prefix by one step: `consumed` tokens, and the `stop` id reached, if any."""

    def __init__(
        self,
        text: ConstrainedCanvas,
        stats: HostStats,
        view: StepView,
        room: int,
        min_tokens: float,
    ) -> None:
        self.matcher, self.stops = text.matcher, text.vocabulary.stops
        self.begin = len(text.state.block)
        self.room = min(room, text.state.tokens_left)
        self.tops, self.top_p = stats.tops, stats.top_p
        self.logits, self.min_tokens = view.logits, min_tokens
        self.consumed: list[int] = []
        self.stop: int | None = None
        self._num_chosen = 0
        self._diverged = False  # diverged from the model's tokens: another step is needed
        self._logits_by_position: dict[int, Tensor] = {}

    def run(self) -> None:
        while len(self.consumed) < self.room and self.stop is None:
            if not self._take_forced() and (
                self.matcher.is_stopped or not self._take_most_likely()
            ):
                break
        if self.stop is None and self.matcher.is_complete:
            self.stop = self.stops[0]

    def confident_prefix(self, path: Sequence[int], pins: Mapping[int, int]) -> list[int]:
        """Return the part of a path to pin now."""
        tokens: list[int] = []
        for position, token in enumerate(path, self.begin):
            is_confident = self.tops[position] == token and self.top_p[position] >= CONFIDENT
            if position not in pins and not is_confident:
                if self._num_chosen >= self.min_tokens:
                    break
                self._num_chosen += 1
            tokens.append(token)
        return tokens

    def _take_forced(self) -> bool:
        forced = self.matcher.forced()[: self.room - len(self.consumed)]
        position = self.begin + len(self.consumed)
        forced = forced[: self.matcher.consume(forced)] if forced else []
        self._diverged |= forced != self.tops[position : position + len(forced)]
        self.consumed.extend(forced)
        return bool(forced)

    def _take_most_likely(self) -> bool:
        """Consume the most likely allowed token, if the model is confident or progress is due."""
        is_due = self._num_chosen < self.min_tokens
        if self._diverged and not is_due:
            return False
        position = self.begin + len(self.consumed)
        top = self.tops[position]
        token, p = self._most_likely(position)
        # A model that is confident in a disallowed token rarely changes.
        is_stuck = token != top and top not in self.stops and self.top_p[position] >= CONFIDENT
        if not (is_due or is_stuck or p >= CONFIDENT):
            return False
        self._num_chosen += 1
        self._diverged |= token != top
        if token in self.stops:
            self.stop = token
        elif not self.matcher.consume([token]):
            raise ConstraintFault("the grammar refuses a token that it allowed")
        else:
            self.consumed.append(token)
        return True

    def _most_likely(self, position: int) -> tuple[int, float]:
        """Return the most likely allowed token and its probability; the argmax needs no logits."""
        top = self.tops[position]
        is_stop = top in self.stops
        if self.matcher.is_accepting if is_stop else self.matcher.consume([top]):
            self.matcher.rollback(0 if is_stop else 1)
            return top, self.top_p[position]
        return most_likely(self._logits_at(position), self.matcher.allowed())

    def _logits_at(self, position: int) -> Tensor:
        """Read logits position by position, or several together if all must be decided."""
        if position not in self._logits_by_position:
            count = LOGIT_POSITIONS if self.min_tokens > 1 else 1
            positions = range(position, min(position + count, len(self.tops)))
            logits = self.logits(positions).unbind()
            self._logits_by_position = dict(zip(positions, logits, strict=True))
        return self._logits_by_position[position]
