"""Passes on memory that never moves, and the engine that takes them: the same tokens as without.

Without kernels these passes run by definition, so what is tested is all but the kernels.
"""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch

from dgemma.cache import KVCache, Room
from dgemma.canvas import NO_PINS, Noise, Pins
from dgemma.config import GenerationConfig
from dgemma.denoise import Row, commit, denoise, start
from dgemma.engine import Done, Draft, EditOptions, Engine, FillOptions, Options
from dgemma.engine.options import Mode
from dgemma.engine.sudoku import solve
from dgemma.graph.capture import WARM_UPS
from dgemma.graph.memory import Shape
from dgemma.graph.step import Stepper
from dgemma.graph.steppers import Fast
from dgemma.graph.token import Committer
from dgemma.model import Gemma
from dgemma.sampler import EntropyBound, Sampler
from dgemma.stack import Stack
from dgemma.text.chat import ChatTemplate, Prompt
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import load_model
from dgemma.weights.random import random_model
from tests.taught import ANSWERS, CANVAS, GENERATION, SHORT, taught_config, taught_model
from tests.text.small import TEMPLATE, small_tokenizer

CPU = torch.device("cpu")
CONFIG = taught_config()
STEPS = 5
PUZZLE = "087500632000700000504690800000001006065420319100300728000009050090200160003007980"
SAMPLER = Sampler(max_steps=STEPS, rule=EntropyBound(bound=2.0))


# --- passes


@pytest.fixture(scope="module")
def model() -> Gemma:
    """Sharp enough that some positions are decided."""
    made = random_model(CONFIG, seed=3).requires_grad_(False)
    made.embed_tokens.weight.mul_(6.0)
    return made


def cache_of(model: Gemma, prompt: int, past: int = 0) -> KVCache:
    """A prompt, in a room so small that sliding layers move on in every block or two."""
    room = Room(tokens=200, span=2 * CANVAS, slack=4)
    cache = KVCache(CONFIG, room, torch.float32, CPU)
    tokens_T = torch.randint(300, CONFIG.vocab_size, (prompt,), generator=seeded(1))
    if past:
        commit(model, cache, tokens_T[:past], chunk=8)
        cache = cache.branch(150)
    commit(model, cache, tokens_T[past:], chunk=8)
    return cache


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def row_of(block: int, pins: Pins = NO_PINS) -> Row:
    noise = Noise(seed=3).block(block, STEPS, CANVAS, CONFIG.vocab_size, CPU)
    return start(SAMPLER, noise, pins)


def one_by_one(model: Gemma, cache: KVCache, blocks: int) -> list[list[int]]:
    """Committed first, stepped then."""
    found = []
    for block in range(blocks):
        *_, (row,) = denoise(model, [cache], [row_of(block)])
        found.append(row.canvas.guess_L.tolist())
        commit(model, cache, row.canvas.guess_L, chunk=CANVAS)
    return found


def merged(stepper: Stepper, cache: KVCache, blocks: int) -> list[list[int]]:
    found: list[list[int]] = []
    for block in range(blocks):
        row: Row | None = row_of(block)
        assert row is not None
        row = stepper.first(found[-1], row, cache) if found else stepper.step(row, cache)
        while row is not None and not row.is_done:
            row = stepper.step(row, cache)
        assert row is not None
        found.append(row.canvas.guess_L.tolist())
    return found


