"""`dgemma chat`: the conversation, its commands, and a real terminal."""

import io
import shutil
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from dgemma.cli.chat import ChatSettings, Conversation, greeting, handle
from dgemma.cli.show import CanvasView, PipeReader, TerminalReader, WordWrap, unquote
from dgemma.config import GenerationConfig
from dgemma.engine import Engine, Event, Text
from dgemma.errors import UsageError
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from examples.chat_screen import Screen, chat_command
from tests.taught import ANSWERS, LONG, SHORT, taught_config
from tests.text.small import TEMPLATE, make_backend


@pytest.fixture
def conversation(checkpoint: Path) -> Conversation:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    return Conversation(engine, ChatSettings(seed=1))


def test_answers_join_the_history(conversation: Conversation) -> None:
    with CanvasView() as view:
        answer = conversation.answer(SHORT, view)
    assert answer.text == ANSWERS[SHORT]
    assert answer.done is not None
    assert [m.role for m in conversation.messages] == ["user", "assistant"]
    assert conversation.messages[1].content == ANSWERS[SHORT]


def test_an_interrupt_keeps_the_conversation_and_what_was_promised(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CanvasView() as view:
        conversation.answer(SHORT, view)
    real = conversation.engine.follow

    def interrupted(*given: object) -> Generator[Event, None, None]:
        for event in real(*given):  # type: ignore[arg-type]
            yield event
            if isinstance(event, Text):
                raise KeyboardInterrupt

    monkeypatch.setattr(conversation.engine, "follow", interrupted)
    with CanvasView() as view:
        answer = conversation.answer("and then?", view)
    assert answer.done is None
    assert len(conversation.messages) == 4
    assert conversation.messages[-1].content == answer.text != ""
    assert not conversation.engine.scheduler.requests, "the request was cancelled"


def test_commands_change_settings_and_wrong_ones_are_refused(conversation: Conversation) -> None:
    handle(conversation, "/mode ar")
    handle(conversation, "/seed 7")
    handle(conversation, "/thinking on")
    assert conversation.settings == ChatSettings(mode="ar", seed=7, thinking=True)
    handle(conversation, "/seed")
    assert conversation.settings.seed is None
    handle(conversation, "/temperature 0.5")
    assert conversation.settings.temperature == 0.5
    for wrong, reason in [
        ("/mode fast", "diffusion, ar, hybrid"),
        ("/seed x", "whole number"),
        ("/thinking maybe", "on or off"),
        ("/replay", "no canvas"),
        ("/undo", "nothing to undo"),
        ("/temperature hot", "not a number"),
        ("/save", "no file is given"),
        ("/load /no/such/file", "cannot be read"),
        ("/dance", "/help lists"),
    ]:
        with pytest.raises(UsageError, match=reason):
            handle(conversation, wrong)
    assert handle(conversation, "/quit") is False


def test_undo_and_clear_forget(conversation: Conversation) -> None:
    for _ in range(2):
        handle(conversation, SHORT)
    handle(conversation, "/undo")
    assert len(conversation.messages) == 2
    handle(conversation, "/clear")
    assert conversation.messages == []


def test_without_a_terminal_only_answers_are_printed(checkpoint: Path) -> None:
    done = subprocess.run(
        chat_command(checkpoint),
        input=f"{SHORT}\n\n/clear\n{LONG}\n/nope\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, "a refused line is told to whoever wrote the script"
    assert done.stdout == f"{ANSWERS[SHORT]}\n{ANSWERS[LONG]}\n"
    assert "/nope is not a command" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_quoted_message_has_several_lines_and_may_begin_with_a_slash(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('"""/usr\n\n  is a directory\n"""\nnext\n"""open'))
    reader = PipeReader()
    quoted = reader.read()
    assert quoted is not None
    assert unquote(quoted) == "/usr\n\n  is a directory"
    assert reader.read() == "next"
    with pytest.raises(UsageError, match="ends inside a message"):
        reader.read()
    assert handle(conversation, quoted), "what it begins with is no command"
    assert conversation.messages[0].content == "/usr\n\n  is a directory"
    assert unquote('say """this""" twice') == 'say """this""" twice'


ENDLESS = ("--mode", "ar", "--temperature", "1")  # greedy, it writes line breaks alone
ALT_ENTER, PASTE, PASTE_END = "\x1b\r", "\x1b[200~", "\x1b[201~"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("one\r", "one"),
        (f"one{ALT_ENTER}two\r", "one\ntwo"),
        (f"{PASTE}one\n  two\n{PASTE_END}\r", "one\n  two\n"),
        ('"""one\rtwo"""\r', '"""one\rtwo"""'.replace("\r", "\n")),
        ("typo\x15right\r", "right"),  # Ctrl-U
        ("first\x03second\r", "second"),  # Ctrl-C
        ("\x04", None),  # Ctrl-D
    ],
)
def test_a_terminal_edits_lines_and_takes_several(keys: str, message: str | None) -> None:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        reader = TerminalReader(["help"])
        pipe.send_text(keys)
        assert reader.read() == message


