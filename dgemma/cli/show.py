"""The live canvas in a terminal: noise dim, decided tokens cyan, sure ones white, pins underlined.

Drawn on stderr and wiped when the text is promised, so stdout holds the answer alone. Without a
terminal nothing is drawn.
"""

import sys
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dgemma.engine import Draft

SURE_NATS = 0.01  # below: will hardly change


class CanvasView:
    """Draws drafts in place. A context manager, so that the terminal is always restored."""

    def __init__(self) -> None:
        self.live = Live(
            console=Console(file=sys.stderr),
            transient=True,
            auto_refresh=False,
            vertical_overflow="crop",
        )

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self.live.is_started

    def __enter__(self) -> "CanvasView":
        if self.live.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
        self.live.stop()

    def draw(self, draft: Draft) -> None:
        if self.is_live:
            self.live.update(paint(draft), refresh=True)

    def clear(self) -> None:
        if self.is_live:
            self.live.update(Text(""), refresh=True)


def paint(draft: Draft) -> Text:
    """The canvas as styled text, under a line that says how far it is."""
    decided = sum(draft.kept) / len(draft.kept)
    heading = f"block {draft.block + 1} · step {draft.step} · {decided:.0%} decided\n"
    text = Text(heading, style="dim")
    for token, entropy, kept, pinned in zip(
        draft.tokens, draft.entropy, draft.kept, draft.pinned, strict=True
    ):
        # A line break that is only noise would tear the canvas apart.
        shown = printable(token) if kept else printable(token).replace("\n", "·")
        text.append(shown, style=style(entropy, kept=kept, pinned=pinned))
    return text


def style(entropy: float, *, kept: bool, pinned: bool) -> str:
    if pinned:
        return "bold underline"
    if not kept:
        return "dim"
    return "bold white" if entropy < SURE_NATS else "cyan"


def printable(token: str) -> str:
    """What has no glyph (control tokens, lone bytes, cursor movements) shows as a dot."""
    return "".join(c if is_shown(c) else "·" for c in token) or "·"


def is_shown(character: str) -> bool:
    return character == "\n" or (character.isprintable() and character != "\ufffd")
