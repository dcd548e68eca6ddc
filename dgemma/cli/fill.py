"""`dgemma fill`: a text file with holes, filled; everything else stays byte for byte."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import Adapter, AsJson, Device, Dtype, Model, Quant, app
from dgemma.cli.texts import STDIN, check_writable, print_text, read_text, write_text
from dgemma.errors import UsageError

if TYPE_CHECKING:
    from dgemma.constrain.holes import Holed
    from dgemma.engine import Engine
    from dgemma.engine.fill import Filled, FilledText, FillOptions


@app.command()
def fill(
    file: Annotated[str, typer.Argument(help="A text file with <|fill|> in it; - is stdin.")],
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quant: Quant = "auto",
    adapter: Adapter = None,
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
    form: Annotated[
        str | None,
        typer.Option(
            help="How the model is asked: base, by the text alone; instruct, by a request that "
            "shows the whole text; both, the default where there is a chat template."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write the file instead of stdout.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Watch a canvas settle.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fill each <|fill|> in a text; everything else is untouched."""
    from dgemma.cli.loading import load_engine
    from dgemma.constrain.holes import Holed
    from dgemma.engine.fill import FillOptions, check_fill

    if in_place and file == STDIN:
        raise UsageError("stdin cannot be written in place; give a file, or leave out --in-place")
    holed = Holed.read(read_text(file))
    if in_place:
        check_writable(file)
    options = FillOptions(
        lengths=_lengths(length, holed.count),
        max_tokens=max_tokens,
        single_line=single_line,
        stop=tuple(stop or ()),
        candidates=candidates,
        effort=effort,  # type: ignore[arg-type]  # refused below if it is not known
        form=form,  # type: ignore[arg-type]  # the same
        seed=seed,
        drafts=show,
    )
    check_fill(options)  # before a long load
    filled = _run(load_engine(model, device, dtype, adapter, quant), holed, options)
    if in_place:
        write_text(file, filled.text)
    if as_json:
        print(json.dumps(_report(filled, model), ensure_ascii=False))
    elif not in_place:
        print_text(filled.text)
    if not as_json:
        for number, one in enumerate(filled.candidates[1:], start=2):
            texts = ", ".join(repr(hole.text) for hole in one.holes)
            print(f"candidate {number}, score {one.score:.3f}: {texts}", file=sys.stderr)


def _lengths(given: list[int] | None, count: int) -> tuple[int, ...] | None:
    """One length stands for all holes."""
    if not given:
        return None
    if len(given) not in (1, count):
        raise UsageError(f"{len(given)} lengths are given for {count} holes; give one, or {count}")
    return tuple(given * count)[:count]


def _run(engine: "Engine", holed: "Holed", options: "FillOptions") -> "Filled":
    from dgemma.cli.show import CanvasView
    from dgemma.engine.fill import Filled

    with ExitStack() as stack:
        view = stack.enter_context(CanvasView()) if options.drafts else None
        for event in engine.stream_fill(holed, options):
            if isinstance(event, Filled):
                return event
            if view is not None:
                view.draw(event)
    raise AssertionError("a stream ends with its result")


def _report(filled: "Filled", model: str) -> dict[str, object]:
    return {
        **_text(filled.candidates[0]),
        "candidates": [_text(one) for one in filled.candidates],
        "steps": filled.steps,
        "canvases": filled.canvases,
        "seconds": round(filled.seconds, 4),
        "seed": filled.seed,
        "form": filled.form,
        "model": model,
    }


def _text(one: "FilledText") -> dict[str, object]:
    return {
        "text": one.text,
        "holes": [asdict(hole) for hole in one.holes],
        "score": one.score,
    }
