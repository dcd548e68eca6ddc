"""Terminal input and output: the live canvas, answers, and messages of a chat.

The canvas shows noise dim, and accepted tokens brighter the more certain they are. It is drawn on
stderr and wiped at the end, so stdout has only the answer. Without a terminal nothing is drawn.

A chat reads messages of one or several lines: with prompt_toolkit on a terminal (history, bracketed
paste, Alt+Enter), else plain lines. In both, a message that begins with three quotation marks ends
with three. Keys typed while an answer is written are not echoed; the next prompt reads them.
"""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dgemma.engine import Draft, Engine
from dgemma.engine import Text as Promised
from dgemma.engine.request import Program
from dgemma.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

T = TypeVar("T")
QUOTES = '"""'
PROMPT, CONTINUED = "> ", "… "
PLACEHOLDER = "a message, or /help"

# An accepted token gets the first shade with an entropy bound (nats) above its own.
SHADES = ((0.01, "bold bright_white"), (0.1, "white"), (0.5, "cyan"))


class CanvasView:
    """Draws committed text and the canvas in place while a request runs.

    A context manager, so that the terminal is always restored. Committed text is wiped at the end
    and printed by the caller; without a terminal it is printed as it arrives.
    """

    def __init__(self, *, is_live: bool = True) -> None:
        self.committed = Text()
        self.output = WordWrap()
        self.may_draw = is_live
        self.live = Live(
            console=Console(file=sys.stderr),
            transient=True,
            auto_refresh=False,
            vertical_overflow="crop",
        )

    @property
    def is_live(self) -> bool:
        """True if drafts are requested and there is a terminal."""
        return self.may_draw and self.live.console.is_terminal

    def __enter__(self) -> "CanvasView":
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._update(Text())
        self.live.stop()
        self.output.flush()

    def draw(self, draft: Draft) -> None:
        self._update(Text.assemble(self._tail(), paint(draft)))

    def commit(self, text: Promised) -> None:
        if not self.is_live and not text.is_thought:
            self.output.write(text.text)
        self.committed.append(text.text, style="dim italic" if text.is_thought else "")
        self._update(self._tail())

    def _tail(self) -> Text:
        """Return as much committed text as fits above the canvas."""
        lines = self.committed.wrap(self.live.console, self.live.console.width)
        kept = lines[-max(3, self.live.console.height // 2) :] if len(self.committed) else []
        return Text("\n").join([*kept, Text()]) if kept else Text()

    def _update(self, shown: Text) -> None:
        if self.live.is_started:
            self.live.update(shown, refresh=True)


class WordWrap:
    """Prints text on stdout as it arrives; on a terminal it wraps between words."""

    def __init__(self) -> None:
        self.width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        self.column, self.word, self.space = 0, "", ""  # word and space: not yet printed

    def write(self, text: str) -> None:
        for part in re.findall(r"\n|[^\S\n]+|\S+", text) if self.width else [text]:
            if not self.width:
                sys.stdout.write(part)
            elif not part.isspace():
                self.word += part
            elif part == "\n":
                self._print_word()
                sys.stdout.write("\n")
                self.column, self.space = 0, ""
            else:
                self._print_word()
                self.space += part
        sys.stdout.flush()

    def flush(self) -> None:
        """Print the last word."""
        self._print_word()
        sys.stdout.flush()

    def _print_word(self) -> None:
        if not self.word:
            return
        if self.column and self.column + cell_len(self.space + self.word) > self.width:
            sys.stdout.write("\n")
            self.column, self.space = 0, ""
        sys.stdout.write(self.space + self.word)
        self.column += cell_len(self.space + self.word)
        self.word = self.space = ""


def print_wrapped(text: str) -> None:
    """Print a whole text and end its line."""
    output = WordWrap()
    output.write(f"{text}\n")
    output.flush()


def run_program(engine: Engine, program: Program[T], *, show: bool, doing: str) -> T:
    """Run a program; with `show`, draw its drafts.

    Otherwise a status line on the terminal shows the current canvas and the seconds elapsed.
    """
    with CanvasView() if show else ProgressLine(doing) as view:
        for event in engine.follow(program):
            if isinstance(event, Draft):
                view.draw(event)
    result: T = event
    return result


class ProgressLine:
    """A line on stderr that is redrawn while a program runs, and wiped at its end."""

    def __init__(self, doing: str) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr)
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self.bars = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self.doing = doing
        self.task = self.bars.add_task(doing)

    def __enter__(self) -> "ProgressLine":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def draw(self, draft: Draft) -> None:
        at = f"canvas {draft.block + 1}, step {draft.step}"
        self.bars.update(self.task, description=f"{self.doing}: {at}")


def paint(draft: Draft) -> Text:
    """Return the canvas as styled text under a status line."""
    accepted = sum(draft.accepted) / len(draft.accepted)
    heading = f"block {draft.block + 1} · step {draft.step} · {accepted:.0%} accepted\n"
    text = Text(heading, style="dim")
    for token, entropy, is_accepted, pinned in zip(
        draft.tokens, draft.entropy, draft.accepted, draft.pinned, strict=True
    ):
        # A line break in noise would break the canvas into lines.
        shown = printable(token) if is_accepted else printable(token).replace("\n", "·")
        text.append(shown, style=style(entropy, accepted=is_accepted, pinned=pinned))
    return text


def style(entropy: float, *, accepted: bool, pinned: bool) -> str:
    if pinned:
        return "bold underline"
    if not accepted:
        return "dim"
    return next((shade for nats, shade in SHADES if entropy < nats), "blue")


def printable(token: str) -> str:
    """Replace what has no glyph (control tokens, lone bytes, cursor movements) by a dot."""
    return "".join(c if is_shown(c) else "·" for c in token) or "·"


def is_shown(character: str) -> bool:
    return character == "\n" or (character.isprintable() and character != "\ufffd")


# --- input


class MessageReader(Protocol):
    """Returns one message at a time; None at the end of input."""

    def read(self) -> str | None: ...


def is_open(message: str) -> bool:
    """True if a message has unclosed quotation marks."""
    return message.lstrip().startswith(QUOTES) and message.count(QUOTES) == 1


def unquote(message: str) -> str:
    """Remove the quotation marks around a message, and the line breaks next to them."""
    text = message.strip()
    is_quoted = len(text) >= 2 * len(QUOTES) and text.startswith(QUOTES) and text.endswith(QUOTES)
    inner = text[len(QUOTES) : -len(QUOTES)]
    return inner.strip("\n") if is_quoted and QUOTES not in inner else message


class PipeReader:
    """Reads messages from a stdin that is not a terminal."""

    def read(self) -> str | None:
        lines = [sys.stdin.readline()]
        if not lines[0]:
            return None
        while is_open("".join(lines)):
            line = sys.stdin.readline()
            if not line:
                raise UsageError(f"the input ends inside a message that {QUOTES} opened; close it")
            lines.append(line)
        return "".join(lines).rstrip("\n")


class TerminalReader:
    """Reads messages with line editing; draws on stderr, so that stdout has only answers."""

    def __init__(self, commands: Iterable[str] = (), history: Path | None = None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.output import create_output

        self.session: PromptSession[str] = PromptSession(
            message=PROMPT,
            prompt_continuation=CONTINUED,
            placeholder=[("ansibrightblack", PLACEHOLDER)],
            multiline=True,
            key_bindings=_key_bindings(),
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=WordCompleter([f"/{name}" for name in commands], sentence=True),
            complete_while_typing=False,
            output=create_output(stdout=sys.stderr),
        )

    def read(self) -> str | None:
        """Return a message; Ctrl-C discards what is typed, Ctrl-D on an empty line ends."""
        while True:
            try:
                return self.session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:
                continue


def _key_bindings() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: "KeyPressEvent") -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")  # Alt+Enter
    @keys.add("c-j")  # Ctrl+Enter and Shift+Enter of many terminals
    def break_line(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    return keys


@contextmanager
def without_echo() -> Iterator[None]:
    """Do not echo keys typed during an answer; Ctrl-C still interrupts.

    Enter stays Enter, so that the next prompt takes such a line as typed there.
    """
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = termios.tcgetattr(terminal)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
