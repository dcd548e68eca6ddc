"""The policy of every request field: honoured, harmless or refused.

Honoured: it has an effect, and the request schema declares it. Harmless: ignoring it breaks no
promise; it is accepted and named in the reply. Refused: ignoring it would break a promise, so the
request gets a 400 with the reason, unless the value has no effect. A field without a policy gets a
400 too. docs/serve.md prints the tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from dgemma.server.errors import ApiError

Kind = Literal["honoured", "harmless", "refused"]


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """The policy of one field."""

    kind: Kind
    note: str
    neutral: tuple[object, ...] = ()  # values of a refused field without effect, like null


FieldTable = dict[str, FieldPolicy]


def harmless(note: str) -> FieldPolicy:
    return FieldPolicy("harmless", note)


def refused(note: str, *neutral: object) -> FieldPolicy:
    return FieldPolicy("refused", note, neutral)


COMMON: FieldTable = {
    "top_p": harmless(
        "a canvas commits its most likely tokens; refused in ar and hybrid above temperature 0"
    ),
    "top_k": harmless("as top_p"),
    "min_p": harmless("as top_p"),
    "typical_p": harmless("as top_p"),
    "presence_penalty": harmless("as repetition_penalty"),
    "frequency_penalty": harmless("as repetition_penalty"),
    "repetition_penalty": harmless(
        "a canvas that repeats itself is retried; refused in ar and hybrid"
    ),
    "repeat_penalty": harmless("as repetition_penalty"),
    "user": harmless("nothing is stored per user"),
    "metadata": harmless("nothing is stored"),
    "store": harmless("nothing is stored"),
    "service_tier": harmless("there is one"),
    "safety_identifier": harmless("nothing is stored per user"),
    "prompt_cache_key": harmless("prefixes are found by their tokens"),
    "prompt_cache_retention": harmless("prefixes are cached as memory allows"),
    "cache_prompt": harmless("prefixes are always reused"),
    "keep_alive": harmless("the model stays loaded"),
    "logit_bias": refused("logits of single tokens cannot be changed", {}),
    "min_tokens": refused("an answer cannot be prevented from ending", 0),
    "ignore_eos": refused("an answer cannot be prevented from ending", False),
    "best_of": refused("answers are not ranked; use n", 1),
    # Added to every request by gateways such as sglang-router and vllm-router.
    "no_stop_trim": refused("the answer ends before a stop string", False),
    "continue_final_message": refused("an answer is a new turn", False),
    "skip_special_tokens": refused("control tokens are not part of a text", True),
    "separate_reasoning": refused("thoughts are always separate from the answer", True),
    "stream_reasoning": refused("thoughts are streamed like the answer", True),
    "include_reasoning": refused("a thought is part of the reply", True),
    "return_hidden_states": refused("a reply is text", False),
}

# Fields that would change the draws in AR, and their values without effect. They are not
# applied: a draw is the argmax, or from the whole distribution.
TRUNCATIONS: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
}
PENALTIES: dict[str, tuple[float, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
}

# In messages of any role; removed before the message is read, and named in the reply.
MESSAGE_HARMLESS: dict[str, str] = {
    "name": "the role says who speaks (in a tool message it is honoured)",
    "cache_control": "prefixes are found by their tokens; also in a content part",
    "tool_calls[].index": "the index of a call in a stream that is sent back",
}


def sort_fields(body: Mapping[str, Any], table: FieldTable) -> tuple[dict[str, Any], list[str]]:
    """Return the fields to honour and the names of harmless ones; refuses the others by name."""
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


def check_ar(body: Mapping[str, Any], mode: str, temperature: float | None) -> None:
    """Refuse fields that would change AR draws and are not applied."""
    if mode == "diffusion":
        return
    # At temperature 0, the default in AR, the argmax is taken, which truncation keeps.
    neutral = PENALTIES | (TRUNCATIONS if temperature else {})
    for name, allowed in neutral.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            other = "" if name in PENALTIES else " or set temperature to 0,"
            sentence = (
                f"{name} is refused in mode {mode}, where it is not applied: send {allowed[0]},"
                f"{other} or leave it out"
            )
            raise refusal(name, sentence)


def refusal(param: str, sentence: str) -> ApiError:
    """Return a 400 about one field; pydantic passes it through."""
    return ApiError(400, sentence, param=param, code="unsupported_parameter")


def clean_messages(raw: object) -> tuple[object, list[str]]:
    """Return messages without harmless fields, and the names of these."""
    ignored: set[str] = set()
    if not isinstance(raw, list):
        return raw, []
    return [_clean_message(message, ignored) for message in raw], sorted(ignored)


def _clean_message(message: object, ignored: set[str]) -> object:
    if not isinstance(message, dict):
        return message
    drop = {"cache_control"} if message.get("role") == "tool" else {"cache_control", "name"}
    cleaned = without(message, drop, "messages[]", ignored)
    for name, harmless_name in (("content", "cache_control"), ("tool_calls", "index")):
        if isinstance(cleaned.get(name), list):
            path = f"messages[].{name}[]"
            cleaned[name] = [without(o, {harmless_name}, path, ignored) for o in cleaned[name]]
    return cleaned


def without(fields: Any, names: set[str], path: str, ignored: set[str]) -> Any:
    """Return an object without its harmless fields; appends their paths to `ignored`."""
    if not isinstance(fields, dict):
        return fields
    ignored |= {f"{path}.{name}" for name in fields.keys() & names}
    return {name: value for name, value in fields.items() if name not in names}


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # 0 is not False here: {"echo": 0} is as strange as {"min_tokens": false}.
    return any(value == one and type(value) is type(one) for one in neutral)


def _unknown(name: str, table: FieldTable) -> FieldPolicy:
    honoured = [known for known, field in table.items() if field.kind == "honoured"]
    close = get_close_matches(name[:60], honoured, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "docs/serve.md lists those that are"
    raise refusal(name[:60], f"the field {name[:60]!r} is not known; {hint}")
