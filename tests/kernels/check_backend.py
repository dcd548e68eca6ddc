"""The CUDA backend under the interpreter agrees with the reference, in every kind of batch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dgemma.backends.base import (
    CanvasQuery,
    ForwardInput,
    ForwardOutput,
    ImageRows,
    TokenDraw,
)
from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.cuda.passes import DenoisePass
from dgemma.backends.reference import ReferenceBackend
from dgemma.diffusion.canvas import NO_PINS, Canvas, Pins
from dgemma.diffusion.denoise import CanvasState
from dgemma.diffusion.rules import Confidence
from dgemma.diffusion.sampler import LogitsAt, Sampler, StepView
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache
from tests.kernels import small

pytestmark = pytest.mark.usefixtures("small_configs")
STEPS = 3


@pytest.fixture(scope="module")
def model() -> Gemma:
    return small.model()


@pytest.fixture(scope="module")
def mine(model: Gemma) -> CudaBackend:
    return CudaBackend(model)


@pytest.fixture(scope="module")
def want(model: Gemma) -> ReferenceBackend:
    return ReferenceBackend(model)


def same(got: CanvasState | None, wanted: CanvasState | None) -> None:
    assert got is not None
    assert wanted is not None
    a, b = got.canvas, wanted.canvas
    assert torch.equal(a.tokens_L, b.tokens_L)
    assert torch.equal(a.guess_L, b.guess_L)
    assert torch.equal(a.accepted_L, b.accepted_L)
    assert torch.equal(a.pinned_L, b.pinned_L)
    assert bool(a.converged) == bool(b.converged)
    assert int(a.stable_steps) == int(b.stable_steps)
    assert a.num_steps == b.num_steps
    torch.testing.assert_close(a.entropy_L, b.entropy_L, atol=1e-4, rtol=1e-3)
    if not got.is_done:  # nothing is conditioned after the last step
        assert a.soft_LD is not None
        assert b.soft_LD is not None
        torch.testing.assert_close(a.soft_LD, b.soft_LD, atol=3e-3, rtol=1e-3)


def new_state(seed: int, sampler: Sampler, pins: Pins = NO_PINS, length: int = 4) -> CanvasState:
    return small.new_state(sampler, seed, pins, length=length)


def run_both(
    mine: CudaBackend, want: ReferenceBackend, states: list[CanvasState], prompts: list[int]
) -> None:
    """Step the same states on both until all are done."""
    caches = [[small.cache(b.model, n) for n in prompts] for b in (mine, want)]
    held = [list(states), list(states)]
    while moving := [i for i, r in enumerate(held[1]) if not r.is_done]:
        for side, backend in enumerate((mine, want)):
            inputs = [ForwardInput(cache=caches[side][i], state=held[side][i]) for i in moving]
            for i, output in zip(moving, backend.run(inputs), strict=True):
                assert output.state is not None
                held[side][i] = output.state
        for i in moving:
            same(held[0][i], held[1][i])


@pytest.mark.parametrize("count", [1, 3, 5])
def test_rows_in_any_batch_are_stepped_as_by_the_reference(
    mine: CudaBackend, want: ReferenceBackend, count: int
) -> None:
    """Rows leave at different steps; a bucket is padded where it holds more than there are."""
    samplers = [
        Sampler(max_denoising_steps=STEPS),
        Sampler(max_denoising_steps=2, temperature=0.5),
        Sampler(max_denoising_steps=STEPS, temperature=0.0),
        Sampler(max_denoising_steps=1, temperature=1.7),
        Sampler(max_denoising_steps=2),
    ]
    states = [
        new_state(seed, samplers[seed], Pins((1,), (5,)) if seed == 1 else NO_PINS)
        for seed in range(count)
    ]
    run_both(mine, want, states, [5, 7, 9, 3, 6][:count])


def test_canvases_are_scored_beside_others_that_are_not(
    mine: CudaBackend, want: ReferenceBackend
) -> None:
    states = [new_state(seed, Sampler(max_denoising_steps=STEPS)) for seed in range(3)]
    query = CanvasQuery((1, 2, 3, 4), (0, 3), (7, 9), penalty=1.5)
    queries, found = (None, query, replace(query, positions=(), targets=())), []
    for backend in (mine, want):
        inputs = [
            ForwardInput(cache=small.cache(backend.model, 5), state=state, query=asked)
            for state, asked in zip(states, queries, strict=True)
        ]
        outputs = backend.run(inputs)
        scores = [output.canvas_score for output in outputs]
        assert scores[0] is None and scores[1] is not None and scores[2] is not None
        assert scores[2].targets == scores[2].best == ()
        found.append((*scores[1].targets, *scores[1].best))
        same(outputs[1].state, want.run(inputs)[1].state)
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_canvases_of_different_lengths_share_a_pass(
    mine: CudaBackend, want: ReferenceBackend
) -> None:
    sampler = Sampler(max_denoising_steps=2)
    run_both(mine, want, [new_state(0, sampler, length=2), new_state(1, sampler, length=4)], [5, 7])


def test_short_canvases_have_short_passes_until_a_long_one_joins(
    model: Gemma, want: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a commit of a whole block, in two segments; the third step is of both lengths."""
    monkeypatch.setattr("dgemma.backends.cuda.backend.SHORT_LENGTH", 2)
    mine, sampler = CudaBackend(model), Sampler(max_denoising_steps=STEPS)
    sides = []
    for backend in (mine, want):
        caches = [small.cache(model, n) for n in (5, 7, 4)]
        states = [new_state(seed, sampler, length=2 + 2 * (seed == 2)) for seed in range(3)]
        inputs = [ForwardInput(cache=caches[0], tokens=(5, 9, 2, 7), state=states[0])]
        inputs += [ForwardInput(cache=caches[1], state=states[1])]
        for number in range(STEPS):
            outputs = backend.run(inputs)
            inputs = [
                ForwardInput(cache=item.cache, state=output.state)
                for item, output in zip(inputs, outputs, strict=True)
            ]
            inputs += [ForwardInput(cache=caches[2], state=states[2])] * (number == 1)
        sides.append([output.state for output in outputs] + [inputs[2].state])
    for got, wanted in zip(*sides, strict=True):
        same(got, wanted)
    assert [*mine.pools] == [2, 4]
    assert set(mine.pools[2].passes) == {(2, 2), (2, 0)}
    assert set(mine.pool.passes) == {(3, 0)}


