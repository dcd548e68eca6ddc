"""Stories sampled from the story model: seeds, temperatures, ends, and the file."""

import json
import lzma
from pathlib import Path

import pytest
import torch

from dgemma.eval.stories import BOS, TOKENIZER, WEIGHTS, StoryModel, StoryTokenizer
from recipes.nano.stories15m import StorySampling, decode_story, main, sample_ids
from tests.eval.test_stories15m import make_random_model

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "train"
needs_weights = pytest.mark.skipif(
    not (SHARED / WEIGHTS).is_file(), reason=f"{SHARED / WEIGHTS} does not exist"
)


@pytest.fixture(scope="module")
def model() -> StoryModel:
    return make_random_model()


def test_samples_follow_the_seed_and_stop_at_the_end(model: StoryModel) -> None:
    sampling = StorySampling(max_tokens=12)
    rows = sample_ids(model, 3, 5, sampling)
    assert rows == sample_ids(model, 3, 5, sampling)
    assert rows != sample_ids(model, 3, 6, sampling)
    assert all(BOS not in row[:-1] and len(row) <= 12 for row in rows)


def test_low_temperatures_take_the_likeliest_token(model: StoryModel) -> None:
    most_likely = int(model.logits(model.hidden(torch.tensor([[BOS]])))[0, 0].argmax())
    for sampling in (
        StorySampling(temperature=1e-4, max_tokens=1),
        StorySampling(min_p=1.0, max_tokens=1),
    ):
        assert sample_ids(model, 2, 0, sampling) == [[most_likely], [most_likely]]


def test_a_story_without_an_end_is_cut_after_its_last_sentence() -> None:
    pieces = [b"<unk>", b"<s>", b"</s>", *(bytes([b]) for b in range(256)), b" A b. C d", b"!"]
    tokenizer = StoryTokenizer(pieces, [0.0] * len(pieces))
    first, second = len(pieces) - 2, len(pieces) - 1
    assert decode_story(tokenizer, [first]).text == "A b."
    assert not decode_story(tokenizer, [first]).is_whole
    assert decode_story(tokenizer, [first, BOS]).text == "A b. C d"
    assert decode_story(tokenizer, [first, second]).text == "A b. C d!"
    assert decode_story(tokenizer, [second]).text == "!"


@needs_weights
def test_the_real_model_tells_stories() -> None:
    model = StoryModel.load(SHARED, torch.device("cpu"), torch.float32)
    tokenizer = StoryTokenizer.load(SHARED / TOKENIZER)
    (ids,) = sample_ids(model, 1, 0, StorySampling(temperature=0.1, max_tokens=24))
    assert decode_story(tokenizer, ids).text.startswith("Once upon a time")


@needs_weights
def test_stories_are_written_as_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stories.jsonl.xz"
    options = "--count 3 --batch 2 --max-tokens 30 --device cpu --dtype float32".split()
    main(["--weights", str(SHARED), "--out", str(out), *options])
    with lzma.open(out, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    assert [set(line) for line in lines] == [{"text", "whole"}] * 3
    assert len({line["text"] for line in lines}) == 3  # batches differ
    assert "3/3 stories" in capsys.readouterr().err