@pytest.mark.parametrize(("prompt", "past"), [(3, 0), (40, 0), (30, 11)])
def test_a_commit_merged_with_a_first_step_is_one_after_the_other(
    model: Gemma, prompt: int, past: int
) -> None:
    """Seven blocks, so that the buffers of sliding layers move on several times."""
    apart, together = cache_of(model, prompt, past), cache_of(model, prompt, past)
    bases = together.buffers[0].base
    want = one_by_one(model, apart, 7)
    stepper = Stepper(model, Stack(model), Shape(CANVAS, STEPS, SAMPLER.rule))
    assert merged(stepper, together, 7) == want
    assert len({tuple(ids) for ids in want}) == 7
    assert together.buffers[0].base > bases
    # The last block is not committed here.
    end = prompt + 6 * CANVAS
    assert together.length == end
    for layer, window in enumerate((12, None)):
        first = 0 if window is None else end - window + 1
        for a, b in zip(
            together.read(layer, first, end), apart.read(layer, first, end), strict=True
        ):
            torch.testing.assert_close(a.k_SMH, b.k_SMH)
            torch.testing.assert_close(a.v_SMH, b.v_SMH)


def test_a_first_step_goes_on_without_loading_the_row_again(model: Gemma) -> None:
    cache = cache_of(model, 20)
    stepper = Stepper(model, Stack(model), Shape(CANVAS, STEPS, SAMPLER.rule))
    row = stepper.first(list(range(300, 300 + CANVAS)), row_of(0), cache)
    assert row is not None and cache.length == 20 + CANVAS
    context = stepper.context
    assert stepper.step(row, cache) is not None
    assert stepper.context is context
    before = row.canvas.soft_LD
    assert before is not None
    kept = before.clone()
    stepper.step(row_of(1), cache)
    assert torch.equal(before, kept)  # what was handed out is nobody's memory


def test_the_last_step_has_room_for_the_warm_ups_of_a_capture(model: Gemma) -> None:
    """These take the work's steps again and again; what they change is put back behind them."""
    shape = Shape(CANVAS, STEPS, SAMPLER.rule)
    cache, stepper = cache_of(model, 20), Stepper(model, Stack(model), shape)
    row: Row | None = row_of(0)
    for _ in range(STEPS - 1):
        assert row is not None
        row = stepper.step(row, cache)
    assert row is not None and not row.is_done
    with torch.inference_mode():
        for _ in range(1 + WARM_UPS):
            stepper._step()
    assert int(stepper.memory.index_1) == STEPS + WARM_UPS


@pytest.mark.parametrize("count", [CANVAS, CANVAS - 3])
def test_up_to_so_many_tokens_are_committed_as_by_definition(model: Gemma, count: int) -> None:
    mine, want = cache_of(model, 20), cache_of(model, 20)
    committer = Committer(model, Stack(model), CANVAS)
    tokens = list(range(310, 310 + count))
    assert committer.commit(tokens, mine)
    commit(model, want, torch.tensor(tokens), chunk=CANVAS)
    assert mine.length == want.length == 20 + count
    (a,), (b,) = mine.read(1, 0, mine.length), want.read(1, 0, want.length)
    torch.testing.assert_close(a.k_SMH, b.k_SMH)


def test_a_size_of_prompts_is_captured_when_it_comes_again(
    model: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, bool]] = []
    commit = Committer.commit

    def watched(self: Committer, tokens: list[int], cache: KVCache, *, captured: bool) -> bool:
        given.append((self.count, captured))
        return commit(self, tokens, cache, captured=captured)

    monkeypatch.setattr(Committer, "commit", watched)
    monkeypatch.setattr("dgemma.graph.steppers.PROMPTS", (4, 12))
    fast, first, cache = Fast(model), cache_of(model, 20), cache_of(model, 20)
    tokens = list(range(310, 330))
    for _ in range(2):  # its own prompt goes on
        assert fast.commit(tokens[:9], first)
    assert fast.commit(tokens[:5], cache) and cache.length == 25
    assert fast.commit(tokens[:12], cache) and cache.length == 37
    assert fast.commit(tokens[:3], cache) and fast.commit(tokens[:4], first)
    assert given == [(12, False)] * 2 + [(12, True)] * 2 + [(4, False), (4, True)]
    commit(fast.committers[4], [300], cache)  # a reply, and then the same row again
    assert fast.commit(tokens[:2], cache) and given.pop() == (4, True)
    assert not fast.commit(tokens[:13], cache)  # more than any
    cache.room = replace(cache.room, tokens=cache.length + 11)
    assert not fast.commit(tokens[:5], cache)  # what follows them would not fit
    assert cache.length == 43


