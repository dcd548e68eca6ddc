"""Videos against transformers' video processor, and the forms in which they are given."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as Pillow
from torch import Tensor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from dgemma import video as videos
from dgemma.engine import SamplingParams
from dgemma.errors import CheckpointError, UsageError
from dgemma.images import Image
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.messages import ToolCall, read_content
from dgemma.text.tokenizer import Tokenizer
from dgemma.video import Video, shown_indices
from tests.images.test_pixels import RELEASED
from tests.images.tiny_tower import LARGE, encoded, noise_image, photo, png_of, seeing_engine, seen
from tests.weights.sample import SHARED

SIZES = ((64, 48), (320, 180), (180, 320), (900, 30), (528, 288), (33, 17))
BOI, VIDEO, EOI = 17, 23, 21
PARAMS = SamplingParams(seed=1, max_tokens=8)


def resize(video: Tensor, size: list[int], interpolation: Any, antialias: bool) -> Tensor:
    """Do what torchvision's `resize` does with bytes on a CPU."""
    assert video.dtype == torch.uint8 and antialias
    return torch.nn.functional.interpolate(video, size, mode="bicubic", antialias=True)


@pytest.fixture(scope="module")
def processor() -> Any:
    """transformers' own class; the one function of torchvision that it calls is written above.

    torchvision itself cannot be imported beside a PyTorch built for CPUs.
    """
    functional = SimpleNamespace(resize=resize, InterpolationMode=object)
    name = "transformers.models.gemma4.video_processing_gemma4"
    path = Path(transformers.__file__).parent / "models/gemma4/video_processing_gemma4.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module: Any = ModuleType(name)
    module.__package__, module.__file__, module.tvF = name.rpartition(".")[0], str(path), functional
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    made = object.__new__(module.Gemma4VideoProcessor)
    made.normalize = lambda images, mean, std, inplace: images.sub_(mean[0]).div_(std[0])
    return made


def theirs(processor: Any, frames: Sequence[Pillow.Image]) -> Any:
    """Return what the reference makes of frames that are all shown."""
    video = torch.stack([torch.from_numpy(np.array(f)).permute(2, 0, 1) for f in frames])
    return processor._preprocess(
        [video],
        do_resize=True,
        resample=None,
        do_rescale=True,
        rescale_factor=0.00392156862745098,
        do_normalize=True,
        image_mean=(0.0, 0.0, 0.0),
        image_std=(1.0, 1.0, 1.0),
        return_tensors="pt",
        patch_size=16,
        max_soft_tokens=70,
        pooling_kernel_size=3,
    )


def frames_of(size: tuple[int, int], count: int) -> list[Pillow.Image]:
    return [photo(*size, seed=seed) for seed in range(count)]


def video_of(frames: Sequence[Pillow.Image], **options: Any) -> Video:
    return Video(tuple(Image(frame) for frame in frames), **options)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_pixels_equal_the_reference_s_bit_for_bit(processor: Any, size: tuple[int, int]) -> None:
    frames = frames_of(size, 3)
    expected = theirs(processor, frames)
    clip = video_of(frames).prepare(RELEASED)
    assert expected["num_frames_per_video"].tolist() == [3]
    for index, picture in enumerate(clip.frames):
        count = picture.rows * picture.columns
        assert picture.num_tokens == expected["num_soft_tokens_per_video"][0] <= 70
        assert torch.equal(
            torch.from_numpy(picture.patches()), expected["pixel_values_videos"][index][:count]
        )
        last = expected["video_position_ids"][index][count - 1].tolist()
        assert last == [picture.columns - 1, picture.rows - 1]


@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 63, 64, 100, 1798, 36_000])
def test_the_frames_that_are_shown_are_the_reference_s(count: int) -> None:
    metadata = VideoMetadata(total_num_frames=count, fps=29.97)
    if count < 32:  # where the reference raises, all are shown
        assert list(shown_indices(count, 32)) == list(range(count))
    else:
        assert list(shown_indices(count, 32)) == list(default_sample_indices_fn(metadata, 32))


