"""`dgemma generate`: one answer to one prompt."""

import json
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, Device, Dtype, Model, app
from dgemma.errors import UsageError

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine, Options
    from dgemma.sampler import Sampler
    from dgemma.text.chat import Prompt

RULES = ("entropy", "confidence")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from stdin.")],
    model: Model = "nano",
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    thinking: Annotated[bool, typer.Option(help="Let the model think first.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Go on with the text; no chat.")] = False,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text.")] = None,
    canvas: Annotated[int | None, typer.Option(help="Canvas length, up to the model's.")] = None,
    steps: Annotated[int | None, typer.Option(help="Most steps per canvas.")] = None,
    rule: Annotated[str, typer.Option(help="entropy (the reference) or confidence.")] = "entropy",
    show: Annotated[bool, typer.Option("--show", help="Watch the canvas settle.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt."""
    from dgemma.cli.loading import load_engine
    from dgemma.engine import Options

    text = _read_prompt(prompt)
    if plain and (system or thinking):
        raise UsageError("--plain has no chat turns; leave out --system and --thinking")
    engine = load_engine(model, device, dtype)
    options = Options(
        max_tokens=max_tokens,
        seed=seed,
        sampler=_sampler(engine, rule, steps),
        canvas_length=canvas,
        stop=tuple(stop or ()),
        drafts=show,
    )
    request = engine.plain(text) if plain else _chat(engine, text, system, thinking)
    done = _run(engine, request, options, is_quiet=as_json)
    if as_json:
        print(json.dumps(_report(done, model), ensure_ascii=False))


def _read_prompt(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _sampler(engine: "Engine", rule: str, steps: int | None) -> "Sampler":
    from dataclasses import replace

    from dgemma.sampler import Confidence

    if rule not in RULES:
        raise UsageError(f"rule {rule!r} is not known; use {' or '.join(RULES)}")
    sampler = engine.sampler if rule == "entropy" else replace(engine.sampler, rule=Confidence())
    return sampler if steps is None else replace(sampler, max_steps=steps)


def _chat(engine: "Engine", text: str, system: str, thinking: bool) -> "Prompt | str":
    from dgemma.text.chat import Message

    if engine.template is None:
        if system or thinking:
            raise UsageError("this checkpoint has no chat template: no --system, no --thinking")
        return text
    messages = [Message(role="system", content=system)] if system else []
    return engine.prompt([*messages, Message(role="user", content=text)], thinking=thinking)


def _run(
    engine: "Engine", request: "Prompt | str", options: "Options", *, is_quiet: bool
) -> "Done":
    from dgemma.cli.show import CanvasView
    from dgemma.engine import Done, Draft, Text

    with ExitStack() as stack:
        view = stack.enter_context(CanvasView()) if options.drafts else None
        for event in engine.stream(request, options):
            if isinstance(event, Done):
                break
            if isinstance(event, Draft) and view is not None:
                view.draw(event)
            if isinstance(event, Text):
                if view is not None:
                    view.clear()
                if not is_quiet and not event.is_thought:
                    print(event.text, end="", flush=True)
    if not is_quiet:
        print()
    return event  # type: ignore[return-value]


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
        "mode": "diffusion",
        "model": model,
    }
