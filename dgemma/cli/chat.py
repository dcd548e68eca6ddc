"""`dgemma chat`: a conversation with a live canvas; /commands change its settings."""

import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli import media
from dgemma.cli.app import ReplyOptions, app, load_engine, with_options
from dgemma.errors import FAILED, DgemmaError, UsageError
from dgemma.options import option
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.cli.show import CanvasView, MessageReader
    from dgemma.engine import Done, Draft, Engine, Event
    from dgemma.engine.generation import Generation
    from dgemma.text.chat import Message, Prompt
    from dgemma.text.messages import Media

REPLAY_PAUSE = 0.15  # seconds a canvas stays on the screen
NANO_CAN = (
    "It does well: Sudoku, also from a picture (dgemma sudoku --image), holes in a text (dgemma\n"
    "fill), JSON of a schema (dgemma generate --schema), and here small talk, short stories, and\n"
    '"Change cat to dog.", an empty line and a text.'
)
NANO_CANNOT = "It cannot: it knows next to nothing of the world."
NANO_TASKS = "So /clear before another task: what went before would confuse it."
KEYS = 'Several lines: paste them, or Alt+Enter, or """ before and after. /help lists commands.'
HELP = """\
/mode diffusion|ar|hybrid|auto   how answers are written
/temperature X              of draws; /temperature alone takes the model's own
/seed N                     same seed, same answers; /seed alone draws a new one each time
/thinking on|off            let the model think first, or not
/system TEXT                a system message; /system alone shows it, /system "" removes it
/image FILE                 show a picture with the next message; /image alone forgets it
/video FILE                 show a video, a GIF or a folder of frames with the next message
/replay                     show the last answer converging again, slowly
/history                    the conversation so far
/undo                       forget the last question and its answer
/clear                      forget the conversation; the system message stays
/save FILE                  write the conversation as JSON
/load FILE                  continue a saved conversation
/quit, /exit, Ctrl-D        leave; so does end of input
Enter sends. Alt+Enter (or Ctrl-J) breaks the line, and a paste keeps its lines; \"\"\" opens a
message that ends with \"\"\". Ctrl-C stops an answer and keeps the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings(ReplyOptions):
    """Settings of a chat, changed by /commands."""

    drop_oldest: bool = option(False, "Forget the oldest questions when the context is full.")
    image_tokens: int | None = None  # per picture


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The committed text, and the end of its generation (None if interrupted)."""

    text: str
    done: "Done | None"


class Conversation:
    """Messages, settings, and the drafts of the last answer."""

    def __init__(self, engine: "Engine", settings: ChatSettings, system: str = "") -> None:
        from dgemma.text.chat import Message

        if engine.template is None:
            raise UsageError("this checkpoint has no chat template; use dgemma generate --plain")
        self.engine = engine
        self.system: list[Message] = []
        self.messages: list[Message] = []
        self.set_system(system)
        self.settings = settings
        self.drafts: list[Draft] = []
        self.shown: list[Media] = []  # pictures to send with the next message
        self.num_dropped = 0  # oldest questions dropped for the last one
        self.saved: set[Path] = set()  # files that /save may overwrite
        self.change(settings)

    def set_system(self, text: str) -> None:
        """Set or remove the system message."""
        from dgemma.text.chat import Message

        self.system = [Message(role="system", content=text)] if text else []

    def change(self, settings: ChatSettings) -> None:
        """Change settings, after checking them."""
        from dgemma.engine.params import check_params

        check_params(settings.params())
        self.settings = settings

    @property
    def context(self) -> int:
        """Tokens of a whole conversation, answers included."""
        return self.engine.model.config.max_position_embeddings

    def context_left(self) -> int:
        """Tokens left for the next question and its answer."""
        from dgemma.text.chat import Message

        return self.context - len(self._prompt(Message(role="user", content="")).ids)

    def _prompt(self, question: "Message") -> "Prompt":
        history = [*self.system, *self.messages, question]
        return self.engine.prompt(history, thinking=self.settings.thinking)

    def _generation(self, question: "Message", *, drafts: bool) -> "Generation":
        """Return an answer's task within the context; if there is no room, say what to do."""
        from dgemma.errors import PromptTooLong

        params = self.settings.params(drafts=drafts)
        while True:
            prompt = self._prompt(question)
            try:
                return self.engine.generation(prompt, params, fit=True)
            except PromptTooLong:
                if not self.messages or not self.settings.drop_oldest:
                    raise UsageError(self._advice(len(prompt.ids))) from None
            self.num_dropped += 1
            del self.messages[:2]

    def _advice(self, num_prompt: int) -> str:
        canvas = self.engine.model.config.canvas_length
        needs = f"{canvas} for an answer" if self.settings.mode != "ar" else "1 for an answer"
        full = (
            f"the context is full: this conversation with your question has {num_prompt:,} tokens "
            f"and needs {needs}, of {self.context:,}"
        )
        if self.shown:
            return f"{full}; /image alone forgets what is shown with it"
        if not self.messages:
            return f"{full}; shorten the question"
        return (
            f"{full}; /undo forgets the last question, /clear all of them, and dgemma chat "
            "--drop-oldest forgets the oldest by itself"
        )

    def answer(self, words: str, view: "CanvasView") -> ChatAnswer:
        """Ask a question and show the answer; an interrupt keeps the committed text."""
        from dgemma.engine import Done, Text
        from dgemma.text.chat import Message

        content = (*self.shown, words) if self.shown else words
        question, self.num_dropped = Message(role="user", content=content), 0
        task = self._generation(question, drafts=view.is_live)
        self.drafts, committed, done = [], "", None
        with closing(self.engine.follow(task)) as stream:
            try:
                for event in stream:
                    if isinstance(event, Done):
                        done = event
                    elif isinstance(event, Text) and not event.is_thought:
                        committed += event.text
                    self._show(event, view)
            except KeyboardInterrupt:
                done = None
        if committed or done is not None:
            self.messages += [question, Message(role="assistant", content=committed)]
            self.shown.clear()
        return ChatAnswer(text=committed, done=done)

    def show(self, part: "Media") -> None:
        """Add a picture or a video to the next message, if it can be read."""
        from dgemma.images import Picture

        found = part.prepare(self.engine.tower().vision)
        pictures = [found] if isinstance(found, Picture) else found.frames
        if pictures[0].note:
            print(f"dgemma: {pictures[0].note}", file=sys.stderr)
        self.shown.append(part)
        count = sum(picture.num_tokens for picture in pictures)
        print(f"[{part.name}: {count} tokens, with the next message]", file=sys.stderr)

    def _show(self, event: "Event", view: "CanvasView") -> None:
        from dgemma.engine import Draft, Text

        if isinstance(event, Draft):
            self.drafts.append(event)
            view.draw(event)
        elif isinstance(event, Text):
            view.commit(event)