def their_text(fps: float | None, indices: Sequence[int], num_tokens: int) -> str:
    metadata = VideoMetadata(total_num_frames=100, fps=fps, frames_indices=list(indices))
    tokens = SimpleNamespace(boi_token="<|image>", video_token="<|video|>", eoi_token="<image|>")
    inputs = {"num_soft_tokens_per_video": [num_tokens], "video_metadata": [metadata]}
    text: str = Gemma4Processor.replace_video_token(tokens, inputs, 0)
    return text


def body_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode text whose control tokens are meant."""
    mark = "\ud800"
    for name in ("<|image>", "<|video|>", "<image|>", "<|turn>", "<turn|>"):
        text = text.replace(name, mark + name)
    return list(tokenizer.encode_control(text, mark=mark))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the released template is not beside this checkout")
@pytest.mark.parametrize(
    ("fps", "count"), [(None, 3), (0.5, 32), (29.97, 100), (1.0, 700)], ids=str
)
def test_the_prompt_is_the_reference_s(fps: float | None, count: int) -> None:
    """The released template, and the text that the reference's processor puts in it."""
    engine = seeing_engine()
    tokenizer = Tokenizer.load(SHARED)
    engine.tokenizer, engine.template = tokenizer, ChatTemplate.load(SHARED, tokenizer)
    frame = photo(48, 24)
    video = video_of([frame] * count, fps=fps)
    num_tokens = video.prepare(LARGE).frames[0].num_tokens
    prompt = engine.prompt([seen("What happens?", video, "Be brief.")])
    shown = their_text(fps, shown_indices(count, 32), num_tokens)
    rest = f"What happens?{shown}Be brief.<turn|>\n<|turn>model\n"
    expected = body_of(f"<|turn>user\n{rest}", tokenizer)
    assert list(prompt.ids[-len(expected) :]) == expected
    assert prompt.num_image_tokens == num_tokens * min(count, 32)
    for image in prompt.images:
        assert prompt.ids[image.begin - 1] == 255_999 and prompt.ids[image.end] == 258_882
        assert set(prompt.ids[image.begin : image.end]) == {258_884}


def test_videos_and_pictures_stand_where_the_message_has_them() -> None:
    engine = seeing_engine()
    picture, video = noise_image(1), video_of(frames_of((40, 20), 2), fps=0.01)
    prompt = engine.prompt([seen("Is", picture, "in", video, "or before?")])
    assert len(prompt.images) == 3
    text = engine.tokenizer.decode([t for t in prompt.ids if t not in (BOI, EOI, VIDEO, 19)])
    assert "Isin00:00  01:40 or before?" in text
    call = ToolCall(name="camera", id="1")
    answer = Message(role="tool", tool_call_id="1", content=("Seen:", video))
    asked = [seen("Look."), Message(role="assistant", tool_calls=(call,)), answer]
    assert len(engine.prompt(asked).images) == 2


def test_answers_depend_on_the_frames_and_their_order() -> None:
    engine, plain = seeing_engine(), seeing_engine(prefix_bytes=0)
    frames = frames_of((40, 20), 3)
    answers = []
    for shown in (frames, frames[::-1], frames):
        prompt = engine.prompt([seen(video_of(shown, fps=1), "What happens?")])
        done = engine.generate(prompt, PARAMS)
        assert done.ids == plain.generate(prompt, PARAMS).ids
        answers.append(done.ids)
    assert answers[0] == answers[2] != answers[1]


# --- forms


