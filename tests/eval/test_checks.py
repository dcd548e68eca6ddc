"""Checks accept what they should and name what they do not."""

from pathlib import Path
from typing import Any

import pytest

from dgemma.errors import UsageError
from dgemma.eval.checks import CHECKS, CheckedAnswer, CheckSpec, distinct_n
from dgemma.eval.workload import AREAS, builtin_workloads, find_workloads, read_workload

SOURCES = {"1": "The bridge was opened in 1832.", "2": "The tunnel was closed for repairs."}
ADD = 'def add(a, b):\n    """Add."""\n    return a + b\n'
TESTS = "assert add(2, 3) == 5"
SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
TABLE = "| a | b |\n|---|---|\n| 1 | 2 |"
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
GRID = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
LINES = "\n".join(" ".join(GRID[i : i + 9]) for i in range(0, 81, 9))


@pytest.mark.parametrize(
    ("name", "params", "good", "bad"),
    [
        ("exact", {"to": "Paris", "ignore": "."}, " paris.\n", "London"),
        ("contains", {"all": ["dog"], "any": ["a", "the"]}, "The dog", "The dogs"),
        ("contains", {"none": ["very"]}, "every", "Very good"),
        ("matches", {"regex": r"\d+"}, "12\n", "12 a"),
        ("words", {"min": 2, "max": 3}, "a b c", "a b c d"),
        ("words", {"min": 2}, "a b", "a"),
        ("varied", {}, "one two three four five six seven eight nine " * 2, "a b " * 20),
        ("asks_back", {}, "Which one?", "Done."),
        ("unit_tests", {"tests": TESTS}, f"```python\n{ADD}```", ADD.replace("+", "-")),
        ("keeps_code", {"code": ADD, "documented": True}, ADD, ADD.replace("+", "-")),
        ("keeps_code", {"code": ADD, "documented": True}, ADD, ADD.replace('    """Add."""\n', "")),
        ("json_schema", {"schema": SCHEMA}, ' {"a" : 3}', '{"a": "x"}'),
        ("json_schema", {"schema": SCHEMA}, '{"a": 3}', '{"a": 3'),
        ("json_equal", {"to": {"a": "X", "b": 1}}, '{"b": 1, "a": "x "}', '{"a": "x"}'),
        ("json_equal", {"to": {"a": 1}, "keys": ["a"]}, '{"a": 1, "z": 2}', '{"a": 2}'),
        ("table", {"columns": 2, "min_rows": 1}, TABLE, TABLE + "\n| 3 |"),
        ("table", {"columns": 2, "min_rows": 1}, TABLE, "a, b"),
        ("citations", {"sources": SOURCES}, "It was opened in 1832 [1].", "It was opened in 1832."),
        ("citations", {"sources": SOURCES}, "Opened in 1832 [1].", "Opened in 1832 [3]."),
        ("citations", {"sources": SOURCES}, "Opened in 1832 [1].", "Opened in 1832 [2]."),
    ],
)
def test_a_check_accepts_and_refuses(name: str, params: Any, good: str, bad: str) -> None:
    check = CheckSpec.read(name, params, "here")
    assert check.reason(CheckedAnswer(text=good)) == ""
    assert check.reason(CheckedAnswer(text=bad)) != ""


@pytest.mark.parametrize(
    ("name", "params", "good", "bad"),
    [
        ("similarity", {"min": 0.5, "max": 0.9}, "the dog ran away home", "the dog ran home"),
        ("locality", {"allowed": ["ran"]}, "the dog walked home", "the cat walked home"),
        ("locality", {"allowed": ["ran"]}, "the dog walked home", "the dog ran home now"),
    ],
)
def test_a_check_compares_with_the_original(name: str, params: Any, good: str, bad: str) -> None:
    check, old = CheckSpec.read(name, params, "here"), "the dog ran home"
    assert check.reason(CheckedAnswer(text=good, original=old)) == ""
    assert check.reason(CheckedAnswer(text=bad, original=old)) != ""