def test_prompts_that_cannot_be_captured_leave_the_steps_as_they_are(
    model: Gemma, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> bool:
        raise torch.cuda.OutOfMemoryError("no memory\nby far")

    monkeypatch.setattr("dgemma.graph.steppers.PROMPTS", (12,))
    fast, cache = Fast(model), cache_of(model, 20)
    fast.pool = object()  # as if passes were captured here
    monkeypatch.setattr(Committer, "commit", failing)
    for _ in range(2):
        assert not fast.commit([310, 311], cache)
    assert caplog.messages == ["prompts are not captured from now on: no memory"]
    assert not fast.is_broken and fast.step(row_of(0), cache) is not None
    monkeypatch.setattr(Stepper, "step", failing)
    assert fast.step(row_of(0), cache) is None
    assert fast.is_broken and not fast.can_step(SAMPLER)


# --- the engine


class Spy(Fast):
    """Counts what it served."""

    def __init__(self, model: Gemma) -> None:
        super().__init__(model)
        self.served: Counter[str] = Counter()

    def _seen(self, name: str, result: Any) -> Any:
        self.served[name] += result is not None and result is not False
        return result

    def step(self, *given: Any) -> Any:
        return self._seen("step", super().step(*given))

    def first(self, *given: Any) -> Any:
        return self._seen("first", super().first(*given))

    def commit(self, *given: Any) -> Any:
        return self._seen("commit", super().commit(*given))

    def tell(self, *given: Any) -> Any:
        return self._seen("tell", super().tell(*given))


def engine_of(model: Gemma, generation: GenerationConfig) -> Engine:
    tokenizer = small_tokenizer()
    return Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), generation)


def pair(model: Gemma, generation: GenerationConfig = GENERATION) -> tuple[Engine, Engine, Spy]:
    """The same engine without and with captured passes."""
    plain, captured = engine_of(model, generation), engine_of(model, generation)
    assert plain.fast is None  # no GPU
    captured.fast = spy = Spy(model)
    return plain, captured, spy


@pytest.fixture(scope="module")
def wild_model() -> Gemma:
    return random_model(CONFIG, seed=3)


@pytest.fixture
def wild(wild_model: Gemma) -> tuple[Engine, Engine, Spy]:
    """Its answers depend on the noise, and go on until they are cut."""
    return pair(wild_model, replace(GENERATION, max_denoising_steps=4, stop_ids=(1,)))


@pytest.fixture
def taught() -> tuple[Engine, Engine, Spy]:
    return pair(taught_model())


def told(engine: Engine, prompt: str | Prompt, options: Options, **more: Any) -> list[Any]:
    """Events without their times and what was cached, numbers rounded."""
    events = []
    for event in engine.stream(prompt, options, **more):
        if isinstance(event, Done):
            rounded = tuple(round(p, 4) for p in event.logprobs)
            told_apart = {"seconds": 0.0, "prefill_seconds": 0.0, "reused_tokens": 0}
            event = replace(event, logprobs=rounded, **told_apart)
        if isinstance(event, Draft):
            event = replace(event, entropy=tuple(round(nats, 3) for nats in event.entropy))
        events.append(event)
    return events