def test_a_rule_without_a_kernel_runs_on_the_host_in_the_same_pass(
    mine: CudaBackend, want: ReferenceBackend
) -> None:
    states = [
        new_state(0, Sampler(max_denoising_steps=2, rule=Confidence())),
        new_state(1, Sampler(max_denoising_steps=2)),
    ]
    run_both(mine, want, states, [5, 7])


class PinFirst:
    """A constraint: pins the first position to an even token, and reopens the last."""

    def apply(self, canvas: Canvas, view: StepView) -> Canvas:
        token = int(self.even(view.logits)[0].argmax())
        tokens_L, pinned_L = canvas.tokens_L.clone(), canvas.pinned_L.clone()
        tokens_L[0], pinned_L[0] = 2 * token, True
        reopened_L = torch.zeros_like(pinned_L)
        reopened_L[-1] = True
        tokens_L[-1] = view.noise_L[-1]
        guess_L = torch.where(pinned_L, tokens_L, canvas.guess_L)
        changed = {"tokens_L": tokens_L, "pinned_L": pinned_L, "guess_L": guess_L}
        return replace(canvas, **changed, reopened_L=reopened_L)

    def even(self, logits_at: LogitsAt) -> Tensor:
        return logits_at([0])[:, ::2].cpu()


def test_a_constrained_row_rides_the_same_pass(mine: CudaBackend, want: ReferenceBackend) -> None:
    states = [
        new_state(0, Sampler(max_denoising_steps=STEPS)),
        new_state(1, Sampler(max_denoising_steps=STEPS)),
    ]
    run_both(mine, want, [replace(states[0], constraint=PinFirst()), states[1]], [5, 7])