def talk(conversation: Conversation, model: str = "", history: Path | None = None) -> bool:
    """Read messages until the end of input; returns True if all succeeded.

    Answers and /history go to stdout, everything else to stderr.
    """
    from dgemma.cli.show import PipeReader, TerminalReader, without_echo

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return _talk(conversation, PipeReader(), is_script=not sys.stdin.isatty())
    print(greeting(conversation, model), file=sys.stderr)
    with without_echo():
        return _talk(conversation, TerminalReader(COMMANDS, history), is_script=False)


def _talk(conversation: Conversation, reader: "MessageReader", *, is_script: bool) -> bool:
    has_failed = False
    while True:
        try:
            line = reader.read()
            if line is None or (line.strip() and not handle(conversation, line.strip())):
                return not has_failed
        except DgemmaError as error:
            print(f"dgemma: {error}", file=sys.stderr)
            has_failed |= is_script  # reported by the exit code of a script
        except KeyboardInterrupt:  # before an answer has begun, or while it is printed
            print("[stopped]", file=sys.stderr)


def greeting(conversation: Conversation, model: str) -> str:
    """Return the lines that open a chat: the model, its abilities, its context, the keys."""
    left, context = conversation.context_left(), conversation.context
    name = "nano, the small built-in model" if model == "nano" else model
    about = [NANO_CAN, NANO_CANNOT, NANO_TASKS] if model == "nano" else []
    return "\n".join([f"{name}: {left:,} of {context:,} tokens of context left.", *about, KEYS])


def handle(conversation: Conversation, line: str) -> bool:
    """Run a /command or answer a message; False ends the chat."""
    if not line.startswith("/"):
        ask(conversation, line)
        return True
    name, *rest = line[1:].split(maxsplit=1)
    if name in ("quit", "exit"):
        return False
    if name not in COMMANDS:
        raise UsageError(
            f'/{name} is not a command; /help lists them, and """ around a message sends it as text'
        )
    COMMANDS[name](conversation, rest[0].strip() if rest else "")
    return True


def ask(conversation: Conversation, message: str) -> None:
    """Answer a message: the text on stdout, a line with its cost on stderr."""
    from dgemma.cli.show import CanvasView, print_wrapped, unquote

    with CanvasView() as view:
        answer = conversation.answer(unquote(message), view)
    print_wrapped(answer.text if view.is_live else "")
    if conversation.num_dropped:
        print(f"[forgot the oldest {conversation.num_dropped} to make room]", file=sys.stderr)
    print(summary(answer.done, conversation), file=sys.stderr)


