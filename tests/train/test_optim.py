"""Optimizers: Muon, master weights, captured steps and schedules."""

import math
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dgemma.errors import ConfigError
from dgemma.train import optim
from dgemma.train.build import initialize
from dgemma.train.optim import (
    MixedPrecisionOptimizer,
    Muon,
    OptimSettings,
    Schedule,
    StepFunction,
    can_capture,
    is_muon_weight,
    orthogonalize,
)
from tests.tiny import TINY


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- Newton and Schulz


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 7), (40, 16)])
def test_singular_values_are_brought_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonalize(draw(3, *shape)))
    # The iteration is tuned for speed: it stops in a band around one. Values that are tiny beside
    # the greatest need more rounds.
    assert values.max() < 1.3 and values.median() > 0.6


def test_matrices_go_through_together_as_they_would_alone() -> None:
    stack = torch.cat([draw(2, 6, 9), 100 * draw(2, 6, 9, seed=1)])
    together = orthogonalize(stack)
    for matrix, found in zip(stack, together, strict=True):
        assert torch.allclose(orthogonalize(matrix[None])[0], found, atol=1e-5)


def test_directions_are_kept() -> None:
    matrix = draw(6, 6)
    left, _, right = torch.linalg.svd(matrix)
    rotated = left.T @ orthogonalize(matrix[None])[0] @ right.T
    off = rotated - torch.diag(rotated.diagonal())
    assert off.abs().max() < 1e-4


# --- Muon


def moved(make: Any, weights: list[Tensor], steps: int = 4) -> list[Tensor]:
    """Weights after some steps of an optimizer, with the same gradients for all."""
    own = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = make(own)
    for step in range(steps):
        for number, weight in enumerate(own):
            weight.grad = draw(*weight.shape, seed=100 * step + number)
        optimizer.step()
    return [weight.detach() for weight in own]


def test_it_agrees_with_torchs_own_on_matrices() -> None:
    """Torch's iterates in bfloat16, this one on a CPU in float32."""
    weights = [draw(12, 30), draw(30, 12, seed=1), draw(16, 16, seed=2)]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    mine = moved(lambda own: Muon(own, **settings), weights)
    theirs = moved(lambda own: torch.optim.Muon(own, **settings), weights)
    for before, a, b in zip(weights, mine, theirs, strict=True):
        assert (a - b).norm() < 0.02 * (a - before).norm()


def test_a_stack_of_matrices_moves_as_each_of_them() -> None:
    stack = draw(3, 5, 8)

    def as_matrices(own: list[Tensor]) -> Any:
        return Muon(own, lr=0.1)

    whole = nn.Parameter(stack.clone())
    whole.grad = draw(3, 5, 8, seed=1)
    Muon([whole], lr=0.1).step()
    for number, matrix in enumerate(stack):
        alone = nn.Parameter(matrix.clone())
        alone.grad = whole.grad[number].clone()
        as_matrices([alone]).step()
        assert torch.allclose(whole[number], alone, atol=1e-5)