def test_commits_first_steps_and_prompts_share_a_pass(
    mine: CudaBackend, want: ReferenceBackend
) -> None:
    """A block with the next canvas's first step, a step, and two prompts, one of many segments."""
    sampler = Sampler(max_denoising_steps=2)
    found = []
    for backend in (mine, want):
        a, b, c, d = (small.cache(backend.model, n) for n in (5, 7, 2, 1))
        inputs = [
            ForwardInput(cache=a, tokens=(5, 9, 2, 7), state=new_state(0, sampler)),
            ForwardInput(cache=b, state=new_state(1, sampler)),
            ForwardInput(cache=c, tokens=tuple(range(11))),
            ForwardInput(cache=d, tokens=(3, 4)),
        ]
        outputs = backend.run(inputs)
        assert [cache.length for cache in (a, b, c, d)] == [9, 7, 13, 3]
        again = backend.run(
            [
                ForwardInput(cache=a, state=outputs[0].state),
                ForwardInput(cache=c, tokens=(8,), state=new_state(2, sampler)),
            ]
        )
        found.append([outputs[0].state, outputs[1].state, again[0].state, again[1].state])
        keys = [cache.read(1, 0, cache.length)[-1].k_SMH for cache in (a, c, d)]
        found[-1].append(torch.cat(keys))
    for got, wanted in zip(found[0][:4], found[1][:4], strict=True):
        same(got, wanted)
    torch.testing.assert_close(found[0][4], found[1][4], atol=1e-4, rtol=1e-4)


