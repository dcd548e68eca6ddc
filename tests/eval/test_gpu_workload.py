"""The workload of the GPU benchmark, on tiny shapes and whatever device there is."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("quant", ["none", "fp8", "nvfp4"])
def test_it_counts_what_it_committed(
    quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    main = import_module("gpu_workload").main
    sizes = "--prompt 20 --tokens 40 --ar-tokens 6 --steps 2 --runs 2 --long 30 --chunk 16"
    where = "--shapes tiny --layers 2 --device cpu --dtype float32"
    out = tmp_path / "facts.json"
    facts = main([*sizes.split(), *where.split(), "--quant", quant, "--out", str(out)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == facts
    assert json.loads(out.read_text()) == facts
    assert (facts["tokens"], facts["steps"]) == (40, 3 * 2)  # three canvases of 16
    assert facts["tokens_per_s"] == pytest.approx(40 / facts["seconds"], rel=0.5)
    assert 0 < facts["first_canvas_s"] < facts["seconds"]
    assert facts["prefill_30_ms"] > 0 and facts["ar_ms_per_token"] > 0
    assert not any(facts["kernels"].values())
