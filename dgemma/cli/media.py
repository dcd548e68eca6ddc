"""Pictures and videos on the command line: options, and /image and /video of a chat.

Also /save and /load of a chat, whose files contain the pictures.
"""

import json
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dgemma.errors import UsageError
from dgemma.options import option

if TYPE_CHECKING:
    from dgemma.cli.chat import Conversation
    from dgemma.text.messages import Media, Message, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions:
    """Pictures and videos shown before the prompt."""

    image: list[Path] | None = option(
        None, "A picture to show before the prompt; may be repeated.", "--image", "-a"
    )
    image_tokens: int | None = option(
        None, "Soft tokens of each picture: 70, 140, 280, 560 or 1120 (small text)."
    )
    video: list[Path] | None = option(
        None, "A video, a GIF or a folder of frames to show; may be repeated."
    )
    video_fps: float | None = option(None, "Frames per second of a folder of frames; default: 24.")

    def read(self) -> "tuple[Media, ...]":
        """Read pictures and find videos before a model is loaded."""
        from dgemma.images import Image
        from dgemma.video import Video

        if self.video_fps is not None and not self.video:
            raise UsageError("--video-fps is given without --video; show a folder or leave it out")
        pictures = [Image.open(path, tokens=self.image_tokens) for path in self.image or ()]
        return (*pictures, *(Video.open(path, self.video_fps) for path in self.video or ()))


# --- commands of a chat


def image(conversation: "Conversation", argument: str) -> None:
    from dgemma.images import Image

    if argument:
        tokens = conversation.settings.image_tokens
        conversation.show(Image.open(named_path(argument), tokens=tokens))
    else:
        conversation.shown.clear()
        print("[nothing is shown with the next message]", file=sys.stderr)


def video(conversation: "Conversation", argument: str) -> None:
    from dgemma.video import Video

    if not argument:
        raise UsageError("no video is given; name a file or a folder, such as /video clip.mp4")
    conversation.show(Video.open(named_path(argument)))


def save(conversation: "Conversation", argument: str) -> None:
    """Write the messages as JSON; does not overwrite other files."""
    path = _file(argument)
    if path.exists() and path not in conversation.saved:
        raise UsageError(f"{path} exists; give another name")
    messages = [*conversation.system, *conversation.messages]
    text = json.dumps({"messages": list(map(saved, messages))}, ensure_ascii=False, indent=1)
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    conversation.saved.add(path)
    print(f"[saved {len(messages)} messages to {path}]", file=sys.stderr)


def load(conversation: "Conversation", argument: str) -> None:
    path = _file(argument)
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["messages"]
        messages = [loaded(row, conversation.settings.image_tokens) for row in rows]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} is not a saved conversation; /save writes one") from None
    system = [m for m in messages[:1] if m.role == "system"]
    exchanges = messages[len(system) :]
    roles = ["user", "assistant"] * (len(exchanges) // 2)
    if [m.role for m in exchanges] != roles:
        raise UsageError(f"{path} has other than questions with answers; /save writes a chat")
    conversation.system, conversation.messages = system, exchanges
    print(f"[loaded {len(messages)} messages from {path}]", file=sys.stderr)


def _file(argument: str) -> Path:
    if not argument:
        raise UsageError("no file is given; name one, such as /save chat.json")
    return Path(argument).expanduser().resolve()


def named_path(argument: str) -> Path:
    """Return a path that was typed or dropped: terminals quote paths with spaces."""
    path = Path(argument).expanduser()
    with suppress(ValueError):
        words = shlex.split(argument)
        if not path.exists() and len(words) == 1:
            return Path(words[0]).expanduser()
    return path


def spelled(message: "Message") -> str:
    """Return a message's text with the names of its pictures and videos."""
    if isinstance(message.content, str):
        return message.content
    return " ".join(p if isinstance(p, str) else f"[{p.name}]" for p in message.content)


def saved(message: "Message") -> dict[str, Any]:
    """Return a message in the file format: pictures inline, as in an HTTP request."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [_saved_part(part) for part in content]
    return {"role": message.role, "content": content}


def loaded(row: "dict[str, Any]", tokens: int | None) -> "Message":
    """Read a message of a file; `tokens` limits each picture."""
    from dgemma.images import Image
    from dgemma.text.messages import Message, read_content

    content = read_content(row["content"])
    if not isinstance(content, str):
        content = tuple(replace(p, tokens=tokens) if isinstance(p, Image) else p for p in content)
    return Message(role=row["role"], content=content)


def _saved_part(part: "Part") -> dict[str, Any]:
    from base64 import b64encode

    from dgemma.images import Image

    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Image):
        raise UsageError(f"{part.name} is a video, which is not saved; /undo it, or keep its file")
    url = f"data:image/*;base64,{b64encode(cast(bytes, part.source)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
