"""The kernels agree with their definitions under Triton's interpreter, and compile for GPUs."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed: pip install triton"
)


def run(*arguments: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-3000:]
    return finished.stdout


@needs_triton
@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("check_*.py")))
def test_kernels_agree_with_their_definitions(name: str) -> None:
    options = ["-p", "no:cacheprovider", "-o", "python_files=check_*.py"]
    out = run("-m", "pytest", *options, str(HERE / name), TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out


@needs_triton
def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    out = run(str(HERE / "compile_all.py"), TRITON_INTERPRET="0", PYTHONPATH=path_with_root())
    lines = [line.split()[0] for line in out.splitlines() if "compiled" in line]
    found = {card: lines.count(card) for card in set(lines)}
    assert found.keys() == {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}
    assert min(found.values()) > 10
    assert min(found["sm_86"], found["sm_90"]) > 50  # all kernels, without fp8 and with it


def path_with_root() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
