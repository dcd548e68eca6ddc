"""`dgemma generate`: one answer to one prompt."""

import json
import sys
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import RULES, AsJson, ReplyOptions, app, load_engine, load_rule, with_options
from dgemma.cli.media import MediaOptions
from dgemma.errors import DgemmaError, UsageError
from dgemma.options import option
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.cli.show import CanvasView
    from dgemma.constrain.grammar import ConstraintArgs
    from dgemma.engine import Done, Engine, Event, SamplingParams
    from dgemma.engine.speculation import Drafter, SpeculativeParams
    from dgemma.text.chat import Prompt
    from dgemma.text.messages import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions(ReplyOptions):
    """Options of `dgemma generate`."""

    system: str = option("", "A system message.")
    plain: bool = option(False, "Continue the text, without chat turns.")
    stop: list[str] | None = option(None, "Stop before this text.")
    canvas: int | None = option(None, "Canvas length, up to the model's.")
    steps: int | None = option(None, "Most steps per canvas.", min=1)
    rule: str | None = option(None, RULES)
    schema: str | None = option(
        None, "Answer in JSON of this schema: a file, or the schema itself."
    )
    regex: str | None = option(None, "Answer with text that matches this regular expression.")
    grammar: Path | None = option(None, "Answer in the language of a Lark grammar: a file.")
    choices: str | None = option(None, "Answer with one of these: a,b,c.")
    draft: str | None = option(
        None,
        "Speculative decoding for AR: ngram (prompt lookup), canvas, or an assistant's directory; "
        "the same tokens in fewer passes.",
    )
    verify: str | None = option(
        None, "Verify diffusion drafts in causal mode: strict (AR's text) or loose."
    )
    show: bool = option(False, "Watch the canvas converge.")


@app.command()
@with_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from stdin.")],
    model: ModelOptions,
    options: GenerateOptions,
    media: MediaOptions,
    as_json: AsJson = False,
) -> None:
    """Answer a prompt."""
    from dgemma.engine.params import check_params
    from dgemma.text.chat import Prompt

    text = _read_prompt(prompt)
    shown = media.read()
    if media.image_tokens is not None and not media.image:
        raise UsageError("--image-tokens is given without --image; show a picture or leave it out")
    if options.plain and (options.system or options.thinking or shown):
        left_out = "--system, --thinking, --image and --video"
        raise UsageError(f"--plain has no chat turns; leave out {left_out}")
    _check_sampler_options(options)
    own_rule = load_rule(options.rule)
    params = replace(
        options.params(drafts=options.show),
        canvas_length=options.canvas,
        preset=options.preset,  # type: ignore[arg-type]  # checked by check_params
        stop=tuple(options.stop or ()),
    )
    check_params(params)  # before a long load
    speculation = _speculation(params, options)
    constraint = _read_constraint(options)
    if constraint and options.stop:
        raise UsageError("--stop would cut constrained text; leave it out")
    engine = load_engine(model, rule=own_rule)
    compiled = engine.constraint(**constraint) if constraint else None
    if options.steps is not None:
        sampler = replace(engine.sampler_of(options.preset), max_denoising_steps=options.steps)
        params = replace(params, sampler=sampler)
    params = replace(params, constraint=compiled)
    content: str | tuple[Part, ...] = (*shown, text) if shown else text
    request = engine.plain_prompt(text) if options.plain else _chat(engine, content, options)
    for note in request.notes if isinstance(request, Prompt) else ():
        print(f"dgemma: {note}", file=sys.stderr)
    if speculation is not None and speculation.drafter == "assistant":
        from dgemma.weights.source import load_assistant

        assistant = load_assistant(Path(options.draft or ""), engine.model)
        speculation = replace(speculation, assistant=assistant)
    done = _run(_events(engine, request, params, speculation), show=options.show, is_quiet=as_json)
    if as_json:
        print(json.dumps(_report(done, model.model), ensure_ascii=False))
    if compiled is not None:
        _check_done(done)


