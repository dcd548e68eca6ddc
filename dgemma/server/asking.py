"""A body to plans for the engine: the prompt, the options, one plan for each answer wanted.

Runs beside the event loop, in a thread: a long prompt takes a while to encode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dgemma.errors import UsageError
from dgemma.server.errands import fill_errand, new_seed
from dgemma.server.faults import ApiError
from dgemma.server.guest import Errand
from dgemma.server.sentinels import Around, find_hole
from dgemma.server.structure import calls_guide, check_none, text_guide
from dgemma.server.wire import Body, ChatBody, CompletionBody

if TYPE_CHECKING:
    from dgemma.constrain.matcher import Guide
    from dgemma.diffusion.sampler import Rule, Sampler
    from dgemma.engine import Engine, FillOptions, Options
    from dgemma.engine.options import Plan
    from dgemma.engine.search import Effort
    from dgemma.text.chat import Prompt

SEEDS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, ready for the engine. Plan number i answers as choice i."""

    plans: "tuple[Plan | Errand, ...]"
    wants_logprobs: bool
    max_seconds: float | None
    one_call: bool = False  # calls after the first are left out


def read_chat(engine: "Engine", body: ChatBody) -> Asked:
    from dgemma.text.messages import read_messages, read_tools

    messages, tools = read_messages(body.messages), read_tools(body.tools)
    offered = () if body.tool_choice == "none" else tools
    guide = calls_guide(engine, body, tools)
    held = text_guide(engine, body.dgemma, body.response_format)
    if held is not None and offered:
        raise ApiError(
            400,
            "an answer cannot be held to a form while tools may be called; use tool_choice none",
        )
    prompt = engine.prompt(messages, offered, thinking=bool(body.wants_thought))
    limit = body.max_tokens or body.max_completion_tokens
    return Asked(
        plans=plans_for(engine, body, [prompt], limit, guide or held),
        wants_logprobs=body.logprobs,
        max_seconds=body.dgemma.max_seconds,
        one_call=not body.parallel_tool_calls,
    )


def read_completion(engine: "Engine", body: CompletionBody) -> Asked:
    plans: list[Plan | Errand] = []
    guide = text_guide(engine, body.dgemma, body.response_format)
    for prompt in body.prompts:
        hole = _hole(prompt, body.suffix)
        if hole is None:
            check_no_effort(body.effort)
            plans += plans_for(engine, body, [_plain(engine, prompt)], body.max_tokens, guide)
        elif guide is not None:
            raise ApiError(400, "a hole cannot be held to a form; leave out the suffix or the form")
        elif body.logprobs is not None:
            raise ApiError(400, "a hole is filled without logprobs; leave them out", param="suffix")
        else:
            plans += fills_for(engine, body, hole, body.effort)
    return Asked(
        plans=tuple(plans),
        wants_logprobs=body.logprobs is not None,
        max_seconds=body.dgemma.max_seconds,
    )


def _hole(prompt: str | Sequence[int], suffix: str) -> Around | None:
    """The hole of a request: in front of its suffix, or between sentinels inside its prompt."""
    if suffix and not isinstance(prompt, str):
        raise ApiError(400, "a suffix needs a prompt of text, not of token ids", param="suffix")
    if not isinstance(prompt, str):
        return None
    return Around(prompt, suffix) if suffix else find_hole(prompt)


def check_no_effort(effort: "Effort | None") -> None:
    """Refuse an effort where there is no hole to spend it on."""
    if effort is not None:
        raise ApiError(
            400, "effort is for a hole, and there is none; give a suffix", param="effort"
        )


def fills_for(
    engine: "Engine", body: Body, hole: Around, effort: "Effort | None" = None
) -> list[Errand]:
    """An errand for each answer wanted; without a word on effort, at an editor's speed."""
    from dgemma.constrain.holes import Holed

    options = fill_options(engine, body, effort or "fast")
    assert options.seed is not None
    holed = Holed((hole.before, hole.after))
    choices = [replace(options, seed=(options.seed + choice) % SEEDS) for choice in range(body.n)]
    # What the causal mode proposes knows no seed: it would be every answer's best.
    own = [choices[0], *(replace(one, proposals=0) for one in choices[1:])]
    return [fill_errand(engine, holed, one) for one in own]


def fill_options(engine: "Engine", body: Body, effort: "Effort") -> "FillOptions":
    """What a request chooses for its holes; what has no meaning there is refused."""
    from dgemma.engine import FillOptions
    from dgemma.engine.fill import check_fill
    from dgemma.engine.search import least_after

    check_errand(engine, body)
    length = engine.model.config.canvas_length
    most = max(1, length - least_after(length))
    options = FillOptions(
        max_tokens=min(body.max_tokens or most, most),
        stop=tuple(body.stop),
        effort=effort,
        seed=new_seed(body.seed),
        sampler=sampler_for(engine, body),
        drafts=body.dgemma.drafts,
    )
    check_fill(options)
    return options


def check_errand(engine: "Engine", body: Body) -> None:
    """Refuse what fills and edits cannot honour: their canvases have lengths of their own."""
    asked = body.dgemma
    if not engine.model.config.can_denoise:
        raise UsageError("this checkpoint has no denoiser, so it can neither fill nor edit")
    if asked.mode != "diffusion":
        raise ApiError(400, f"mode {asked.mode} cannot fill or edit; use diffusion", param="dgemma")
    refused = [name for name in ("canvas_length", "retries") if getattr(asked, name)]
    if refused:
        raise ApiError(400, f"dgemma.{refused[0]} is refused: it is not for fills", param="dgemma")
    if body.diffusing:
        raise ApiError(400, "a fill cannot replace its text; leave out diffusing")
    check_none(asked)
    if (asked.drafts or asked.pace) and not body.stream:
        raise ApiError(400, "drafts and pace need stream to be true", param="dgemma")


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


def plans_for(
    engine: "Engine",
    body: Body,
    prompts: Sequence["Prompt"],
    limit: int | None,
    guide: "Guide | None" = None,
) -> tuple["Plan", ...]:
    options = replace(_options(engine, body), guide=guide)
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
        # Behind a thought that ends anywhere one canvas more may be begun.
        spare = options.mode == "hybrid" or options.guide is not None
        room = (room // length - spare) * length
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
        sampler=_chosen_sampler(engine, body),
        temperature=body.temperature,
        canvas_length=asked.canvas_length,
        drafts=asked.drafts or (body.diffusing and has_canvas),
        **optional,
    )


def sampler_for(engine: "Engine", body: Body) -> "Sampler | None":
    """The checkpoint's sampler with what was asked for changed; None if nothing was."""
    chosen, temperature = _chosen_sampler(engine, body), body.temperature
    if temperature is None:
        return chosen
    return replace(chosen or engine.sampler, temperature=temperature)


def _chosen_sampler(engine: "Engine", body: Body) -> "Sampler | None":
    """The same but for the temperature, which leaves the model's own way with long replies."""
    asked = body.dgemma
    changes = {
        name: value
        for name in ("max_denoising_steps", "t_max", "t_min")
        if (value := getattr(asked, name)) is not None
    }
    rule = _rule(engine, body)
    if rule is None and not changes:
        return None
    sampler = replace(engine.sampler, **changes)
    return sampler if rule is None else replace(sampler, rule=rule)


def _rule(engine: "Engine", body: Body) -> "Rule | None":
    from dgemma.diffusion.sampler import Confidence, EntropyBound

    asked = body.dgemma
    settings: dict[str, Any] = {
        "entropy_bound": asked.entropy_bound,
        "confidence_threshold": asked.confidence_threshold,
        "stability_threshold": asked.stability_threshold,
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