def test_an_animation_has_its_own_times(tmp_path: Path) -> None:
    frames = [Pillow.new("RGB", (48, 48), colour) for colour in ("red", "lime", "blue")]
    for form in ("GIF", "WEBP"):
        path = tmp_path / f"a.{form.lower()}"
        options = {"save_all": True, "append_images": frames[1:], "duration": [1000, 61_000, 500]}
        path.write_bytes(encoded(frames[0], form, **options))
        clip = Video.open(path).prepare(LARGE)
        assert clip.stamps == ("00:00", "00:01", "01:02")
        means = [frame.pixels.reshape(-1, 3).mean(0).argmax() for frame in clip.frames]
        assert means == [0, 1, 2]
        two = replace(Video.open(path), num_frames=2).prepare(LARGE)
        assert two.stamps == ("00:00", "00:01")


def test_a_folder_has_its_frames_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for index in (10, 2, 1):
        Pillow.new("L", (9, 9), 20 * index).save(tmp_path / f"frame{index}.png")
    (tmp_path / "notes.txt").write_text("no frame")
    clip = Video.open(tmp_path, fps=0.5).prepare(LARGE)
    assert [int(f.pixels.mean()) for f in clip.frames] == [20, 40, 200]
    assert clip.stamps == ("00:00", "00:02", "00:04")


