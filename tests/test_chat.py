"""`dgemma chat`: the conversation, its commands, and a real terminal."""

import shutil
import subprocess
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from dgemma.cli.conversation import Conversation, Settings, handle
from dgemma.cli.show import CanvasView
from dgemma.config import GenerationConfig
from dgemma.engine import Engine, Event, Text
from dgemma.errors import UsageError
from dgemma.weights.load import Checkpoint
from dgemma.weights.random import random_model
from dgemma.weights.save import save_checkpoint
from examples.chat_screen import Screen, chat_command
from tests.taught import ANSWERS, LONG, SHORT, taught_config
from tests.text.small import TEMPLATE, make_backend


@pytest.fixture
def conversation(checkpoint: Path) -> Conversation:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    return Conversation(engine, Settings(seed=1))


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
    real = conversation.engine.stream

    def interrupted(*given: object) -> Generator[Event, None, None]:
        for event in real(*given):  # type: ignore[arg-type]
            yield event
            if isinstance(event, Text):
                raise KeyboardInterrupt

    monkeypatch.setattr(conversation.engine, "stream", interrupted)
    with CanvasView() as view:
        answer = conversation.answer("and then?", view)
    assert answer.done is None
    assert len(conversation.messages) == 4
    assert conversation.messages[-1].content == answer.text != ""
    assert not conversation.engine.jobs, "the request was cancelled"


def test_commands_change_settings_and_wrong_ones_are_refused(conversation: Conversation) -> None:
    handle(conversation, "/mode ar")
    handle(conversation, "/seed 7")
    handle(conversation, "/thinking on")
    assert conversation.settings == Settings(mode="ar", seed=7, thinking=True)
    handle(conversation, "/seed")
    assert conversation.settings.seed is None
    for wrong, reason in [
        ("/mode fast", "diffusion, ar, hybrid"),
        ("/seed x", "whole number"),
        ("/thinking maybe", "on or off"),
        ("/replay", "no canvas"),
        ("/undo", "nothing to undo"),
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


def test_a_checkpoint_without_a_template_cannot_chat(checkpoint: Path) -> None:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    engine.template = None
    with pytest.raises(UsageError, match="no chat template"):
        Conversation(engine, Settings())


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


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_real_terminal_shows_a_conversation_and_a_replay(checkpoint: Path) -> None:
    with Screen(chat_command(checkpoint)) as screen:
        screen.wait_for("/help")
        screen.say(SHORT)
        shown = screen.wait_for("[diffusion:")
        assert ANSWERS[SHORT] in shown
        assert "decided" not in shown, "the canvas is wiped when the answer stands"
        screen.say("/replay")
        screen.wait_for("[replayed")
        screen.press("C-c")
        screen.say("/history")
        assert f"user: {SHORT}" in screen.wait_for("assistant: ")


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_real_interrupt_stops_an_answer_and_not_the_chat(endless: Path) -> None:
    with Screen(chat_command(endless, "--mode", "ar", "--max-tokens", "50000")) as screen:
        screen.wait_for("/help")
        screen.say("hello")
        screen.wait_for("hello")
        time.sleep(1.0)
        screen.press("C-c")
        screen.wait_for("[stopped]")
        screen.say("/mode")
        screen.wait_for("[mode ar]")
