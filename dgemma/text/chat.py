"""Renders messages and tools to a prompt by the checkpoint's chat template, safe from injection.

Every control token that the template writes is marked, in its parsed tree, with half a surrogate
pair: a character that valid text cannot hold. After rendering, marked control tokens become control
ids and all the rest is encoded as plain text. So content that spells `<|turn>`, in one piece or in
several that the template concatenates, stays text, and content is never changed. Strings that the
template searches for in content (`split`, `in`) are not marked, so that they still match. A control
token assembled from pieces (`'<|' ~ role ~ '>'`) is text; the released template has none.

The model's replies are parsed in reply.py.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from dgemma.config.strict_json import read_regular
from dgemma.errors import CheckpointError, UsageError
from dgemma.images import Image, Picture, key_ids
from dgemma.text.control_tokens import (
    BOS,
    CHANNEL,
    CHANNEL_END,
    IMAGE_BEGIN,
    IMAGE_END,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
)
from dgemma.text.messages import Message, Part, Tool, ToolCall, check_conversation
from dgemma.text.template import MARK, compile_template, render, render_bounded
from dgemma.text.tokenizer import Tokenizer, refuse_surrogates
from dgemma.video import Video

__all__ = ["ChatTemplate", "Message", "Prompt", "Tool", "ToolCall"]

MAX_NESTING = 100  # levels of arguments and schemas; the template recurses over them
MAX_TEMPLATE_BYTES = 1 << 20  # the released one has 17 KiB
RELEASED_SHA256 = "9aeb7eac68ad87bba7567e9d4597ff203e5609f1b427d9e823437d0142cc61bf"
PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = (PACKAGE / "text" / "gemma4.jinja", PACKAGE / "models" / "nano" / "chat_template.jinja")
PROBE = {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": True}


@dataclass(frozen=True, slots=True)
class PromptImage:
    """A picture in a prompt; its soft tokens have the positions [begin, end)."""

    begin: int
    picture: Picture

    @property
    def end(self) -> int:
        return self.begin + self.picture.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A rendered conversation. `in_thought`: it ends in a thought that the reply continues."""

    text: str
    ids: tuple[int, ...]
    in_thought: bool = False
    images: tuple[PromptImage, ...] = ()  # in order

    @property
    def cache_ids(self) -> tuple[int, ...]:
        """Return ids that identify what each key is computed from: soft tokens by their picture."""
        if not self.images:
            return self.ids
        return key_ids(self.ids, [(image.begin, image.picture) for image in self.images])

    @property
    def num_image_tokens(self) -> int:
        return sum(image.picture.num_tokens for image in self.images)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences about pictures that were shrunk much, each once."""
        notes = (image.picture.note for image in self.images)
        return tuple(dict.fromkeys(note for note in notes if note))


class ChatTemplate:
    """A checkpoint's chat template, bound to its tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, is_trusted: bool = True) -> None:
        """Compile a template; one that is not trusted runs in a process with limits."""
        self._tokenizer, self._source, self._is_trusted = tokenizer, source, is_trusted
        self._pattern = tokenizer.control_pattern(MARK)
        self._control = tuple(tokenizer.control_ids)
        if is_trusted:
            compile_template(source, self._control)
        else:
            with contextlib.suppress(UsageError):  # it compiles, and may want other messages
                render_bounded(source, self._control, PROBE)

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read `chat_template.jinja` of a checkpoint directory."""
        path = directory / "chat_template.jinja"
        if not path.exists():
            raise CheckpointError(
                f"no chat_template.jinja in {directory}; this model has no chat form"
            )
        try:
            source = read_regular(path, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from None
        return cls.of_checkpoint(source, tokenizer)

    @classmethod
    def of_checkpoint(cls, source: str, tokenizer: Tokenizer) -> ChatTemplate:
        """Take the template of a checkpoint; only the released and shipped ones are trusted."""
        if len(source) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are "
                "read"
            )
        return cls(source, tokenizer, is_trusted=is_known(source))

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        enable_thinking: bool = False,
        preserve_thinking: bool = False,
        add_generation_prompt: bool = True,
        stamps: Sequence[Sequence[str]] = (),
    ) -> Prompt:
        """Render a conversation; past thoughts are dropped unless `preserve_thinking`.

        `stamps` are the times of each video's frames, which stand before the frames.
        """
        check_conversation(messages)
        variables = {
            "messages": [message_data(message) for message in messages],
            "tools": [tool_data(tool) for tool in tools] or None,
            "enable_thinking": enable_thinking,
            "preserve_thinking": preserve_thinking,
            "add_generation_prompt": add_generation_prompt,
        }
        check_data(variables)
        return self._encode(with_stamps(self._render(variables), stamps))

    def _render(self, variables: Mapping[str, object]) -> str:
        bos = MARK + BOS if BOS in self._tokenizer.control_ids else ""
        variables = {**variables, "bos_token": bos}
        if self._is_trusted:
            return render(compile_template(self._source, self._control), variables)
        return render_bounded(self._source, self._control, variables)

    def _encode(self, rendered: str) -> Prompt:
        if MARK in self._pattern.sub("", rendered):
            raise CheckpointError(
                "the chat template takes its own control tokens apart; use another one"
            )
        ids = self._tokenizer.encode_control(rendered, mark=MARK)
        return Prompt(
            text=rendered.replace(MARK, ""), ids=tuple(ids), in_thought=self._in_thought(ids)
        )

    def _in_thought(self, ids: Sequence[int]) -> bool:
        opens, closes = map(self._tokenizer.control_ids.get, (CHANNEL, CHANNEL_END))
        return next((token == opens for token in reversed(ids) if token in (opens, closes)), False)


def is_known(source: str) -> bool:
    """True for the released template and those of this package, whose cost is known."""
    return hashlib.sha256(source.encode("utf-8", "replace")).hexdigest() in _known_digests()


@cache
def _known_digests() -> frozenset[str]:
    shipped = (path.read_bytes() for path in SHIPPED if path.is_file())
    return frozenset({RELEASED_SHA256, *(hashlib.sha256(data).hexdigest() for data in shipped)})


def message_data(message: Message) -> dict[str, object]:
    """Return a message as templates read it; empty fields are left out: they test for presence."""
    fields = {
        "reasoning_content": message.thought,
        "tool_calls": [call_data(call) for call in message.tool_calls],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    present = {name: value for name, value in fields.items() if value}
    return {"role": message.role, "content": content_data(message.content), **present}


def content_data(content: str | tuple[Part, ...]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    kinds = {Image: "image", Video: "video"}
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": kinds[type(part)]}
        for part in content
    ]


def with_stamps(rendered: str, stamps: Sequence[Sequence[str]]) -> str:
    """Replace each video in a template's text by its frames, each after its time."""
    before, *after = rendered.split(MARK + VIDEO_TOKEN)
    _check_written(len(after), len(stamps), "videos")
    for times, text in zip(stamps, after, strict=True):
        before += " ".join(f"{time} {MARK}{VIDEO_TOKEN}" for time in times) + text
    return before


