"""`dgemma fill`: fill the holes of a text file; everything else stays byte for byte."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, PresetOption, app, load_engine, with_options
from dgemma.cli.text_files import STDIN, check_writable, print_text, read_text, write_text
from dgemma.errors import UsageError
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.engine import Engine
    from dgemma.programs.infill.document import InfillDocument
    from dgemma.programs.infill.infill import FilledText, FillParams, FillResult


@app.command()
@with_options
def fill(
    file: Annotated[str, typer.Argument(help="A text file with <|fill|> in it; - is stdin.")],
    options: ModelOptions,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of the holes, if known: one for all, or one for each."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest hole.")] = None,
    single_line: Annotated[
        bool, typer.Option("--single-line", help="A hole ends with its line.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option(help="A hole ends before this text.")] = None,
    candidates: Annotated[int, typer.Option(help="How many ways to fill it; the best first.")] = 1,
    effort: Annotated[
        str,
        typer.Option(
            help="thorough: search lengths, and what the causal mode would write; fast: one batch "
            "of canvases for each hole, as editors want it."
        ),
    ] = "thorough",
    prompt_style: Annotated[
        str | None,
        typer.Option(
            help="Prompt style: base, the text alone; instruct, a user turn that shows the whole "
            "text; both, the default if there is a chat template."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write the file instead of stdout.")
    ] = False,
    preset: PresetOption = None,
    show: Annotated[bool, typer.Option("--show", help="Watch a canvas converge.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fill each <|fill|> in a text; everything else is untouched."""
    from dgemma.programs.infill.document import InfillDocument
    from dgemma.programs.infill.infill import FillParams, check_fill

    if in_place and file == STDIN:
        raise UsageError("stdin cannot be written in place; give a file, or leave out --in-place")
    text = read_text(file)
    document = InfillDocument.parse(text)
    if in_place:
        check_writable(file)
    params = FillParams(
        lengths=_lengths(length, document.num_holes),
        max_tokens=max_tokens,
        single_line=single_line,
        stop=tuple(stop or ()),
        num_candidates=candidates,
        effort=effort,  # type: ignore[arg-type]  # refused below if it is not known
        prompt_style=prompt_style,  # type: ignore[arg-type]  # the same
        seed=seed,
        drafts=show or sys.stderr.isatty(),
    )
    check_fill(params)  # before a long load
    engine = load_engine(options, preset)
    filled = _run(engine, document, params, show=show)
    if in_place:
        write_text(file, filled.text, text)
    if as_json:
        print(json.dumps(_report(filled, options.model), ensure_ascii=False))
    elif not in_place:
        print_text(filled.text)
    if not as_json:
        for number, candidate in enumerate(filled.candidates[1:], start=2):
            texts = ", ".join(repr(hole.text) for hole in candidate.holes)
            print(f"candidate {number}, score {candidate.score:.3f}: {texts}", file=sys.stderr)


def _lengths(lengths: list[int] | None, count: int) -> tuple[int, ...] | None:
    """Return a length for each hole; a single one is for all of them."""
    if not lengths:
        return None
    if len(lengths) not in (1, count):
        raise UsageError(
            f"{len(lengths)} lengths are given for {count} holes; give one, or {count}"
        )
    return tuple(lengths * count)[:count]


def _run(
    engine: "Engine", document: "InfillDocument", params: "FillParams", *, show: bool
) -> "FillResult":
    from dgemma.cli.show import run_program
    from dgemma.programs.infill.infill import fill_program

    program = fill_program(engine, document, params)
    return run_program(engine, program, show=show, doing="filling")


def _report(filled: "FillResult", model: str) -> dict[str, object]:
    return {
        **_text(filled.candidates[0]),
        "candidates": [_text(candidate) for candidate in filled.candidates],
        "steps": filled.steps,
        "canvases": filled.canvases,
        "seconds": round(filled.seconds, 4),
        "seed": filled.seed,
        "form": filled.prompt_style,
        "model": model,
    }


def _text(candidate: "FilledText") -> dict[str, object]:
    return {
        "text": candidate.text,
        "holes": [asdict(hole) for hole in candidate.holes],
        "score": candidate.score,
    }