def _read_constraint(options: GenerateOptions) -> "ConstraintArgs":
    """Read and check the constraint before loading a model; empty if there is none."""
    from dgemma.constrain.grammar import read_constraint

    constraint: ConstraintArgs = {}
    if options.schema is not None:
        constraint["schema"] = _read_schema(options.schema)
    if options.regex is not None:
        constraint["regex"] = options.regex
    if options.grammar is not None:
        constraint["grammar"] = _read_file(options.grammar, "the grammar")
    if options.choices is not None:
        constraint["choices"] = [choice.strip() for choice in options.choices.split(",")]
    if len(constraint) > 1:
        names = " and ".join(f"--{name}" for name in constraint)
        raise UsageError(f"{names} are given together; a text takes one of them")
    if constraint:
        read_constraint(constraint)
    return constraint


def _check_done(done: "Done") -> None:
    """Fail if constrained text could not be completed; warn if a limit forced its end."""
    if done.fault and not done.ids:
        raise DgemmaError(f"no text: {done.fault}; raise --max-tokens or loosen the constraint")
    if done.forced_from is not None:
        print(
            "dgemma: a limit forced the end of this text; the model's own words end at character "
            f"{done.forced_from} of {len(done.text)}: raise --max-tokens, or give strings "
            'a maxLength and objects "additionalProperties": false',
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
    engine: "Engine", content: "str | tuple[Part, ...]", options: GenerateOptions
) -> "Prompt | str":
    from dgemma.text.chat import Message

    if engine.template is None:
        if options.system or options.thinking or not isinstance(content, str):
            raise UsageError(
                "this checkpoint has no chat template: no --system, no --thinking, no --image"
            )
        return content
    messages = [Message(role="user", content=content)]
    if options.system:
        messages.insert(0, Message(role="system", content=options.system))
    return engine.prompt(messages, thinking=options.thinking)


def _check_sampler_options(options: GenerateOptions) -> None:
    """Refuse options of the sampler where no sampler decides."""
    given = {"--rule": options.rule, "--steps": options.steps, "--preset": options.preset}
    names = " and ".join(name for name, value in given.items() if value is not None)
    if names and options.mode == "ar":
        raise UsageError(f"AR mode has no canvas, so it cannot honour {names}; leave it out")
    if names and options.verify is not None:
        raise UsageError(f"--verify commits what the causal mode chooses; leave out {names}")


def _drafter(draft: str) -> "Drafter":
    if draft not in ("ngram", "canvas", "assistant") and Path(draft).is_dir():
        return "assistant"
    return draft  # type: ignore[return-value]  # checked by SpeculativeParams


def _speculation(params: "SamplingParams", options: GenerateOptions) -> "SpeculativeParams | None":
    """Read --draft and --verify; refuses invalid combinations."""
    from dgemma.engine.speculation import SpeculativeParams

    draft, verify = options.draft, options.verify
    if draft is None and verify is None:
        return None
    if draft is not None and (params.mode != "ar" or verify is not None):
        raise UsageError("--draft speeds up AR; give it with --mode ar, and without --verify")
    if verify is not None and params.mode != "diffusion":
        raise UsageError("--verify checks drafts of diffusion; leave out --mode, or use --draft")
    if params.drafts:
        raise UsageError("verified text appears token by token; leave out --show")
    return SpeculativeParams(
        drafter=_drafter(draft or "canvas"),
        accept=verify or "strict",  # type: ignore[arg-type]
        num_speculative_tokens=params.canvas_length,
    )


def _events(
    engine: "Engine",
    request: "Prompt | str",
    params: "SamplingParams",
    speculation: "SpeculativeParams | None",
) -> "Generator[Event, None, None]":
    """Start the request; with draft tokens, as AR with verification."""
    from dgemma.engine.speculation import speculative_task

    if speculation is None:
        return engine.stream(request, params)
    plain = replace(params, mode="ar", canvas_length=None, sampler=None, preset=None)
    return engine.follow(speculative_task(engine, request, plain, speculation))


def _run(events: "Generator[Event, None, None]", *, show: bool, is_quiet: bool) -> "Done":
    """Print the answer as it is committed or, with a live canvas, at its end."""
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
        if committed:  # the canvas is wiped, committed text stays
            _print_rest(committed, view)
        raise
    if not is_quiet:
        _print_rest(committed, view)
    return done


def _print_rest(committed: str, view: "CanvasView") -> None:
    """Print the text that the live canvas showed and wiped."""
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
