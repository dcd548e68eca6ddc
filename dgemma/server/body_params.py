"""Maps the fields of a body to the engine's parameters: sampling, samplers, constraints."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dgemma.errors import PromptTooLong, UsageError
from dgemma.server import limits
from dgemma.server.errors import ApiError
from dgemma.server.schemas import Body, Extension, ResponseFormat

if TYPE_CHECKING:
    from dgemma.constrain.grammar import ConstraintArgs
    from dgemma.constrain.matcher import Constraint
    from dgemma.diffusion.sampler import Rule, Sampler
    from dgemma.engine import Engine
    from dgemma.engine.generation import Generation
    from dgemma.text.chat import Prompt

FORMS = ("regex", "grammar", "choices")  # constraints of the extension


def generations(
    engine: "Engine",
    body: Body,
    prompt: "Prompt",
    max_tokens: int | None,
    constraint: "Constraint | None" = None,
) -> "list[Generation]":
    """Return one generation for each answer to a prompt."""
    from dgemma.engine import SamplingParams

    extension, sampling = body.dgemma, body.sampling
    check_streamed(body)
    if extension.pace and body.diffusing:
        raise ApiError(400, "text that is replaced cannot be paced; leave out pace", param="dgemma")
    params = SamplingParams(
        mode=extension.mode,
        preset=extension.preset,
        max_tokens=max_tokens,
        seed=new_seed(sampling.seed),
        stop=sampling.stop,
        sampler=_chosen_sampler(engine, extension),
        temperature=sampling.temperature,
        canvas_length=extension.canvas_length,
        constraint=constraint,
        drafts=extension.drafts or (body.diffusing and extension.mode != "ar"),
    )
    if extension.retries is not None:
        params = replace(params, retries=extension.retries)
    return [
        engine.generation(prompt, replace(params, choice=answer), fit=True)
        for answer in range(body.n)
    ]


def check_streamed(body: Body) -> None:
    """Refuse options that need a stream."""
    if body.stream:
        return
    if body.diffusing:
        raise ApiError(400, "diffusing needs stream to be true", param="diffusing")
    if body.dgemma.drafts or body.dgemma.pace:
        raise ApiError(400, "drafts and pace need stream to be true", param="dgemma")


def check_program(engine: "Engine", body: Body) -> None:
    """Refuse options that fills and edits cannot honour: they choose canvas lengths themselves."""
    extension = body.dgemma
    if not engine.model.config.can_denoise:
        raise UsageError("this checkpoint has no denoiser, so it can neither fill nor edit")
    if extension.mode != "diffusion":
        sentence = f"mode {extension.mode} cannot fill or edit; use diffusion"
        raise ApiError(400, sentence, param="dgemma")
    for name in _present(extension, "canvas_length", "retries"):
        raise ApiError(400, f"dgemma.{name} is refused: it is not for fills", param="dgemma")
    if body.diffusing:
        raise ApiError(400, "a fill cannot replace its text; leave out diffusing")
    check_unconstrained(extension)
    check_streamed(body)


def new_seed(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else seed


# --- samplers


def sampler_for(engine: "Engine", body: Body) -> "Sampler | None":
    """Return the checkpoint's sampler with the body's changes, or None if there are none."""
    preset, temperature = body.dgemma.preset, body.sampling.temperature
    chosen = _chosen_sampler(engine, body.dgemma)
    if chosen is None and preset is None and temperature is None:
        return None
    chosen = chosen or engine.sampler_of(preset)
    return chosen if temperature is None else replace(chosen, temperature=temperature)


def _chosen_sampler(engine: "Engine", extension: Extension) -> "Sampler | None":
    """Return the same, ignoring temperature and preset, which keep the long-reply policy."""
    changes = _present(extension, "max_denoising_steps", "t_max", "t_min")
    base = engine.sampler_of(extension.preset)
    rule = _rule(base, extension)
    if rule is None and not changes:
        return None
    sampler = replace(base, **changes)
    return sampler if rule is None else replace(sampler, rule=rule)


def _rule(base: "Sampler", extension: Extension) -> "Rule | None":
    from dgemma.diffusion.rules import Confidence
    from dgemma.diffusion.sampler import EntropyBound

    names = ("entropy_bound", "confidence_threshold", "stability_threshold")
    changes = _present(extension, *names)
    if extension.rule == "confidence":
        if changes:
            raise ApiError(400, "the confidence rule has no entropies to set", param="dgemma")
        return Confidence()
    if not changes:
        return None
    rule = base.rule
    return replace(rule if isinstance(rule, EntropyBound) else EntropyBound(), **changes)


def _present(extension: Extension, *names: str) -> dict[str, Any]:
    values = {name: getattr(extension, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


# --- constraints


def text_constraint(
    engine: "Engine", extension: Extension, response_format: ResponseFormat | None
) -> "Constraint | None":
    """Compile the constraint on an answer's text, or return None."""
    constraints: dict[str, Any] = {
        f"dgemma.{name}": {name: value} for name, value in _present(extension, *FORMS).items()
    }
    if response_format is not None and response_format.type != "text":
        constraints["response_format"] = {"schema": response_format.schema_body}
    if len(constraints) > 1:
        names = " and ".join(sorted(constraints))
        raise ApiError(400, f"{names} are given; give one of them")
    compiled = (compile_constraint(engine, text, name) for name, text in constraints.items())
    return next(compiled, None)


