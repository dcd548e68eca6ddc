"""Converts Anthropic's content blocks to messages."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from dgemma.errors import UsageError
from dgemma.images import Image
from dgemma.text import messages as reader
from dgemma.text.messages import Message, Part, ToolCall

BLOCK_FIELDS = {
    "text": {"type", "text", "citations"},
    "thinking": {"type", "thinking", "signature"},
    "redacted_thinking": {"type", "data"},
    "tool_use": {"type", "id", "name", "input", "caller"},
    "tool_result": {"type", "tool_use_id", "content", "is_error"},
    "image": {"type", "source"},
}
ROLES = ("user", "assistant", "system")
PARAGRAPH = "\n\n"  # separates text blocks; templates would join them without a separator


def system_messages(system: str | list[Any]) -> list[Message]:
    parts = [system] if isinstance(system, str) else [_read_text(part) for part in system]
    return [Message(role="system", content=PARAGRAPH.join(parts))] if any(parts) else []


def read_turn(raw: object) -> list[Message]:
    """Read one message; tool results in it become separate messages."""
    fields = reader.read_fields(raw, {"role", "content"}, "a message")
    role, content = fields.get("role"), fields.get("content")
    if role not in ROLES:
        reader.refuse("a message's role", role, f"one of {', '.join(ROLES)}")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        return [_read_assistant(reader.read_list(blocks, "content"))]
    messages: list[Message] = []
    for is_result, group in groupby(reader.read_list(blocks, "content"), _is_result):
        if is_result:
            messages += map(_read_result, group)
        else:
            messages.append(Message(role=role, content=_content(map(_read_part, group))))
    return messages


def _is_result(block: object) -> bool:
    return reader.read_object(block, "a content block").get("type") == "tool_result"


def _content(parts: Iterable[Part]) -> str | tuple[Part, ...]:
    """Join consecutive texts; pictures stay in place."""
    kept: list[Part] = []
    for part in parts:
        if kept and isinstance(part, str) and isinstance(kept[-1], str):
            part = f"{kept.pop()}{PARAGRAPH}{part}"
        kept.append(part)
    texts = [part for part in kept if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(kept) else tuple(kept)


def _read_assistant(blocks: Sequence[object]) -> Message:
    texts, thoughts, calls = [], [], []
    for raw in blocks:
        kind = reader.read_object(raw, "a content block").get("type")
        if kind == "text":
            texts.append(_read_text(raw))
            continue
        block = _read_block(raw, ("thinking", "redacted_thinking", "tool_use"))
        if kind == "thinking":
            thoughts.append(reader.read_string(block, "thinking", "a thinking block"))
        elif kind == "tool_use":
            calls.append(
                ToolCall(
                    id=reader.read_string(block, "id", "a tool_use block"),
                    name=reader.read_string(block, "name", "a tool_use block"),
                    arguments=reader.read_object(block.get("input"), "a tool_use block's input"),
                )
            )
    thought = "\n".join(thoughts)
    return Message(role="assistant", content=tuple(texts), thought=thought, tool_calls=tuple(calls))


def _read_result(raw: object) -> Message:
    """Read the result of a tool; a failure is stated in its text."""
    block = _read_block(raw, ("tool_result",))
    content = block.get("content") or ""
    blocks = [] if isinstance(content, str) else reader.read_list(content, "content")
    parts = [content] if isinstance(content, str) else [_read_part(block) for block in blocks]
    shown = _content(parts)
    if reader.read_flag(block.get("is_error"), "a tool_result block's is_error"):
        shown = f"Error: {shown}" if isinstance(shown, str) else ("Error: ", *shown)
    return Message(
        role="tool",
        content=shown,
        tool_call_id=reader.read_string(block, "tool_use_id", "a tool_result block"),
    )


def _read_part(raw: object) -> Part:
    """Read a text or a picture, which must be base64."""
    if reader.read_object(raw, "a content block").get("type") != "image":
        return _read_text(raw)
    source = reader.read_object(_read_block(raw, ("image",)).get("source"), "an image's source")
    match source.get("type"):
        case "url":
            raise UsageError("no address is opened; send the picture as base64")
        case "file":
            raise UsageError("no files are stored; send the picture as base64")
    where = "an image's source of type base64"
    fields = reader.read_fields(source, {"type", "media_type", "data"}, where)
    if fields.get("type") != "base64":
        reader.refuse("an image's source type", fields.get("type"), "'base64'")
    return Image.from_base64(reader.read_string(fields, "data", where))


def _read_text(raw: object) -> str:
    """Read a text block; other media are refused as in chat."""
    block = reader.read_object(raw, "a content block")
    drop = {"cache_control", "citations"}
    return reader.read_text_part({name: value for name, value in block.items() if name not in drop})


def _read_block(raw: object, kinds: Iterable[str]) -> dict[str, Any]:
    kind = reader.read_object(raw, "a content block").get("type")
    if not isinstance(kind, str) or kind not in kinds:
        reader.refuse("a content block's type", kind, f"one of text, {', '.join(kinds)}")
    return reader.read_fields(raw, BLOCK_FIELDS[kind] | {"cache_control"}, f"a {kind} block")
