"""`dgemma sudoku`: puzzles in, solved grids out, by diffusion or by AR of the same weights."""

import json
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import FAILED, INTERRUPTED, Adapter, AsJson, Device, Dtype, Model, Quant, app
from dgemma.errors import UsageError
from dgemma.text.sudoku import CELLS, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.text import Text

    from dgemma.engine import Engine
    from dgemma.engine.sudoku import How, Solved

RULE = "──────┼───────┼──────"
GIVEN, CHANGED, FILLED, MISSING = "bold", "bold red", "cyan", "dim"
RESTARTS = 8


@app.command()
def sudoku(
    puzzles: Annotated[
        list[str],
        typer.Argument(
            metavar="PUZZLE...",
            help="81 characters, 0 or . for an empty cell; or a file with one a line; - is stdin.",
        ),
    ],
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quant: Quant = "auto",
    adapter: Adapter = None,
    mode: Annotated[str, typer.Option(help="diffusion or ar.")] = "diffusion",
    pin: Annotated[
        bool | None,
        typer.Option("--pin/--no-pin", help="Hold the givens in place; diffusion's default."),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            help=f"Most new attempts, {RESTARTS} if not given, each in another form of the puzzle "
            "(lines shuffled, digits renamed); made only if a canvas does not settle."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same solution.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Watch the canvas settle.")] = False,
    as_json: AsJson = False,
) -> None:
    """Solve Sudoku; exits with 1 if any puzzle is left unsolved.

    The model alone solves: replies are checked only when all is over. Grids are printed as they are
    solved, in the puzzles' order; Ctrl-C prints those that are ready.
    """
    from dgemma.cli.loading import load_engine
    from dgemma.engine.sudoku import How

    if mode == "ar":
        _check_ar({"--pin": pin, "--restarts": restarts is not None, "--show": show})
    cells = [cell for argument in puzzles for cell in _read(argument)]
    how = How(
        mode=mode,  # type: ignore[arg-type]  # refused there if it is not known
        pinned=mode != "ar" if pin is None else pin,
        restarts=RESTARTS if restarts is None else restarts,
        seed=secrets.randbits(32) if seed is None else seed,
        drafts=show,
    )
    engine = load_engine(model, device, dtype, adapter, quant)
    results = Results(how, len(cells), as_json)
    try:
        for index, one in _solve(engine, cells, how, show=show):
            results.take(index, one)
    except KeyboardInterrupt:
        results.finish()
        print(f"dgemma: interrupted after {results.summary}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    results.finish()
    if results.solved < len(cells):
        raise typer.Exit(FAILED)


def _check_ar(given: "Mapping[str, bool | None]") -> None:
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise UsageError(f"AR mode has no canvas; leave out {' and '.join(names)}")


def _read(argument: str) -> list[str]:
    """The puzzles an argument stands for: itself, the lines of a file, or those of stdin."""
    if argument == "-":
        return _read_lines(sys.stdin.read(), "stdin")
    is_puzzle = len("".join(argument.split())) == CELLS
    if not is_puzzle and _is_file(argument):
        try:
            return _read_lines(Path(argument).read_text(encoding="utf-8"), argument)
        except UnicodeDecodeError:
            raise UsageError(f"{argument} is no text file; give one puzzle a line") from None
    if not is_puzzle and not set(argument) <= set("0123456789. \n"):
        raise UsageError(f"{argument!r} is neither a file nor a puzzle of 81 characters")
    return [parse(argument)]


def _is_file(argument: str) -> bool:
    try:
        return Path(argument).is_file()
    except (OSError, ValueError):  # no name a file could have
        return False


def _read_lines(text: str, name: str) -> list[str]:
    """One puzzle a line; what follows it, such as its solution, is left alone."""
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
    engine: "Engine", puzzles: list[str], how: "How", *, show: bool
) -> "Iterator[tuple[int, Solved]]":
    """All puzzles at once, or one after the other where their canvases are to be watched."""
    from dgemma.engine.sudoku import Solved, follow

    if show:
        for index, puzzle in enumerate(puzzles):
            yield index, _watch(engine, puzzle, how)
        return
    for index, event in follow(engine, puzzles, how):
        if isinstance(event, Solved):
            yield index, event


def _watch(engine: "Engine", puzzle: str, how: "How") -> "Solved":
    from dgemma.cli.show import CanvasView
    from dgemma.engine.sudoku import Solved, follow

    with CanvasView() as view:
        for _, event in follow(engine, [puzzle], how):
            if isinstance(event, Solved):
                return event
            view.draw(event)
    raise AssertionError("a puzzle ends with its result")


@dataclass(slots=True)
class Results:
    """What came of the puzzles; a grid is printed when those before it are, JSON at the end."""

    how: "How"
    count: int  # of all puzzles
    as_json: bool
    found: "dict[int, Solved]" = field(default_factory=dict)
    printed: int = 0

    @property
    def solved(self) -> int:
        return sum(one.is_right for one in self.found.values())

    @property
    def summary(self) -> str:
        return f"{len(self.found)} of {_counted(self.count)}, {self.solved} solved"

    def take(self, index: int, one: "Solved") -> None:
        self.found[index] = one
        while not self.as_json and self.printed in self.found:
            self._print(self.printed)
            self.printed += 1

    def finish(self) -> None:
        """Print what is there and was not: if all is over early, some before it may be missing."""
        if self.as_json:
            print(json.dumps([_report(self.found[i], self.how) for i in sorted(self.found)]))
            return
        for index in sorted(self.found):
            if index >= self.printed:
                self._print(index)
        if self.count > 1 and len(self.found) == self.count:
            print(f"{self.solved} of {self.count} solved")

    def _print(self, index: int) -> None:
        from rich.console import Console

        one, console = self.found[index], Console(highlight=False, soft_wrap=True)
        number = f"puzzle {index + 1}: " if self.count > 1 else ""
        console.print(_outcome(one))
        console.print(number + _summary(one), style="dim")
        console.print()


def _counted(count: int) -> str:
    return "1 puzzle" if count == 1 else f"{count} puzzles"


def _report(one: "Solved", how: "How") -> dict[str, object]:
    return {
        "puzzle": one.puzzle,
        "solution": one.solution,
        "solved": one.is_right,
        "steps": one.steps,
        "seconds": round(one.seconds, 4),
        "restarts": one.restarts,
        "settled": one.settled,
        "mode": how.mode,
        "pinned": how.pinned,
        "seed": how.seed,
    }


def _outcome(one: "Solved") -> "Text":
    """The grid; where there is none, the reply as it was written, or the puzzle."""
    from rich.text import Text

    # A later attempt's reply is of another form of the puzzle.
    if one.solution is None and one.restarts == 0 and one.reply.strip():
        return Text(one.reply.strip(), style=FILLED)
    return _grid(one)


def _grid(one: "Solved") -> "Text":
    """The grid with its givens set apart; an empty cell is a dot."""
    from rich.text import Text

    grid = Text()
    for cell in range(CELLS):
        row, column = divmod(cell, 9)
        if column == 0 and row in (3, 6):
            grid.append(RULE + "\n", style=MISSING)
        digit = one.puzzle[cell] if one.solution is None else one.solution[cell]
        grid.append(digit.replace("0", "·"), style=_style(one.puzzle[cell], digit))
        grid.append(" │ " if column in (2, 5) else "\n" if column == 8 else " ", style=MISSING)
    grid.rstrip()
    return grid


def _style(given: str, digit: str) -> str:
    if given == "0":
        return MISSING if digit == "0" else FILLED
    return GIVEN if given == digit else CHANGED


def _summary(one: "Solved") -> str:
    if one.solution is None:
        outcome = "no grid in the reply"
    else:
        outcome = "solved" if one.is_right else "not solved"
    settled = "" if one.settled else ", did not settle"
    restarts = f", restarts: {one.restarts}" if one.restarts else ""
    return f"{outcome}{settled}; {one.steps} steps, {one.seconds:.2f} s{restarts}"
