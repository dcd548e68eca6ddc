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
from recipes.nano_reshape import Shape, main, reshaped
from tests.tiny import TINY
from tests.train.runs import mixture, save_random, shaken

INNER, DENSE = TINY.moe_intermediate_size, TINY.intermediate_size
FEWER = INNER // 2
ROOM = TINY.num_experts * (INNER - FEWER)


def made_of(model: Gemma, shape: Shape) -> Gemma:
    return reshaped(Checkpoint(model=model, generation=GenerationConfig()), shape).model


def wide(model: Gemma, dense: int, inner: int) -> Gemma:
    return made_of(model, Shape(dense=dense, inner=inner))


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


def quiet(model: Gemma, dense: int) -> Gemma:
    """With all but so many neurons of each dense block silenced."""
    for block in (*(layer.mlp for layer in model.layers), model.self_conditioning):
        parts = [part.weight.data for part in (block.gate_proj, block.up_proj, block.down_proj)]
        says = [
            float(parts[0][n].norm() * parts[1][n].norm() * parts[2][:, n].norm())
            for n in range(DENSE)
        ]
        for neuron in sorted(range(DENSE), key=lambda n: says[n])[: DENSE - dense]:
            parts[2][:, neuron] = 0
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


def test_a_narrower_model_is_the_old_one_without_its_quietest_neurons() -> None:
    want, found = quiet(shaken(), DENSE - 5), made_of(shaken(), Shape(dense=DENSE - 5))
    assert found.config == replace(TINY, intermediate_size=DENSE - 5)
    assert torch.allclose(hidden(found), hidden(want), atol=1e-5)
    assert not torch.allclose(hidden(found), hidden(shaken()), atol=1e-3)


def test_more_heads_of_keys_and_values_say_the_same() -> None:
    found = made_of(shaken(), Shape(kv_heads=4))
    want = replace(TINY, num_key_value_heads=4, num_global_key_value_heads=4)
    assert found.config == want
    assert torch.allclose(hidden(found), hidden(shaken()), atol=1e-5)


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


@pytest.mark.parametrize(("dense", "inner"), [(DENSE, INNER + 1), (DENSE + 1, INNER), (999, 1)])
def test_shapes_that_cannot_be_are_refused(dense: int, inner: int) -> None:
    with pytest.raises(UsageError, match=f"{dense} neurons in the dense block and {inner} in each"):
        wide(shaken(), dense, inner)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(UsageError, match="1 heads of keys and values; layer 0 has 2"):
        made_of(shaken(), Shape(kv_heads=1))


def test_the_command_writes_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save_random(tmp_path / "old")
    config = load_model(old).model.config
    dense, inner = config.intermediate_size + 1, config.moe_intermediate_size - 1
    options = ["--dense", str(dense), "--experts", str(inner)]
    monkeypatch.setattr("sys.argv", ["reshape", str(old), str(tmp_path / "new"), *options])
    main()
    made = load_model(tmp_path / "new").model
    want = replace(config, intermediate_size=dense, moe_intermediate_size=inner)
    assert replace(made.config, dtype=want.dtype) == want
