"""Sudoku by a model: puzzles in, text out, attempts counted.

The model gets each puzzle as a person would write it and the reply is read as text. Nothing checks
a reply on the way: a new attempt is made only when a canvas did not settle, which the model itself
reports. Its noise is the next choice of the same seed, and the puzzle is asked in another form,
with lines shuffled and digits renamed: where one form stalls, another often does not.
"""

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from dgemma.diffusion.canvas import NO_PINS, Pins
from dgemma.engine.events import Done, Draft
from dgemma.engine.job import FAULT, Job
from dgemma.engine.options import Mode, Options, Plan
from dgemma.errors import UsageError
from dgemma.text import sudoku as text
from dgemma.text.slots import Slots
from dgemma.text.sudoku_forms import AS_IT_IS, Form, random_form

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

SEEDS = 1 << 64
CANVAS_UNIT = 32  # a canvas is as many times so long as holds the reply
# Steps of an attempt. Nearly all canvases that settle do so within a dozen: a new attempt brings
# more than to wait for the others. Behind the last attempt is none, so it is waited for.
STEPS, LAST_STEPS = 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What became of one puzzle, all attempts together."""

    puzzle: str
    solution: str | None  # 81 digits, right or wrong; None: the reply was no grid
    settled: bool  # AR: the reply came to its end
    steps: int
    restarts: int  # attempts after the first
    seconds: float
    reply: str = ""  # the last attempt's, as it stands: after restarts, of another form

    @property
    def is_right(self) -> bool:
        """Whether the solution keeps the givens and obeys the rules."""
        return self.solution is not None and text.is_solution(self.puzzle, self.solution)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to solve. AR has no canvas to pin or settle: pins and restarts are for diffusion."""

    mode: Mode = "diffusion"
    pinned: bool = True  # whether the givens are held in their places
    restarts: int = 0  # most attempts after the first
    seed: int = 0
    drafts: bool = False  # whether to report canvases

    def __post_init__(self) -> None:
        if self.mode not in ("diffusion", "ar"):
            raise UsageError(f"mode {self.mode!r} is not for Sudoku; use diffusion or ar")
        if self.restarts < 0:
            raise UsageError(f"restarts is {self.restarts}; it must be 0 or more")
        if not 0 <= self.seed < SEEDS:
            raise UsageError(f"seed is {self.seed}; it must be 0 to {SEEDS - 1}")


def solve(
    engine: "Engine",
    puzzles: Sequence[str],
    *,
    mode: Mode = "diffusion",
    pinned: bool = True,
    restarts: int = 0,
    seed: int = 0,
) -> list[Solved]:
    """Solve puzzles of 81 digits or dots, as many at once as the engine takes in a pass."""
    how = How(mode=mode, pinned=pinned, restarts=restarts, seed=seed)
    puzzles = [text.parse(puzzle) for puzzle in puzzles]
    results = {
        index: event for index, event in follow(engine, puzzles, how) if isinstance(event, Solved)
    }
    return [results[index] for index in range(len(puzzles))]


def follow(
    engine: "Engine", puzzles: Sequence[str], how: How
) -> Iterator[tuple[int, Draft | Solved]]:
    """Solve puzzles, and yield drafts and results, each with its puzzle's number, as they come."""
    layout = text.reply_slots(engine.tokenizer)
    waiting = deque(Attempt(index, puzzle) for index, puzzle in enumerate(puzzles))
    running: dict[int, tuple[Attempt, Job]] = {}
    try:
        while waiting or running:
            # No more than run at once, so that no puzzle's clock counts the time others take.
            while waiting and len(running) < engine.max_rows:
                attempt = waiting.popleft()
                running[attempt.index] = attempt, engine.submit(plan(engine, attempt, layout, how))
            engine.step()
            for index, event in [e for pair in running.values() for e in _events(*pair)]:
                if isinstance(event, Draft):
                    yield index, as_asked(event, running[index][0].form, layout)
                    continue
                attempt, _ = running.pop(index)
                if attempt.take(event, how):
                    attempt.begin_again(how)
                    waiting.append(attempt)
                else:
                    yield index, attempt.result(event)
    finally:
        for _, job in running.values():
            engine.cancel(job)


