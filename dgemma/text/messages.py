"""Messages, tool calls and tools of a conversation, read strictly from OpenAI-style dicts."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeVar, cast

from dgemma.errors import UsageError
from dgemma.images import Detail, Image, refuse_address
from dgemma.video import MAX_FRAMES, Video

T = TypeVar("T")
Role = Literal["system", "developer", "user", "assistant", "tool"]
Media = Image | Video
Part = str | Media

FIELDS: dict[str, frozenset[str]] = {
    "system": frozenset({"role", "content"}),
    "developer": frozenset({"role", "content"}),
    "user": frozenset({"role", "content"}),
    "assistant": frozenset({"role", "content", "reasoning", "reasoning_content", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
}
KNOWN_FIELDS = frozenset[str]().union(*FIELDS.values())
# OpenAI's client writes these into every assistant message it echoes; ignored if empty.
ECHOED_FIELDS = frozenset({"refusal", "annotations", "audio", "function_call"})
# Of the Responses API.
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
NO_EFFECT_IN_PARTS = {"annotations", "logprobs", "prompt_cache_breakpoint"}
IMAGE_PARTS = frozenset({"image_url", "input_image"})
# Parts that are refused, each with its sentence.
REFUSED_PARTS = {
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "the model has no audio; send text"),
    "video": "send its frames as video_url",
    **dict.fromkeys(
        ("file", "input_file", "document"), "files are not read; send text, or pages as images"
    ),
    "image": "use image_url of chat completions, or input_image of responses, and a data: URL",
    "image_embeds": "send the picture itself",
}
MAX_IMAGES = 16  # of one conversation that a client sends
FRAMES_URL = "data:video/jpeg;base64"  # and frames, each after a comma, as vLLM takes them
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
        parameters = inner.get("parameters")
        return cls(
            name=read_string(inner, "name", "a tool's function"),
            description=read_string(inner, "description", "a tool's function", default=""),
            parameters={} if parameters is None else read_object(parameters, "a tool's parameters"),
            strict=read_flag(inner.get("strict"), "a tool's strict"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `content` given in parts stays in parts: the template joins them by role."""

    role: Role
    content: str | tuple[Part, ...] = ""
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.role not in FIELDS:
            refuse("a message's role", self.role, f"one of {', '.join(FIELDS)}")
        if self.media and self.role not in ("user", "tool"):
            raise UsageError(
                f"a {self.role} message holds a picture or a video; only user and tool messages may"
            )
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

    @property
    def media(self) -> tuple[Media, ...]:
        """Return the pictures and videos of the content, in order."""
        return tuple(part for part in self.content if not isinstance(part, str))

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
    """Read a list of OpenAI-style messages; a refusal names the position."""
    return tuple(read_each(raw, "messages", Message.from_dict))


def read_each(raw: object, where: str, read: Callable[[object], T]) -> list[T]:
    """Read each entry of a list; a refusal names the position."""
    entries = []
    for position, entry in enumerate(read_list(raw, where)):
        try:
            entries.append(read(entry))
        except UsageError as error:
            raise UsageError(f"{where}[{position}]: {error}") from None
    return entries


def with_media_named(messages: Sequence[Message], tokens: int | None) -> tuple[Message, ...]:
    """Number pictures and videos of a request, each kind by itself, for errors and notes.

    Too many are refused. `tokens` is the budget of each picture, instead of its `detail`'s.
    """
    media = [part for message in messages for part in message.media]
    videos = [part for part in media if isinstance(part, Video)]
    num_images, num_frames = len(media) - len(videos), sum(video.num_frames for video in videos)
    if num_images > MAX_IMAGES:
        raise UsageError(f"the conversation has {num_images} pictures; at most {MAX_IMAGES} may be")
    if num_frames > MAX_FRAMES:
        raise UsageError(
            f"the videos of the conversation have {num_frames} frames; at most {MAX_FRAMES} may be"
        )
    pictures, clips = itertools.count(1), itertools.count(1)

    def named(part: Part) -> Part:
        if isinstance(part, Image):
            return replace(part, name=f"picture {next(pictures)}", tokens=tokens)
        return replace(part, name=f"video {next(clips)}") if isinstance(part, Video) else part

    return tuple(
        replace(message, content=tuple(map(named, message.content))) if message.media else message
        for message in messages
    )


def read_tools(raw: object) -> tuple[Tool, ...]:
    """Read a list of OpenAI-style tools; null is none."""
    return check_distinct(
        [Tool.from_dict(tool) for tool in read_list([] if raw is None else raw, "tools")]
    )


def read_flat_tools(raw: Iterable[object], kind: str, schema: str) -> tuple[Tool, ...]:
    """Read tools that are not nested, as other APIs have them; `schema` names the parameters."""
    tools = []
    for entry in raw:
        found = read_object(entry, "a tool").get("type", kind)
        if found != kind:
            refuse("a tool's type", found, f"{kind!r}; tools of other types do not run here")
        fields = read_fields(entry, {"type", "name", "description", schema, "strict"}, "a tool")
        tools.append(
            Tool(
                name=read_string(fields, "name", "a tool"),
                description=read_string(fields, "description", "a tool", default=""),
                parameters=read_object(fields.get(schema) or {}, f"a tool's {schema}"),
                strict=read_flag(fields.get("strict"), "a tool's strict"),
            )
        )
    return check_distinct(tools)


def check_distinct(found: Iterable[Tool]) -> tuple[Tool, ...]:
    """Return the tools, unless two share a name."""
    tools = tuple(found)
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise UsageError(f"two tools share a name in {names}; give each its own")
    return tools


