"""Plots of a run's losses, and of evaluations before and after it."""

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dgemma.cli.before_after import plot_proportions
from dgemma.eval.measure import Case
from dgemma.train.checkpoint import heldout_summary, plot_losses


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{"step": step, "denoise": 1 / step, "causal": 2 / step} for step in range(1, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def add_heldout(run: Path, *totals: float) -> None:
    lines = [{"step": 5 * i, "denoise": t - 1, "causal": 1.0} for i, t in enumerate(totals)]
    (run / "heldout.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_losses_are_drawn_those_held_out_with_dots(run: Path) -> None:
    def count(kind: str) -> int:
        path = plot_losses(run)
        assert path == run / "loss.svg"
        drawn = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        return len(drawn.findall(f"{{http://www.w3.org/2000/svg}}{kind}"))

    assert (count("polyline"), count("circle")) == (2, 0)
    add_heldout(run, 4.0, 3.0, 2.0)
    assert (count("polyline"), count("circle")) == (4, 6)


@pytest.mark.parametrize(
    ("totals", "bars", "advice"),
    [
        ((4.0, 3.0, 2.0), "█▅▁", "lowest at the end: more steps may help (--steps 20)"),
        ((4.0, 2.0, 3.0), "█▁▅", "lowest at step 5: fewer steps may do as well (--steps 5)"),
        ((2.0, 3.0, 4.0), "▁▅█", "it never fell: halve the rate"),
    ],
)
def test_the_held_out_loss_advises_on_steps(
    run: Path, totals: tuple[float, ...], bars: str, advice: str
) -> None:
    assert heldout_summary(run) == []
    add_heldout(run, *totals)
    losses, advised = heldout_summary(run)
    assert losses.endswith(
        f"{totals[0] - 1:.3f} + 1.000 before, {totals[-1] - 1:.3f} + 1.000 after  {bars}"
    )
    assert advice in advised


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
def test_proportions_are_plotted_before_and_after(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before, after = (report(tmp_path / f"{right}.json", right) for right in (0, 16))
    drawings = []
    for reports in ({"before": before, "after": after}, {"before": before}, {"after": after}):
        path = plot_proportions(reports, tmp_path / "eval.svg")
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
    assert plot_proportions({"before": tmp_path / "none.json"}, tmp_path / "none.svg") is None


def test_without_the_library_nothing_is_drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_proportions({"after": report(run / "a.json", 3)}, run / "eval.svg") is None
