"""The values of a conversation: messages, tool calls, tools; read strictly from OpenAI-style dicts.

Owns what each may hold and the sentences that refuse the rest. Knows no template and no token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from dgemma.errors import UsageError

Role = Literal["system", "developer", "user", "assistant", "tool"]

FIELDS: dict[str, frozenset[str]] = {
    "system": frozenset({"role", "content"}),
    "developer": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "reasoning", "reasoning_content", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
KNOWN_FIELDS = frozenset[str]().union(*FIELDS.values())
# OpenAI's client writes these into every assistant message it echoes; empty they say nothing.
ECHOED_FIELDS = frozenset({"refusal", "annotations", "audio", "function_call"})
MEDIA_PARTS = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "audio",
        "input_audio",
        "video",
        "video_url",
        "file",
        "input_file",
    }
)
# Names are written bare before a brace, in declarations and in calls.
TOOL_NAME = re.compile(r"[^\s{}]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the model makes. `id` ties the tool's answer to it."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        check_tool_name(self.name)

    @classmethod
    def from_dict(cls, raw: object) -> ToolCall:
        outer = read_fields(raw, {"id", "type", "function"}, "a tool call")
        check_function_type(outer, "a tool call")
        inner = read_fields(outer.get("function"), {"name", "arguments"}, "a tool call's function")
        return cls(
            id=read_string(outer, "id", "a tool call", default=""),
            name=read_string(inner, "name", "a tool call's function"),
            arguments=read_arguments(inner.get("arguments")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call; `strict` asks the engine to hold arguments to the schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        check_tool_name(self.name)

    @classmethod
    def from_dict(cls, raw: object) -> Tool:
        outer = read_fields(raw, {"type", "function"}, "a tool")
        check_function_type(outer, "a tool")
        allowed = {"name", "description", "parameters", "strict"}
        inner = read_fields(outer.get("function"), allowed, "a tool's function")
        parameters, strict = inner.get("parameters"), inner.get("strict")
        if not isinstance(strict, bool | None):
            refuse("a tool's strict", strict, "true or false")
        return cls(
            name=read_string(inner, "name", "a tool's function"),
            description=read_string(inner, "description", "a tool's function", default=""),
            parameters={} if parameters is None else read_object(parameters, "a tool's parameters"),
            strict=strict is True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `content` given in parts stays in parts: the template joins them by role."""

    role: Role
    content: str | tuple[str, ...] = ""
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.role not in FIELDS:
            refuse("a message's role", self.role, f"one of {', '.join(FIELDS)}")
        if self.role != "assistant" and (self.thought or self.tool_calls):
            raise UsageError(
                f"a {self.role} message holds a thought or tool calls; only assistant may"
            )
        if self.role != "tool" and (self.tool_call_id or self.name):
            raise UsageError(f"a {self.role} message holds tool_call_id or name; only tool may")
        # With equal ids the template gives every answer the name of the last call.
        if len({call.id for call in self.tool_calls}) < len(self.tool_calls):
            raise UsageError(
                "the tool calls of one message share an id or have none; give each its own"
            )

    @classmethod
    def from_dict(cls, raw: object) -> Message:
        """Read one OpenAI-style message; null counts as absent."""
        present = drop_empty(read_object(raw, "a message"))
        role = present.get("role")
        if not isinstance(role, str) or role not in FIELDS:
            refuse("a message's role", role, f"one of {', '.join(FIELDS)}")
        where = f"a message of role {role}"
        read_fields(present, FIELDS[role], where)
        thought = read_thought(present)
        tool_calls = read_list(present.get("tool_calls", []), "tool_calls")
        if "content" not in present and not (thought or tool_calls):
            raise UsageError(f"{where} has no content; give a string or a list of text parts")
        return cls(
            role=cast(Role, role),
            content=read_content(present.get("content", "")),
            thought=thought,
            tool_calls=tuple(map(ToolCall.from_dict, tool_calls)),
            tool_call_id=read_string(present, "tool_call_id", where, default=""),
            name=read_string(present, "name", where, default=""),
        )