def check_conversation(messages: Sequence[Message]) -> None:
    """Refuse an answer to a call that was not made: a template would drop it silently."""
    if not messages:
        raise UsageError("there are no messages; give at least one")
    calls: tuple[ToolCall, ...] = ()
    for position, message in enumerate(messages):
        if message.role != "tool":
            calls = message.tool_calls
        elif not calls:
            raise UsageError(
                f"messages[{position}] answers a tool call, "
                "but no assistant message with tool_calls comes before it"
            )
        elif not message.name and message.tool_call_id not in {call.id for call in calls}:
            raise UsageError(
                f"messages[{position}] has tool_call_id {message.tool_call_id!r}; "
                f"the calls before it have {[call.id for call in calls]}"
            )


def read_content(value: object) -> str | tuple[Part, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("content", value, "a string or a list of text parts")
    return tuple(map(read_part, value))


def read_part(raw: object) -> Part:
    part = read_object(raw, "a content part")
    kind = part.get("type")
    if isinstance(kind, str) and kind in REFUSED_PARTS:
        raise UsageError(f"content parts of type {kind!r} are not taken: {REFUSED_PARTS[kind]}")
    if isinstance(kind, str) and kind in IMAGE_PARTS:
        return read_image(part)
    if kind == "video_url":
        return read_video(part)
    if kind != "text":
        refuse("a content part's type", kind, "'text', 'image_url' or 'video_url'")
    read_fields(part, {"type", "text"}, "a text part")
    return read_string(part, "text", "a text part")


def read_text_part(raw: object) -> str:
    """Read a part where pictures are not taken."""
    part = read_part(raw)
    if not isinstance(part, str):
        raise UsageError("a picture or a video is where only text is read; send text")
    return part


def read_flat_content(raw: object) -> str | tuple[Part, ...]:
    """Read content of the Responses API: texts become one; among pictures each stays in place."""
    parts = read_flat_parts(raw, read_part)
    texts = [part for part in parts if isinstance(part, str)]
    return "\n\n".join(texts) if len(texts) == len(parts) else tuple(parts)


def read_flat_parts(raw: object, read: Callable[[object], T]) -> list[T]:
    """Read a text, or parts as the Responses API names them."""
    if isinstance(raw, str):
        return [read({"type": "text", "text": raw})]
    parts = []
    for entry in read_list(raw, "content"):
        part = read_object(entry, "a content part")
        kept = {name: value for name, value in part.items() if name not in NO_EFFECT_IN_PARTS}
        kind = "text" if kept.get("type") in TEXT_PARTS else kept.get("type")
        parts.append(read({**kept, "type": kind}))
    return parts


def read_image(part: Mapping[str, Any]) -> Image:
    """Read an image part; chat completions nest what the Responses API keeps flat."""
    inner = part.get("image_url")
    if isinstance(inner, dict):
        read_fields(part, {"type", "image_url"}, "an image part")
        fields = read_fields(inner, {"url", "detail"}, "an image part's image_url")
    else:
        read_fields(part, {"type", "image_url", "detail"}, "an image part")
        fields = {"url": inner, "detail": part.get("detail")}
    url = read_string(fields, "url", "an image part's image_url")
    detail = read_string(fields, "detail", "an image part", default="auto")
    return Image.from_base64(image_data(url), cast(Detail, detail))


def read_video(part: Mapping[str, Any]) -> Video:
    """Read the frames of a video; a file is not decoded for strangers."""
    read_fields(part, {"type", "video_url"}, "a video part")
    fields = read_fields(part.get("video_url"), {"url", "fps"}, "a video part's video_url")
    url, fps = read_string(fields, "url", "a video part's video_url"), fields.get("fps")
    refuse_address(url, "its frames", "the video")
    head, comma, data = url.partition(",")
    if head.lower() != FRAMES_URL or not comma:
        raise UsageError(f"of a video only frames are taken; send {FRAMES_URL},FRAME,FRAME,...")
    if not isinstance(fps, int | float | None) or isinstance(fps, bool):
        refuse("a video's fps", fps, "a number of frames a second")
    num_frames = data.count(",") + 1
    if num_frames > MAX_FRAMES:
        raise UsageError(f"a video has {num_frames} frames; send at most {MAX_FRAMES}")
    return Video(tuple(map(Image.from_base64, data.split(","))), fps, num_frames)


def image_data(url: str) -> str:
    """Return the base64 text of a `data:` URL; nothing else is opened."""
    refuse_address(url, "a data: URL")
    scheme, _, rest = url.partition(":")
    match scheme.lower():
        case "file":
            raise UsageError("no file is opened; send the picture as a data: URL")
        case "data":
            head, comma, data = rest.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise UsageError("a data: URL must be data:image/...;base64, and the picture")
            return data
    raise UsageError("an image_url is not a data: URL; send data:image/...;base64, and the picture")


def read_thought(fields: Mapping[str, object]) -> str:
    names = [name for name in ("reasoning_content", "reasoning") if name in fields]
    thoughts = {read_string(fields, name, "an assistant message") for name in names}
    if len(thoughts) > 1:
        raise UsageError("reasoning and reasoning_content differ; give one of them")
    return thoughts.pop() if thoughts else ""


def read_arguments(value: object) -> Mapping[str, object]:
    """Read a call's arguments: an object or its JSON text; null and blank text are none."""
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


def read_flag(value: object, where: str) -> bool:
    """Read a boolean; null is false."""
    if not isinstance(value, bool | None):
        refuse(where, value, "true or false")
    return value is True


def refuse(what: str, value: object, allowed: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise UsageError(f"{what} is {shown}; it must be {allowed}")