def summary(done: "Done | None", conversation: Conversation) -> str:
    left, context = conversation.context_left(), conversation.context
    room = f"context: {max(0, left):,} of {context:,} left"
    if done is None:
        return f"[stopped; {room}]"
    retried = f", {done.retries} retries" if done.retries else ""
    return (
        f"[{done.mode}: {done.tokens} tokens, {done.steps} steps, {done.seconds:.1f} s, "
        f"{done.finish}{retried}, seed {done.seed}; {room}]"
    )


def _help(conversation: Conversation, argument: str) -> None:
    print(HELP, file=sys.stderr)


def _mode(conversation: Conversation, argument: str) -> None:
    if argument:
        conversation.change(replace(conversation.settings, mode=argument))
    print(f"[mode {conversation.settings.mode}]", file=sys.stderr)


def _seed(conversation: Conversation, argument: str) -> None:
    if argument and not argument.isdecimal():
        raise UsageError(f"seed {argument!r} is not a whole number")
    seed = int(argument) if argument else None
    conversation.change(replace(conversation.settings, seed=seed))
    print(f"[seed {'drawn anew each time' if seed is None else seed}]", file=sys.stderr)


def _thinking(conversation: Conversation, argument: str) -> None:
    if argument not in ("on", "off"):
        raise UsageError(f"thinking can be on or off, not {argument!r}")
    conversation.settings = replace(conversation.settings, thinking=argument == "on")
    print(f"[thinking {argument}]", file=sys.stderr)


def _temperature(conversation: Conversation, argument: str) -> None:
    try:
        temperature = float(argument) if argument else None
    except ValueError:
        raise UsageError(f"temperature {argument!r} is not a number") from None
    conversation.change(replace(conversation.settings, temperature=temperature))
    shown = "the model's own" if temperature is None else temperature
    print(f"[temperature {shown}]", file=sys.stderr)


def _system(conversation: Conversation, argument: str) -> None:
    from dgemma.cli.show import unquote

    if argument:
        # `""` removes the message; other quotation marks are part of it.
        conversation.set_system("" if argument == '""' else unquote(argument))
    text = conversation.system[0].content if conversation.system else "none"
    print(f"[system message: {text}]", file=sys.stderr)


def _replay(conversation: Conversation, argument: str) -> None:
    from dgemma.cli.show import CanvasView

    if not conversation.drafts:
        raise UsageError("there is no canvas to replay; ask something in diffusion mode first")
    steps, blocks = 0, 1
    with CanvasView() as view, suppress(KeyboardInterrupt):
        for draft in conversation.drafts:
            view.draw(draft)
            steps, blocks = steps + 1, draft.block + 1
            time.sleep(REPLAY_PAUSE)
    print(f"[replayed {steps} steps of {blocks} blocks]", file=sys.stderr)


def _history(conversation: Conversation, argument: str) -> None:
    for message in [*conversation.system, *conversation.messages]:
        print(f"{message.role}: {media.spelled(message)}")


def _undo(conversation: Conversation, argument: str) -> None:
    if not conversation.messages:
        raise UsageError("there is nothing to undo")
    del conversation.messages[-2:]
    count, left = len(conversation.messages) // 2, conversation.context_left()
    print(f"[{count} questions kept; {left:,} tokens of context left]", file=sys.stderr)


def _clear(conversation: Conversation, argument: str) -> None:
    conversation.messages.clear()
    print(f"[forgotten; {conversation.context_left():,} tokens of context left]", file=sys.stderr)


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "help": _help,
    "mode": _mode,
    "temperature": _temperature,
    "seed": _seed,
    "thinking": _thinking,
    "system": _system,
    "image": media.image,
    "video": media.video,
    "replay": _replay,
    "history": _history,
    "undo": _undo,
    "clear": _clear,
    "save": media.save,
    "load": media.load,
}


@app.command()
@with_options
def chat(
    model: ModelOptions,
    settings: ChatSettings,
    shown: media.MediaOptions,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    history: Annotated[
        Path | None, typer.Option(help="Keep what you type in this file; else it is not kept.")
    ] = None,
) -> None:
    """Chat with the model; /help lists commands.

    Enter sends; Alt+Enter, a paste or \"\"\" make several lines; Ctrl-C stops an answer.
    """
    from dgemma.engine.params import check_params

    check_params(settings.params())  # before a long load
    parts, settings = shown.read(), replace(settings, image_tokens=shown.image_tokens)
    conversation = Conversation(load_engine(model, settings.preset), settings, system)
    for part in parts:
        conversation.show(part)
    if not talk(conversation, model.model, history):
        raise typer.Exit(FAILED)
