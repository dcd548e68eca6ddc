"""The story model: its two ways to run agree, its tokenizer merges by score, its stories end."""

import json
import lzma
import struct
from pathlib import Path

import pytest
import torch

from dgemma.errors import CheckpointError
from dgemma.eval.stories15m import (
    BEGIN,
    CONTEXT,
    FIRST_BYTE,
    SHAPES,
    TOKENIZER,
    WEIGHTS,
    Draw,
    StoryModel,
    StoryTokenizer,
    likelihood,
    main,
    sample,
    sample_ids,
    tell,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "train"
needs_weights = pytest.mark.skipif(
    not (SHARED / WEIGHTS).is_file(), reason=f"{SHARED / WEIGHTS} does not exist"
)
PIECES = [b" ", b"a", b"b", b"ab", b" a", b" ab", b"ba", "é".encode(), b"\n"]
SCORES = [-9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -1.0, -9.0, -9.0]


@pytest.fixture(scope="module")
def random_story_model() -> StoryModel:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) < 3 else 0.06)
        for name, shape in SHAPES.items()
    }
    return StoryModel(weights)


@pytest.fixture(scope="module")
def small_stories() -> StoryTokenizer:
    bytes_ = [b"<unk>", b"<s>", b"</s>", *(bytes([b]) for b in range(256))]
    return StoryTokenizer([*bytes_, *PIECES], [0.0] * len(bytes_) + SCORES)


def test_one_token_at_a_time_gives_what_the_whole_text_gives(
    random_story_model: StoryModel,
) -> None:
    model = random_story_model
    tokens_BT = torch.randint(32000, (3, 20), generator=torch.Generator().manual_seed(1))
    whole = model.hidden(tokens_BT)
    cache = model.new_cache(3, 20)
    steps = [model.hidden(tokens_BT[:, i : i + 1], cache, i) for i in range(20)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-3, rtol=1e-3)


def test_position_matters(random_story_model: StoryModel) -> None:
    """Without the turns of rope, a repeated token would look the same at every place."""
    states = random_story_model.hidden(torch.tensor([[5, 7, 5, 9, 5]]))[0]
    assert not torch.allclose(states[2], states[4], atol=1e-2)


def test_likelihood_is_that_of_the_logits(
    random_story_model: StoryModel, small_stories: StoryTokenizer
) -> None:
    model, texts = random_story_model, ["ab ba", "b", "a" * 300]
    results = likelihood(model, small_stories, texts, batch=2)
    ids = torch.tensor([[BEGIN, *small_stories.encode("ab ba")]])
    logprob = model.logits(model.hidden(ids))[0].log_softmax(-1)
    expected = -sum(float(logprob[i, ids[0, i + 1]]) for i in range(ids.shape[1] - 1))
    assert results[0] == (pytest.approx(expected, rel=1e-4), ids.shape[1] - 1)
    assert results[2][1] == CONTEXT - 1  # no more than the model was trained on


def test_the_best_scored_pair_is_merged_first(small_stories: StoryTokenizer) -> None:
    def pieces(text: str) -> list[bytes]:
        return [small_stories.pieces[i] for i in small_stories.encode(text)]

    # "ba" beats "ab" and " a"; the space before the text is the model's habit.
    assert pieces("aba") == [b" a", b"ba"]
    assert pieces("ab a") == [b" ab", b" a"]
    assert pieces("a  b\né") == [b" a", b" ", b" ", b"b", b"\n", "é".encode()]
    assert small_stories.encode("π")[1:] == [FIRST_BYTE + b for b in "π".encode()]


@pytest.mark.parametrize("text", ["ab ba", "  a", "π\n", "", "été"])
def test_texts_come_back(small_stories: StoryTokenizer, text: str) -> None:
    assert small_stories.decode(small_stories.encode(text)) == text


def test_draws_follow_the_seed_and_stop_at_the_end(random_story_model: StoryModel) -> None:
    draw = Draw(max_tokens=12)
    rows = sample_ids(random_story_model, 3, 5, draw)
    assert rows == sample_ids(random_story_model, 3, 5, draw)
    assert rows != sample_ids(random_story_model, 3, 6, draw)
    assert all(BEGIN not in row[:-1] and len(row) <= 12 for row in rows)


def test_cold_draws_take_the_likeliest_token(random_story_model: StoryModel) -> None:
    model = random_story_model
    likeliest = int(model.logits(model.hidden(torch.tensor([[BEGIN]])))[0, 0].argmax())
    for draw in (Draw(temperature=1e-4, max_tokens=1), Draw(min_p=1.0, max_tokens=1)):
        assert sample_ids(model, 2, 0, draw) == [[likeliest], [likeliest]]


def test_a_story_without_an_end_is_cut_after_its_last_sentence() -> None:
    pieces = [b"<unk>", b"<s>", b"</s>", *(bytes([b]) for b in range(256)), b" A b. C d", b"!"]
    tokenizer = StoryTokenizer(pieces, [0.0] * len(pieces))
    first, second = len(pieces) - 2, len(pieces) - 1
    assert tell(tokenizer, [first]).text == "A b."
    assert not tell(tokenizer, [first]).is_whole
    assert tell(tokenizer, [first, BEGIN]).text == "A b. C d"
    assert tell(tokenizer, [first, second]).text == "A b. C d!"
    assert tell(tokenizer, [second, first][:1]).text == "!"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=WEIGHTS):
        StoryModel.load(tmp_path, torch.device("cpu"), torch.float32)
    (tmp_path / WEIGHTS).write_bytes(lzma.compress(b"\0" * 100))
    with pytest.raises(CheckpointError, match="50 numbers"):
        StoryModel.load(tmp_path, torch.device("cpu"), torch.float32)
    (tmp_path / TOKENIZER).write_bytes(struct.pack("<ifi", 4, 0.0, 1) + b"a")
    with pytest.raises(CheckpointError, match="1 pieces"):
        StoryTokenizer.load(tmp_path / TOKENIZER)


@needs_weights
def test_the_real_model_tells_stories(tmp_path: Path) -> None:
    model = StoryModel.load(SHARED, torch.device("cpu"), torch.float32)
    tokenizer = StoryTokenizer.load(SHARED / TOKENIZER)
    good = "Once upon a time, there was a little girl named Lily. She loved to play outside."
    bad = "Lily upon girl a outside. play little to named there a She time, was loved Once"
    (good_nats, good_count), (bad_nats, bad_count) = likelihood(model, tokenizer, [good, bad])
    assert good_nats / good_count < 1.0 < 5.0 < bad_nats / bad_count
    assert tokenizer.decode(tokenizer.encode(good)) == good
    story = sample(model, tokenizer, 1, 0, Draw(temperature=0.1, max_tokens=24))[0]
    assert story.startswith("Once upon a time")


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