CASES: dict[str, Callable[[], Options]] = {
    "diffusion": lambda: Options(seed=2, drafts=True, max_tokens=3 * CANVAS),
    "cut": lambda: Options(seed=2, max_tokens=CANVAS + 3),
    "pins": lambda: Options(seed=3, drafts=True, pins=Pins((0, 5), (301, 302))),
    "short canvas": lambda: Options(seed=4, canvas_length=9, max_tokens=25),
    "old version": lambda: Options(seed=5, canvas=tuple(range(300, 330))),
    "other sampler": lambda: Options(seed=5, sampler=SAMPLER),
    "tempered": lambda: Options(seed=5, sampler=replace(SAMPLER, temperature=0.5)),
    "budget": lambda: Options(seed=6, max_steps=6),
    "AR": lambda: Options(mode="ar", max_tokens=20, seed=7),
    "warm AR": lambda: Options(mode="ar", max_tokens=20, heat=0.9, seed=7),
    "hybrid": lambda: Options(mode="hybrid", seed=8, max_tokens=30),
}


@pytest.mark.parametrize("case", CASES)
def test_captured_passes_give_the_same_events(wild: tuple[Engine, Engine, Spy], case: str) -> None:
    plain, captured, spy = wild
    options = CASES[case]()
    want = told(plain, "x", options)
    assert told(captured, "x", options) == want
    done = want[-1]
    if case in ("AR", "warm AR"):
        assert +spy.served == {"tell": done.steps}
    elif case == "tempered":
        assert spy.served["step"] == spy.served["first"] == 0
    elif case not in ("hybrid", "budget"):
        assert spy.served["first"] == done.blocks - 1
        assert spy.served["step"] == done.steps - done.blocks + 1


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
def test_prompts_committed_by_captured_passes_give_the_same_events(
    wild: tuple[Engine, Engine, Spy], monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Those that fit; a prompt of one block comes with the first step."""
    monkeypatch.setattr("dgemma.graph.steppers.PROMPTS", (16, 32))
    plain, captured, spy = wild
    options = Options(mode=mode, seed=2, max_tokens=CANVAS + 3)
    for number, length in enumerate((30, 20, 33, 1 + CANVAS, CANVAS, 2)):
        ids = torch.randint(300, CONFIG.vocab_size, (length,), generator=seeded(number)).tolist()
        prompt = Prompt(text="", ids=tuple(ids))
        assert told(captured, prompt, options) == told(plain, prompt, options)
    assert spy.served["commit"] == {"diffusion": 4, "ar": 6}[mode]
    assert set(spy.committers) == {16, 32}


def test_text_held_to_a_grammar_is_the_same(taught: tuple[Engine, Engine, Spy]) -> None:
    plain, captured, spy = taught
    options = Options(seed=1, max_tokens=3 * CANVAS)
    want = told(plain, SHORT, options, regex="[a-z]{30}")
    assert told(captured, SHORT, options, regex="[a-z]{30}") == want
    assert spy.served["step"] == spy.served["first"] == 0  # a walker looks at every step


@pytest.mark.parametrize("question", ANSWERS)
def test_taught_answers_come_by_captured_passes(
    taught: tuple[Engine, Engine, Spy], question: str
) -> None:
    plain, captured, spy = taught
    options = Options(seed=1, drafts=True)
    assert told(captured, question, options) == told(plain, question, options)
    assert spy.served["step"] > 0


def test_a_row_that_others_join_and_leave_gives_the_same(
    wild: tuple[Engine, Engine, Spy],
) -> None:
    plain, captured, spy = wild
    options = Options(seed=9, max_tokens=8 * CANVAS)
    others = [Options(seed=10 + n, max_tokens=(1 + n) * CANVAS) for n in range(2)]
    want = [plain.generate("long", options).ids, *(plain.generate("b", o).ids for o in others)]
    job = captured.submit(captured.plan("long", options))
    joined: list[Any] = []
    for number in range(200):
        if number in (3, 7):
            joined.append(captured.submit(captured.plan("b", others[len(joined)])))
        if job.is_over and all(other.is_over for other in joined):
            break
        captured.step()
    found = [next(e.ids for e in j.events if isinstance(e, Done)) for j in (job, *joined)]
    assert found == want
    assert spy.served["step"] > 4  # alone before and after


def test_a_request_cancelled_in_the_middle_leaves_nothing_behind(
    wild: tuple[Engine, Engine, Spy],
) -> None:
    plain, captured, _ = wild
    options = Options(seed=11, drafts=True, max_tokens=3 * CANVAS)
    for count in (1, 3, 6):
        stream = captured.stream("gone", options)
        for _ in range(count):
            next(stream)
        stream.close()
        assert told(captured, "x", options) == told(plain, "x", options)
    # What was committed is used again, also by the one that was cancelled.
    assert told(captured, "gone", options) == told(plain, "gone", options)


def test_canvases_behind_a_shared_prefix_are_the_same(taught: tuple[Engine, Engine, Spy]) -> None:
    plain, captured, spy = taught
    for engine in (plain, captured):
        engine.prefixes.clear()
    text = "the <|fill|> then"
    fills = [engine.fill(text, FillOptions(seed=1)) for engine in (plain, captured)]
    assert fills[0].text == fills[1].text
    edits = [
        engine.edit("one, twe.", "mend", EditOptions(seed=1)).text for engine in (plain, captured)
    ]
    assert edits[0] == edits[1]
    assert spy.served.total() > 0


def test_a_puzzle_is_solved_in_the_same_steps() -> None:
    """By the built-in model, as it is before it is packed for a CPU."""
    directory = find_checkpoint("nano")
    found = load_model(directory, device=CPU, dtype=torch.float32)
    solved = []
    for is_captured in (False, True):
        engine = Engine(found.model, Tokenizer.load(directory), None, found.generation)
        engine.template = ChatTemplate.load(directory, engine.tokenizer)
        if is_captured:
            engine.fast = spy = Spy(found.model)
        solved += solve(engine, [PUZZLE])
    assert replace(solved[0], seconds=0.0) == replace(solved[1], seconds=0.0)
    assert solved[0].is_right
    assert spy.served["step"] == solved[1].steps


def test_a_long_prompt_in_larger_chunks_is_the_same_prompt(
    wild: tuple[Engine, Engine, Spy],
) -> None:
    plain, captured, _ = wild
    ids = torch.randint(300, CONFIG.vocab_size, (150,), generator=seeded(4)).tolist()
    prompt, options = Prompt(text="", ids=tuple(ids)), Options(seed=1, max_tokens=2 * CANVAS)
    want = plain.generate(prompt, options).ids
    captured.chunk = 1024
    job = captured.submit(captured.plan(prompt, options))
    captured.step()
    assert job.cache.length == 150
    while not job.is_over:
        captured.step()
    assert [e.ids for e in job.events if isinstance(e, Done)] == [want]


def test_long_prompts_share_out_what_a_pass_may_hold(
    wild: tuple[Engine, Engine, Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.engine.engine.PREFILL_CHUNK", 16)
    engine = wild[0]
    engine.chunk = 64
    prompts = [Prompt(text="", ids=tuple(range(300, 400))) for _ in range(3)]
    jobs = [engine.submit(engine.plan(prompt, Options(max_tokens=4))) for prompt in prompts[:2]]
    engine.step()
    assert [job.cache.length for job in jobs] == [32, 32]
    jobs.append(engine.submit(engine.plan(prompts[2], Options(max_tokens=4))))
    engine.step()
    assert [job.cache.length for job in jobs] == [53, 53, 21]
    for job in jobs:
        engine.cancel(job)


def test_fixed_memory_keeps_no_row_alive(wild: tuple[Engine, Engine, Spy]) -> None:
    """Kernels find keys by their places; only where there are none a context holds the row."""
    _, captured, spy = wild
    job = captured.submit(captured.plan("x", Options(seed=2, max_tokens=CANVAS)))
    while not job.is_over:
        captured.step()
    row = ref(job.cache)
    for stepper in spy.steppers.values():
        assert stepper.current is not None
        stepper.context = None
    captured.prefixes.clear()
    del job
    gc.collect()
    assert row() is None