def test_more_rows_and_commits_than_a_pass_holds_take_several(
    model: Gemma, want: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgemma.backends.cuda.backend.MAX_BATCH_SIZE", 2)
    monkeypatch.setattr("dgemma.backends.cuda.backend.MAX_COMMITS", 2)
    mine, sampler = CudaBackend(model), Sampler(max_denoising_steps=2)
    prompt = tuple(range(17))
    found = []
    for backend in (mine, want):
        caches = [small.cache(model, n) for n in (5, 7, 9)]
        inputs = [ForwardInput(cache=c, state=new_state(i, sampler)) for i, c in enumerate(caches)]
        other = small.cache(model, 1)
        outputs = backend.run([*inputs, ForwardInput(cache=other, tokens=prompt)])
        assert other.length == 18
        found.append([output.state for output in outputs[:3]])
    for got, wanted in zip(*found, strict=True):
        same(got, wanted)


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_of_several_sequences_are_drawn_in_one_pass(
    mine: CudaBackend, want: ReferenceBackend, count: int
) -> None:
    """After prompts of different lengths, greedy and at a temperature."""
    draws = [TokenDraw(), TokenDraw(0.8, 0.3), TokenDraw(1.5, 0.9)][:count]
    sides = []
    for backend in (mine, want):
        caches = [small.cache(backend.model, n) for n in (5, 1, 7)[:count]]
        tokens: list[tuple[int, ...]] = [(9,), (3, 1, 4, 1, 5, 9), (2, 6)][:count]
        drawn = []
        for _ in range(4):
            outputs = backend.run(
                [
                    ForwardInput(cache=c, tokens=t, draw=d)
                    for c, t, d in zip(caches, tokens, draws, strict=True)
                ]
            )
            tokens = [(output.token or 0,) for output in outputs]
            drawn.append([(output.token, output.logprob) for output in outputs])
        sides.append((drawn, [cache.length for cache in caches]))
    assert sides[0][1] == sides[1][1]
    for got, wanted in zip(sides[0][0], sides[1][0], strict=True):
        assert [token for token, _ in got] == [token for token, _ in wanted]
        torch.testing.assert_close(
            [p for _, p in got], [p for _, p in wanted], atol=1e-4, rtol=1e-4
        )


def test_logits_are_handed_to_a_constraint(mine: CudaBackend, want: ReferenceBackend) -> None:
    found: list[ForwardOutput] = []
    for backend in (mine, want):
        given = ForwardInput(
            cache=small.cache(backend.model, 5), tokens=(9,), draw=TokenDraw(), needs_logits=True
        )
        found += backend.run([given])
    assert found[0].logits_V is not None
    assert found[1].logits_V is not None
    torch.testing.assert_close(found[0].logits_V, found[1].logits_V, atol=1e-4, rtol=1e-4)


def test_a_row_that_left_comes_back_as_it_was(mine: CudaBackend, want: ReferenceBackend) -> None:
    """Others take its place in the buffers between two of its steps."""
    sampler = Sampler(max_denoising_steps=STEPS)
    found = []
    for backend in (mine, want):
        caches: list[KVCache] = [small.cache(backend.model, n) for n in (5, 7)]
        (first,) = backend.run([ForwardInput(cache=caches[0], state=new_state(0, sampler))])
        backend.run([ForwardInput(cache=caches[1], state=new_state(1, sampler))])
        if isinstance(backend, CudaBackend):
            backend.pool.residents = [None] * backend.max_batch_size
        (second,) = backend.run([ForwardInput(cache=caches[0], state=first.state)])
        found.append(second.state)
    same(*found)


def test_more_steps_than_the_buffers_hold_make_larger_ones(model: Gemma) -> None:
    mine = CudaBackend(model)
    before = mine.max_steps
    sampler = Sampler(max_denoising_steps=before + 3)
    cache = small.cache(model, 5)
    (output,) = mine.run([ForwardInput(cache=cache, state=new_state(0, sampler))])
    (wanted,) = ReferenceBackend(model).run(
        [ForwardInput(cache=cache, state=new_state(0, sampler))]
    )
    same(output.state, wanted.state)
    assert mine.max_steps > before + 3


def test_passes_that_others_drive_agree(mine: CudaBackend, want: ReferenceBackend) -> None:
    """Segments of different lengths, commits and canvases, after a shared prefix."""
    found = []
    for backend in (mine, want):
        root = small.cache(backend.model, 7)
        forks = [root.fork(12) for _ in range(3)]
        segments = [
            Segment(forks[0], 5, commit=True),
            Segment(forks[1], 3, commit=False),
            Segment(forks[2], 1, commit=True),
        ]
        batch = ForwardBatch(segments)
        with torch.inference_mode():
            found.append(backend.encode(torch.arange(9), batch))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_a_pass_that_fails_late_can_be_run_again(
    model: Gemma, want: ReferenceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canvas in the buffers has moved on by then: it is loaded anew."""
    mine, sampler = CudaBackend(model), Sampler(max_denoising_steps=STEPS)
    caches = [small.cache(model, 5), small.cache(model, 5)]
    held = [new_state(0, sampler), new_state(0, sampler)]
    for number in range(STEPS):
        if number == 1:
            with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"):

                def fails(self: object, stats: object, *, sparse: bool) -> None:
                    raise RuntimeError("no memory")

                patched.setattr(DenoisePass, "soft_embed", fails)
                mine.run([ForwardInput(cache=caches[0], state=held[0])])
        for side, backend in enumerate((mine, want)):
            (output,) = backend.run([ForwardInput(cache=caches[side], state=held[side])])
            assert output.state is not None
            held[side] = output.state
        same(held[0], held[1])


def test_encoded_texts_give_the_reference_s_hidden_states(
    mine: CudaBackend, want: ReferenceBackend
) -> None:
    """Texts of several segments and of one token, by the pass that is captured."""
    found = []
    for backend in (mine, want):
        root = small.cache(backend.model, 7)
        segments = [Segment(root.fork(12), n, commit=True) for n in (9, 1, 4)]
        batch = ForwardBatch(segments)
        with torch.inference_mode():
            found.append(backend.encode(torch.arange(14), batch))
        batch.close()
        found.append(torch.cat([s.cache.read(1, 7, s.cache.length)[-1].k_SMH for s in segments]))
    torch.testing.assert_close(found[0], found[2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], found[3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["canvas", "draw", "chunk"])
def test_pictures_are_committed_as_by_the_reference(
    mine: CudaBackend, want: ReferenceBackend, kind: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    width = mine.model.config.hidden_size
    features_SD = torch.randn(3, width, generator=generator).to(mine.model.embed_tokens.weight)
    images = (ImageRows(2, features_SD),)
    outputs, caches = [], []
    for backend in (mine, want):
        caches.append(small.cache(backend.model, 5))
        item = ForwardInput(cache=caches[-1], tokens=(5, 6, 7, 7, 7, 8, 9), images=images)
        if kind == "canvas":
            item = replace(item, state=new_state(0, Sampler(max_denoising_steps=2)))
        elif kind == "draw":
            item = replace(item, draw=TokenDraw())
        plain = ForwardInput(cache=small.cache(backend.model, 4), tokens=(3, 4))
        outputs.append(backend.run([plain, item])[1])
    assert caches[0].length == caches[1].length == 12
    if kind == "canvas":
        same(outputs[0].state, outputs[1].state)
    elif kind == "draw":
        assert outputs[0].token == outputs[1].token
    for ours, theirs in zip(caches[0].buffers, caches[1].buffers, strict=True):
        first = max(ours.base, theirs.base)
        a, b = ours.read(first, 12), theirs.read(first, 12)
        torch.testing.assert_close(a.k_SMH, b.k_SMH, atol=3e-3, rtol=1e-3)