def test_a_sent_message_can_be_called_back(tmp_path: Path) -> None:
    file = tmp_path / "history"
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text("once\r")
        assert TerminalReader(history=file).read() == "once"
        pipe.send_text("\x1b[A\r")  # up
        assert TerminalReader(history=file).read() == "once", "by another chat, from the file"


def test_a_full_context_is_refused_with_true_numbers_and_advice(
    conversation: Conversation,
) -> None:
    context = conversation.context
    for _ in range(2):
        handle(conversation, SHORT)
    count, words = len(conversation.messages), "x" * conversation.context_left()
    with pytest.raises(UsageError, match=rf"16 for an answer, of {context}; /undo .* /clear"):
        handle(conversation, words)
    assert len(conversation.messages) == count, "a refused question is not kept"
    conversation.change(replace(conversation.settings, drop_oldest=True))
    handle(conversation, words)
    assert conversation.num_dropped > 0
    assert conversation.messages[-2].content == words
    conversation.messages.clear()
    with pytest.raises(UsageError, match=rf"has {context + 16} tokens .* shorten the question"):
        handle(conversation, "x" * context)


def test_a_conversation_is_saved_and_continued(conversation: Conversation, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    handle(conversation, "/system Be brief.")
    handle(conversation, SHORT)
    handle(conversation, f"/save {file}")
    handle(conversation, f"/save {file}")  # its own file
    before = list(conversation.messages)
    handle(conversation, "/clear")
    handle(conversation, '/system ""')
    assert conversation.system == []
    handle(conversation, '/system Say "hi"')
    assert conversation.system[0].content == 'Say "hi"'
    handle(conversation, f"/load {file}")
    assert conversation.messages == before
    assert conversation.system[0].content == "Be brief."
    other = Conversation(conversation.engine, ChatSettings())
    with pytest.raises(UsageError, match="exists"):
        handle(other, f"/save {file}")
    file.write_text('{"messages": [{"role": "user", "content": "?"}]}', encoding="utf-8")
    with pytest.raises(UsageError, match="other than questions with answers"):
        handle(other, f"/load {file}")


def test_the_greeting_tells_the_model_its_limits_and_the_context_left(
    conversation: Conversation,
) -> None:
    words = greeting(conversation, "nano")
    assert f"{conversation.context_left()} of {conversation.context} tokens" in words
    assert "Sudoku" in words
    assert "It cannot" in words
    assert "Sudoku" not in greeting(conversation, "some/model")


def test_lines_are_broken_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "10")
    output = WordWrap()
    for piece in ("one tw", "o three\n", "  four fi", "ve 漢字漢字 supercalifragilistic", " x"):
        output.write(piece)
    output.flush()
    shown = "one two\nthree\n  four\nfive\n漢字漢字\nsupercalifragilistic\nx"
    assert capsys.readouterr().out == shown


def test_a_checkpoint_without_a_template_cannot_chat(checkpoint: Path) -> None:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    engine.template = None
    with pytest.raises(UsageError, match="no chat template"):
        Conversation(engine, ChatSettings())


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was taught nothing and never stops by itself."""
    directory = tmp_path_factory.mktemp("endless")
    make_backend().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    config = taught_config()
    model = random_model(replace(config, max_position_embeddings=100_000), seed=5)
    generation = GenerationConfig(stop_ids=(3,))
    save_checkpoint(Checkpoint(model=model, generation=generation), directory)
    return directory


NEEDS_TMUX = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


@contextmanager
def answering(model: Path, max_tokens: str) -> Iterator[Screen]:
    """A chat in the midst of a long answer."""
    with Screen(chat_command(model, *ENDLESS, "--max-tokens", max_tokens)) as screen:
        screen.wait_for("/help")
        screen.say("hello")
        screen.wait_for_answer("> hello\n")
        yield screen


@NEEDS_TMUX
def test_a_real_terminal_shows_a_conversation_and_a_replay(checkpoint: Path) -> None:
    with Screen(chat_command(checkpoint)) as screen:
        screen.wait_for("/help")
        screen.say(SHORT)
        shown = screen.wait_for("[diffusion:")
        assert ANSWERS[SHORT] in shown
        assert "accepted" not in shown, "the canvas is wiped when the answer stands"
        screen.say("/replay")
        screen.wait_for("[replayed")
        screen.press("C-c")
        screen.wait_for("\n>", count=4)  # else the line would be discarded with it
        screen.say("/history")
        assert f"user: {SHORT}" in screen.wait_for("assistant: ")


@NEEDS_TMUX
def test_typing_during_an_answer_leaves_no_trash_and_is_the_next_message(endless: Path) -> None:
    with answering(endless, "300") as screen:
        screen.say("/mode ar")
        shown = screen.wait_for("[mode ar]")
        assert shown.count("/mode ar") == 1, "at its prompt, and nowhere in the answer"
        assert shown.index("[ar:") < shown.index("> /mode ar")


@NEEDS_TMUX
def test_a_real_interrupt_stops_an_answer_and_not_the_chat(endless: Path) -> None:
    with answering(endless, "50000") as screen:
        screen.press("C-c")
        screen.wait_for("[stopped")
        screen.say("/mode")
        screen.wait_for("[mode ar]")
