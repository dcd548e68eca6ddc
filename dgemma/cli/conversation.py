"""The state of a chat and what its lines do: words go to the model, /commands to the program."""

import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import cast

from dgemma.cli.show import CanvasView
from dgemma.engine import Done, Draft, Engine, Event, Mode, Options, Text
from dgemma.engine.options import check_options
from dgemma.errors import DgemmaError, UsageError
from dgemma.text.chat import Message

REPLAY_PAUSE = 0.15  # seconds a canvas stays on the screen
HELP = """\
/mode diffusion|ar|hybrid   how answers are written
/seed N                     same seed, same answers; /seed alone draws a new one each time
/thinking on|off            whether the model thinks first
/replay                     show the last answer settling again, slowly
/history                    the conversation so far
/undo                       forget the last question and its answer
/clear                      forget the conversation
/quit, /exit                leave; so does end of input
Ctrl-C stops an answer and keeps the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    mode: str = "diffusion"
    seed: int | None = None
    thinking: bool = False
    max_tokens: int | None = None

    def options(self, *, drafts: bool = False) -> Options:
        """What a request with these settings asks for; AR mode has no drafts."""
        return Options(
            mode=cast(Mode, self.mode),
            seed=self.seed,
            max_tokens=self.max_tokens,
            drafts=drafts and self.mode != "ar",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was promised, and how it ended; an interrupted answer has no end."""

    text: str
    done: Done | None


class Conversation:
    """Messages, settings, and the drafts of the last answer."""

    def __init__(self, engine: Engine, settings: Settings, system: str = "") -> None:
        if engine.template is None:
            raise UsageError("this checkpoint has no chat template; use dgemma generate --plain")
        self.engine = engine
        self.system = [Message(role="system", content=system)] if system else []
        self.messages: list[Message] = []
        self.settings = settings
        self.drafts: list[Draft] = []
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """Take other settings, if a request could have them."""
        check_options(settings.options())
        self.settings = settings

    def answer(self, words: str, view: CanvasView) -> Answer:
        """Put a question and show the answer; an interrupt keeps what was promised so far."""
        question = Message(role="user", content=words)
        history = [*self.system, *self.messages, question]
        options = self.settings.options(drafts=view.is_live)
        prompt = self.engine.prompt(history, thinking=self.settings.thinking)
        self.drafts, promised, done = [], "", None
        with closing(self.engine.stream(prompt, options)) as stream:
            try:
                for event in stream:
                    if isinstance(event, Done):
                        done = event
                    elif isinstance(event, Text) and not event.is_thought:
                        promised += event.text
                    self._show(event, view)
            except KeyboardInterrupt:
                done = None
        if promised or done is not None:
            self.messages += [question, Message(role="assistant", content=promised)]
        return Answer(text=promised, done=done)

    def _show(self, event: Event, view: CanvasView) -> None:
        if isinstance(event, Draft):
            self.drafts.append(event)
            view.draw(event)
        elif isinstance(event, Text):
            view.promise(event)


def talk(conversation: Conversation) -> bool:
    """Read lines until there are no more; tells whether all went well.

    Answers and /history go to stdout, all else to stderr.
    """
    is_terminal, is_well = sys.stdin.isatty(), True
    if is_terminal:
        import readline  # noqa: F401 - gives the prompt its line editing and history

        print("Say something; /help lists commands.", file=sys.stderr)
    while (line := read_line("> " if is_terminal else "")) is not None:
        if not line.strip():
            continue
        try:
            if not handle(conversation, line.strip()):
                break
        except DgemmaError as error:
            print(f"dgemma: {error}", file=sys.stderr)
            is_well = is_terminal  # a person has seen it and goes on; a script must be told
        except KeyboardInterrupt:  # before an answer has begun, or while it is printed
            print("[stopped]", file=sys.stderr)
    return is_well


def read_line(prompt: str) -> str | None:
    """A line of input; None at its end. Ctrl-C throws away the line being typed."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)


def handle(conversation: Conversation, line: str) -> bool:
    """Do what a line says; False ends the chat."""
    if not line.startswith("/"):
        with CanvasView() as view:
            answer = conversation.answer(line, view)
        print(answer.text if view.is_live else "")
        print(summary(answer.done), file=sys.stderr)
        return True
    name, _, argument = line[1:].partition(" ")
    if name in ("quit", "exit"):
        return False
    if name not in COMMANDS:
        raise UsageError(f"/{name} is not a command; /help lists them")
    COMMANDS[name](conversation, argument.strip())
    return True


def summary(done: Done | None) -> str:
    if done is None:
        return "[stopped]"
    rate = done.tokens / done.seconds
    retried = f", {done.retries} retries" if done.retries else ""
    return (
        f"[{done.mode}: {done.tokens} tokens, {done.steps} steps, {done.seconds:.1f} s, "
        f"{rate:.0f} tokens/s, {done.finish}{retried}, seed {done.seed}]"
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


def _replay(conversation: Conversation, argument: str) -> None:
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
        print(f"{message.role}: {message.content}")


def _undo(conversation: Conversation, argument: str) -> None:
    if not conversation.messages:
        raise UsageError("there is nothing to undo")
    del conversation.messages[-2:]
    print(f"[{len(conversation.messages) // 2} questions left]", file=sys.stderr)


def _clear(conversation: Conversation, argument: str) -> None:
    conversation.messages.clear()
    print("[forgotten]", file=sys.stderr)


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "help": _help,
    "mode": _mode,
    "seed": _seed,
    "thinking": _thinking,
    "replay": _replay,
    "history": _history,
    "undo": _undo,
    "clear": _clear,
}
