"""The live canvas in a terminal: noise dim, decided tokens brighter as they are surer.

Drawn on stderr and wiped at the end, so stdout holds the answer alone. Without a terminal nothing
is drawn.
"""

import sys
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dgemma.engine import Draft
from dgemma.engine import Text as Promised

# A decided token takes the first shade whose entropy, in nats, it stays below.
SHADES = ((0.01, "bold bright_white"), (0.1, "white"), (0.5, "cyan"))


class CanvasView:
    """Draws promised text and the canvas behind it, in place, while a request runs.

    A context manager, so that the terminal is always restored. What was promised is wiped with the
    rest and is for the caller to print: without a terminal it is printed as it comes.
    """

    def __init__(self) -> None:
        self.promised = Text()
        self.live = Live(
            console=Console(file=sys.stderr),
            transient=True,
            auto_refresh=False,
            vertical_overflow="crop",
        )

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self.live.console.is_terminal

    def __enter__(self) -> "CanvasView":
        if self.is_live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._update(Text())
        self.live.stop()

    def draw(self, draft: Draft) -> None:
        self._update(Text.assemble(self._tail(), paint(draft)))

    def promise(self, text: Promised) -> None:
        if not self.is_live and not text.is_thought:
            print(text.text, end="", flush=True)
        self.promised.append(text.text, style="dim italic" if text.is_thought else "")
        self._update(self._tail())

    def _tail(self) -> Text:
        """As much of the promised text as leaves room for a canvas."""
        lines = self.promised.wrap(self.live.console, self.live.console.width)
        kept = lines[-max(3, self.live.console.height // 2) :] if len(self.promised) else []
        return Text("\n").join([*kept, Text()]) if kept else Text()

    def _update(self, shown: Text) -> None:
        if self.live.is_started:
            self.live.update(shown, refresh=True)


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
    return next((shade for nats, shade in SHADES if entropy < nats), "blue")


def printable(token: str) -> str:
    """What has no glyph (control tokens, lone bytes, cursor movements) shows as a dot."""
    return "".join(c if is_shown(c) else "·" for c in token) or "·"


def is_shown(character: str) -> bool:
    return character == "\n" or (character.isprintable() and character != "\ufffd")
