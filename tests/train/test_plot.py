"""The picture of a run's losses."""

import json
import sys
from pathlib import Path

import pytest

from dgemma.train.plot import plot_losses


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{"step": step, "denoise": 1 / step, "causal": 2 / step} for step in range(1, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of the library itself
def test_losses_are_drawn(run: Path) -> None:
    pytest.importorskip("matplotlib")
    path = plot_losses(run)
    assert path == run / "loss.svg"
    drawn = path.read_text(encoding="utf-8")
    assert drawn.lstrip().startswith("<?xml") and "</svg>" in drawn


def test_without_the_library_nothing_is_drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_losses(run) is None
    assert not (run / "loss.svg").exists()
