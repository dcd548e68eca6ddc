"""The story model: its two ways to run agree, and its tokenizer merges by score."""

import lzma
import struct
from pathlib import Path

import pytest
import torch

from dgemma.errors import CheckpointError
from dgemma.eval.stories import (
    BOS,
    CONTEXT,
    FIRST_BYTE,
    SHAPES,
    TOKENIZER,
    WEIGHTS,
    StoryModel,
    StoryTokenizer,
    likelihood,
)

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "train"
needs_weights = pytest.mark.skipif(
    not (SHARED / WEIGHTS).is_file(), reason=f"{SHARED / WEIGHTS} does not exist"
)
PIECES = [b" ", b"a", b"b", b"ab", b" a", b" ab", b"ba", "é".encode(), b"\n"]
SCORES = [-9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -1.0, -9.0, -9.0]


def make_random_model() -> StoryModel:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) < 3 else 0.06)
        for name, shape in SHAPES.items()
    }
    return StoryModel(weights)


@pytest.fixture(scope="module")
def random_story_model() -> StoryModel:
    return make_random_model()


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
    """Without RoPE, a repeated token would have the same state at every position."""
    states = random_story_model.hidden(torch.tensor([[5, 7, 5, 9, 5]]))[0]
    assert not torch.allclose(states[2], states[4], atol=1e-2)


def test_likelihood_is_that_of_the_logits(
    random_story_model: StoryModel, small_stories: StoryTokenizer
) -> None:
    model, texts = random_story_model, ["ab ba", "b", "a" * 300]
    results = likelihood(model, small_stories, texts, batch=2)
    ids = torch.tensor([[BOS, *small_stories.encode("ab ba")]])
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
def test_the_real_model_prefers_sentences_to_their_words() -> None:
    model = StoryModel.load(SHARED, torch.device("cpu"), torch.float32)
    tokenizer = StoryTokenizer.load(SHARED / TOKENIZER)
    good = "Once upon a time, there was a little girl named Lily. She loved to play outside."
    bad = "Lily upon girl a outside. play little to named there a She time, was loved Once"
    (good_nats, good_count), (bad_nats, bad_count) = likelihood(model, tokenizer, [good, bad])
    assert good_nats / good_count < 1.0 < 5.0 < bad_nats / bad_count
    assert tokenizer.decode(tokenizer.encode(good)) == good
