"""`dgemma sudoku`: solve puzzles by diffusion or by AR of the same weights."""

import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, SamplerOptions, app, load_engine, with_options
from dgemma.config import DEFAULT_MODE
from dgemma.errors import FAILED, INTERRUPTED, UsageError
from dgemma.options import option
from dgemma.programs.sudoku.grid import CELLS, RESTARTS, parse
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.text import Text

    from dgemma.engine import Engine
    from dgemma.images import Image
    from dgemma.programs.sudoku.solve import SudokuParams, SudokuResult

RULE = "──────┼───────┼──────"
GIVEN, CHANGED, FILLED, MISSING = "bold", "bold red", "cyan", "dim"
MAX_SHOWN = 100  # characters of an argument that an error quotes


@dataclass(frozen=True, slots=True, kw_only=True)
class SudokuOptions(SamplerOptions):
    """Options of `dgemma sudoku`."""

    image: list[Path] | None = option(
        None, "A picture of a puzzle to read; may be repeated.", "--image", "-a"
    )
    mode: str = option(DEFAULT_MODE, "diffusion or ar.")
    pin: bool | None = option(
        None, "Hold the givens in place; diffusion's default.", "--pin/--no-pin"
    )
    restarts: int | None = option(
        None,
        f"Most new attempts, {RESTARTS} if not given, each in another form of the puzzle (lines "
        "shuffled, digits renamed); made only if a canvas does not converge.",
    )
    show: bool = option(False, "Watch the canvas converge.")

    def params(self) -> "SudokuParams":
        """Refuse options of a canvas in AR mode; draw a seed if none is given."""
        from dgemma.programs.sudoku.solve import SudokuParams

        if self.mode == "ar":
            given = {"--pin": self.pin, "--restarts": self.restarts is not None}
            _check_ar({**given, "--show": self.show, "--preset": self.preset is not None})
        return SudokuParams(
            mode=self.mode,  # type: ignore[arg-type]  # refused there if it is not known
            pinned=self.mode != "ar" if self.pin is None else self.pin,
            restarts=RESTARTS if self.restarts is None else self.restarts,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            drafts=self.show,
        )


