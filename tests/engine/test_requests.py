"""Requests that run together, what they remember of each other, and what a mode refuses."""

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dgemma.backends.cpu import pack
from dgemma.diffusion.canvas import Pins
from dgemma.diffusion.sampler import Sampler
from dgemma.engine import Done, Engine, SamplingParams
from dgemma.engine.core import prefill_chunk, prefix_capacity
from dgemma.engine.generation import Generation
from dgemma.errors import PromptTooLong, UsageError
from dgemma.text.chat import Message, Prompt
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from tests.taught import ANSWERS, CANVAS, GENERATION, LONG, SHORT, taught_config
from tests.text.small import small_tokenizer

STOP = GENERATION.stop_ids[0]


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return Engine.load(checkpoint, device="cpu", dtype="float32")


@pytest.fixture
def wild() -> Engine:
    """A model that was taught nothing, without a template."""
    generation = replace(GENERATION, max_denoising_steps=4, stop_ids=(STOP,))
    return Engine(random_model(taught_config(), seed=3), small_tokenizer(), None, generation)


def test_several_prompts_are_answered_together_in_their_order(engine: Engine) -> None:
    questions = [SHORT, LONG, SHORT, LONG]
    done = engine.generate_all(questions, [SamplingParams(seed=n) for n in range(4)])
    assert [d.text for d in done] == [ANSWERS[question] for question in questions]
    assert not engine.scheduler.requests
    with pytest.raises(UsageError, match="4 prompts have 1 params"):
        engine.generate_all(questions, [SamplingParams()])


def test_no_more_requests_run_at_once_than_rows_are_allowed(engine: Engine) -> None:
    engine.scheduler.max_batch_size = 2
    tasks = [engine.generation(LONG, SamplingParams(seed=n)) for n in range(5)]
    requests = [engine.submit(task) for task in tasks]
    most = 0
    while not all(request.is_over for request in requests):
        engine.step()
        most = max(most, len(engine.scheduler.admitted))
    assert most <= 2
    assert all(isinstance(request.events[-1], Done) for request in requests)


def test_a_step_without_requests_does_nothing(engine: Engine) -> None:
    engine.step()
    assert not engine.scheduler.requests


def test_a_second_turn_reuses_the_first(engine: Engine) -> None:
    first = [Message(role="user", content=SHORT)]
    engine.generate(engine.prompt(first), SamplingParams(seed=1))
    history = [*first, Message(role="assistant", content=ANSWERS[SHORT]), *first]
    second = engine.prompt(history)
    done = engine.generate(second, SamplingParams(seed=1, max_tokens=4))
    assert done.reused_tokens >= len(engine.prompt(first).ids) - 1
    engine.prefixes.clear()
    fresh = engine.generate(second, SamplingParams(seed=1, max_tokens=4))
    assert fresh.reused_tokens == 0
    assert fresh.ids == done.ids


@pytest.mark.parametrize("room", [0, -1])
def test_an_engine_without_room_for_prefixes_keeps_none(checkpoint: Path, room: int) -> None:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32", prefix_bytes=room)
    for _ in range(2):
        assert engine.generate(SHORT, SamplingParams(seed=1)).reused_tokens == 0
    assert len(engine.prefixes) == 0
    task = engine.generation(SHORT, SamplingParams(seed=1))
    request = engine.submit(task)
    engine.step()
    assert (
        task.sequence.is_prefilled and not task.sequence.cache.checkpoints
    )  # which would cost memory for nothing
    engine.cancel(request)


@pytest.mark.parametrize(
    ("memory", "chunk", "prefixes"),
    [(141e9, 1024, 2 << 30), (25e9, 1024, int(1.25e9)), (16e9, 512, int(0.8e9))],
)
def test_a_smaller_gpu_gets_smaller_passes_and_remembers_less(
    monkeypatch: pytest.MonkeyPatch, memory: float, chunk: int, prefixes: int
) -> None:
    card = SimpleNamespace(total_memory=int(memory))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    assert prefill_chunk(torch.device("cuda", 0), torch.bfloat16) == chunk
    assert prefix_capacity(torch.device("cuda", 0)) == prefixes
    assert prefill_chunk(torch.device("cpu"), torch.float32) == 512
    assert prefill_chunk(torch.device("cpu"), torch.bfloat16) == 128
    assert prefix_capacity(torch.device("cpu")) == 2 << 30