def read_messages(raw: object) -> tuple[Message, ...]:
    """Read a list of OpenAI-style messages, and say which one is refused."""
    messages = []
    for position, entry in enumerate(read_list(raw, "messages")):
        try:
            messages.append(Message.from_dict(entry))
        except UsageError as error:
            raise UsageError(f"messages[{position}]: {error}") from None
    return tuple(messages)


def read_tools(raw: object) -> tuple[Tool, ...]:
    """Read a list of OpenAI-style tools; null is none."""
    tools = tuple(map(Tool.from_dict, read_list([] if raw is None else raw, "tools")))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise UsageError(f"two tools share a name in {names}; give each its own")
    return tools


def check_conversation(messages: Sequence[Message]) -> None:
    """Refuse what a template would drop in silence: an answer to a call that nobody made."""
    if not messages:
        raise UsageError("there are no messages; give at least one")
    calls: tuple[ToolCall, ...] = ()
    for position, message in enumerate(messages):
        if message.role != "tool":
            calls = message.tool_calls
        elif not calls:
            raise UsageError(
                f"messages[{position}] answers a tool call, "
                "but no assistant message with tool_calls stands before it"
            )
        elif not message.name and message.tool_call_id not in {call.id for call in calls}:
            raise UsageError(
                f"messages[{position}] has tool_call_id {message.tool_call_id!r}; "
                f"the calls before it have {[call.id for call in calls]}"
            )


def read_content(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("content", value, "a string or a list of text parts")
    return tuple(map(read_part, value))


def read_part(raw: object) -> str:
    part = read_object(raw, "a content part")
    kind = part.get("type")
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise UsageError(f"content parts of type {kind!r} are not supported yet; send text only")
    if kind != "text":
        refuse("a content part's type", kind, "'text'")
    read_fields(part, {"type", "text"}, "a text part")
    return read_string(part, "text", "a text part")


def read_thought(fields: Mapping[str, object]) -> str:
    names = [name for name in ("reasoning_content", "reasoning") if name in fields]
    thoughts = {read_string(fields, name, "an assistant message") for name in names}
    if len(thoughts) > 1:
        raise UsageError("reasoning and reasoning_content differ; give one of them")
    return thoughts.pop() if thoughts else ""


def read_arguments(value: object) -> Mapping[str, object]:
    """Read a call's arguments: an object or its JSON text; null and blank text are no arguments."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=refuse_constant) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"a tool call's arguments are not JSON: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse("a tool call's arguments", value, "a JSON object, as such or as text")
    return value


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def check_tool_name(name: str) -> None:
    if not TOOL_NAME.fullmatch(name):
        refuse("a tool's name", name, "one word without braces")


def check_function_type(fields: Mapping[str, object], where: str) -> None:
    if fields.get("type", "function") != "function":
        refuse(f"{where}'s type", fields["type"], "'function'")


def drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if not (value is None and name in KNOWN_FIELDS)
        and not (not value and name in ECHOED_FIELDS)
    }


def read_object(raw: object, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        refuse(where, raw, "an object")
    return raw


def read_fields(raw: object, allowed: Iterable[str], where: str) -> dict[str, Any]:
    """Return `raw` as an object, and refuse keys that are not allowed, by name."""
    fields = read_object(raw, where)
    unknown = sorted(map(repr, fields.keys() - allowed))
    if unknown:
        raise UsageError(f"{where} has {', '.join(unknown)}; allowed: {', '.join(sorted(allowed))}")
    return fields


def read_list(raw: object, where: str) -> Sequence[object]:
    if not isinstance(raw, list | tuple):
        refuse(where, raw, "a list")
    return raw


def read_string(
    fields: Mapping[str, object], key: str, where: str, default: str | None = None
) -> str:
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        refuse(f"{where}'s {key}", value, "a string")
    return value


def refuse(what: str, given: object, allowed: str) -> NoReturn:
    shown = repr(given)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise UsageError(f"{what} is {shown}; it must be {allowed}")
