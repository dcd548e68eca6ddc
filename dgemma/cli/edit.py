"""`dgemma edit`: change a text file by an instruction; print a diff or write the file."""

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, SamplerOptions, app, load_engine, with_options
from dgemma.cli.text_files import STDIN, check_writable, print_text, read_text, write_text
from dgemma.errors import UsageError
from dgemma.options import option
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.programs.edit.edit import EditResult


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOptions(SamplerOptions):
    """Options of `dgemma edit`."""

    do: str | None = option(
        None,
        "What to change. Without it words that the model doubts are replaced; nano finds few "
        "mistakes.",
    )
    lines: str | None = option(None, "Only these lines, counted from 1.", metavar="A:B")
    strength: float | None = option(
        None, "0 to 1: how readily text is changed; default: 0.5; 1 opens all."
    )
    passes: int | None = option(None, "Most passes over the text; default: 2, or 3 without --do.")
    apply: bool = option(False, "Write the file, or print a diff.", "--apply/--diff")
    show: bool = option(False, "Watch a canvas converge.")


@app.command()
@with_options
def edit(
    file: Annotated[str, typer.Argument(help="A text file; - is stdin.")],
    options: EditOptions,
    model: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Edit a text in place; everything that need not change stays byte for byte."""
    from dgemma.cli.show import run_program
    from dgemma.programs.edit.edit import EditParams, check_edit, edit_program
    from dgemma.programs.edit.spans import line_span

    text = read_text(file)
    if options.apply:
        check_writable(file)
    params = EditParams(
        lines=_lines(options.lines),
        strength=options.strength,
        passes=options.passes,
        seed=options.seed,
        drafts=options.show or sys.stderr.isatty(),
    )
    check_edit(params)  # before a long load
    if params.lines is not None:
        line_span(text, *params.lines)
    engine = load_engine(model, options.preset)
    program = edit_program(engine, text, options.do, params)
    edited = run_program(engine, program, show=options.show, doing="editing")
    name = "stdin" if file == STDIN else Path(file).as_posix().lstrip("/")
    if options.apply and not (as_json and file == STDIN):
        write_text(file, edited.text, text)
    if as_json:
        print(json.dumps(_report(edited, name, model.model), ensure_ascii=False))
    elif not options.apply:
        print_text(edited.diff(name))
    if not as_json and edited.text == text:
        print(f"dgemma: {_no_change(edited)}", file=sys.stderr)


def _no_change(edited: "EditResult") -> str:
    """Say that nothing changed, how far the model looked, and what looks further."""
    more = "; --strength 0.8 opens more, and --lines A:B opens a selection as a whole"
    if not edited.opened:
        return f"nothing changed: no word was doubtful{more}"
    kept = "the old text stayed the most likely in all of them"
    return f"nothing changed: {len(edited.opened)} spans were opened, and {kept}{more}"


def _lines(option: str | None) -> tuple[int, int] | None:
    if option is None:
        return None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", option)
    if match is None:
        raise UsageError(f"lines are {option!r}; give the first and the last, such as 3:7")
    return int(match[1]), int(match[2] or match[1])


def _report(edited: "EditResult", name: str, model: str) -> dict[str, object]:
    return {
        "text": edited.text,
        "changed": [asdict(change) for change in edited.changed],
        "opened": edited.opened,
        "diff": edited.diff(name),
        "passes": edited.passes,
        "steps": edited.steps,
        "canvases": edited.canvases,
        "seconds": round(edited.seconds, 4),
        "seed": edited.seed,
        "model": model,
    }
