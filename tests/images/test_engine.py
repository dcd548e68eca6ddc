"""Pictures through the engine: prompts, chunks, the prefix cache, batches and cancels."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dgemma.engine import Done, Engine, SamplingParams
from dgemma.engine.image_features import chunk_end
from dgemma.engine.prefix_cache import _whole_images
from dgemma.errors import CheckpointError, UsageError
from dgemma.images import Image, Picture
from dgemma.text.chat import ChatTemplate, Message, Prompt, PromptImage, insert_images
from dgemma.text.messages import ToolCall
from dgemma.text.tokenizer import Tokenizer
from tests.images.tiny_tower import (
    LARGE,
    noise_image,
    photo,
    seeing_engine,
    seen,
    small_picture,
)
from tests.weights.sample import SHARED

PARAMS = SamplingParams(seed=1, max_tokens=8)
BOI, IMAGE, EOI = 17, 19, 21
PHASES = (Phase.explicit, Phase.generate)  # a failing case is small already


def blocks_of(prompt: Prompt) -> list[int]:
    """Lengths of the runs of soft tokens between a begin and an end."""
    runs, count, ids = [], 0, prompt.ids
    for index, token in enumerate(ids):
        if token == IMAGE:
            assert ids[index - 1] in (BOI, IMAGE) and ids[index + 1] in (IMAGE, EOI)
            count += 1
        elif token == EOI:
            runs.append(count)
            count = 0
    return runs


def test_pictures_are_where_the_message_has_them() -> None:
    engine = seeing_engine()
    wide, tall = noise_image(1, (90, 30)), noise_image(2, (30, 60))
    prompt = engine.prompt([seen("Compare ", wide, " with ", tall, "please.")])
    sizes = [wide.prepare(LARGE).num_tokens, tall.prepare(LARGE).num_tokens]
    assert blocks_of(prompt) == sizes and sizes[0] != sizes[1]
    assert [image.end - image.begin for image in prompt.images] == sizes
    for image in prompt.images:
        assert prompt.ids[image.begin - 1] == BOI and prompt.ids[image.end] == EOI
    text = engine.tokenizer.decode([t for t in prompt.ids if t not in (BOI, IMAGE, EOI)])
    assert "Comparewithplease." in text
    assert prompt.num_image_tokens == sum(sizes)
    first = prompt.images[0]
    assert prompt.cache_ids[first.begin : first.end] == first.picture.cache_ids
    assert prompt.cache_ids[: first.begin] == prompt.ids[: first.begin]


def test_pictures_of_a_tool_follow_its_answer() -> None:
    engine = seeing_engine()
    call = ToolCall(name="camera", id="1")
    messages = [
        Message(role="user", content="Look outside."),
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", tool_call_id="1", content=("Here: ", noise_image(3), "taken now")),
    ]
    prompt = engine.prompt(messages)
    assert len(prompt.images) == 1
    before = engine.tokenizer.decode(list(prompt.ids[: prompt.images[0].begin - 1]))
    assert "Here:taken now" in before and before.count("<tool_response|>") == 1


def test_text_that_spells_an_image_token_stays_text() -> None:
    engine = seeing_engine()
    assert IMAGE not in engine.prompt([seen("<|image|> <|image><image|>")]).ids
    prompt = engine.prompt([seen("<|image|>", noise_image(1))])
    assert len(prompt.images) == 1


def test_pictures_are_refused_where_they_cannot_be_read() -> None:
    engine = seeing_engine()
    for role in ("system", "assistant", "developer"):
        with pytest.raises(UsageError, match=f"a {role} message holds a picture"):
            Message(role=role, content=(noise_image(1),))  # type: ignore[arg-type]
    engine.images = None
    with pytest.raises(UsageError, match="this checkpoint has no image tower"):
        engine.prompt([seen("What is it?", noise_image(1))])


def test_a_template_that_drops_pictures_is_refused() -> None:
    engine = seeing_engine()
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    engine.template = ChatTemplate(source, engine.tokenizer)
    with pytest.raises(CheckpointError, match="has 1 pictures, but the chat template writes 0"):
        engine.prompt([seen("What is it?", noise_image(1))])


def test_a_shrunk_picture_leaves_a_note_in_the_prompt() -> None:
    engine = seeing_engine()
    large = Image(photo(400, 300), tokens=70, name="plan.png")
    prompt = engine.prompt([seen("Read it.", large, large)])
    assert len(prompt.notes) == 1 and prompt.notes[0].startswith("plan.png was shrunk from 400x300")
    assert engine.prompt([seen("Read it.", noise_image(1))]).notes == ()


# --- chunks


def image_at(begin: int, rows: int, columns: int) -> PromptImage:
    return PromptImage(begin, small_picture(rows, columns, begin))


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(
    gaps=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4)), max_size=4),
    chunk=st.integers(1, 20),
)
def test_a_chunk_never_cuts_a_picture_and_cuts_do_not_depend_on_the_start(
    gaps: list[tuple[int, int]], chunk: int
) -> None:
    images: list[PromptImage] = []
    end = 0
    for gap, rows in gaps:
        images.append(image_at(end + gap, rows, 3))
        end = images[-1].end + 1
    cuts = [0]
    while cuts[-1] < end + 5:
        cuts.append(chunk_end(cuts[-1], chunk, images))
        assert cuts[-1] > cuts[-2]
    inside = {p for image in images for p in range(image.begin + 1, image.end)}
    assert not inside & set(cuts)
    assert {p for p in range(0, end + 5, chunk) if p not in inside} <= set(cuts)


def test_a_reused_prefix_does_not_end_inside_a_picture() -> None:
    import numpy as np

    ids = np.array([5, 6, -1, -2, -3, 7, -4, -5])
    whole = [_whole_images(ids, length) for length in range(9)]
    assert whole == [0, 1, 2, 2, 2, 5, 6, 6, 8]


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_the_answer_does_not_depend_on_the_chunk(mode: Any) -> None:
    parts = ("What are", noise_image(1), "and", noise_image(2, (30, 60)), "here?")
    params = replace(PARAMS, mode=mode)
    answers = set()
    for chunk in (16, 64, 512):
        engine = seeing_engine(prefix_bytes=0, chunk=chunk)
        done = engine.generate(engine.prompt([seen(*parts)]), params)
        answers.add(done.ids)
        assert done.image_tokens == sum(
            i.picture.num_tokens for i in engine.prompt([seen(*parts)]).images
        )
    assert len(answers) == 1


# --- reuse


def conversation(turns: Sequence[Image], upto: int) -> list[Message]:
    """A picture in each turn, up to one that is to be answered."""
    messages: list[Message] = []
    for index in range(upto + 1):
        messages.append(seen(turns[index], "What is it?"))
        if index < upto:
            messages.append(Message(role="assistant", content="A thing."))
    return messages


@settings(deadline=None, derandomize=True, database=None, max_examples=6, phases=PHASES)
@given(
    seeds=st.lists(st.integers(0, 50), min_size=3, max_size=3, unique=True),
    chunk=st.sampled_from([16, 64, 512]),
    mode=st.sampled_from(["diffusion", "ar"]),
    cancelled=st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
def test_three_pictures_in_three_turns_give_three_answers(
    seeds: list[int], chunk: int, mode: Any, cancelled: list[int]
) -> None:
    """With the prefix cache, cancelled requests and batches, as without any of them."""
    params = replace(PARAMS, mode=mode)
    pictures = [noise_image(seed) for seed in seeds]
    plain, caching = seeing_engine(prefix_bytes=0, chunk=chunk), seeing_engine(chunk=chunk)
    prompts = [caching.prompt(conversation(pictures, turn)) for turn in range(3)]
    # The same question about another picture of the same size, with the same text before it.
    prompts += [caching.prompt([seen(picture, "What is it?")]) for picture in pictures]
    answers = [plain.generate(prompt, params) for prompt in prompts]
    expected = [done.ids for done in answers]
    for group in (answers[:3], answers[3:]):
        assert all(differ(*pair) for pair in combinations(group, 2))
    for turn, prompt in enumerate(prompts[:3]):
        _cancel_after(caching, prompt, params, cancelled[turn])
        done = caching.generate(prompt, params)
        assert done.ids == expected[turn]
        assert turn == 0 or done.reused_tokens > prompts[turn].images[turn - 1].begin
    assert [done.ids for done in caching.generate_all(prompts, [params] * 6)] == expected
    assert [caching.generate(prompt, params).ids for prompt in reversed(prompts)] == expected[::-1]


def differ(a: Done, b: Done) -> bool:
    """True if two answers differ; greedy ones may do so in their probabilities alone."""
    pairs = zip(a.logprobs, b.logprobs, strict=False)
    return a.ids != b.ids or any(abs(x - y) > 1e-3 for x, y in pairs)


def _cancel_after(engine: Engine, prompt: Prompt, params: SamplingParams, passes: int) -> None:
    request = engine.submit(engine.generation(prompt, params))
    for _ in range(passes):
        engine.step()
    engine.cancel(request)


def test_requests_with_and_without_pictures_share_passes() -> None:
    engine, plain = seeing_engine(), seeing_engine(prefix_bytes=0)
    prompts = [
        engine.prompt([seen(noise_image(1), "What is it?")]),
        engine.prompt([seen("What is it?")]),
        engine.prompt([seen("Is", noise_image(2, (30, 60)), "like", noise_image(1), "?")]),
    ]
    params = [PARAMS, replace(PARAMS, mode="ar"), replace(PARAMS, seed=3)]
    together = engine.generate_all(prompts, params)
    alone = [plain.generate(*pair) for pair in zip(prompts, params, strict=True)]
    assert [done.ids for done in together] == [done.ids for done in alone]


def test_the_tower_is_loaded_for_the_first_picture_and_runs_once_for_each() -> None:
    engine = seeing_engine(prefix_bytes=0)
    assert engine.images is not None
    engine.generate("Hello.", PARAMS)
    assert not engine.images.is_loaded
    same = [engine.prompt([seen(noise_image(1), text)]) for text in ("One?", "Two?")]
    for prompt in [*same, engine.prompt([seen(noise_image(2), "Three?")])]:
        engine.generate(prompt, PARAMS)
    assert engine.images.is_loaded and engine.images.num_encoded == 2


def test_features_are_kept_within_a_bound_of_memory() -> None:
    engine = seeing_engine()
    features = engine.images
    assert features is not None
    pictures = [noise_image(seed).prepare(LARGE) for seed in range(4)]
    size = features.features(pictures[0]).numel() * 4
    features.max_bytes = 2 * size
    for picture in pictures:
        features.features(picture)
    assert features.num_bytes == 2 * size and features.num_encoded == 4
    features.features(pictures[3])
    assert features.num_encoded == 4
    features.features(pictures[0])
    assert features.num_encoded == 5


def test_one_picture_in_two_files_is_one_prefix() -> None:
    engine = seeing_engine()
    first = engine.prompt([seen(noise_image(5), "What is it?")])
    engine.generate(first, PARAMS)
    again = Image(photo(60, 40, seed=5), tokens=70)  # not a file at all
    second = engine.prompt([seen(again, "What is it?")])
    done = engine.generate(second, PARAMS)
    assert done.reused_tokens == len(second.ids) - 1


def test_texts_are_scored_after_a_picture() -> None:
    engine = seeing_engine()
    totals = []
    for seed in (1, 2, 1):
        prompt = engine.prompt([seen(noise_image(seed), "What is it?")])
        (score,) = engine.score(prompt, ["A dog."])
        totals.append(score.total)
        ar = engine.generate(prompt, replace(PARAMS, mode="ar", max_tokens=3))
        (same,) = engine.run(engine.score_program(prompt, [ar.ids]))
        assert torch.allclose(torch.tensor(same.logprobs), torch.tensor(ar.logprobs), atol=1e-4)
    assert totals[0] == totals[2] != totals[1]


def test_a_picture_too_long_for_the_tower_fails_its_request_alone() -> None:
    engine = seeing_engine()
    long = Image(photo(3, 3000), tokens=280)
    prompt = engine.prompt([seen(long, "What is it?")])
    assert isinstance(prompt.images[0].picture, Picture)
    bad = engine.submit(engine.generation(prompt, PARAMS))
    done = engine.generate(engine.prompt([seen(noise_image(1), "What is it?")]), PARAMS)
    assert isinstance(done, Done)
    with pytest.raises(UsageError, match="patches is too long for this tower"):
        bad.raise_error()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the released template is not beside this checkout")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_released_template_takes_pictures(count: int) -> None:
    tokenizer = Tokenizer.load(SHARED)
    template = ChatTemplate.load(SHARED, tokenizer)
    pictures = [small_picture(1, 2 + index, index) for index in range(count)]
    images = [noise_image(index) for index in range(count)]
    call = ToolCall(name="camera", id="1")
    plain = template.prompt([seen(*images, "Describe <|image|>.")])
    prompt = insert_images(plain, pictures, tokenizer) if count else plain
    framed = [[255_999, *[258_880] * picture.num_tokens, 258_882] for picture in pictures]
    body = [*chain(*framed), *tokenizer.encode("Describe <|image|>.")]
    text, ids = ",".join(map(str, body)), ",".join(map(str, prompt.ids))
    assert f",{text}," in ids and ids.count("258880") == sum(p.num_tokens for p in pictures)
    answer = Message(role="tool", tool_call_id="1", content=(*images, "taken"))
    calling = Message(role="assistant", tool_calls=(call,))
    shown = template.prompt([seen("Look."), calling, answer])
    assert shown.ids.count(258_880) == count
