"""The sampler's update by kernel: canvases, flags and soft embeddings of the definition."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dgemma.backends.base import ForwardInput
from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.cuda.graphs import GraphBuffers
from dgemma.backends.cuda.kernels import sampler_update as kernel
from dgemma.backends.cuda.kernels import soft_embed_topk as topk
from dgemma.backends.cuda.kernels.soft_embed_topk import Candidates, SoftEmbedOut
from dgemma.backends.cuda.passes import DenoisePass, StepStats
from dgemma.backends.reference import ReferenceBackend
from dgemma.diffusion.canvas import Canvas, Pins
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.rules import Confidence
from dgemma.diffusion.sampler import EntropyBound, Rule, Sampler, advance
from dgemma.model.gemma import Gemma, TokenTable
from tests.kernels import small

STEPS, GROUPS = 3, 5
COMPARED = ("tokens_L", "accepted_L", "guess_L", "entropy_L", "converged", "stable_steps")


@pytest.fixture(scope="module")
def model() -> Gemma:
    return small.model()


@dataclass(frozen=True)
class Case:
    """A canvas in the middle of its steps, and what the next one says of it."""

    canvas: Canvas
    stats: PositionStats
    candidates: Candidates
    noise_NL: Tensor
    rule: EntropyBound

    def moved(self) -> Canvas:
        """Return the canvas after the step, by definition."""
        noise_L = self.noise_NL[self.canvas.num_steps + 1]
        return advance(self.canvas, self.stats, noise_L, self.rule)


def drawn(seed: int, length: int, rule: EntropyBound) -> Case:
    """Draw a case. Entropies are multiples of a power of two, so that every sum is exact."""
    of = torch.Generator().manual_seed(seed)

    def integers(most: int, *size: int) -> Tensor:
        return torch.randint(most, size or (length,), generator=of)

    pinned_L = integers(10) < (0, 1, 3, 10)[seed % 4]
    guess_L = integers(96)
    canvas = Canvas(
        tokens_L=integers(96),
        pinned_L=pinned_L,
        accepted_L=integers(2) > 0,
        guess_L=guess_L,
        entropy_L=torch.full((length,), 9.0),
        soft_LD=None,
        converged=torch.tensor(seed % 2 == 0),
        stable_steps=torch.tensor(seed % 3),
        # Positions without self-conditioning are open as others are.
        reopened_L=~pinned_L & (integers(8) < 2) if seed % 3 == 0 else None,
        num_steps=seed % STEPS,
    )
    top_L = guess_L.clone()
    if seed % 2:
        top_L[integers(length, 1)] += 1
    stats = PositionStats(
        draw_T=integers(96),
        top_T=top_L,
        entropy_T=integers(2 + seed % 30).float() * 2.0 ** -(6 + seed % 9),
        top_p_T=torch.ones(length),
        current_p_T=torch.ones(length),
    )
    counts_LG = integers(1 + seed % 50, length, GROUPS).int()
    candidates = Candidates(counts_LG, torch.full((length, GROUPS), 0.2))
    if seed % 5 == 0:
        candidates.mass_TG[integers(length, 1), 2] -= 0.003
    return Case(canvas, stats, candidates, integers(96, STEPS + 1, length), rule)


def updated(model: Gemma, cases: list[Case]) -> tuple[list[Canvas], list[list[bool]]]:
    """Return canvases and flags that one launch makes of these, in entries of any order.

    An entry that is not named stays as it is.
    """
    length = cases[0].canvas.length
    size = {"num_canvases": len(cases) + 1, "num_commits": 0, "max_steps": STEPS}
    buffers = GraphBuffers(model, length=length, **size)
    entries, idle = [*range(len(cases), 0, -1)], [0, len(cases) + 1]
    for entry, case in zip(entries, cases, strict=True):
        buffers.write_state(entry, case.canvas)
        buffers.noise_ENL[entry].copy_(case.noise_NL)
        rule = case.rule
        numbers = (rule.entropy_bound, rule.confidence_threshold, rule.stability_threshold)
        buffers.rule_E3[entry].copy_(torch.tensor(numbers))
        buffers.step_E[entry] = case.canvas.num_steps
    buffers.state_EB[idle] = 7
    names = ("draw_T", "top_T", "entropy_T")
    stats = {name: torch.cat([getattr(case.stats, name) for case in cases]) for name in names}
    candidates = Candidates(
        torch.cat([case.candidates.count_TG for case in cases]),
        torch.cat([case.candidates.mass_TG for case in cases]),
    )
    entry_C = torch.tensor(entries, dtype=torch.int32)
    kernel.update(buffers.canvas_states(), kernel.Stats(**stats, candidates=candidates), entry_C)
    assert (buffers.state_EB[idle] == 7).all()
    assert buffers.step_E[entries].tolist() == [case.canvas.num_steps + 1 for case in cases]
    states_CB = buffers.state_EB[entries]
    canvases = [buffers.canvas(s, c.canvas) for s, c in zip(states_CB, cases, strict=True)]
    return canvases, buffers.flags_E2[entries].tolist()


def same(got: Canvas, want: Canvas, but: str = "") -> None:
    for name in COMPARED:
        if name != but:
            assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.num_steps == want.num_steps


def test_the_kernel_moves_canvases_as_the_rule_does(model: Gemma) -> None:
    """Sixteen in one launch, each by its own numbers."""
    seen = {"converged": set[bool](), "sparse": set[bool](), "kept": set[int]()}
    for first, length in enumerate((1, 4, 9, 32, 50)):
        cases = []
        for seed in range(16 * first, 16 * first + 16):
            unit = 2.0 ** -(6 + seed % 9)
            rule = EntropyBound(
                entropy_bound=unit * (1 + 7 * (seed % 11)),  # sums hit it exactly
                confidence_threshold=unit * (1 + seed % 7),
                stability_threshold=seed % 4,
            )
            cases.append(drawn(seed, length, rule))
        canvases, flags = updated(model, cases)
        for got, flag, case in zip(canvases, flags, cases, strict=True):
            want = case.moved()
            same(got, want)
            assert flag == [bool(want.converged), bool(case.candidates.covers_mass())]
            seen["converged"].add(flag[0])
            seen["sparse"].add(flag[1])
            seen["kept"].add(int(want.accepted_L.sum()))
    assert seen["converged"] == seen["sparse"] == {True, False}
    assert len(seen["kept"]) > 10


def test_entropies_as_they_come_are_added_up_alike(model: Gemma) -> None:
    cases = []
    for seed in range(12):
        case = drawn(seed, 64, EntropyBound())
        of = torch.Generator().manual_seed(seed)
        nats_L = torch.randn(64, generator=of).mul(3).sub(6).exp()
        cases.append(replace(case, stats=replace(case.stats, entropy_T=nats_L)))
    for got, case in zip(updated(model, cases)[0], cases, strict=True):
        want = case.moved()
        same(got, want)
        assert bool(case.canvas.pinned_L.all()) or 0 < int(want.accepted_L.sum()) < 64


@pytest.mark.parametrize("at", [0, 5])
def test_a_position_that_is_no_number_is_never_decided_nor_converged(model: Gemma, at: int) -> None:
    case = drawn(4, 9, EntropyBound(stability_threshold=0))
    entropy_L = torch.zeros(9)
    entropy_L[at] = float("nan")
    canvas = replace(case.canvas, pinned_L=torch.zeros(9, dtype=torch.bool))
    case = replace(case, canvas=canvas, stats=replace(case.stats, entropy_T=entropy_L))
    (got,), ((converged, _),) = updated(model, [case])
    assert not got.converged and not converged
    assert not got.accepted_L[at] and int(got.accepted_L.sum()) == 8
    same(got, case.moved(), but="entropy_L")
    assert got.entropy_L.isnan().tolist() == entropy_L.isnan().tolist()


def test_of_equal_entropies_the_first_position_is_decided(model: Gemma) -> None:
    case = drawn(0, 50, EntropyBound(entropy_bound=0.5))
    case = replace(case, stats=replace(case.stats, entropy_T=torch.full((50,), 0.5)))
    for made in (updated(model, [case])[0][0], case.moved()):
        assert made.accepted_L.nonzero().flatten().tolist() == [0, 1]


def test_longer_canvases_are_compared_a_part_at_a_time(
    model: Gemma, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "PAIRS", 128)
    case = drawn(6, 50, EntropyBound(entropy_bound=0.05))
    same(updated(model, [case])[0][0], case.moved())


def test_padding_steps_without_end(model: Gemma) -> None:
    """Its noise is not read past the end, whatever its number of steps."""
    case = drawn(1, 4, EntropyBound())
    late = replace(case, canvas=replace(case.canvas, num_steps=STEPS - 1))
    buffers = GraphBuffers(model, length=4, num_canvases=1, num_commits=0, max_steps=STEPS)
    buffers.step_E[0] = 1000
    buffers.write_state(0, case.canvas)
    buffers.noise_ENL[0].copy_(case.noise_NL)
    given = {name: getattr(case.stats, name) for name in ("draw_T", "top_T", "entropy_T")}
    stats = kernel.Stats(**given, candidates=case.candidates)
    kernel.update(buffers.canvas_states(), stats, torch.zeros(1, dtype=torch.int32))
    noise_L = buffers.views["tokens_L"][0]
    is_noise_L = ~buffers.views["accepted_L"][0].bool()
    assert torch.equal(noise_L[is_noise_L], late.noise_NL[STEPS][is_noise_L])
    assert buffers.step_E[0] <= STEPS


@pytest.mark.parametrize("way", ["sparse", "dense"])
def test_soft_embeddings_are_scaled_and_pinned_positions_have_their_own_token(way: str) -> None:
    """Of two canvases in an order of their own, one with a position that takes none."""
    of = torch.Generator().manual_seed(0)
    table = TokenTable(96, 300).half()
    table.weight.data.copy_(torch.randn(96, 300, generator=of))
    tokens_EL = torch.tensor([[90, 91, 92], [7, 9, 11], [1, 2, 3]])
    pinned_EL = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 2]], dtype=torch.uint8)
    entry_I = torch.tensor([2, 1], dtype=torch.int32)
    p_LV = torch.zeros(6, 96)
    p_LV[:, [3, 50]] = torch.tensor([0.75, 0.25])
    mean_LD = p_LV.half() @ table.weight
    soft_ELD = torch.full((3, 3, 300), 5.0, dtype=torch.float16)
    # Rows of states lie further apart than they are long.
    wide = [torch.cat([x, torch.full_like(x, 88)], 1)[:, :3] for x in (tokens_EL, pinned_EL)]
    out = SoftEmbedOut(soft_ELD, *wide, entry_I, table.scale)
    with torch.inference_mode():
        if way == "sparse":
            ids = torch.tensor([3, 50]).int().expand(6, 2).contiguous()
            p = torch.tensor([0.75, 0.25]).expand(6, 2).contiguous()
            topk.mean_of_candidates(table.weight, ids, p, torch.full((6,), 2).int(), out)
        else:
            topk.store_mean(table.weight, mean_LD, out)
        own_ELD = table(tokens_EL)
    want_ELD = torch.where(pinned_EL[..., None] == 1, own_ELD, mean_LD[0] * table.scale)
    want_ELD = want_ELD.masked_fill(pinned_EL[..., None] == 2, 0.0)
    want_ELD[0] = 5.0  # not named
    torch.testing.assert_close(soft_ELD, want_ELD, atol=0.02, rtol=2e-3)
    assert torch.equal(soft_ELD[1, 1], want_ELD[1, 1])
    assert not soft_ELD[2, 2].any()


@pytest.mark.usefixtures("small_configs")
@pytest.mark.parametrize("rule", [Confidence(), EntropyBound(entropy_bound=3.0)])
def test_where_few_tokens_do_not_hold_a_position_the_whole_vocabulary_is_taken(
    model: Gemma, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rule that the kernel knows, and with another."""
    monkeypatch.setattr(kernel, "MAX_CANDIDATES", -1)
    is_sparse, whole = list[bool](), DenoisePass.soft_embed

    def watched(denoise: DenoisePass, stats: StepStats, *, sparse: bool) -> None:
        is_sparse.append(sparse)
        whole(denoise, stats, sparse=sparse)

    monkeypatch.setattr(DenoisePass, "soft_embed", watched)
    state = small.new_state(Sampler(max_denoising_steps=2, rule=rule), 0, Pins((1,), (5,)))
    mine, want = CudaBackend(model), ReferenceBackend(model)
    held = [state, state]
    caches = [small.cache(model, 5) for _ in held]
    for number in range(2):
        for side, backend in enumerate((mine, want)):
            (output,) = backend.run([ForwardInput(cache=caches[side], state=held[side])])
            assert output.state is not None
            held[side] = output.state
        a, b = (state.canvas for state in held)
        assert torch.equal(a.tokens_L, b.tokens_L)
        assert torch.equal(a.accepted_L, b.accepted_L)
        if number == 0:  # after the last step nothing is conditioned
            assert a.soft_LD is not None and b.soft_LD is not None
            torch.testing.assert_close(a.soft_LD, b.soft_LD, atol=1e-4, rtol=1e-4)
    assert is_sparse == [False]
