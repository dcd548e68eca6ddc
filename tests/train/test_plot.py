"""The picture of a run's losses."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dgemma.eval.measure import Case
from dgemma.train.plot import plot_losses, plot_shares


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


def report(path: Path, right: int) -> Path:
    case = Case("sudoku", "diffusion")
    measures = [
        case.share("hard: solved", [True] * right + [False] * (20 - right)),
        case.share("no case", []),
        case.mean("hard: steps", [3.0, 4.0], "steps"),
    ]
    path.write_text(json.dumps({"measures": [asdict(one) for one in measures]}))
    return path


@pytest.mark.filterwarnings("ignore")  # of the library itself
def test_shares_are_drawn_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before, after = (report(tmp_path / f"{right}.json", right) for right in (0, 16))
    drawings = []
    for reports in ({"before": before, "after": after}, {"before": before}, {"after": after}):
        path = plot_shares(reports, tmp_path / "eval.svg")
        assert path == tmp_path / "eval.svg"
        drawings.append(path.read_text(encoding="utf-8"))
    labels = [re.findall(r"<!-- (.*?) -->", drawn) for drawn in drawings]
    assert [("before" in names, "after" in names) for names in labels] == [
        (True, True),
        (True, False),
        (False, True),
    ]
    assert all("sudoku: hard: solved diffusion" in names for names in labels)
    assert not any("sudoku: hard: steps diffusion" in names for names in labels)
    assert plot_shares({"before": tmp_path / "none.json"}, tmp_path / "none.svg") is None


def test_without_the_library_nothing_is_drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_losses(run) is None
    assert plot_shares({"after": report(run / "a.json", 3)}, run / "eval.svg") is None
    assert not (run / "loss.svg").exists()