def film(
    path: Path, count: int, rate: int, size: tuple[int, int] = (64, 48), turn: int = 0
) -> Path:
    """Write a film whose left half is red, to be turned by so many degrees when it is shown."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4" if path.suffix == ".mp4" else "libvpx", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if turn:
            stream.set_display_rotation(turn)
        for index in range(count):
            image = Pillow.new("RGB", size, (0, 0, 2 * index))
            image.paste((250, 0, 0), (0, 0, size[0] // 2, size[1]))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize("name", ["a.mp4", "a.webm"])
def test_a_file_gives_the_frames_that_the_reference_s_reader_gives(
    name: str, tmp_path: Path
) -> None:
    path = film(tmp_path / name, 100, 2)
    from transformers.video_utils import read_video_pyav

    given = []
    fit = videos.fit_frame
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(videos, "fit_frame", lambda im, *a: given.append(np.array(im)) or fit(im, *a))
        clip = Video.open(path).prepare(LARGE)
    indices = shown_indices(100, 32)
    assert clip.seconds == tuple(index / 2 for index in indices)

    def sample(metadata: Any, **_: Any) -> Any:
        assert metadata.fps == 2.0 and metadata.total_num_frames in (0, 100)  # WebM has no count
        return np.array(indices)

    expected, _ = read_video_pyav(str(path), sample)
    assert np.array_equal(np.stack(given), expected)
    assert clip is not Video.open(path).prepare(LARGE)


def test_a_film_on_its_side_is_turned(tmp_path: Path) -> None:
    def shown(turn: int) -> Any:
        path = film(tmp_path / f"{turn}.mp4", 3, 2, (96, 48), turn)
        return Video.open(path).prepare(LARGE).frames[1].pixels[..., 0].astype(int)

    flat, upright = shown(0), shown(-90)
    assert flat.shape[1] > flat.shape[0] and upright.shape == flat.shape[::-1]
    # The left half is red: a clockwise turn brings it to the top.
    assert flat[:, :20].mean() > 200 > 100 > flat[:, -20:].mean()
    assert upright[:20].mean() > 200 > 100 > upright[-20:].mean()


# --- refusals


def refusal(call: Any) -> str:
    with pytest.raises(UsageError) as refused:
        call()
    return str(refused.value)


def test_what_is_no_video_is_refused_by_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("av")
    path = tmp_path / "a.mp4"
    path.write_bytes(b"no video at all")
    assert "a.mp4 is damaged or of another format" in refusal(
        lambda: Video.open(path).prepare(LARGE)
    )
    sound = film(tmp_path / "b.mp4", 40, 10).read_bytes()
    path.write_bytes(sound[: len(sound) // 2])
    assert "a.mp4" in refusal(lambda: Video.open(path).prepare(LARGE))
    playlist = tmp_path / "c.m3u8"
    playlist.write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{tmp_path / 'b.mp4'}\n#EXT-X-ENDLIST\n")
    assert "of another format" in refusal(lambda: Video.open(playlist).prepare(LARGE))
    assert "No such file" in refusal(lambda: Video.open(tmp_path / "none.mp4"))
    (tmp_path / "empty").mkdir()
    assert "has no frames" in refusal(lambda: Video.open(tmp_path / "empty"))
    address = "no address is opened; send the video as a file"
    assert address in refusal(lambda: Video.open("https://example.com/a.mp4"))
    fps = "has times of its own"
    assert fps in refusal(lambda: Video.open(tmp_path / "b.mp4", fps=2))


def test_limits_come_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    path = film(tmp_path / "a.mp4", 40, 10)
    for name, value, sentence in (
        ("MAX_SECONDS", 3, "has 40 frames of 4 seconds; a video may have"),
        ("MAX_COUNT", 39, "has 40 frames of 4 seconds"),
        ("MAX_FRAME_PIXELS", 1000, "is 64x48 pixels; a frame may have"),
        ("MAX_FILE_BYTES", 100, "a video may have 0 GB"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(videos, name, value)
            assert sentence in refusal(lambda: Video.open(path).prepare(LARGE))
    huge = Video((Image(png_of(4000, 3000)),))
    assert "frame 1 of the video is 4000x3000 pixels" in refusal(lambda: huge.prepare(LARGE))
    frame = Image(photo(9, 9))
    assert "num_frames is 61; it must be 1 to 60" in refusal(lambda: Video([frame], num_frames=61))
    assert "fps is 0" in refusal(lambda: Video([frame], fps=0))
    assert "tokens of a frame are 71" in refusal(lambda: Video([frame], tokens=71))
    assert "has 0 frames" in refusal(lambda: Video([]))


def test_without_pyav_files_are_refused_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "find_spec", lambda name: None)
    (tmp_path / "a.mp4").write_bytes(b"any")
    assert 'pip install "dgemma[video]"' in refusal(lambda: Video.open(tmp_path / "a.mp4"))
    (tmp_path / "a.gif").write_bytes(encoded(photo(9, 9), "GIF"))
    assert Video.open(tmp_path / "a.gif").prepare(LARGE).stamps == ("00:00",)


def test_a_template_that_drops_videos_is_refused() -> None:
    engine = seeing_engine()
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    engine.template = ChatTemplate(source, engine.tokenizer)
    video = video_of(frames_of((9, 9), 2))
    with pytest.raises(CheckpointError, match="has 1 videos, but the chat template writes 0"):
        engine.prompt([seen("What is it?", video)])


def test_text_that_spells_a_video_token_stays_text() -> None:
    engine = seeing_engine()
    assert VIDEO not in engine.prompt([seen("<|video|> <|image>")]).ids
    prompt = engine.prompt([seen("<|video|>", video_of(frames_of((9, 9), 2)))])
    assert len(prompt.images) == 2


@pytest.mark.parametrize(
    ("video_url", "sentence"),
    [
        ({"url": "https://x/y.mp4"}, "no address is opened; send the video as its frames"),
        ({"url": "data:video/mp4;base64,AAAA"}, "of a video only frames are taken"),
        ({"url": "data:video/jpeg;base64"}, "of a video only frames are taken"),
        ({"url": "data:video/jpeg;base64,AAAA,?"}, "not valid base64"),
        (
            {"url": "data:video/jpeg;base64," + ",".join(["AAAA"] * 61)},
            "61 frames; send at most 60",
        ),
        ({"url": "data:video/jpeg;base64,AAAA", "fps": True}, "fps is True"),
        ({"url": "data:video/jpeg;base64,AAAA", "fps": -1}, "fps is -1"),
        ({"url": "data:video/jpeg;base64,AAAA", "speed": 1}, "'speed'"),
    ],
)
def test_a_part_that_is_no_video_is_refused(video_url: Any, sentence: str) -> None:
    part = {"type": "video_url", "video_url": video_url}
    assert sentence in refusal(lambda: read_content([part]))
