"""Holds the canvases of a request to a grammar, from left to right, while all else is refined.

The frontier is how far a canvas is sure to be in the language. After each step it walks on: tokens
that the grammar forces are pinned at once; then, position by position, the likeliest token that is
allowed, as long as the model is sure of it. It stops where the model is undecided, so that the next
step can look again with what was pinned. Behind the frontier nothing is held to anything.

Only tokens that the matcher has consumed are ever committed, and an end that still fits the budget
is always at hand: a text can be finished at any time.

L canvas length, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dgemma.constrain.masks import likeliest, masked
from dgemma.constrain.matcher import Ending, Guide, GuideFault
from dgemma.constrain.route import find_route
from dgemma.diffusion.canvas import Canvas, Pins
from dgemma.diffusion.logit_stats import RowStats
from dgemma.diffusion.sampler import View

TRIES = 8  # tokens tried in AR where their ends do not fit, before the known end is taken
LOOKS = 16  # positions looked at together when a canvas must be finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When a token is pinned."""

    sure: float = 0.7  # from this probability on, at once
    patience: int = 1  # steps without any token before one is pinned unsure


PACE = Pace()


class Frontier:
    """One request's way through its grammar. `fault` says why there is no way; else it is empty."""

    def __init__(self, guide: Guide, pace: Pace = PACE) -> None:
        self.guide, self.pace = guide, pace
        self.matcher = guide.open()
        self.vocabulary = guide.vocabulary
        self.ending = guide.shortest
        self.budget = 0  # tokens the text may still take from the beginning of the block
        self.block: list[int] = []  # what the present block is sure to hold
        self.is_complete = False
        self.fault = ""
        self.error: Exception | None = None
        self._first_ending = self.ending  # at the beginning of the block
        self._pins: dict[int, int] = {}
        self._route: list[int] = []  # tokens from the frontier up to the last pin
        self._max_steps = self._stalled = 0
        self._is_closing = False  # no end is shorter than the known one, which is taken
        self._saved: _Saved | None = None  # as it was before the last walk

    @property
    def left(self) -> int:
        """Tokens the text may still take from the frontier."""
        return self.budget - len(self.block)

    def start(self, budget: int) -> None:
        """Let the text begin, with so many tokens to take."""
        self.budget = budget
        if self.ending is None:
            self.fault = "no text of this grammar was found that comes to an end"
        elif len(self.ending.tokens) > budget:
            self.fault = (
                f"the shortest text found for this grammar has {len(self.ending.tokens)} tokens, "
                f"but {budget} are left"
            )

    def begin_block(self, pins: Pins, max_steps: int) -> None:
        """Begin a canvas, or begin it again: what the last attempt consumed is undone."""
        self.matcher.back(len(self.block))
        self.ending = self._first_ending
        self.block, self._route, self._stalled = [], [], 0
        self.is_complete = self._is_closing = False
        self._max_steps, self._saved = max_steps, None
        stops = [p for p, t in _pairs(pins) if t in self.vocabulary.stops]
        self._pins = {p: t for p, t in _pairs(pins) if t not in self.vocabulary.stops}
        if stops and min(stops) < max(self._pins, default=-1):
            self.fault = "a stop is pinned before text: a text that is held to a grammar ends there"
        elif stops:
            self.start(min(self.budget, *stops))

    def end_block(self) -> list[int]:
        """The tokens of the block, which are committed."""
        block, self.block = self.block, []
        self.budget -= len(block)
        self._first_ending = self.ending
        self._pins = {}
        return block

    def close(self) -> list[int]:
        """All of the block, and the shortest way to the end of the text."""
        if self._pins and len(self.block) + len(self._route) <= max(self._pins):
            raise GuideFault("there was no time to find a text that holds the pinned tokens")
        ending = () if self.is_complete else self._end().tokens
        self.block += [*self._route, *ending]
        self._route, self.is_complete = [], True
        return self.end_block()

    def walk(self, canvas: Canvas, view: View) -> Canvas:
        """Go on after a step, and pin what is sure. Never raises: see `fault` and `error`.

        The same step may come again, if the pass failed after it: then it starts where it did.
        """
        if self._saved is not None and self._saved.num_steps == canvas.num_steps:
            self._restore(self._saved)
        self._saved = self._save(canvas.num_steps)
        try:
            if not self.fault:
                return self._walk(canvas, view)
        except GuideFault as fault:
            self.fault = str(fault)
        except Exception as error:
            self.error = error
        return replace(canvas, settled=torch.ones_like(canvas.settled))

    def _save(self, num_steps: int) -> "_Saved":
        return _Saved(
            num_steps,
            len(self.block),
            {name: getattr(self, name) for name in _Saved.NAMES},
        )

    def _restore(self, saved: "_Saved") -> None:
        self.matcher.back(len(self.block) - saved.num_tokens)
        del self.block[saved.num_tokens :]
        for name, value in saved.state.items():
            setattr(self, name, value)

    def choose(self, logits_V: Tensor, draw: Callable[[Tensor], int]) -> int:
        """AR: the next token, drawn among the allowed; a stop id ends the text."""
        token = self._choose(logits_V, draw)
        self.end_block()
        return token

    def _choose(self, logits_V: Tensor, draw: Callable[[Tensor], int]) -> int:
        if self._must_end():
            return self._end_on()
        masked_V = masked(logits_V, self.matcher.allowed())
        for _ in range(TRIES):
            token = draw(masked_V)
            if token in self.vocabulary.stops:
                self.is_complete = True
                return token
            if self.keep(self.take([token])):
                return token
            masked_V[token] = -torch.inf
            if bool(masked_V.isinf().all()):
                break
        return self._end_on()

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Consume tokens; returns those that the grammar allows."""
        return list(tokens[: self.matcher.consume(list(tokens))])

    def keep(self, taken: list[int]) -> list[int]:
        """Make sure of an end behind tokens just consumed; returns those that leave room for one.

        The others are undone.
        """
        ending = self.matcher.end(self.left - len(taken), self.ending)
        if ending is not None:
            self._extend(taken, ending)
            return taken
        self.matcher.back(len(taken))
        kept: list[int] = []
        for token in taken:
            self.matcher.consume([token])
            ending = self.matcher.end(self.left - 1, self.ending)
            if ending is None:
                self.matcher.back(1)
                break
            self._extend([token], ending)
            kept.append(token)
        return kept

    def _extend(self, tokens: Sequence[int], ending: Ending) -> None:
        self.block += tokens
        self.ending = ending
        self.is_complete = self.matcher.is_complete or self.left == 0

    def _end(self) -> Ending:
        assert self.ending is not None, "a text without an end is not begun"
        return self.ending

    def _must_end(self) -> bool:
        """Whether only the shortest way to the end is left. The known one need not be that."""
        if len(self._end().tokens) < self.left and not self.matcher.is_blind:
            return False
        shorter = None if self._is_closing else self.matcher.end(self.left - 1, is_brief=True)
        self._is_closing = shorter is None
        self.ending = self.ending if shorter is None else shorter
        return self._is_closing

    def _end_on(self) -> int:
        """The next token of the known end, or a stop where the text ends already."""
        return next(iter(self._take_ending(1)), self.vocabulary.stops[0])

    def _take_ending(self, count: int) -> list[int]:
        """Go on along the known end."""
        tokens, rest = self._end().tokens[:count], self._end().tokens[count:]
        if self.matcher.consume(tokens) < len(tokens):
            raise GuideFault("the grammar refuses an end that it allowed")
        self._extend(tokens, Ending(rest, tuple(self.vocabulary.spell_ids(rest))))
        self.is_complete |= not rest
        return list(tokens)

    def _walk(self, canvas: Canvas, view: View) -> Canvas:
        numbers = _Numbers.read(view.stats)
        if math.isnan(sum(numbers.entropy)):
            return replace(canvas, settled=torch.ones_like(canvas.settled))  # for the guard to see
        begin = len(self.block)
        room = canvas.length - begin
        walk = _Walk(self, numbers, view, room, self._wanted(canvas))
        if self._pins and begin <= max(self._pins):
            self._follow_route(walk)
        elif self._must_end():
            self._take_ending(room)
        else:
            self._follow_model(walk)
        self._stalled = 0 if len(self.block) > begin else self._stalled + 1
        return self._reopened(self._pinned(canvas, walk.stop), view)

    def _wanted(self, canvas: Canvas) -> float:
        """How many tokens the step must bring even if the model is not sure of them."""
        steps_left = self._max_steps - canvas.num_steps
        if steps_left <= 0:
            return math.inf
        if canvas.num_steps * 2 > self._max_steps:
            return math.ceil((canvas.length - len(self.block)) / (steps_left + 1))
        return 1 if self._stalled >= self.pace.patience else 0

    def _follow_model(self, walk: "_Walk") -> None:
        walk.run()
        kept = self.keep(walk.taken) if walk.taken else []
        if len(kept) < len(walk.taken):
            walk.stop = None  # the stop stood behind what was undone
        self.is_complete |= walk.stop is not None
        if walk.taken and not kept:
            self._take_ending(1)

    def _follow_route(self, walk: "_Walk") -> None:
        """Pins lie ahead: go along a way that leads through all of them."""
        begin, last = len(self.block), max(self._pins)
        found = find_route(self.matcher, walk.tops[begin:], self._ahead(), self._route)
        ending = None if found is None else self.matcher.end(self.left - len(found))
        if found is not None:
            self.matcher.back(len(found))
        if found is not None and ending is not None:
            self._route, self.ending = found, ending
        if len(self._route) <= last - begin:
            raise GuideFault("no text of this grammar was found that holds the pinned tokens")
        taken = walk.along(self._route, self._pins)
        self.matcher.consume(taken)
        self.block += taken
        self._route = self._route[len(taken) :]
        self.is_complete = not self._route and self.matcher.is_complete

    def _ahead(self) -> list[int | None]:
        """From the frontier to the last pin: the token that must stand at each position."""
        return [self._pins.get(p) for p in range(len(self.block), max(self._pins) + 1)]

    def _reopened(self, canvas: Canvas, view: View) -> Canvas:
        """The canvas without stops where the text cannot have ended yet.

        They would be taken for its end, and what the model thinks of the places before them with
        it. Such places are noise again, and believe nothing of themselves.
        """
        least = 0 if self.is_complete else len(self.block) + len(self._end().tokens)
        place_L = torch.arange(canvas.length, device=canvas.tokens_L.device)
        stops = torch.tensor(self.vocabulary.stops, device=canvas.tokens_L.device)
        is_stop_L = torch.isin(view.stats.top_T, stops) | torch.isin(canvas.tokens_L, stops)
        open_L = is_stop_L & (place_L < least) & ~canvas.pinned_L
        return replace(
            canvas,
            tokens_L=torch.where(open_L, view.noise_L, canvas.tokens_L),
            kept_L=canvas.kept_L & ~open_L,
            reopened_L=open_L,
        )

    def _pinned(self, canvas: Canvas, stop: int | None) -> Canvas:
        """The canvas with the block pinned, and filled with stops behind a text that has ended."""
        tokens = list(self.block[: canvas.length])
        if self.is_complete:
            fill = self.vocabulary.stops[0]
            tokens += [fill if stop is None else stop, *[fill] * canvas.length]
            tokens = tokens[: canvas.length]
        count, device = len(tokens), canvas.tokens_L.device
        held_L = torch.arange(canvas.length, device=device) < count
        what_L = canvas.tokens_L.clone()
        what_L[:count] = torch.tensor(tokens, dtype=what_L.dtype, device=device)
        pinned_L = canvas.pinned_L | held_L
        is_settled = count == canvas.length and canvas.num_steps < self._max_steps  # else: forced
        return replace(
            canvas,
            tokens_L=what_L,
            pinned_L=pinned_L,
            kept_L=canvas.kept_L | held_L,
            guess_L=torch.where(held_L, what_L, canvas.guess_L),
            entropy_L=canvas.entropy_L.masked_fill(held_L, 0.0),
            settled=torch.full_like(canvas.settled, is_settled),
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    """The state before a walk. Values are replaced by a walk, never changed, but for the block."""

    NAMES: ClassVar[tuple[str, ...]] = (
        "ending",
        "is_complete",
        "fault",
        "error",
        "_route",
        "_stalled",
        "_is_closing",
    )

    num_steps: int
    num_tokens: int  # of the block
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a step says of each position."""

    tops: list[int]
    top_p: list[float]
    entropy: list[float]

    @classmethod
    def read(cls, stats: RowStats) -> "_Numbers":
        columns = (stats.top_T.double(), stats.top_p_T.double(), stats.entropy_T.double())
        tops, top_p, entropy = torch.stack(columns).tolist()  # one wait for the device
        return cls([int(token) for token in tops], top_p, entropy)


