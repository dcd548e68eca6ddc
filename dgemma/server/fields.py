"""Every field a request may carry: honoured, harmless or refused. docs/serve.md prints this table.

Honoured: it does what its name says. Harmless: it changes nothing that was promised; it is accepted
and named in the reply. Refused: leaving it out in silence would break a promise, so a request with
it is a 400 that says why, unless its value asks for nothing. A field in no table is a 400 too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from dgemma.server.faults import ApiError

Kind = Literal["honoured", "harmless", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    kind: Kind
    note: str
    neutral: tuple[object, ...] = ()  # values of a refused field that ask for nothing; null is one


def _honoured(note: str) -> Field:
    return Field("honoured", note)


def _harmless(note: str) -> Field:
    return Field("harmless", note)


def _refused(note: str, *neutral: object) -> Field:
    return Field("refused", note, neutral)


COMMON: dict[str, Field] = {
    "model": _honoured("a name from /v1/models, or left out; another is a 404"),
    "stream": _honoured("server-sent events, ended by [DONE]"),
    "stream_options": _honoured("include_usage; include_obfuscation is harmless"),
    "max_tokens": _honoured("longest answer, cut exactly; lowered to what the context holds"),
    "temperature": _honoured("0 to 2; 1 is the model's own; below 0.05 the likeliest is drawn"),
    "seed": _honoured("same seed, same answer; in float32 among other requests, too"),
    "stop": _honoured("a string or up to 64; the answer ends before the first of them"),
    "n": _honoured("1 to 8 answers"),
    "diffusing": _honoured("with stream: each chunk's text replaces the text so far"),
    "dgemma": _honoured("the extension object: mode, sampler, drafts, pace, deadline"),
    "top_p": _harmless("the draw is not cut; answers are the likeliest tokens of a settled canvas"),
    "top_k": _harmless("as top_p"),
    "min_p": _harmless("as top_p"),
    "typical_p": _harmless("as top_p"),
    "presence_penalty": _harmless("tokens are not weighed by what was said before"),
    "frequency_penalty": _harmless("as presence_penalty"),
    "repetition_penalty": _harmless("as presence_penalty; loops are done again by the engine"),
    "repeat_penalty": _harmless("as presence_penalty"),
    "user": _harmless("nothing is kept per user"),
    "metadata": _harmless("nothing is stored"),
    "store": _harmless("nothing is stored"),
    "service_tier": _harmless("there is one"),
    "safety_identifier": _harmless("nothing is kept per user"),
    "prompt_cache_key": _harmless("prefixes are found by their tokens"),
    "prompt_cache_retention": _harmless("prefixes are kept as memory allows"),
    "cache_prompt": _harmless("prefixes are always reused"),
    "keep_alive": _harmless("the model stays loaded"),
    "logit_bias": _refused("the weight of single tokens cannot be changed", {}),
    "min_tokens": _refused("an answer cannot be kept from ending", 0),
    "ignore_eos": _refused("an answer cannot be kept from ending", False),
    "best_of": _refused("answers are not ranked; ask for n", 1),
}

EFFORT = "fast: one batch of canvases; thorough: a search that takes several times as long"
FORMAT = _honoured("text, json_object or json_schema; the answer fits, or there is none")

CHAT: dict[str, Field] = {
    **COMMON,
    "messages": _honoured("system, developer, user, assistant and tool; text parts"),
    "max_completion_tokens": _honoured("as max_tokens"),
    "tools": _honoured("functions the model may call"),
    "tool_choice": _honoured("auto, none, required, or the function to call"),
    "parallel_tool_calls": _honoured("false: calls after the first are left out"),
    "reasoning_effort": _honoured("none, minimal, instant: no thought; other levels: one"),
    "chat_template_kwargs": _honoured("enable_thinking"),
    "logprobs": _honoured("of each token of the reply, from the causal pass"),
    "response_format": FORMAT,
    "prediction": _harmless("a hint for speed; the answer does not depend on it"),
    "verbosity": _harmless("the model has no such setting"),
    "reasoning_summary": _harmless("the thought is given whole"),
    "reasoning_summary_wait": _harmless("the thought comes before the answer"),
    "top_logprobs": _refused("only the tokens of the answer are scored", 0),
    "functions": _refused("this form is outdated; use tools", []),
    "function_call": _refused("this form is outdated; use tool_choice", "auto", "none"),
    "modalities": _refused("answers are text", ["text"], []),
    "audio": _refused("answers are text"),
    "web_search_options": _refused("the server opens nothing on anyone's behalf"),
}

COMPLETIONS: dict[str, Field] = {
    **COMMON,
    "prompt": _honoured("text to go on with, up to 16 of them, or token ids; see sentinels"),
    "suffix": _honoured("text behind the hole that is filled; diffusion alone"),
    "effort": _honoured(f"of a hole; {EFFORT}; fast unless told"),
    "logprobs": _honoured("0: of each token of the answer, from the causal pass; more is refused"),
    "response_format": FORMAT,
    "echo": _refused("the prompt is not repeated", False),
}

# Of the object `dgemma` in a request; absent: as the checkpoint says.
EXTENSION: dict[str, str] = {
    "mode": "diffusion (the default), ar, or hybrid: the thought in AR, the answer in diffusion",
    "rule": "which positions of a canvas are decided: entropy, the default, or confidence",
    "entropy_bound": "nats that the positions decided in a step may leave open together",
    "confidence_threshold": "mean nats per position below which a canvas may settle",
    "stability_threshold": "steps its likeliest tokens must have stayed the same by then",
    "max_denoising_steps": "most steps of a canvas, 1 to 512",
    "t_max": "temperature of a canvas's first step, falling evenly towards...",
    "t_min": "...this one; `temperature` changes neither",
    "canvas_length": "tokens of a canvas, up to the model's own",
    "retries": "how often a canvas that went wrong is done again, 0 to 8; 2 by default",
    "max_seconds": "deadline from arrival, up to the server's; what there is by then is the answer",
    "regex": "a regular expression that the answer matches as a whole",
    "grammar": "a context-free grammar of the answer in Lark's notation, from its rule `start`",
    "choices": "texts of which the answer is one, up to 256",
    "drafts": "with stream: the canvas after each step",
    "pace": "with stream: text comes word by word, so many characters a second",
}

# Of a message, whatever its role; dropped before the message is read, and named in the reply.
MESSAGE_HARMLESS: dict[str, str] = {
    "name": "who speaks is told by the role (in a tool message it is honoured)",
    "cache_control": "prefixes are found by their tokens; also in a content part",
    "tool_calls[].index": "the place of a call in a stream that is sent back",
}


def sort_fields(
    body: Mapping[str, Any], table: Mapping[str, Field]
) -> tuple[dict[str, Any], list[str]]:
    """The fields to honour, and the names of the harmless ones; refuse the rest by name."""
    kept, ignored = {}, []
    for name, value in body.items():
        field = table.get(name) or _unknown(name, table)
        if value is None:
            continue
        if field.kind == "honoured":
            kept[name] = value
        elif field.kind == "harmless":
            ignored.append(name)
        elif not _is_neutral(value, field.neutral):
            raise refusal(name, f"{name} is refused: {field.note}")
    return kept, ignored


def refusal(param: str, sentence: str) -> ApiError:
    """A 400 about one field; validation lets it pass as it is."""
    return ApiError(400, sentence, param=param, code="unsupported_parameter")


def clean_messages(raw: object) -> tuple[object, list[str]]:
    """Messages without what is harmless in them, and its names."""
    ignored: set[str] = set()
    if not isinstance(raw, list):
        return raw, []
    return [_clean_message(message, ignored) for message in raw], sorted(ignored)


def _clean_message(message: object, ignored: set[str]) -> object:
    if not isinstance(message, dict):
        return message
    drop = {"cache_control"} if message.get("role") == "tool" else {"cache_control", "name"}
    kept = _without(message, drop, "messages[]", ignored)
    if isinstance(kept.get("content"), list):
        kept["content"] = [
            _without(part, {"cache_control"}, "messages[].content[]", ignored)
            if isinstance(part, dict)
            else part
            for part in kept["content"]
        ]
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [
            _without(call, {"index"}, "messages[].tool_calls[]", ignored)
            if isinstance(call, dict)
            else call
            for call in kept["tool_calls"]
        ]
    return kept


def _without(
    fields: dict[str, Any], names: set[str], where: str, ignored: set[str]
) -> dict[str, Any]:
    ignored |= {f"{where}.{name}" for name in fields.keys() & names}
    return {name: value for name, value in fields.items() if name not in names}


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # 0 is not False here: {"echo": 0} is as strange as {"min_tokens": false}.
    return any(value == asked and type(value) is type(asked) for asked in neutral)


def _unknown(name: str, table: Mapping[str, Field]) -> Field:
    honoured = [known for known, field in table.items() if field.kind == "honoured"]
    close = get_close_matches(name, honoured, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "docs/serve.md lists those that are"
    raise refusal(name, f"the field {name[:60]!r} is not known; {hint}")
