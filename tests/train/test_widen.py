"""A trained model in another shape."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dgemma.config import GenerationConfig
from dgemma.errors import UsageError
from dgemma.model import Gemma
from dgemma.train.context import Batch, PackedContext
from dgemma.train.objective import Objective
from dgemma.train.weighting import Weighting
from dgemma.weights.load import Checkpoint, load_model
from recipes.nano_widen import main, widened
from tests.tiny import TINY
from tests.train.runs import mixture, save_random, shaken

INNER, DENSE = TINY.moe_intermediate_size, TINY.intermediate_size
FEWER = INNER // 2
ROOM = TINY.num_experts * (INNER - FEWER)


def wide(model: Gemma, dense: int, inner: int) -> Gemma:
    return widened(Checkpoint(model=model, generation=GenerationConfig()), dense, inner).model


def hidden(model: Gemma) -> Tensor:
    """Of canvases and texts, and of canvases that are told something."""
    batch = Batch.of(torch.from_numpy(mixture().batch(0)), "cpu")
    told_TD = torch.randn(
        batch.token.numel(), TINY.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        return Objective(model, Weighting())._hidden(batch, told_TD, PackedContext(TINY, batch))


def pruned(model: Gemma) -> Gemma:
    """With the weaker half of each expert's neurons silenced, one after the other."""
    for layer in model.layers:
        gate_up, down = layer.experts.gate_up_proj.data, layer.experts.down_proj.data
        for expert in range(TINY.num_experts):
            says = [
                float(gate_up[expert, n].norm())
                * float(gate_up[expert, INNER + n].norm())
                * float(down[expert, :, n].norm())
                for n in range(INNER)
            ]
            for neuron in sorted(range(INNER), key=lambda n: says[n])[: INNER - FEWER]:
                down[expert, :, neuron] = 0
    return model


def test_a_wider_model_is_the_old_one_with_pruned_experts() -> None:
    want, found = pruned(shaken()), wide(shaken(), DENSE + ROOM - 3, FEWER)
    config = found.config
    assert (config.intermediate_size, config.moe_intermediate_size) == (DENSE + ROOM - 3, FEWER)
    assert torch.allclose(hidden(found), hidden(want), atol=1e-5)
    assert not torch.allclose(hidden(found), hidden(shaken()), atol=1e-3)


def test_nothing_changes_where_nothing_is_asked_for() -> None:
    # But for the order in which neurons are added up.
    assert torch.allclose(hidden(wide(shaken(), DENSE, INNER)), hidden(shaken()), atol=1e-5)


def test_new_neurons_read_what_the_freed_ones_did() -> None:
    model = shaken()
    layer, made = model.layers[0], wide(shaken(), DENSE + ROOM, FEWER).layers[0]
    x_TD = torch.randn(5, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old = layer.pre_feedforward_layernorm_2(x_TD) @ layer.experts.gate_up_proj.mT
        new = made.mlp.gate_proj(made.pre_feedforward_layernorm(x_TD))[:, DENSE:]
    # All that experts read of the stream, by gate: each new neuron is one of them.
    every = old[:, :, :INNER].transpose(0, 1).flatten(1)
    apart = (new[:, :, None] - every[:, None, :]).abs().amax(0)
    assert apart.amin(1).max() < 1e-4
    assert len(set(apart.argmin(1).tolist())) == ROOM


@pytest.mark.parametrize(("dense", "inner"), [(DENSE, INNER + 1), (DENSE - 1, INNER), (999, 1)])
def test_shapes_that_cannot_be_are_refused(dense: int, inner: int) -> None:
    with pytest.raises(UsageError, match=f"{dense} neurons in the dense block and {inner} in each"):
        wide(shaken(), dense, inner)


def test_the_command_writes_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save_random(tmp_path / "old")
    config = load_model(old).model.config
    dense, inner = config.intermediate_size + 1, config.moe_intermediate_size - 1
    options = ["--dense", str(dense), "--experts", str(inner)]
    monkeypatch.setattr("sys.argv", ["widen", str(old), str(tmp_path / "new"), *options])
    main()
    made = load_model(tmp_path / "new").model
    want = replace(config, intermediate_size=dense, moe_intermediate_size=inner)
    assert replace(made.config, dtype=want.dtype) == want