class _Walk:
    """One step's walk: `taken` are the tokens it consumed, `stop` a stop id it came to."""

    def __init__(
        self, frontier: Frontier, numbers: _Numbers, view: View, room: int, wanted: float
    ) -> None:
        self.matcher, self.stops = frontier.matcher, frontier.vocabulary.stops
        self.sure, self.begin = frontier.pace.sure, len(frontier.block)
        self.room = min(room, frontier.left)
        self.tops, self.top_p = numbers.tops, numbers.top_p
        self.look, self.wanted = view.look, wanted
        self.taken: list[int] = []
        self.stop: int | None = None
        self._unforced = 0
        self._surprised = False  # the model had something else in mind, so it must look again
        self._seen: dict[int, Tensor] = {}

    def run(self) -> None:
        while len(self.taken) < self.room and self.stop is None:
            if not self._take_forced() and (self.matcher.is_complete or not self._take_best()):
                break
        if self.stop is None and self.matcher.is_complete:
            self.stop = self.stops[0]

    def along(self, route: Sequence[int], pins: dict[int, int]) -> list[int]:
        """The part of a way that is pinned now."""
        taken: list[int] = []
        for position, token in enumerate(route, self.begin):
            is_sure = self.tops[position] == token and self.top_p[position] >= self.sure
            if position not in pins and not is_sure:
                if self._unforced >= self.wanted:
                    break
                self._unforced += 1
            taken.append(token)
        return taken

    def _take_forced(self) -> bool:
        forced = self.matcher.forced()[: self.room - len(self.taken)]
        position = self.begin + len(self.taken)
        forced = forced[: self.matcher.consume(forced)] if forced else []
        self._surprised |= forced != self.tops[position : position + len(forced)]
        self.taken += forced
        return bool(forced)

    def _take_best(self) -> bool:
        """Take the likeliest token that is allowed, if the model is sure or it must be."""
        must = self._unforced < self.wanted
        if self._surprised and not must:
            return False
        position = self.begin + len(self.taken)
        top = self.tops[position]
        token, p = self._best(position)
        # To wait for a model that is sure of something impossible would be to no purpose.
        is_stuck = token != top and top not in self.stops and self.top_p[position] >= self.sure
        if not (must or is_stuck or p >= self.sure):
            return False
        self._unforced += 1
        self._surprised |= token != top
        if token in self.stops:
            self.stop = token
        elif not self.matcher.consume([token]):
            raise GuideFault("the grammar refuses a token that it allowed")
        else:
            self.taken.append(token)
        return True

    def _best(self, position: int) -> tuple[int, float]:
        """The likeliest allowed token and its probability: the model's own choice, if it may."""
        top = self.tops[position]
        is_stop = top in self.stops
        if self.matcher.is_accepting if is_stop else self.matcher.consume([top]):
            self.matcher.back(0 if is_stop else 1)
            return top, self.top_p[position]
        return likeliest(self._logits(position), self.matcher.allowed())

    def _logits(self, position: int) -> Tensor:
        """Looked up one by one, or several together where all must be decided."""
        if position not in self._seen:
            last = len(self.tops)
            count = LOOKS if self.wanted > 1 else 1
            positions = range(position, min(position + count, last))
            self._seen = dict(zip(positions, self.look(positions).unbind(), strict=True))
        return self._seen[position]


def _pairs(pins: Pins) -> list[tuple[int, int]]:
    return list(zip(pins.positions, pins.tokens, strict=True))
