"""Solve Sudoku by the model: puzzles in, text out, attempts counted.

The model gets each puzzle as a person would write it and the reply is read as text. Nothing checks
a reply on the way: a new attempt is made only when a canvas did not converge, which the model
itself reports. Its noise is the next choice of the same seed, and the puzzle is asked in another
form, with lines shuffled and digits renamed: where one form stalls, another often does not.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from dgemma.config import DEFAULT_MODE, Mode
from dgemma.diffusion.canvas import NO_PINS, Pins
from dgemma.engine.events import Done, Draft
from dgemma.engine.generation import FAULT, Generation
from dgemma.engine.params import SamplingParams
from dgemma.engine.request import Program
from dgemma.errors import UsageError, require
from dgemma.images import Image, Picture
from dgemma.programs.sudoku import grid
from dgemma.programs.sudoku.grid import ORIGINAL, GridSymmetry, SlotTemplate, random_form
from dgemma.programs.sudoku.straighten import SHEET, sheet_of
from dgemma.text.messages import Message

if TYPE_CHECKING:
    from dgemma.engine.engine import Engine

MAX_SEED = 1 << 64
CANVAS_MULTIPLE = 32  # of the canvas that holds the reply
# Nearly all canvases that converge do so within a dozen steps: a new attempt brings more than to
# wait for the others. After the last attempt there is none.
MAX_STEPS, MAX_LAST_STEPS = 16, 32
SHIFTS = ((0, 0), (2, -2), (-2, 2))  # pixels down and right, of pictures that are read together
MIN_COSINE = 0.4  # of soft tokens and what they spell, on average; unrelated ones have about 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SudokuResult:
    """The result of one puzzle, all attempts together."""

    puzzle: str
    solution: str | None  # 81 digits, right or wrong; None: the reply was not a grid
    converged: bool  # AR: the reply came to its end
    steps: int
    restarts: int  # attempts after the first
    seconds: float
    prompt_tokens: int = 0  # of all attempts together
    reply: str = ""  # of the last attempt: after restarts, of another form

    @property
    def is_right(self) -> bool:
        """True if the solution keeps the givens and obeys the rules."""
        return self.solution is not None and grid.is_solution(self.puzzle, self.solution)


@dataclass(frozen=True, slots=True, kw_only=True)
class SudokuParams:
    """Parameters of solving. AR has no canvas: pins and restarts are for diffusion."""

    mode: Mode = DEFAULT_MODE
    pinned: bool = True  # hold the givens in place
    restarts: int = 0  # most attempts after the first
    seed: int = 0
    drafts: bool = False  # report canvases

    def __post_init__(self) -> None:
        if self.mode not in ("diffusion", "ar"):
            raise UsageError(f"mode {self.mode!r} is not for Sudoku; use diffusion or ar")
        require(self.restarts >= 0, "restarts", self.restarts, "0 or more")
        require(0 <= self.seed < MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED - 1}")


def solve(
    engine: "Engine", puzzles: Sequence[str], params: SudokuParams | None = None
) -> list[SudokuResult]:
    """Solve puzzles of 81 digits or dots, as many at once as the engine takes in a pass."""
    params = params or SudokuParams()
    parsed = [grid.parse(puzzle) for puzzle in puzzles]
    return engine.run_all([solve_program(engine, puzzle, params) for puzzle in parsed])


def solve_program(engine: "Engine", puzzle: str, params: SudokuParams) -> Program[SudokuResult]:
    """Solve one puzzle, with restarts."""
    steps, seconds, restarts, prompt_tokens = 0, 0.0, 0, 0
    while True:
        form = attempt_form(puzzle, params.seed, restarts)
        task = sudoku_task(engine, puzzle, restarts, params)
        (done,) = yield [task]
        steps, seconds = steps + done.steps, seconds + done.seconds
        prompt_tokens += done.prompt_tokens
        has_converged = _has_converged(done)
        if has_converged or params.mode == "ar" or restarts == params.restarts:
            break
        restarts += 1
    cells = grid.read_reply(done.text)
    return SudokuResult(
        puzzle=puzzle,
        solution=None if cells is None else form.read(cells),
        converged=has_converged,
        steps=steps,
        restarts=restarts,
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        reply=done.text,
    )


def picture_program(
    engine: "Engine", reading: Generation, name: str, params: SudokuParams
) -> Program[SudokuResult]:
    """Let the model read a puzzle from the picture of this name, and solve what it read.

    Nano's tower is trained to give the embeddings of the digits, which then spell the puzzle. Where
    they do not, as with other towers, the model is asked for it.
    """
    steps, seconds = 0, 0.0
    cells = spelled_givens(engine, reading.prompt.images[0].picture)
    if cells is None:
        (done,) = yield [reading]
        cells, steps, seconds = grid.read_givens(done.text), done.steps, done.seconds
    if cells is None:
        raise UsageError(f"no Sudoku was read from {name}; show one grid, upright, with its frame")
    try:
        puzzle = grid.parse(cells)
    except UsageError as error:
        raise UsageError(
            f"{name} was read as {cells}, and {error}; show a sharper picture, or type it"
        ) from None
    result = yield from solve_program(engine, puzzle, params)
    return replace(result, steps=result.steps + steps, seconds=result.seconds + seconds)


def spelled_givens(engine: "Engine", picture: Picture) -> str | None:
    """Return the puzzle that the soft tokens of a straightened grid spell; None if they do not.

    A soft token spells the digit whose embedding has its direction, 0 for an empty cell, and a
    newline beside the grid. The mean over slightly moved pictures misreads fewer. Runs the tower,
    and therefore in the engine's thread: inside a program.
    """
    images = engine.images
    assert images is not None
    if picture.num_tokens != SHEET**2:
        return None
    moved = [replace(picture, pixels=np.roll(picture.pixels, by, (0, 1))) for by in SHIFTS]
    features_PSD = torch.stack([images.features(one).float() for one in moved])
    tokens = [engine.tokenizer.encode(text)[-1] for text in ("0", *grid.DIGITS, "\n")]
    known = torch.tensor(tokens, device=features_PSD.device)
    table_KD = F.normalize(engine.model.embed(known).float(), dim=-1)
    cosine_SK = (F.normalize(features_PSD, dim=-1) @ table_KD.T).mean(0)
    cells_CK = cosine_SK.view(SHEET, SHEET, -1)[1:-1, 1:-1].flatten(0, 1)
    cosine_C, digit_C = cells_CK.max(-1)
    if cosine_C.mean() < MIN_COSINE or (digit_C > 9).any():
        return None
    return "".join(map(str, digit_C.tolist()))


def reading_task(engine: "Engine", image: Image, params: SudokuParams) -> Generation:
    """Return the generation that reads the givens of a picture, whose grid is straightened."""
    message = Message(role="user", content=(grid.READ_TASK, sheet_of(image)))
    length = canvas_length(grid.reply_slots(engine.tokenizer))
    canvas = None if params.mode == "ar" else min(length, engine.model.config.canvas_length)
    reading = SamplingParams(
        mode=params.mode, seed=params.seed, max_tokens=length, canvas_length=canvas, retries=0
    )
    return engine.generation(engine.prompt([message]), reading)


def _has_converged(done: Done) -> bool:
    has_ended = done.finish == "stop" if done.mode == "ar" else done.finish != FAULT
    return has_ended and done.unconverged_blocks == 0


def attempt_form(puzzle: str, seed: int, restarts: int) -> GridSymmetry:
    """Return the form in which an attempt writes the puzzle: the first as it is."""
    return random_form(Random(f"{seed} {puzzle} {restarts}")) if restarts else ORIGINAL


def sudoku_task(engine: "Engine", puzzle: str, restarts: int, params: SudokuParams) -> Generation:
    """Return the generation of one attempt."""
    form = attempt_form(puzzle, params.seed, restarts)
    # The noise belongs to the puzzle and the seed, not to the puzzle's index in a list.
    seed = (params.seed + zlib.crc32(puzzle.encode())) % MAX_SEED
    written, slots = form.write(puzzle), grid.reply_slots(engine.tokenizer)
    prompt, length = grid.prompt_text(written), canvas_length(slots)
    if params.mode == "ar":
        ar = SamplingParams(mode="ar", max_tokens=length, seed=seed, retries=0)
        return engine.generation(prompt, ar)
    max_length = engine.model.config.canvas_length
    if params.pinned and max_length < length:
        raise UsageError(
            f"givens cannot be pinned: the model's canvas holds {max_length} tokens, and a Sudoku "
            f"takes {len(slots.ids)}; leave them open with --no-pin (pinned=False)"
        )
    max_steps = MAX_STEPS if restarts < params.restarts else MAX_LAST_STEPS
    # A canvas at a lower temperature than the model's converges on wrong answers too.
    sampler = replace(
        engine.sampler,
        t_max=1.0,
        t_min=1.0,
        max_denoising_steps=min(max_steps, engine.sampler.max_denoising_steps),
    )
    diffusion = SamplingParams(
        seed=seed,
        choice=restarts,
        max_tokens=length,
        canvas_length=min(length, max_length),
        pins=givens(written, slots) if params.pinned else NO_PINS,
        sampler=sampler,
        retries=0,  # attempts are counted here
        drafts=params.drafts,
    )
    map_draft = partial(original_draft, form=form, slots=slots)
    return engine.generation(prompt, diffusion, map_draft=map_draft)


def canvas_length(slots: SlotTemplate) -> int:
    """Return the shortest canvas, a multiple of 32, that holds a reply and its end."""
    return -(-len(slots.ids) // CANVAS_MULTIPLE) * CANVAS_MULTIPLE


def givens(puzzle: str, slots: SlotTemplate) -> Pins:
    """Return the givens as pins of a canvas."""
    pins = [
        (position, tokens[int(cell) - 1])
        for position, tokens, cell in zip(slots.positions, slots.tokens, puzzle, strict=True)
        if cell != "0"
    ]
    return Pins(tuple(p for p, _ in pins), tuple(t for _, t in pins))


def original_draft(draft: Draft, form: GridSymmetry, slots: SlotTemplate) -> Draft:
    """Return a canvas in the puzzle's original form; one that holds part of the grid stays."""
    if form == ORIGINAL or len(draft.ids) <= slots.positions[-1]:
        return draft
    order = list(range(len(draft.ids)))  # source of each position
    renamed: dict[tuple[int, int], tuple[int, str, str]] = {}  # position, id: id, both digits
    for new, old in enumerate(form.cells):
        order[slots.positions[old]] = slots.positions[new]
        for name, written in zip(grid.DIGITS, slots.tokens[new], strict=True):
            digit = form.original_digit(name)
            own = slots.tokens[old][int(digit) - 1]
            renamed[slots.positions[old], written] = own, name, digit

    def translate(ids: tuple[int, ...], tokens: tuple[str, ...]) -> list[tuple[int, str]]:
        pairs = []
        for position, source in enumerate(order):
            own, name, digit = renamed.get((position, ids[source]), (ids[source], "", ""))
            pairs.append((own, tokens[source].replace(name, digit)))
        return pairs

    now, guess = translate(draft.ids, draft.tokens), translate(draft.guess, draft.guess_tokens)
    return replace(
        draft,
        ids=tuple(own for own, _ in now),
        tokens=tuple(token for _, token in now),
        guess=tuple(own for own, _ in guess),
        guess_tokens=tuple(token for _, token in guess),
        entropy=tuple(draft.entropy[source] for source in order),
        accepted=tuple(draft.accepted[source] for source in order),
        pinned=tuple(draft.pinned[source] for source in order),
    )