@app.command()
@with_options
def sudoku(
    model: ModelOptions,
    options: SudokuOptions,
    puzzles: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PUZZLE...]",
            help="81 characters, 0 or . for an empty cell; or a file with one a line; - is stdin.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Solve Sudoku; exits with 1 if any puzzle is left unsolved.

    The model alone reads pictures and solves: replies are checked only when all is over. Grids are
    printed as they are solved, in the puzzles' order; Ctrl-C prints those that are ready.
    """
    from dgemma.images import Image

    params = options.params()
    cells = [cell for argument in puzzles or () for cell in _read(argument)]
    images = [Image.open(path) for path in options.image or ()]
    if not cells and not images:
        raise UsageError("PUZZLE is missing; give 81 characters, a file of puzzles, or --image")
    engine = load_engine(model, options.preset)
    report = SudokuReport(params, len(cells) + len(images), as_json)
    try:
        for index, result in _solve(engine, cells, images, params):
            report.add(index, result)
    except KeyboardInterrupt:
        report.finish()
        print(f"dgemma: interrupted after {report.summary}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    report.finish()
    if report.solved < report.count:
        raise typer.Exit(FAILED)


def _check_ar(options: "Mapping[str, bool | None]") -> None:
    names = [name for name, is_set in options.items() if is_set]
    if names:
        raise UsageError(f"AR mode has no canvas; leave out {' and '.join(names)}")


def _read(argument: str) -> list[str]:
    """Return the puzzles of an argument: itself, the lines of a file, or those of stdin."""
    if argument == "-":
        return _read_lines(sys.stdin.read(), "stdin")
    is_puzzle = len("".join(argument.split())) == CELLS
    if not is_puzzle and _is_file(argument):
        try:
            return _read_lines(Path(argument).read_text(encoding="utf-8"), argument)
        except UnicodeDecodeError:
            raise UsageError(f"{argument} is not a text file; give one puzzle a line") from None
    if not is_puzzle and not set(argument) <= set("0123456789. \n"):
        shown = argument if len(argument) <= MAX_SHOWN else f"{argument[:MAX_SHOWN]}..."
        raise UsageError(f"{shown!r} is neither a file nor a puzzle of 81 characters")
    return [parse(argument)]


def _is_file(argument: str) -> bool:
    try:
        return Path(argument).is_file()
    except (OSError, ValueError):  # no name a file could have
        return False


def _read_lines(text: str, name: str) -> list[str]:
    """Read one puzzle per line; what follows it, such as its solution, is ignored."""
    puzzles = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            puzzles.append(parse(line.split()[0]))
        except UsageError as error:
            raise UsageError(f"{name}, line {number}: {error}") from None
    if not puzzles:
        raise UsageError(f"{name} holds no puzzle; write one a line, 81 characters each")
    return puzzles


def _solve(
    engine: "Engine", puzzles: list[str], images: "list[Image]", params: "SudokuParams"
) -> "Iterator[tuple[int, SudokuResult]]":
    """Solve all puzzles at once, or one after the other where their canvases are shown."""
    from dgemma.cli.show import run_program
    from dgemma.programs.sudoku.solve import picture_program, reading_task, solve_program

    programs = [solve_program(engine, puzzle, params) for puzzle in puzzles]
    for image in images:
        reading = reading_task(engine, image, params)
        programs.append(picture_program(engine, reading, image.name, params))
    if not params.drafts:
        yield from engine.as_completed(programs)
        return
    for index, program in enumerate(programs):
        yield index, run_program(engine, program, show=True, doing="solving")


@dataclass(slots=True)
class SudokuReport:
    """Results so far; a grid is printed when those before it are, JSON at the end."""

    params: "SudokuParams"
    count: int  # of all puzzles
    as_json: bool
    results: "dict[int, SudokuResult]" = field(default_factory=dict)
    printed: int = 0

    @property
    def solved(self) -> int:
        return sum(result.is_right for result in self.results.values())

    @property
    def summary(self) -> str:
        return f"{len(self.results)} of {_counted(self.count)}, {self.solved} solved"

    def add(self, index: int, result: "SudokuResult") -> None:
        self.results[index] = result
        while not self.as_json and self.printed in self.results:
            self._print(self.printed)
            self.printed += 1

    def finish(self) -> None:
        """Print the results that wait for one before them; an interrupted run has such gaps."""
        if self.as_json:
            print(json.dumps([_report(self.results[i], self.params) for i in sorted(self.results)]))
            return
        for index in sorted(self.results):
            if index >= self.printed:
                self._print(index)
        if self.count > 1 and len(self.results) == self.count:
            print(f"{self.solved} of {self.count} solved")

    def _print(self, index: int) -> None:
        from rich.console import Console

        result, console = self.results[index], Console(highlight=False, soft_wrap=True)
        number = f"puzzle {index + 1}: " if self.count > 1 else ""
        console.print(_outcome(result))
        console.print(number + _summary(result), style="dim")
        console.print()


def _counted(count: int) -> str:
    return "1 puzzle" if count == 1 else f"{count} puzzles"


def _report(result: "SudokuResult", params: "SudokuParams") -> dict[str, object]:
    return {
        "puzzle": result.puzzle,
        "solution": result.solution,
        "solved": result.is_right,
        "steps": result.steps,
        "seconds": round(result.seconds, 4),
        "restarts": result.restarts,
        "converged": result.converged,
        "mode": params.mode,
        "pinned": params.pinned,
        "seed": params.seed,
    }


def _outcome(result: "SudokuResult") -> "Text":
    """Return the grid; where there is none, the reply as it was written, or the puzzle."""
    from rich.text import Text

    # A later attempt's reply is of another form of the puzzle.
    if result.solution is None and result.restarts == 0 and result.reply.strip():
        return Text(result.reply.strip(), style=FILLED)
    return _grid(result)


def _grid(result: "SudokuResult") -> "Text":
    """Return the grid with its givens highlighted; an empty cell is a dot."""
    from rich.text import Text

    grid = Text()
    for cell in range(CELLS):
        row, column = divmod(cell, 9)
        if column == 0 and row in (3, 6):
            grid.append(RULE + "\n", style=MISSING)
        digit = result.puzzle[cell] if result.solution is None else result.solution[cell]
        grid.append(digit.replace("0", "·"), style=_style(result.puzzle[cell], digit))
        grid.append(" │ " if column in (2, 5) else "\n" if column == 8 else " ", style=MISSING)
    grid.rstrip()
    return grid


def _style(clue: str, digit: str) -> str:
    if clue == "0":
        return MISSING if digit == "0" else FILLED
    return GIVEN if clue == digit else CHANGED


def _summary(result: "SudokuResult") -> str:
    if result.solution is None:
        outcome = "no grid in the reply"
    else:
        outcome = "solved" if result.is_right else "not solved"
    converged = "" if result.converged else ", did not converge"
    restarts = f", restarts: {result.restarts}" if result.restarts else ""
    return f"{outcome}{converged}; {result.steps} steps, {result.seconds:.2f} s{restarts}"
