"""`dgemma fill`: fill the holes of a text file; everything else stays byte for byte."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, SamplerOptions, app, load_engine, with_options
from dgemma.cli.text_files import STDIN, check_writable, print_text, read_text, write_text
from dgemma.errors import UsageError
from dgemma.options import option
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.programs.infill.infill import FilledText, FillParams, FillResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions(SamplerOptions):
    """Options of `dgemma fill`."""

    length: list[int] | None = option(
        None, "Tokens of the holes, if known: one number for all, or one per hole.", min=1
    )
    max_tokens: int | None = option(None, "Longest hole.")
    single_line: bool = option(False, "End each hole at the end of its line.")
    stop: list[str] | None = option(None, "End a hole before this text.")
    candidates: int = option(1, "Number of candidates to print, best first.")
    effort: str = option(
        "thorough",
        "thorough: search lengths, and what the causal mode would write; fast: one batch of "
        "canvases for each hole, as editors want it.",
    )
    prompt_style: str | None = option(
        None,
        "Prompt style: base, the text alone; instruct, a user turn that shows the whole text; "
        "both, the default if there is a chat template.",
    )
    in_place: bool = option(False, "Write the file instead of stdout.")
    show: bool = option(False, "Watch a canvas converge.")

    def params(self, num_holes: int) -> "FillParams":
        """Return the parameters of a text with so many holes."""
        from dgemma.programs.infill.infill import FillParams

        return FillParams(
            lengths=_lengths(self.length, num_holes),
            max_tokens=self.max_tokens,
            single_line=self.single_line,
            stop=tuple(self.stop or ()),
            num_candidates=self.candidates,
            effort=self.effort,  # type: ignore[arg-type]  # checked by check_fill
            prompt_style=self.prompt_style,  # type: ignore[arg-type]  # the same
            seed=self.seed,
            drafts=self.show or sys.stderr.isatty(),
        )


@app.command()
@with_options
def fill(
    file: Annotated[str, typer.Argument(help="A text file with <|fill|> in it; - is stdin.")],
    model: ModelOptions,
    options: FillOptions,
    as_json: AsJson = False,
) -> None:
    """Fill each <|fill|> in a text; everything else is untouched."""
    from dgemma.cli.show import run_program
    from dgemma.programs.infill.document import InfillDocument
    from dgemma.programs.infill.infill import check_fill, fill_program

    if options.in_place and file == STDIN:
        raise UsageError("stdin cannot be written in place; give a file, or leave out --in-place")
    text = read_text(file)
    document = InfillDocument.parse(text)
    if options.in_place:
        check_writable(file)
    params = options.params(document.num_holes)
    check_fill(params)  # before a long load
    engine = load_engine(model, options.preset)
    program = fill_program(engine, document, params)
    filled = run_program(engine, program, show=options.show, doing="filling")
    if options.in_place:
        write_text(file, filled.text, text)
    if as_json:
        print(json.dumps(_report(filled, model.model), ensure_ascii=False))
    elif not options.in_place:
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


def _report(filled: "FillResult", model: str) -> dict[str, object]:
    return {
        **_text(filled.candidates[0]),
        "candidates": [_text(candidate) for candidate in filled.candidates],
        "steps": filled.steps,
        "canvases": filled.canvases,
        "seconds": round(filled.seconds, 4),
        "seed": filled.seed,
        "prompt_style": filled.prompt_style,
        "model": model,
    }


def _text(candidate: "FilledText") -> dict[str, object]:
    return {
        "text": candidate.text,
        "holes": [asdict(hole) for hole in candidate.holes],
        "score": candidate.score,
    }
