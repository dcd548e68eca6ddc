"""`dgemma generate`: one answer to one prompt."""

import json
import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import (
    AsJson,
    PresetOption,
    SamplerRule,
    app,
    load_engine,
    load_rule,
    with_options,
)
from dgemma.config import MODES
from dgemma.errors import DgemmaError, UsageError
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.cli.show import CanvasView
    from dgemma.constrain.grammar import ConstraintArgs
    from dgemma.engine import Done, Engine, Event, SamplingParams
    from dgemma.images import Image
    from dgemma.programs.speculative import SpeculativeParams
    from dgemma.text.chat import Prompt
    from dgemma.text.messages import Part


@app.command()
@with_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from stdin.")],
    options: ModelOptions,
    mode: Annotated[str, typer.Option(help=f"{', '.join(MODES)} (AR thought).")] = "diffusion",
    temperature: Annotated[
        float | None, typer.Option(help="Of draws; AR is greedy without it.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    thinking: Annotated[bool, typer.Option(help="Let the model think first.")] = False,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-a", help="A picture to show before the prompt; may be repeated."),
    ] = None,
    image_tokens: Annotated[
        int | None,
        typer.Option(help="Soft tokens of each picture: 70, 140, 280, 560 or 1120 (small text)."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue the text; no chat.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text.")] = None,
    canvas: Annotated[int | None, typer.Option(help="Canvas length, up to the model's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Most steps per canvas.")] = None,
    rule: SamplerRule = None,
    preset: PresetOption = None,
    schema: Annotated[
        str | None,
        typer.Option(help="Answer in JSON of this schema: a file, or the schema itself."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Answer with a text that this expression matches.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="Answer in the language of a Lark grammar: a file.")
    ] = None,
    choices: Annotated[str | None, typer.Option(help="Answer one of these: a,b,c.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Of AR: ngram (what followed before) or canvas; the same tokens in fewer passes."
        ),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            help="Diffusion drafts that the causal mode verifies: strict (greedy AR) or loose."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Watch the canvas converge.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt."""
    from dgemma.engine import SamplingParams
    from dgemma.engine.params import check_params
    from dgemma.text.chat import Prompt

    text = _read_prompt(prompt)
    if plain and (system or thinking or image):
        raise UsageError("--plain has no chat turns; leave out --system, --thinking and --image")
    pictures = _read_images(image or [], image_tokens)
    own_rule = load_rule(rule)
    params = SamplingParams(
        mode=mode,  # type: ignore[arg-type]  # refused below if it is not known
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        canvas_length=canvas,
        preset=preset,  # type: ignore[arg-type]  # the same
        stop=tuple(stop or ()),
        drafts=show and mode != "ar",
    )
    check_params(params)  # before a long load
    drafting = _drafting(params, draft, verify, steps)
    constraint = _read_constraint(schema, regex, grammar, choices)
    if constraint and stop:
        raise UsageError("--stop would cut constrained text; leave it out")
    engine = load_engine(options)
    compiled = engine.constraint(**constraint) if constraint else None
    if own_rule is not None:
        engine.set_rule(own_rule)
    sampler = None
    if steps is not None:
        sampler = replace(engine.sampler_of(preset), max_denoising_steps=steps)
    params = replace(params, sampler=sampler, constraint=compiled)
    content: str | tuple[Part, ...] = (*pictures, text) if pictures else text
    request = engine.plain_prompt(text) if plain else _chat(engine, content, system, thinking)
    for note in request.notes if isinstance(request, Prompt) else ():
        print(f"dgemma: {note}", file=sys.stderr)
    done = _run(_events(engine, request, params, drafting), show=show, is_quiet=as_json)
    if as_json:
        print(json.dumps(_report(done, options.model), ensure_ascii=False))
    if compiled is not None:
        _check_done(done)


def _read_images(paths: Sequence[Path], tokens: int | None) -> "tuple[Image, ...]":
    """Read pictures before a model is loaded."""
    from dgemma.images import Image

    if tokens is not None and not paths:
        raise UsageError("--image-tokens is given without --image; show a picture or leave it out")
    return tuple(Image.open(path, tokens=tokens) for path in paths)


def _read_constraint(
    schema: str | None, regex: str | None, grammar: Path | None, choices: str | None
) -> "ConstraintArgs":
    """Read and check the options before a model is loaded; empty if none is given."""
    from dgemma.constrain.grammar import read_constraint

    constraint: ConstraintArgs = {}
    if schema is not None:
        constraint["schema"] = _read_schema(schema)
    if regex is not None:
        constraint["regex"] = regex
    if grammar is not None:
        constraint["grammar"] = _read_file(grammar, "the grammar")
    if choices is not None:
        constraint["choices"] = [choice.strip() for choice in choices.split(",")]
    if len(constraint) > 1:
        names = " and ".join(f"--{name}" for name in constraint)
        raise UsageError(f"{names} are given together; a text takes one of them")
    if constraint:
        read_constraint(constraint)
    return constraint


def _check_done(done: "Done") -> None:
    """Fail if a constrained text could not be completed; say if a limit forced its end."""
    if done.fault and not done.ids:
        raise DgemmaError(f"no text: {done.fault}; raise --max-tokens or loosen the constraint")
    if done.forced_from is not None:
        print(
            "dgemma: a limit forced the end of this text; the model's own words end at character "
            f"{done.forced_from} of {len(done.text)}: raise --max-tokens, or give a maxLength",
            file=sys.stderr,
        )


def _read_schema(argument: str) -> str:
    """Read a schema from a file, or return the argument if it is one."""
    if argument.lstrip().startswith(("{", "true", "false")):
        return argument
    text = _read_file(Path(argument), "the schema")
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{argument} is not JSON: {error}") from None
    return text


def _read_file(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text") from None


def _read_prompt(prompt: str) -> str:
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the prompt on stdin is not {error.encoding} text: {error.reason}"
        ) from None
    if not text.strip():
        where = " on stdin" if prompt == "-" else ""
        raise UsageError(f"the prompt{where} is empty; say something to the model")
    return text


def _chat(
    engine: "Engine", content: "str | tuple[Part, ...]", system: str, thinking: bool
) -> "Prompt | str":
    from dgemma.text.chat import Message

    if engine.template is None:
        if system or thinking or not isinstance(content, str):
            raise UsageError(
                "this checkpoint has no chat template: no --system, no --thinking, no --image"
            )
        return content
    messages = [Message(role="system", content=system)] if system else []
    return engine.prompt([*messages, Message(role="user", content=content)], thinking=thinking)


def _drafting(
    params: "SamplingParams", draft: str | None, verify: str | None, steps: int | None
) -> "SpeculativeParams | None":
    """Read --draft and --verify; refuse what they cannot be combined with."""
    from dgemma.programs.speculative import CANVAS_DRAFT_STEPS, SpeculativeParams

    if draft is None and verify is None:
        return None
    if draft is not None and (params.mode != "ar" or verify is not None):
        raise UsageError("--draft speeds up AR; give it with --mode ar, and without --verify")
    if verify is not None and params.mode != "diffusion":
        raise UsageError("--verify checks drafts of diffusion; leave out --mode, or use --draft")
    if params.temperature or params.drafts:
        raise UsageError("drafts are verified greedily; leave out --temperature and --show")
    return SpeculativeParams(
        drafter=draft or "canvas",  # type: ignore[arg-type]  # checked there
        accept=verify or "strict",  # type: ignore[arg-type]
        length=params.canvas_length or 0,
        steps=steps or CANVAS_DRAFT_STEPS,
    )


def _events(
    engine: "Engine",
    request: "Prompt | str",
    params: "SamplingParams",
    drafting: "SpeculativeParams | None",
) -> "Generator[Event, None, None]":
    """Start the request; with drafts, as AR that is verified."""
    from dgemma.programs.speculative import speculative_task

    if drafting is None:
        return engine.stream(request, params)
    plain = replace(params, mode="ar", canvas_length=None, sampler=None, preset=None)
    return engine.follow(speculative_task(engine, request, plain, drafting))


def _run(events: "Generator[Event, None, None]", *, show: bool, is_quiet: bool) -> "Done":
    """Print the answer as it is committed, or, with a live canvas, when it is complete."""
    from dgemma.cli.show import CanvasView
    from dgemma.engine import Done, Draft, Text

    committed = ""
    view = CanvasView(is_live=show)
    try:
        with view:
            for event in events:
                if isinstance(event, Done):
                    done = event
                elif isinstance(event, Draft):
                    view.draw(event)
                elif isinstance(event, Text) and not is_quiet:
                    view.commit(event)
                    committed += "" if event.is_thought else event.text
    except KeyboardInterrupt:
        if committed:  # the canvas is wiped, what was committed stays
            _print_rest(committed, view)
        raise
    if not is_quiet:
        _print_rest(committed, view)
    return done


def _print_rest(committed: str, view: "CanvasView") -> None:
    """Print the text that a live canvas has shown and wiped, and end the line."""
    from dgemma.cli.show import print_wrapped

    print_wrapped(committed if view.is_live else "")


def _report(done: "Done", model: str) -> dict[str, object]:
    reply = done.reply
    return {
        "text": done.text,
        "thought": reply.thought,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in reply.tool_calls],
        "tokens": done.tokens,
        "prompt_tokens": done.prompt_tokens,
        "image_tokens": done.image_tokens,
        "steps": done.steps,
        "blocks": done.blocks,
        "unconverged_blocks": done.unconverged_blocks,
        "tokens_per_step": round(done.tokens_per_step, 3),
        "seconds": round(done.seconds, 4),
        "finish": done.finish,
        "seed": done.seed,
        "mode": done.mode,
        "retries": done.retries,
        "fault": done.fault,
        "forced_from": done.forced_from,
        "reused_tokens": done.reused_tokens,
        "model": model,
    }