def test_a_grid_keeps_the_givens_and_the_rules() -> None:
    check = CheckSpec.read("sudoku", {}, "here")
    assert check.reason(CheckedAnswer(text=LINES, original=PUZZLE)) == ""
    other = LINES.translate(str.maketrans("12", "21"))
    assert "breaks" in check.reason(CheckedAnswer(text=other, original=PUZZLE))
    assert "not a grid" in check.reason(CheckedAnswer(text="5", original=PUZZLE))


def test_an_answer_must_depend_on_its_evidence() -> None:
    check = CheckSpec.read("context", {}, "here")
    assert check.reason(CheckedAnswer(text="1832", swapped="1954")) == ""
    assert check.reason(CheckedAnswer(text="1832", swapped="1832 ")) != ""


def test_a_program_that_exits_early_does_not_pass() -> None:
    check = CheckSpec.read("unit_tests", {"tests": TESTS}, "here")
    assert check.reason(CheckedAnswer(text="raise SystemExit(0)")) != ""


def test_distinct_n_needs_a_text() -> None:
    assert distinct_n("too short") is None
    assert distinct_n("a b " * 20) == pytest.approx(2 / 39)
    assert distinct_n(" ".join(map(str, range(30))), 3) == 1.0


def test_every_built_in_workload_is_read_and_every_area_has_one() -> None:
    workloads = find_workloads([])
    assert len(workloads) == len(builtin_workloads()) > 20
    assert {workload.area for workload in workloads} == AREAS.keys()
    used = {check.name for w in workloads for case in w.cases for check in case.checks}
    assert used == CHECKS.keys(), "a check that no workload uses, or the other way round"
    assert {w.program for w in find_workloads([], quick=True)} == {"generate", "fill", "sudoku"}


CASE = '[[case]]\nprompt = "a b"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('area = "chat"\n' + CASE + 'checks = [{ name = "words" }]', "needs a title"),
        ('title = "t"\narea = "x"\n', "area is 'x'; it must be short"),
        ('title = "t"\narea = "chat"\nspeed = 3\n', "'speed' is not known; use area"),
        ('title = "t"\narea = "chat"\n' + CASE, "needs a prompt and at least one check"),
        (
            'title = "t"\narea = "chat"\n' + CASE + 'checks = [{ name = "nice" }]',
            "'nice' is not known; use exact",
        ),
        (
            'title = "t"\narea = "chat"\n' + CASE + 'checks = [{ name = "words", least = 3 }]',
            "check words has no 'least'; it takes min, max",
        ),
        (
            'title = "t"\narea = "chat"\n' + CASE + 'checks = [{ name = "exact" }]',
            "check exact needs 'to'",
        ),
        (
            'title = "t"\narea = "chat"\n' + CASE + 'checks = [{ name = "context" }]',
            "needs swap",
        ),
        (
            'title = "t"\narea = "chat"\n'
            + CASE
            + 'swap = ["c", "d"]\nchecks = [{ name = "context" }]',
            "swap is ['c', 'd']; it must be [words of the prompt",
        ),
        (
            'title = "t"\narea = "chat"\nprogram = "draw"\n' + CASE,
            "program is 'draw'; it must be generate, fill, edit, sudoku",
        ),
    ],
)
def test_a_wrong_workload_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refusal:
        read_workload(path)
    assert words in str(refusal.value)


def test_a_workload_of_ones_own_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    body = 'title = "t"\narea = "chat"\n[[case]]\nprompt = "{filler} x"\nfiller_words = 3\n'
    path.write_text(body + 'checks = [{ name = "words" }]', encoding="utf-8")
    (mine,) = find_workloads([str(path)])
    assert mine.name == "mine" and mine.cases[0].prompt == "The harbour opens x"
    assert [w.name for w in find_workloads([str(tmp_path), "story"])] == ["mine", "story"]
    with pytest.raises(UsageError, match="neither built in nor a file"):
        find_workloads(["nothing"])