@dataclass(slots=True)
class Attempt:
    """A puzzle on its way, and what its attempts have taken so far."""

    index: int
    puzzle: str
    restarts: int = 0
    steps: int = 0
    seconds: float = 0.0
    settled: bool = False
    form: Form = AS_IT_IS  # that it is asked in now

    def take(self, done: Done, how: How) -> bool:
        """Count an attempt that came to its end, and tell whether there is to be another."""
        self.steps += done.steps
        self.seconds += done.seconds
        has_ended = done.finish == "stop" if done.mode == "ar" else done.finish != FAULT
        self.settled = has_ended and done.unsettled_blocks == 0
        return self.is_open(how)

    def is_open(self, how: How) -> bool:
        """Whether there is to be another attempt."""
        return not self.settled and how.mode != "ar" and self.restarts < how.restarts

    def max_steps(self, how: How) -> int:
        return STEPS if self.restarts < how.restarts else LAST_STEPS

    def begin_again(self, how: How) -> None:
        self.restarts += 1
        self.form = random_form(Random(f"{how.seed} {self.puzzle} {self.restarts}"))

    def read(self, reply: str) -> str | None:
        """The grid of a reply, in the puzzle's own form."""
        grid = text.read_reply(reply)
        return None if grid is None else self.form.read(grid)

    def result(self, done: Done) -> Solved:
        """The outcome, whose reply is the last attempt's."""
        return Solved(
            puzzle=self.puzzle,
            solution=self.read(done.text),
            settled=self.settled,
            steps=self.steps,
            restarts=self.restarts,
            seconds=self.seconds,
            reply=done.text,
        )


def plan(engine: "Engine", attempt: Attempt, layout: Slots, how: How) -> Plan:
    """The request of one attempt."""
    # The noise belongs to the puzzle and the seed, not to the puzzle's place in a list.
    seed = (how.seed + zlib.crc32(attempt.puzzle.encode())) % SEEDS
    puzzle, length = attempt.form.write(attempt.puzzle), canvas_length(layout)
    prompt = text.prompt_text(puzzle)
    if how.mode == "ar":
        return engine.plan(prompt, Options(mode="ar", max_tokens=length, seed=seed, retries=0))
    own = engine.model.config.canvas_length
    if how.pinned and own < length:
        raise UsageError(
            f"givens cannot be pinned: the model's canvas holds {own} tokens, and a Sudoku takes "
            f"{len(layout.ids)}; leave them open with --no-pin (pinned=False)"
        )
    options = Options(
        seed=seed,
        choice=attempt.restarts,
        max_tokens=length,
        canvas_length=min(length, own),
        pins=givens(puzzle, layout) if how.pinned else NO_PINS,
        # A canvas told more than the model believes settles on wrong answers too.
        sampler=replace(
            engine.sampler,
            t_max=1.0,
            t_min=1.0,
            max_denoising_steps=min(attempt.max_steps(how), engine.sampler.max_denoising_steps),
        ),
        retries=0,  # attempts are counted here
        drafts=how.drafts,
    )
    return engine.plan(prompt, options)


def canvas_length(layout: Slots) -> int:
    """The shortest canvas, in whole units, that holds a reply and its end."""
    return -(-len(layout.ids) // CANVAS_UNIT) * CANVAS_UNIT


def givens(puzzle: str, layout: Slots) -> Pins:
    """The givens as pins of a canvas."""
    pins = [
        (position, tokens[int(cell) - 1])
        for position, tokens, cell in zip(layout.positions, layout.tokens, puzzle, strict=True)
        if cell != "0"
    ]
    return Pins(tuple(p for p, _ in pins), tuple(t for _, t in pins))


def _events(attempt: Attempt, job: Job) -> list[tuple[int, Draft | Done]]:
    """What an attempt has to report since the last pass."""
    if job.error is not None:
        raise job.error
    events = [event for event in job.events if isinstance(event, Draft | Done)]
    job.events.clear()
    return [(attempt.index, event) for event in events]


def as_asked(draft: Draft, form: Form, layout: Slots) -> Draft:
    """A canvas in the puzzle's own form; one that holds a part of the grid is left as it is."""
    if form == AS_IT_IS or len(draft.ids) <= layout.positions[-1]:
        return draft
    order = list(range(len(draft.ids)))  # where what belongs to a place stands now
    called: dict[tuple[int, int], tuple[int, str, str]] = {}  # there, an id: another, both digits
    for new, old in enumerate(form.cells):
        order[layout.positions[old]] = layout.positions[new]
        for name, written in zip(text.DIGITS, layout.tokens[new], strict=True):
            digit = form.digit(name)
            own = layout.tokens[old][int(digit) - 1]
            called[layout.positions[old], written] = own, name, digit

    def renamed(ids: tuple[int, ...], tokens: tuple[str, ...]) -> list[tuple[int, str]]:
        pairs = []
        for place, source in enumerate(order):
            own, name, digit = called.get((place, ids[source]), (ids[source], "", ""))
            pairs.append((own, tokens[source].replace(name, digit)))
        return pairs

    stands, would = renamed(draft.ids, draft.tokens), renamed(draft.guess, draft.guess_tokens)
    return replace(
        draft,
        ids=tuple(own for own, _ in stands),
        tokens=tuple(token for _, token in stands),
        guess=tuple(own for own, _ in would),
        guess_tokens=tuple(token for _, token in would),
        entropy=tuple(draft.entropy[source] for source in order),
        kept=tuple(draft.kept[source] for source in order),
        pinned=tuple(draft.pinned[source] for source in order),
    )
