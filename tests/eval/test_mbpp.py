"""Holes of MBPP's lines: which problems, which lines, and that nothing else changes."""

from pathlib import Path
from typing import Any

import pytest

from dgemma.engine import Engine
from dgemma.eval.data import Data, read_jsonl
from dgemma.eval.infill import (
    MAX_MBPP_CHARACTERS,
    MBPP_FILE,
    MBPP_TEST,
    mbpp_holes,
    mbpp_lines,
)
from tests.eval.conftest import save_lines

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
CODE = '''import re
SIZE = 3

def helper(a):
  return a + SIZE
class Pair:
    def first(self):
        return self.a
def solve(a, b):
\t"""Nothing to guess."""
\t# nor here
\tif a < b:
\t\tb = re.sub('\\w', a, b)
\telse:
\t\tpass
\treturn helper(b)'''


def problem(code: str = CODE, number: int = 11) -> dict[str, Any]:
    return {"task_id": number, "code": code, "text": "Write a function."}


def test_lines_of_bodies_are_cut_and_the_rest_stays() -> None:
    holes = mbpp_holes(problem(CODE.replace("\n", "\r\n")))
    lines = ["return a + SIZE", "if a < b:", "b = re.sub('\\w', a, b)", "return helper(b)"]
    assert [hole.middle for hole in holes] == lines
    assert {hole.with_text(hole.middle) for hole in holes} == {CODE}


@pytest.mark.parametrize(("number", "count"), [(10, 0), (11, 4), (510, 4), (511, 0)])
def test_only_test_problems_count(number: int, count: int) -> None:
    assert len(mbpp_holes(problem(number=number))) == count


def test_long_solutions_are_left_out() -> None:
    code = CODE + "\n" + "#" * (MAX_MBPP_CHARACTERS - len(CODE) - 1)
    assert len(code) == MAX_MBPP_CHARACTERS and mbpp_holes(problem(code))
    assert not mbpp_holes(problem(code + "#"))


def test_at_most_four_lines_of_a_problem_are_asked(knowing: Engine, data: Data) -> None:
    code = "def f(x):\n" + "".join(f"    y{n} = x\n" for n in range(8))
    save_lines(data.shared / "eval" / MBPP_FILE, problem(code), problem(CODE))
    middles = [hole.middle for hole in mbpp_lines(knowing, data)]
    assert middles[:4] == ["y0 = x", "y2 = x", "y4 = x", "y6 = x"]
    assert len(middles) == 8


@pytest.mark.skipif(
    not (SHARED / "eval" / MBPP_FILE).is_file(), reason=f"{SHARED} has no {MBPP_FILE}"
)
def test_every_test_problem_of_the_real_file_has_a_line() -> None:
    records = read_jsonl(SHARED / "eval" / MBPP_FILE, None)
    held = {record["task_id"] for record in records if mbpp_holes(record)}
    assert held == set(MBPP_TEST)
