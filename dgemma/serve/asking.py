"""A body to plans for the engine: the prompt, the options, one plan for each answer wanted.

Runs beside the event loop, in a thread: a long prompt takes a while to encode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dgemma.errors import UsageError
from dgemma.serve.faults import ApiError
from dgemma.serve.heat import COLD, tempered
from dgemma.serve.wire import Body, ChatBody, CompletionBody

if TYPE_CHECKING:
    from dgemma.engine import Engine, Options
    from dgemma.engine.options import Plan
    from dgemma.sampler import Rule, Sampler
    from dgemma.text.chat import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, ready for the engine. Plan number i answers as choice i."""

    plans: tuple["Plan", ...]
    wants_logprobs: bool
    max_seconds: float | None
    one_call: bool = False  # calls after the first are left out


def read_chat(engine: "Engine", body: ChatBody) -> Asked:
    from dgemma.text.messages import read_messages, read_tools

    messages, tools = read_messages(body.messages), read_tools(body.tools)
    strict = [tool.name for tool in tools if tool.strict]
    if strict:
        raise ApiError(
            400,
            f"strict is refused for {strict[0]!r}: arguments cannot be held to a schema yet",
            param="tools",
        )
    offered = tools if body.tool_choice == "auto" else ()
    prompt = engine.prompt(messages, offered, thinking=bool(body.wants_thought))
    limit = body.max_tokens or body.max_completion_tokens
    return Asked(
        plans=_plans(engine, body, [prompt], limit),
        wants_logprobs=body.logprobs,
        max_seconds=body.dgemma.max_seconds,
        one_call=not body.parallel_tool_calls,
    )


def read_completion(engine: "Engine", body: CompletionBody) -> Asked:
    prompts = [_plain(engine, prompt) for prompt in body.prompts]
    return Asked(
        plans=_plans(engine, body, prompts, body.max_tokens),
        wants_logprobs=body.logprobs is not None,
        max_seconds=body.dgemma.max_seconds,
    )


def _plain(engine: "Engine", prompt: str | Sequence[int]) -> "Prompt":
    from dgemma.text.chat import Prompt

    if isinstance(prompt, str):
        return engine.plain(prompt)
    check_ids(engine, prompt)
    return Prompt(text=engine.tokenizer.decode(prompt), ids=tuple(prompt))


def check_ids(engine: "Engine", ids: Sequence[int]) -> None:
    """Refuse ids that are no tokens of this model."""
    most = engine.tokenizer.vocab_size - 1
    strange = [token for token in ids if not 0 <= token <= most]
    if strange:
        raise UsageError(f"{strange[0]} is no token id of this model; they go from 0 to {most}")


def _plans(
    engine: "Engine", body: Body, prompts: Sequence["Prompt"], limit: int | None
) -> tuple["Plan", ...]:
    options = _options(engine, body)
    plans = []
    for prompt in prompts:
        max_tokens = _fitting(engine, len(prompt.ids), options, limit)
        wanted = replace(options, max_tokens=max_tokens)
        first = engine.plan(prompt, wanted)  # draws a seed where none is given
        seeded = replace(wanted, seed=first.noise.seed)
        plans += [engine.plan(prompt, replace(seeded, choice=choice)) for choice in range(body.n)]
    return tuple(plans)


def _fitting(engine: "Engine", prompt: int, options: "Options", limit: int | None) -> int:
    """The longest answer: a limit is an upper bound, so what the context holds bounds it too.

    A canvas is whole even if the answer ends in its middle.
    """
    wanted = engine.generation.max_new_tokens if limit is None else limit
    room = engine.model.config.max_position_embeddings - prompt
    if options.mode != "ar":
        length = options.canvas_length or engine.model.config.canvas_length
        room = (room // length - (options.mode == "hybrid")) * length
    return min(wanted, room) if room > 0 else wanted  # if nothing fits, the engine says so


def _options(engine: "Engine", body: Body) -> "Options":
    from dgemma.engine import Options

    asked = body.dgemma
    has_canvas = asked.mode != "ar"
    optional: dict[str, Any] = {} if asked.retries is None else {"retries": asked.retries}
    if body.diffusing and not body.stream:
        raise ApiError(400, "diffusing needs stream to be true", param="diffusing")
    if (asked.drafts or asked.pace) and not body.stream:
        raise ApiError(400, "drafts and pace need stream to be true", param="dgemma")
    if asked.pace and body.diffusing:
        raise ApiError(400, "text that is replaced cannot be paced; leave out pace", param="dgemma")
    return Options(
        mode=asked.mode,
        seed=body.seed,
        stop=tuple(body.stop),
        sampler=_sampler(engine, body),
        heat=_heat(body),
        canvas_length=asked.canvas_length,
        drafts=asked.drafts or (body.diffusing and has_canvas),
        **optional,
    )


def _heat(body: Body) -> float:
    """Temperature where single tokens are drawn."""
    asked, temperature = body.dgemma, body.temperature
    if asked.heat is not None and temperature is not None:
        raise ApiError(400, "temperature and dgemma.heat differ in name only; give one of them")
    if asked.mode == "diffusion":
        return asked.heat or 0.0  # refused by the engine if it is given
    given = temperature if asked.heat is None else asked.heat
    return given if given is not None and given >= COLD else 0.0


def _sampler(engine: "Engine", body: Body) -> "Sampler | None":
    """The checkpoint's sampler with what was asked for changed; None if nothing was."""
    asked, temperature = body.dgemma, body.temperature
    changes = {
        name: value
        for name in ("max_steps", "first_heat", "last_heat")
        if (value := getattr(asked, name)) is not None
    }
    rule = _rule(engine, body)
    if rule is None and not changes and (temperature in (None, 1.0) or asked.mode == "ar"):
        return None
    sampler = replace(engine.sampler, **changes)
    sampler = sampler if rule is None else replace(sampler, rule=rule)
    return sampler if temperature is None else tempered(sampler, temperature)


def _rule(engine: "Engine", body: Body) -> "Rule | None":
    from dgemma.sampler import Confidence, EntropyBound

    asked = body.dgemma
    settings: dict[str, Any] = {
        "bound": asked.entropy_bound,
        "settle_entropy": asked.settle_entropy,
        "settle_steps": asked.settle_steps,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if asked.rule == "confidence":
        if given:
            raise ApiError(400, "the confidence rule has no entropies to set", param="dgemma")
        return Confidence()
    own = engine.sampler.rule
    if not given:
        return None
    return replace(own if isinstance(own, EntropyBound) else EntropyBound(), **given)
