"""`dgemma edit`: change a text file by an instruction; print a diff or write the file."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, PresetOption, app, load_engine, with_options
from dgemma.cli.text_files import STDIN, check_writable, print_text, read_text, write_text
from dgemma.errors import UsageError
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.engine import Engine
    from dgemma.programs.edit.edit import EditParams, EditResult


@app.command()
@with_options
def edit(
    file: Annotated[str, typer.Argument(help="A text file; - is stdin.")],
    *,
    do: Annotated[
        str | None,
        typer.Option(
            help="What to change. Without it words that the model doubts are corrected; nano finds "
            "few mistakes."
        ),
    ] = None,
    options: ModelOptions,
    lines: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only these lines, counted from 1.")
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(help="0 to 1: how readily text is opened; 0.5 without it, 1 opens all."),
    ] = None,
    passes: Annotated[
        int | None, typer.Option(help="Most times over the text; 2, or 3 without --do.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same edit.")] = None,
    apply: Annotated[
        bool, typer.Option("--apply/--diff", help="Write the file, or print a diff.")
    ] = False,
    preset: PresetOption = None,
    show: Annotated[bool, typer.Option("--show", help="Watch a canvas converge.")] = False,
    as_json: AsJson = False,
) -> None:
    """Edit a text in place: what need not change stays byte for byte."""
    from dgemma.programs.edit.edit import EditParams, check_edit
    from dgemma.programs.edit.spans import line_span

    text = read_text(file)
    if apply:
        check_writable(file)
    params = EditParams(
        lines=_lines(lines),
        strength=strength,
        passes=passes,
        seed=seed,
        drafts=show or sys.stderr.isatty(),
    )
    check_edit(params)  # before a long load
    if params.lines is not None:
        line_span(text, *params.lines)
    engine = load_engine(options, preset)
    edited = _run(engine, text, do, params, show=show)
    name = "stdin" if file == STDIN else Path(file).as_posix().lstrip("/")
    if apply and not (as_json and file == STDIN):
        write_text(file, edited.text, text)
    if as_json:
        print(json.dumps(_report(edited, name, options.model), ensure_ascii=False))
    elif not apply:
        print_text(edited.diff(name))
    if not as_json and edited.text == text:
        print(f"dgemma: {_no_change(edited)}", file=sys.stderr)


def _no_change(edited: "EditResult") -> str:
    """Say that nothing changed, how far the model looked, and what looks further."""
    more = "; --strength 0.8 opens more, and --lines A:B opens a selection as a whole"
    if not edited.opened:
        return f"nothing changed: no word was doubtful{more}"
    kept = "the old text stayed the likeliest in all of them"
    return f"nothing changed: {len(edited.opened)} spans were opened, and {kept}{more}"


def _lines(option: str | None) -> tuple[int, int] | None:
    if option is None:
        return None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", option)
    if match is None:
        raise UsageError(f"lines are {option!r}; give the first and the last, such as 3:7")
    return int(match[1]), int(match[2] or match[1])


def _run(
    engine: "Engine", text: str, instruction: str | None, params: "EditParams", *, show: bool
) -> "EditResult":
    from dgemma.cli.show import run_program
    from dgemma.programs.edit.edit import edit_program

    program = edit_program(engine, text, instruction, params)
    return run_program(engine, program, show=show, doing="editing")


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