def test_large_weights_are_taken_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [draw(5, 8, seed=i) for i in range(4)] + [draw(3, 5, 8, seed=9)]
    together = moved(lambda own: Muon(own, lr=0.1), weights)
    counts = []
    update = Muon._update
    monkeypatch.setattr(optim, "MAX_STACKED_ELEMENTS", 100)
    monkeypatch.setattr(
        Muon,
        "_update",
        lambda self, some, group: counts.append(len(some)) or update(self, some, group),
    )
    for a, b in zip(together, moved(lambda own: Muon(own, lr=0.1), weights, steps=4), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert counts == [2, 2, 1] * 4


def test_tall_matrices_move_further() -> None:
    """By the root of rows over columns, so that outputs change alike."""
    wide, tall = nn.Parameter(torch.zeros(4, 16)), nn.Parameter(torch.zeros(16, 4))
    wide.grad = draw(4, 16)
    tall.grad = wide.grad.T.clone()
    Muon([wide, tall], lr=1.0).step()
    assert torch.allclose(tall.T, 2 * wide, atol=1e-4)


def test_muon_takes_hidden_matrices_alone() -> None:
    model = initialize(TINY, 0)
    taken = {name for name, weight in model.named_parameters() if is_muon_weight(name, weight)}
    assert "layers.0.experts.gate_up_proj" in taken and "layers.1.self_attn.q_proj.weight" in taken
    assert "self_conditioning.up_proj.weight" in taken
    assert not any("norm" in name or "router" in name or "embed" in name for name in taken)
    optimizer = MixedPrecisionOptimizer(model, OptimSettings())
    kinds = [type(optimizer) for optimizer in optimizer.optimizers]
    assert kinds == [Muon, torch.optim.AdamW]
    on_device = [len(group["params"]) for o in optimizer.optimizers for group in o.param_groups]
    assert on_device == [len(taken), len(optimizer.names) - len(taken)]
    only_adam = MixedPrecisionOptimizer(model, OptimSettings(muon=False))
    assert [type(optimizer) for optimizer in only_adam.optimizers] == [torch.optim.AdamW]


# --- master weights


def small_model(dtype: torch.dtype) -> nn.Module:
    module = nn.Linear(4, 3).to(dtype)
    with torch.no_grad():
        for weight in module.parameters():
            weight.fill_(1.0)
    return module


def test_updates_too_small_for_bfloat16_add_up() -> None:
    module = small_model(torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(module, OptimSettings(adam_lr=1e-4, muon=False, clip=1e9))
    for _ in range(100):
        for weight in module.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step(1.0)
    for master, weight in zip(optimizer.weights, module.parameters(), strict=True):
        assert master.dtype == torch.float32 and weight.dtype == torch.bfloat16
        # A bfloat16 near 1 has steps of 2**-8: each update alone would vanish.
        assert torch.allclose(master, torch.tensor(0.99), atol=1e-4)
        assert torch.equal(weight, master.bfloat16()) and (weight < 1).all()


def test_a_float32_model_is_its_own_master_copy() -> None:
    module = small_model(torch.float32)
    optimizer = MixedPrecisionOptimizer(module, OptimSettings(muon=False))
    assert all(a is b for a, b in zip(optimizer.weights, module.parameters(), strict=True))


def test_master_weights_keep_what_rounding_the_model_takes() -> None:
    module = nn.Linear(4, 3)
    exact = [weight.detach().clone() for weight in module.parameters()]
    optimizer = MixedPrecisionOptimizer(module, OptimSettings(), torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.weights, exact, strict=True))
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}


def test_the_norm_is_reported_before_it_is_clipped() -> None:
    module = small_model(torch.float32)
    optimizer = MixedPrecisionOptimizer(module, OptimSettings(adam_lr=0.1, muon=False, clip=1.0))
    for weight in module.parameters():
        weight.grad = torch.full_like(weight, 3.0)
    assert optimizer.step(1.0).item() == pytest.approx(3 * math.sqrt(15), rel=1e-5)
    assert all(weight.grad is None for weight in module.parameters())


def test_a_saved_state_is_taken_up_to_the_last_bit() -> None:
    def train(optimizer: MixedPrecisionOptimizer, steps: range) -> None:
        for step in steps:
            for number, weight in enumerate(optimizer.model_weights):
                weight.grad = draw(*weight.shape, seed=50 * step + number).to(weight.dtype)
            optimizer.step(0.5)

    for dtype in (torch.float32, torch.bfloat16):
        settings = OptimSettings(weight_decay=0.1)
        through, broken, again = (
            MixedPrecisionOptimizer(initialize(TINY, 0).to(dtype), settings) for _ in range(3)
        )
        train(through, range(6))
        train(broken, range(3))
        again.restore(broken.state())
        train(again, range(3, 6))
        assert all(torch.equal(a, b) for a, b in zip(through.weights, again.weights, strict=True))
        assert all(
            torch.equal(a, b)
            for a, b in zip(through.model_weights, again.model_weights, strict=True)
        )


def test_a_state_of_other_weights_is_refused() -> None:
    state = MixedPrecisionOptimizer(nn.Linear(4, 3), OptimSettings()).state()
    with pytest.raises(ConfigError, match="of other weights than the recipe trains"):
        MixedPrecisionOptimizer(nn.Linear(4, 3, bias=False), OptimSettings()).restore(state)


# --- a step that is captured


