"""Generated programs run apart, within limits, and pass only by reaching their end."""

import time
from pathlib import Path

import pytest

from dgemma.eval.infill import run_program, run_programs


def test_a_program_that_ends_passes_and_one_that_fails_does_not() -> None:
    programs = ["x = 1\nassert x", "assert False", "this is no python", "raise SystemExit(0)"]
    assert run_programs(programs) == [True, False, False, False]


def test_an_endless_loop_is_killed() -> None:
    begun = time.perf_counter()
    assert not run_program("while True: pass", seconds=0.5)
    assert time.perf_counter() - begun < 3


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",  # leaving early
        "exit()",
        "x = bytearray(4 << 30)",  # too much memory
        "open('file', 'w').write('x' * 100000)",  # no file grows
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true') and 1/0; os.fork()",
    ],
)
def test_what_a_program_may_not_do(program: str) -> None:
    assert not run_program(program)


def test_a_program_cannot_delete(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x", encoding="utf-8")
    for call in ("os.remove", "os.unlink", "shutil.rmtree", "pathlib.Path.unlink"):
        assert not run_program(f"import os, shutil, pathlib\n{call}(pathlib.Path({str(kept)!r}))")
    assert kept.read_text(encoding="utf-8") == "x"


def test_it_runs_in_an_empty_place_without_our_environment() -> None:
    assert run_program("import os\nassert os.listdir('.') == []\nassert 'HOME' not in os.environ")