def check_unconstrained(extension: Extension) -> None:
    """Refuse constraints where the route itself fixes the format of the text."""
    for name in _present(extension, *FORMS):
        raise ApiError(400, f"dgemma.{name} is refused: it is not for fills", param="dgemma")


def compile_constraint(engine: "Engine", constraint: "ConstraintArgs", param: str) -> "Constraint":
    """Compile a constraint; refuses one that is too large or matches no text."""
    from dgemma.constrain.matcher import MAX_COMPLETION_BYTES
    from dgemma.constrain.shortest_completion import MAX_SECONDS

    size, most = _size(constraint), limits.MAX_CONSTRAINT
    if size > most:
        raise ApiError(
            400, f"{param} has {size} characters; at most {most} can be compiled", param=param
        )
    try:
        compiled = engine.constraint(**constraint)
    except UsageError as error:
        raise ApiError(400, str(error), param=param) from None
    if compiled.shortest is None:
        sentence = (
            f"no text that fits {param} was found: texts of up to {MAX_COMPLETION_BYTES} bytes are "
            f"searched, for at most {MAX_SECONDS:g} seconds; allow shorter texts"
        )
        raise ApiError(400, sentence, param=param)
    return compiled


def _size(constraint: "ConstraintArgs") -> int:
    """Count the characters of a constraint, written as JSON."""
    tools = [tool.parameters for tool in constraint.get("tools", ())]
    try:
        return len(json.dumps([*tools, *(v for k, v in constraint.items() if k != "tools")]))
    except RecursionError:
        return limits.MAX_CONSTRAINT + 1


def check_length(engine: "Engine", prompt: str | Sequence[int]) -> None:
    """Refuse a prompt that cannot fit before encoding it, which may take seconds.

    Assumes that every token is the longest of the vocabulary.
    """
    context, num_tokens = engine.model.config.max_position_embeddings, len(prompt)
    if num_tokens > context and isinstance(prompt, str):
        num_tokens //= engine.tokenizer.max_token_length
    if num_tokens > context:
        raise PromptTooLong(
            f"the prompt has at least {num_tokens} tokens, but the context holds {context}; "
            "shorten the prompt"
        )


def check_ids(engine: "Engine", ids: Sequence[int]) -> None:
    """Refuse ids outside the vocabulary."""
    most = engine.tokenizer.vocab_size - 1
    unknown = [token for token in ids if not 0 <= token <= most]
    if unknown:
        raise UsageError(f"{unknown[0]} is not a token id of this model; they go from 0 to {most}")