def test_pinned_text_behind_a_stop_is_part_of_the_reply(wild: Engine) -> None:
    """The stop at position 2 is dropped, since text is pinned behind it."""
    letters = small_tokenizer().encode("the")
    pins = Pins((2, 9), (STOP, letters[0]))
    done = wild.generate(
        Prompt(text="", ids=(5, 6)), SamplingParams(seed=1, pins=pins, max_tokens=CANVAS)
    )
    assert letters[0] in done.ids
    assert STOP not in done.ids
    early = SamplingParams(seed=1, pins=pins, max_tokens=CANVAS, max_steps=1)
    cut = wild.generate(Prompt(text="", ids=(5, 6)), early)
    assert cut.finish == "budget"
    assert letters[0] in cut.ids


def test_a_pinned_stop_ends_the_reply_where_nothing_is_pinned_behind_it(wild: Engine) -> None:
    pins = Pins((4,), (STOP,))
    done = wild.generate(Prompt(text="", ids=(5, 6)), SamplingParams(seed=1, pins=pins))
    assert done.finish == "stop"
    assert done.tokens <= 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (SamplingParams(mode="ar", pins=Pins((0,), (5,))), "pins"),
        (SamplingParams(mode="ar", canvas_length=4), "canvas length"),
        (SamplingParams(mode="ar", sampler=Sampler()), "a sampler"),
        (SamplingParams(mode="ar", drafts=True), "drafts"),
        (SamplingParams(temperature=-0.5), "temperature is -0.5"),
        (SamplingParams(mode="ar", temperature=-1.0), "temperature is -1"),
        (SamplingParams(mode="fast"), "mode 'fast' is not known"),  # type: ignore[arg-type]
        (SamplingParams(retries=-1), "retries is -1"),
        (SamplingParams(max_steps=0), "max steps is 0"),
        (SamplingParams(mode="hybrid", pins=Pins((0,), (5,))), "hybrid mode cannot honour pins"),
        (SamplingParams(seed=-1), "seed is -1"),
        (SamplingParams(max_seconds=0.0), "max seconds is 0"),
        (SamplingParams(pins=Pins((CANVAS,), (5,))), "a pin's position is 16"),
        (SamplingParams(pins=Pins((0,), (10**6,))), "a pinned token is 1000000"),
        (SamplingParams(pins=Pins((8,), (5,)), max_tokens=5), "a pin's position is 8"),
        (SamplingParams(stop=("",)), "stop string is empty"),
        (SamplingParams(stop="the"), "give a tuple, such as"),  # type: ignore[arg-type]
    ],
)
def test_what_a_request_cannot_have_is_refused_before_any_work(
    wild: Engine, options: SamplingParams, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        wild.stream(Prompt(text="", ids=(5, 6)), options)
    assert not wild.scheduler.requests


def test_ar_mode_counts_its_tokens_exactly_against_the_context(wild: Engine) -> None:
    limit = taught_config().max_position_embeddings
    prompt = Prompt(text="", ids=(5,) * (limit - 3))
    assert wild.generate(prompt, SamplingParams(mode="ar", max_tokens=3)).tokens <= 3
    with pytest.raises(PromptTooLong):
        wild.generate(prompt, SamplingParams(mode="ar", max_tokens=4))
    with pytest.raises(PromptTooLong):
        wild.generate(prompt, SamplingParams(max_tokens=3))


def test_a_packed_model_refuses_to_be_saved(tmp_path: Path) -> None:
    model = pack(random_model(taught_config(), seed=0, dtype=torch.float32))
    with pytest.raises(UsageError, match="cannot be saved"):
        save_checkpoint(Checkpoint(model=model), tmp_path / "packed")
    assert not (tmp_path / "packed" / "model.safetensors").exists()


def test_an_error_in_a_pass_does_not_spoil_the_next_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = engine.generate(LONG, SamplingParams(seed=2)).text
    stream = engine.stream(LONG, SamplingParams(seed=2))
    monkeypatch.setattr(engine.model, "soft_embed", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    monkeypatch.undo()
    assert not engine.scheduler.requests
    assert engine.generate(LONG, SamplingParams(seed=2)).text == whole


def _interrupt(p_TV: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


def test_one_request_that_fails_does_not_touch_its_neighbours(
    wild: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(text="", ids=(5, 6, n)) for n in (7, 8)]
    options = [SamplingParams(mode="ar", max_tokens=12), SamplingParams(mode="ar", max_tokens=12)]
    alone = wild.generate(prompts[1], options[1]).ids
    wild.prefixes.clear()
    tasks = [wild.generation(p, o) for p, o in zip(prompts, options, strict=True)]
    requests = [wild.submit(task) for task in tasks]
    wild.step()
    monkeypatch.setattr(tasks[0].reader, "feed", _fail)
    while not all(request.is_over for request in requests):
        wild.step()
    assert isinstance(requests[0].error, ValueError)
    assert requests[1].result.ids == alone
    assert not wild.scheduler.requests


def _fail(*_: object) -> list[Any]:
    raise ValueError("broken on purpose")


def test_a_failed_request_tells_whoever_follows_it(
    wild: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.text.reply.ReplyReader.feed", lambda self, ids: _fail(ids))
    with pytest.raises(ValueError, match="broken on purpose"):
        wild.generate(Prompt(text="", ids=(5, 6)), SamplingParams(max_tokens=4, retries=0))
    assert not wild.scheduler.requests


def test_a_request_whose_cache_cannot_be_made_fails_alone(
    wild: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=4)
    tasks = [wild.generation(Prompt(text="", ids=(5, 6)), params) for _ in range(2)]
    monkeypatch.setattr(tasks[0], "start", _fail)
    requests = [wild.submit(task) for task in tasks]
    while not all(request.is_over for request in requests):
        wild.step()
    assert isinstance(requests[0].error, ValueError)
    assert requests[1].result is not None and not wild.scheduler.requests


def test_cancelling_a_followed_request_ends_its_stream(wild: Engine) -> None:
    stream = wild.stream(Prompt(text="", ids=(5, 6)), SamplingParams(max_tokens=64, drafts=True))
    next(stream)
    wild.cancel(wild.scheduler.requests[0])
    assert not any(isinstance(event, Done) for event in stream)


def test_packing_lets_go_of_each_weight() -> None:
    model = random_model(taught_config(), seed=0)
    weights = [weakref.ref(layer.mlp.up_proj) for layer in model.layers]
    pack(model)
    assert all(weight() is None for weight in weights)


def test_a_torn_cache_is_not_remembered(wild: Engine) -> None:
    stream = wild.stream(Prompt(text="", ids=(5, 6, 7)), SamplingParams(max_tokens=64, drafts=True))
    next(stream)
    (task,) = wild.scheduler.admitted
    assert isinstance(task, Generation)
    task.sequence.cache.is_consistent = False
    stream.close()
    assert len(wild.prefixes) == 0


def test_a_torn_cache_is_not_used_after_a_failed_pass(wild: Engine) -> None:
    """The request ends with the error; a neighbour gets the answer it gets alone."""
    prompts = [Prompt(text="", ids=(5, 6, 7)), Prompt(text="", ids=(8, 9))]
    params = SamplingParams(max_tokens=24, seed=3)
    alone = wild.generate(prompts[1], params).ids
    wild.prefixes.clear()
    torn, other = (wild.submit(wild.generation(prompt, params)) for prompt in prompts)
    wild.step()
    (task,) = (task for task, request in wild.scheduler.admitted.items() if request is torn)
    assert isinstance(task, Generation)
    task.sequence.cache.is_consistent = False
    while wild.scheduler.admitted:
        wild.step()
    assert "inconsistent" in str(torn.error) and other.result.ids == alone
