"""`bench/paths.py` and `bench/step.py` on tiny shapes and the CPU."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])


@pytest.mark.parametrize("quant", ["none", "fp8", "nvfp4"])
def test_a_request_takes_every_step_and_all_its_tokens(
    quant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.md"
    sizes = "--prompt 20 --tokens 40 --ar-tokens 6 --steps 2 --runs 1 --long 30"
    where = "--tiny --layers 2 --device cpu --only single ar prefill"
    main = import_module("paths").main
    assert main([*sizes.split(), *where.split(), "--quant", quant, "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert text.strip() == capsys.readouterr().out.strip()
    assert "40 tokens in 6 steps of 3 canvases" in text
    for name in ("diffusion, 1 request", "AR, 16 requests", "prefill of 30 tokens"):
        assert f"| {name} |" in text


def test_a_tower_and_a_first_block_with_a_picture_are_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = "--tiny --layers 2 --device cpu --only image --steps 1"
    assert import_module("paths").main(where.split()) == 0
    out = capsys.readouterr().out
    for name in ("tower, a picture of at most 1120 tokens", "tower, 3 frames of a video"):
        assert f"| {name} (" in out
    for name in ("no picture", "a new picture", "a picture seen lately"):
        assert f"| first block, {name} of at most 280 tokens (14 prompt tokens" in out


def test_it_needs_neither_a_server_nor_grammars() -> None:
    """A GPU machine may have torch and little else."""
    code = "import paths, sys; print({'uvicorn', 'fastapi', 'llguidance', 'PIL'} & {*sys.modules})"
    path = os.pathsep.join([str(BENCH), str(BENCH.parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert found.stdout.decode().strip() == "set()", found.stderr.decode()


def test_steps_commits_and_tokens_are_timed_by_context_and_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "facts.json"
    given = "--shapes tiny --layers 2 --device cpu --dtype float32 --context 8 60 --batch 1 2"
    main = import_module("step").main
    facts = main([*given.split(), "--steps", "1", "--prefill", "40", "--out", str(out)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == facts
    assert json.loads(out.read_text()) == facts
    found = facts["none"]
    for context, batch in ((8, 1), (8, 2), (60, 1), (60, 2)):
        times = found[f"context {context} batch {batch}"]
        assert all(times[name]["ms"] > 0 for name in ("step", "commit", "token"))
        rate = 1000 * batch * 16 / (8 * times["step"]["ms"] + times["commit"]["ms"])
        assert times["rates"]["8_steps_tok_s"] == pytest.approx(rate, abs=0.2)
    assert found["routing"]["experts_hit"] == 1.0 and found["prefill"]["ms"] > 0
