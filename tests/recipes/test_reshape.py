"""Deeper checkpoints and averages of two."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.model.gemma import Gemma
from dgemma.train.masks import PackedContext
from dgemma.train.objective import LossSettings, Objective
from dgemma.train.packing import Batch
from dgemma.weights.load import Checkpoint, load_model, random_model
from recipes.nano.reshape import COPY_SCALE, OUTPUT_NORMS, average, deepen, main
from tests.tiny import TINY
from tests.train.runs import mixture, save_random, shaken


def hidden(model: Gemma) -> Tensor:
    """Return the states of canvases and texts, with self-conditioning."""
    batch = Batch.of(torch.from_numpy(mixture().batch(0)), "cpu")
    self_cond_TD = torch.randn(
        batch.token.numel(), TINY.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        context = PackedContext(model.config, batch)
        objective = Objective(model, LossSettings())
        return objective.run_layers(objective.embed(batch, self_cond_TD), context)[0]


def test_the_last_layers_are_repeated_scaled_down_first() -> None:
    model = shaken()
    model.layers[1].layer_scalar.fill_(0.7)
    deeper = deepen(Checkpoint(model=model), 3).model
    assert deeper.config.layer_types == (*TINY.layer_types, TINY.layer_types[-1])
    copy = deeper.layers[1]
    assert copy.layer_scalar == 1
    assert deeper.layers[2].layer_scalar == model.layers[1].layer_scalar
    old = dict(model.layers[1].named_parameters())
    for name, weight in copy.named_parameters():
        scale = COPY_SCALE if name in OUTPUT_NORMS else 1
        assert torch.equal(weight, old[name] * scale), name
        assert torch.equal(deeper.layers[2].get_parameter(name), old[name])
    # Without the copy's output, it is the old model.
    for norm in (copy.post_attention_layernorm, copy.post_feedforward_layernorm):
        norm.weight.data.zero_()
    assert torch.allclose(hidden(deeper), hidden(model), atol=1e-5)


def test_nothing_changes_for_the_same_number_of_layers() -> None:
    model = shaken()
    assert torch.equal(hidden(deepen(Checkpoint(model=model), 2).model), hidden(model))


@pytest.mark.parametrize("layers", [1, 5])
def test_numbers_of_layers_that_cannot_be_are_refused(layers: int) -> None:
    with pytest.raises(UsageError, match=f"{layers} layers; there are 2.*give 2 to 4"):
        deepen(Checkpoint(model=shaken()), layers)


def test_every_weight_is_interpolated() -> None:
    first, second = (Checkpoint(model=random_model(TINY, seed=seed)) for seed in (0, 1))
    mixed = average(first, second, 0.25).model.state_dict()
    for name, weight in first.model.state_dict().items():
        expected = 0.75 * weight + 0.25 * second.model.state_dict()[name]
        torch.testing.assert_close(mixed[name], expected)
    assert any(not torch.equal(mixed[name], w) for name, w in first.model.state_dict().items())


def test_other_shapes_and_weights_are_refused() -> None:
    checkpoint = Checkpoint(model=random_model(TINY, seed=0))
    wider = replace(TINY, intermediate_size=2 * TINY.intermediate_size)
    with pytest.raises(UsageError, match="different shapes"):
        average(checkpoint, Checkpoint(model=random_model(wider, seed=0)), 0.5)
    with pytest.raises(UsageError, match=r"weight of 1\.5"):
        average(checkpoint, checkpoint, 1.5)


def test_the_commands_write_checkpoints_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (save_random(tmp_path / name) for name in ("a", "b"))
    out = tmp_path / "c"
    monkeypatch.setattr("sys.argv", ["reshape", "average", str(first), str(second), str(out)])
    main()
    assert "weights" in capsys.readouterr().out
    mixed, old = load_model(out).model, load_model(first).model
    for name, weight in old.state_dict().items():
        torch.testing.assert_close(mixed.state_dict()[name], weight)
    options = ["reshape", "deepen", str(first), str(tmp_path / "d"), "--layers", "3"]
    monkeypatch.setattr("sys.argv", options)
    main()
    config = load_model(tmp_path / "d").model.config
    assert config.layer_types == (*old.config.layer_types, old.config.layer_types[-1])