class Tape(TorchDispatchMode):
    """Records every operation; `play` does them again, on the memory they had."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "the host waits for a number"
        out = func(*args, **(kwargs or {}))
        self.recorded.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        for func, args, kwargs, old in self.recorded:
            new = func(*args, **kwargs)
            for a, b in zip(tree_leaves(old), tree_leaves(new), strict=True):
                if isinstance(a, Tensor) and a.data_ptr() != b.data_ptr():
                    a.copy_(b)


def taped(work: StepFunction) -> StepFunction:
    """As a CUDA graph: it knows nothing but the memory that it was captured on."""
    tape, calls = Tape(), []
    with tape:
        out = work()

    def again() -> Tensor:
        calls.append(1)
        if len(calls) > 1:  # the first was done while it was recorded
            tape.play()
        return out.clone()

    return again


def trained(optimizer: MixedPrecisionOptimizer, steps: range) -> list[Tensor]:
    """The norms of some steps, at rates that change."""
    norms = []
    for step in steps:
        for number, weight in enumerate(optimizer.model_weights):
            weight.grad = draw(*weight.shape, seed=50 * step + number).to(weight.dtype)
        norms.append(optimizer.step(1.0 / (1 + step)))
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_step_is_the_plain_one(dtype: torch.dtype) -> None:
    settings = OptimSettings(weight_decay=0.1)
    plain = MixedPrecisionOptimizer(initialize(TINY, 0), settings, dtype)
    taken = MixedPrecisionOptimizer(initialize(TINY, 0), settings, dtype, taped)
    norms = [torch.stack(trained(one, range(8))) for one in (plain, taken)]
    assert taken.captured is not None and taken.captured.is_captured and plain.captured is None
    assert torch.allclose(*norms) and len(set(norms[1].tolist())) == 8
    for a, b in zip(plain.weights, taken.weights, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert all(weight.grad is None for weight in (*taken.model_weights, *taken.weights))
    for rounded, weight in zip(taken.model_weights, taken.weights, strict=True):
        assert torch.equal(rounded, weight.to(dtype))


def test_a_captured_run_is_saved_and_taken_up_as_a_plain_one_is() -> None:
    make = partial(MixedPrecisionOptimizer, settings=OptimSettings(), dtype=torch.bfloat16)
    through, broken, again = (make(initialize(TINY, 0), capture=taped) for _ in range(3))
    trained(through, range(12))
    trained(broken, range(6))
    state = broken.state()
    trained(again, range(5))  # captured already, on memory that the state replaces
    again.restore(deepcopy(state))
    trained(again, range(6, 12))
    assert again.captured is not None and again.captured.is_captured
    assert all(torch.equal(a, b) for a, b in zip(through.weights, again.weights, strict=True))
    plain = make(initialize(TINY, 0))
    plain.restore(state)
    trained(plain, range(6, 12))
    for a, b in zip(through.weights, plain.weights, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    back = make(initialize(TINY, 0), capture=taped)
    back.restore(plain.state())
    trained(back, range(12, 18))
    groups = [group for one in plain.state()["optimizers"] for group in one["param_groups"]]
    assert [type(group["lr"]) for group in groups] == [float, float]


def test_what_cannot_be_captured_is_done_plainly() -> None:
    def refuse(work: StepFunction) -> StepFunction:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    optimizer = MixedPrecisionOptimizer(
        initialize(TINY, 0), OptimSettings(), torch.bfloat16, refuse
    )
    taken = MixedPrecisionOptimizer(initialize(TINY, 0), OptimSettings(), torch.bfloat16, taped)
    with pytest.warns(
        UserWarning, match=r"not be captured as a CUDA graph \(operation not permitted\)"
    ):
        trained(optimizer, range(6))
    trained(taken, range(6))
    assert optimizer.captured is not None and not optimizer.captured.is_captured
    assert all(torch.equal(a, b) for a, b in zip(optimizer.weights, taken.weights, strict=True))


def test_only_small_models_on_a_gpu_are_captured() -> None:
    assert not can_capture([torch.zeros(2)])
    assert MixedPrecisionOptimizer(small_model(torch.float32), OptimSettings()).captured is None


# --- schedules


def test_the_rate_rises_holds_and_falls() -> None:
    schedule = Schedule(steps=100, warmup=10, hold=0.4)
    scales = [schedule.scale(step) for step in range(100)]
    assert scales[0] == pytest.approx(0.1) and scales[4] == pytest.approx(0.5)
    assert set(scales[9:41]) == {1.0}
    assert scales[70] == pytest.approx(0.5) and scales[99] == pytest.approx(1 / 60)
    assert all(a >= b for a, b in pairwise(scales[40:]))


def test_a_cosine_falls_slowly_at_both_ends_and_not_below_the_floor() -> None:
    schedule = Schedule(steps=100, warmup=0, hold=0.0, floor=0.1, shape="cosine")
    scales = [schedule.scale(step) for step in range(101)]
    assert scales[0] == 1.0 and scales[50] == pytest.approx(0.55) and scales[100] == 0.1
    assert scales[0] - scales[10] < scales[45] - scales[55] > scales[90] - scales[100]


def test_a_run_shorter_than_its_warm_up_only_rises() -> None:
    schedule = Schedule(steps=5, warmup=10)
    assert [schedule.scale(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    "given", [{"steps": 0}, {"steps": 5, "warmup": -1}, {"steps": 5, "hold": 2.0}]
)
def test_an_impossible_schedule_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"\[schedule\]"):
        Schedule(**given)
