"""`dgemma generate`: one answer to one prompt."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import Adapter, AsJson, Device, Dtype, Model, Quant, app
from dgemma.errors import UsageError

if TYPE_CHECKING:
    from dgemma.cli.show import CanvasView
    from dgemma.diffusion.sampler import Sampler
    from dgemma.engine import Done, Engine, Options, Text
    from dgemma.text.chat import Prompt

RULES = ("entropy", "confidence")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from stdin.")],
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quant: Quant = "auto",
    adapter: Adapter = None,
    mode: Annotated[str, typer.Option(help="diffusion, ar or hybrid (AR thought).")] = "diffusion",
    temperature: Annotated[
        float | None, typer.Option(help="Of draws; AR is greedy without it.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    thinking: Annotated[bool, typer.Option(help="Let the model think first.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Go on with the text; no chat.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text.")] = None,
    canvas: Annotated[int | None, typer.Option(help="Canvas length, up to the model's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Most steps per canvas.")] = None,
    rule: Annotated[str | None, typer.Option(help="entropy, the default, or confidence.")] = None,
    schema: Annotated[
        str | None,
        typer.Option(help="Answer in JSON of this schema: a file, or the schema itself."),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Answer what this expression matches.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="Answer in the language of a Lark grammar: a file.")
    ] = None,
    choices: Annotated[str | None, typer.Option(help="Answer one of these: a,b,c.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Watch the canvas settle.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt."""
    from dgemma.cli.constraint import check_done, read_options
    from dgemma.cli.loading import load_engine
    from dgemma.engine import Options
    from dgemma.engine.options import check_options

    text = _read_prompt(prompt)
    if plain and (system or thinking):
        raise UsageError("--plain has no chat turns; leave out --system and --thinking")
    if rule not in (None, *RULES):
        raise UsageError(f"rule {rule!r} is not known; use {' or '.join(RULES)}")
    options = Options(
        mode=mode,  # type: ignore[arg-type]  # refused below if it is not known
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        canvas_length=canvas,
        stop=tuple(stop or ()),
        drafts=show and mode != "ar",
    )
    check_options(options)  # before a long load
    constraint = read_options(schema, regex, grammar, choices)
    if constraint and stop:
        raise UsageError("--stop would cut a text that is held to a grammar; leave it out")
    engine = load_engine(model, device, dtype, adapter, quant)
    guide = engine.guide(**constraint) if constraint else None
    options = replace(options, sampler=_sampler(engine, rule, steps), guide=guide)
    request = engine.plain(text) if plain else _chat(engine, text, system, thinking)
    done = _run(engine, request, options, show=show, is_quiet=as_json)
    if as_json:
        print(json.dumps(_report(done, model), ensure_ascii=False))
    if guide is not None:
        check_done(done)


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


def _sampler(engine: "Engine", rule: str | None, steps: int | None) -> "Sampler | None":
    from dgemma.diffusion.sampler import Confidence

    if rule is None and steps is None:
        return None
    sampler = replace(engine.sampler, rule=Confidence()) if rule == "confidence" else engine.sampler
    return sampler if steps is None else replace(sampler, max_denoising_steps=steps)


def _chat(engine: "Engine", text: str, system: str, thinking: bool) -> "Prompt | str":
    from dgemma.text.chat import Message

    if engine.template is None:
        if system or thinking:
            raise UsageError("this checkpoint has no chat template: no --system, no --thinking")
        return text
    messages = [Message(role="system", content=system)] if system else []
    return engine.prompt([*messages, Message(role="user", content=text)], thinking=thinking)


def _run(
    engine: "Engine", request: "Prompt | str", options: "Options", *, show: bool, is_quiet: bool
) -> "Done":
    """Print the answer as it is promised, or, with a live canvas, when it is complete."""
    from dgemma.cli.show import CanvasView
    from dgemma.engine import Done, Draft, Text

    events, promised = engine.stream(request, options), ""
    view = CanvasView() if show else None
    try:
        with view or nullcontext():
            for event in events:
                if isinstance(event, Done):
                    done = event
                elif isinstance(event, Draft) and view is not None:
                    view.draw(event)
                elif isinstance(event, Text) and not is_quiet:
                    _show_text(event, view)
                    promised += "" if event.is_thought else event.text
    except KeyboardInterrupt:
        if promised:  # the canvas is wiped, what was promised stays
            _print_rest(promised, view)
        raise
    if not is_quiet:
        _print_rest(promised, view)
    return done


def _print_rest(promised: str, view: "CanvasView | None") -> None:
    """What a live canvas kept from being printed on the way, and the end of the line."""
    print(promised if view is not None and view.is_live else "")


def _show_text(text: "Text", view: "CanvasView | None") -> None:
    if view is not None:
        view.promise(text)
    elif not text.is_thought:
        print(text.text, end="", flush=True)


def _report(done: "Done", model: str) -> dict[str, object]:
    reply = done.reply
    return {
        "text": done.text,
        "thought": reply.thought,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in reply.tool_calls],
        "tokens": done.tokens,
        "prompt_tokens": done.prompt_tokens,
        "steps": done.steps,
        "blocks": done.blocks,
        "unsettled_blocks": done.unsettled_blocks,
        "tokens_per_step": round(done.tokens_per_step, 3),
        "seconds": round(done.seconds, 4),
        "finish": done.finish,
        "seed": done.seed,
        "mode": done.mode,
        "retries": done.retries,
        "fault": done.fault,
        "reused_tokens": done.reused_tokens,
        "model": model,
    }
