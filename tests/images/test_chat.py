"""Pictures and videos in `dgemma chat`."""

import json
from pathlib import Path
from typing import Any

import pytest

from dgemma.cli.chat import ChatSettings, Conversation, handle
from dgemma.cli.show import CanvasView
from dgemma.engine import Engine
from dgemma.errors import UsageError
from tests.images.tiny_tower import encoded, noise_image, photo, seeing_engine


@pytest.fixture
def chat() -> Conversation:
    settings = ChatSettings(seed=1, max_tokens=8, image_tokens=70)
    return Conversation(seeing_engine(), settings)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"my picture {seed}.png" for seed in (1, 2)]
    for seed, path in enumerate(paths):
        source = noise_image(seed, (300, 240)).source
        assert isinstance(source, bytes)
        path.write_bytes(source)
    return paths


def answer(chat: Conversation, words: str) -> Any:
    with CanvasView(is_live=False) as view:
        return chat.answer(words, view)


def test_a_picture_is_shown_with_the_next_message_and_stays_in_the_conversation(
    chat: Conversation, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    handle(chat, f"/image {files[0]}")
    told = capsys.readouterr().err
    assert "[my picture 1.png: 63 tokens, with the next message]" in told
    assert "my picture 1.png was shrunk from 300x240" in told
    first = answer(chat, "What is it?")
    assert first.done.image_tokens == 63 and not chat.shown
    second = answer(chat, "And now?")
    assert second.done.image_tokens == 63 and second.done.reused_tokens > 63
    handle(chat, "/history")
    assert "user: [my picture 1.png] What is it?\n" in capsys.readouterr().out
    handle(chat, "/undo")
    handle(chat, "/undo")
    assert answer(chat, "What is it?").done.image_tokens == 0


def test_two_pictures_have_two_answers(chat: Conversation, files: list[Path]) -> None:
    answers = []
    for path in files:
        handle(chat, f'/image "{path}"')  # as a terminal writes a file that is dropped
        answers.append(answer(chat, "What is it?").done)
        handle(chat, "/clear")
    handle(chat, f"/image {str(files[0]).replace(' ', chr(92) + ' ')}")
    again = answer(chat, "What is it?").done
    assert answers[0].ids != answers[1].ids
    assert again.ids == answers[0].ids


def test_image_alone_forgets_what_waits(chat: Conversation, files: list[Path]) -> None:
    handle(chat, f"/image {files[0]}")
    handle(chat, f"/image {files[1]}")
    assert len(chat.shown) == 2
    handle(chat, "/image")
    assert answer(chat, "What is it?").done.image_tokens == 0


def test_what_does_not_fit_can_be_forgotten(chat: Conversation, tmp_path: Path) -> None:
    for index in range(40):
        photo(40, 20).save(tmp_path / f"{index}.png")
    handle(chat, f"/video {tmp_path}")
    handle(chat, f"/video {tmp_path}")
    with pytest.raises(UsageError, match="/image alone forgets what is shown with it"):
        answer(chat, "What happens?")
    handle(chat, "/image")
    assert answer(chat, "What happens?").done.image_tokens == 0


def test_an_animation_and_a_folder_are_videos(chat: Conversation, tmp_path: Path) -> None:
    frames = [photo(40, 20, seed=seed) for seed in range(3)]
    path = tmp_path / "a.gif"
    path.write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    folder = tmp_path / "frames"
    folder.mkdir()
    for index, frame in enumerate(frames):
        frame.save(folder / f"{index}.png")
    for shown in (path, folder):
        handle(chat, f"/video {shown}")
        assert answer(chat, "What happens?").done.image_tokens == 3 * 55
        handle(chat, "/clear")


def test_a_conversation_with_a_picture_is_saved_and_loaded(
    chat: Conversation, files: list[Path], tmp_path: Path
) -> None:
    handle(chat, f"/image {files[0]}")
    answer(chat, "What is it?")
    saved = tmp_path / "chat.json"
    handle(chat, f"/save {saved}")
    (image, text) = json.loads(saved.read_text())["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/") and text["text"] == "What is it?"
    other = Conversation(seeing_engine(), chat.settings)
    handle(other, f"/load {saved}")
    assert answer(other, "And now?").done.ids == answer(chat, "And now?").done.ids
    folder = tmp_path / "frames"
    folder.mkdir()
    files[0].rename(folder / "1.png")
    handle(chat, f"/video {folder}")
    answer(chat, "What happens?")
    with pytest.raises(UsageError, match="frames is a video, which is not saved"):
        handle(chat, f"/save {tmp_path / 'video.json'}")


def test_what_cannot_be_shown_is_refused_at_once(chat: Conversation, tmp_path: Path) -> None:
    (tmp_path / "note.png").write_text("no picture")
    for wrong, sentence in [
        (f"/image {tmp_path / 'none.png'}", "cannot be read: No such file"),
        (f"/image {tmp_path / 'note.png'}", "note.png is not a JPEG, PNG, WEBP or GIF file"),
        ("/image https://example.com/a.png", "no address is opened; send the picture as a file"),
        ("/video https://example.com/a.mp4", "no address is opened; send the video as a file"),
        ("/video", "no video is given"),
        (f"/video {tmp_path}/none", "cannot be read: No such file"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            handle(chat, wrong)
    assert not chat.shown


def test_a_model_without_a_tower_says_so(files: list[Path]) -> None:
    engine = Engine.load("nano", device="cpu")
    engine.images = None
    chat = Conversation(engine, ChatSettings())
    with pytest.raises(UsageError, match="this checkpoint has no image tower"):
        handle(chat, f"/image {files[0]}")
