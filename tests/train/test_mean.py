"""The mean of two checkpoints."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dgemma.errors import UsageError
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.random import random_model
from recipes.nano_mean import main, mean
from tests.tiny import TINY
from tests.train.runs import save_random


def test_every_weight_is_as_much_of_both_as_was_asked() -> None:
    first, second = (Checkpoint(model=random_model(TINY, seed=seed)) for seed in (0, 1))
    made = mean(first, second, 0.25).model.state_dict()
    for name, weight in first.model.state_dict().items():
        want = 0.75 * weight + 0.25 * second.model.state_dict()[name]
        torch.testing.assert_close(made[name], want)
    assert any(not torch.equal(made[name], w) for name, w in first.model.state_dict().items())


def test_other_shapes_and_shares_are_refused() -> None:
    one = Checkpoint(model=random_model(TINY, seed=0))
    wider = replace(TINY, intermediate_size=2 * TINY.intermediate_size)
    with pytest.raises(UsageError, match="other shapes"):
        mean(one, Checkpoint(model=random_model(wider, seed=0)), 0.5)
    with pytest.raises(UsageError, match=r"share of 1\.5"):
        mean(one, one, 1.5)


def test_the_command_writes_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [save_random(tmp_path / name) for name in ("a", "b")]
    monkeypatch.setattr(sys, "argv", ["nano_mean", *map(str, places), str(tmp_path / "c")])
    main()
    assert "0.5 of" in capsys.readouterr().out
    made, own = (load_model(place).model for place in (tmp_path / "c", places[0]))
    for name, weight in own.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], weight)