def insert_images(prompt: Prompt, pictures: Sequence[Picture], tokenizer: Tokenizer) -> Prompt:
    """Replace each image and each frame of a prompt by the soft tokens of its picture.

    The n-th token belongs to the n-th picture of the conversation. A template that drops pictures
    is refused: the model would answer about what it has not seen.
    """
    control = tokenizer.control_ids
    soft = {control[name] for name in (IMAGE_TOKEN, VIDEO_TOKEN) if name in control}
    has_frame = IMAGE_BEGIN in control and IMAGE_END in control
    num_written = sum(token in soft for token in prompt.ids) if has_frame else 0
    _check_written(num_written, len(pictures), "pictures")
    if not pictures:
        return prompt
    begin_id, end_id = control[IMAGE_BEGIN], control[IMAGE_END]
    ids: list[int] = []
    images: list[PromptImage] = []
    waiting = iter(pictures)
    for token in prompt.ids:
        if token not in soft:
            ids.append(token)
            continue
        picture = next(waiting)
        images.append(PromptImage(len(ids) + 1, picture))
        ids += [begin_id, *[token] * picture.num_tokens, end_id]
    return replace(prompt, ids=tuple(ids), images=tuple(images))


def _check_written(num_written: int, count: int, what: str) -> None:
    if num_written != count:
        raise CheckpointError(
            f"the conversation has {count} {what}, but the chat template writes {num_written} of "
            "them; use a checkpoint whose template takes them"
        )


def call_data(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    identity = {"id": call.id} if call.id else {}
    return {"type": "function", "function": function, **identity}


def tool_data(tool: Tool) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def check_data(value: object, depth: int = 0) -> None:
    """Refuse what is not JSON or not Unicode: valid text cannot hold a mark."""
    if depth > MAX_NESTING:
        raise UsageError(
            f"arguments or schemas nest deeper than {MAX_NESTING} levels; flatten them"
        )
    if isinstance(value, str):
        refuse_surrogates(value)
    elif isinstance(value, Mapping):
        check_data(list(value.values()), depth)
        check_keys(value)
    elif isinstance(value, list | tuple):
        for item in value:
            check_data(item, depth + 1)
    elif not isinstance(value, bool | int | float | None):
        raise UsageError(f"{value!r} is not JSON data; give strings, numbers, lists and objects")


def check_keys(mapping: Mapping[object, object]) -> None:
    for key in mapping:
        if not isinstance(key, str):
            raise UsageError(f"the key {key!r} is not a string; JSON objects have string keys")
        refuse_surrogates(key)
