"""Requests for a teacher, and the functions extracted from its replies."""

import gzip
import json
import lzma
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from dgemma.errors import UsageError
from recipes.nano import raw
from recipes.nano.data import Material, text_sources
from recipes.nano.pypi import Extracted
from recipes.nano.raw import Function
from recipes.nano.split import Corpus, Split, split_functions
from recipes.nano.teacher import extract
from recipes.nano.teacher.names import free_names, unknown_names
from recipes.nano.teacher.requests import (
    Grid,
    RequestFilter,
    RequestSampler,
    RequestText,
    examples,
    function_specs,
    sample_requests,
    shuffled_cycle,
)
from recipes.nano.teacher.requests import write as write_requests

SUM_EVEN = '''\
def sum_even(values):
    """Add up the even values."""
    total = 0
    for value in values:
        if value % 2 == 0:
            total += value
    return total
'''
HELD = """\
def hide_letters(text, letters):
    found = []
    for letter in text:
        found.append("*" if letter in letters else letter)
    return "".join(found)
"""
NEEDS_NUMPY = SUM_EVEN.replace("sum_even", "mean_even").replace("total = 0", "total = np.zeros(1)")
SOLVE = SUM_EVEN.replace("sum_even(values", "sumEven(self, values")
CLOSE = (
    "    found = max(a) - min(a)\n    if found < b:\n        return True\n    return found == a\n"
)
PROMPT = "Tell whether any two of the given numbers are closer than a threshold allows."


def function(code: str, group: str) -> Function:
    found = re.search(r"def (\w+)", code)
    assert found is not None
    return Function(code, group, found[1], "(self" not in code)


TRAIN = [
    function(SUM_EVEN, "keon/sum_even"),
    function(SOLVE, "kamyu/sumEven"),
    function(SUM_EVEN.replace("sum_even", "add_even"), "box"),
    function(NEEDS_NUMPY, "box"),
    function(SUM_EVEN.replace("sum_even", "hideLetters"), "box"),
]
HELD_OUT = [function(HELD, "keon/hide_letters"), function(HELD.replace("hide", "mask"), "packed")]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with one benchmark problem and one held-out problem of forty."""
    folder = tmp_path / "data"
    (folder / "eval").mkdir(parents=True)
    (folder / "train").mkdir()
    problem = {"entry_point": "has_close", "canonical_solution": CLOSE, "prompt": PROMPT}
    with gzip.open(folder / "eval" / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps(problem) + "\n")
    (folder / "eval" / "mbpp.jsonl").write_text("", encoding="utf-8")
    write_lines(folder / "train" / "py_funcs.jsonl.xz", [])
    codes = [SUM_EVEN.replace("sum_even", f"add_{n}").replace("2", str(n)) for n in range(3, 43)]
    records = [{"s": "keon MIT", "n": re.findall(r"def (\w+)", c)[0], "c": c} for c in codes]
    write_lines(folder / "train" / "algos.jsonl.xz", records)
    return folder


def write_lines(path: Path, records: list[dict[str, object]]) -> Path:
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def reply(text: str, *, prefix: str = "```python\n", ended: bool = True) -> dict[str, object]:
    return {"number": 0, "prefix": prefix, "text": text, "ended": ended}


def read(text: str, *, prefix: str = "```python\n", ended: bool = True) -> list[Extracted | str]:
    return list(extract.read_reply(reply(text, prefix=prefix, ended=ended)))


def names(results: list[Extracted | str]) -> list[str]:
    return [result.name if isinstance(result, Extracted) else result for result in results]


def drawn(data: Path, count: int, seed: int = 1) -> list[tuple[str, RequestText]]:
    sampler = RequestSampler(TRAIN, HELD_OUT, Random(seed))
    return list(islice(sample_requests(sampler, RequestFilter(HELD_OUT, data)), count))


def test_the_same_seed_gives_the_same_requests_and_none_twice(data: Path) -> None:
    requests = drawn(data, 400)
    assert requests == drawn(data, 400) != drawn(data, 400, seed=2)
    assert len({request.key() for _, request in requests}) == 400
    kinds = Counter(kind for kind, _ in requests)
    assert set(kinds) == {"style", "name", "grid", "several"} and kinds["style"] < 130
    assert all(request.prefix.startswith("```python\n") for _, request in requests)


def test_requests_hold_nothing_held_out(data: Path) -> None:
    text = "\n".join(request.prompt + request.prefix for _, request in drawn(data, 400))
    assert "sum_even" in text and "sumEven" in text and "add_even" in text
    assert not re.search(r"hide_?letters|mask_?letters|has_?close|mean_even", text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("text", "rejected"),
    [
        ("Write `hide_letters`.", True),
        ("Write `hideLetters`.", True),
        ("Write hasClose.", True),
        ("def hide_letters(a):", True),
        ("Hide letters that has close ones.", False),
        ("Tell if two of the given numbers are closer than a threshold allows.", True),
        ("Tell if numbers are close.", False),
    ],
)
def test_names_and_quotations_are_rejected(data: Path, text: str, rejected: bool) -> None:
    request = RequestText(text, "```python\n")
    assert RequestFilter(HELD_OUT, data).rejects(request) is rejected


def test_examples_need_nothing_but_python() -> None:
    assert examples(TRAIN, packages=False) == [SUM_EVEN, SOLVE]
    assert len(examples(TRAIN, packages=True)) == 2
    specs = function_specs(TRAIN, [], packages=True)
    assert [spec.name for spec in specs] == ["add_even", "hideLetters"]
    clean = function_specs(TRAIN, HELD_OUT, packages=True)
    assert [spec.name for spec in clean] == ["add_even"]
    assert specs[0].head == "def add_even(values):\n"
    assert specs[0].summary == "Add up the even values."


def test_every_item_comes_before_any_comes_again() -> None:
    items = list(range(9))
    first = list(islice(shuffled_cycle(items, Random(0)), 27))
    assert [sorted(first[at : at + 9]) for at in (0, 9, 18)] == [items] * 3


def test_grid_has_millions_of_requests_and_none_of_them_empty() -> None:
    grid = Grid.read()
    pairs = sum(len(family.data) * len(family.tasks) for family in grid.families)
    assert pairs * len(grid.twists) * len(grid.themes) > 10_000_000
    for family in grid.families:
        assert all(grid.means[group] for group in family.means), family.name
        assert len(set(family.tasks)) == len(family.tasks), family.name
        assert all(text.strip() for text in (*family.data, *family.tasks)), family.name


def test_requests_are_written(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "made" / "requests.jsonl.xz"
    requests = drawn(data, 30)
    counts = write_requests(requests, out, 20)
    assert sum(counts.values()) == 20
    records = list(raw.read_lines(out))
    assert records == [{"prompt": r.prompt, "prefix": r.prefix} for _, r in requests[:20]]


def test_free_names() -> None:
    inner = "    def g(c):\n        return f(c) + d\n"
    code = f"def f(a: T, *, b=C):\n{inner}    return [e for e in g(a)]\n"
    assert free_names(code) == {"T", "C", "d"}
    assert unknown_names("def f(a):\n    return deque(math.sqrt(b) for b in a)\n") == set()
    assert unknown_names("def f(a):\n    import numpy as np\n    return np.sum(a)\n") == {"numpy"}
    assert unknown_names("def f(a):\n    from . import b\n    return b(a)\n") == {"."}
    assert unknown_names("def f():\n    nonlocal a\n    a = 1\n") == {"nonlocal"}


def test_functions_and_methods_of_a_reply_are_extracted_one_by_one() -> None:
    inner = "\n".join("    " + line if line else "" for line in SOLVE.splitlines())
    text = (
        f"import math\n\n@cache\n{SUM_EVEN}\nclass Solution:\n{inner}\n\nprint(sum_even([2]))\n```"
    )
    found = read(text)
    assert found == [Extracted("sum_even", True, SUM_EVEN), Extracted("sumEven", False, SOLVE)]
    cut = "def sum_even("
    assert read(SUM_EVEN.removeprefix(cut), prefix=f"```python\n{cut}") == found[:1]


def test_what_the_limit_cut_is_left_out() -> None:
    second = SUM_EVEN.replace("sum_even", "second")
    both = f"{SUM_EVEN}\n\n{second}"
    assert names(read(both)) == ["sum_even", "second"]
    assert names(read(both, ended=False)) == ["sum_even"]  # it parses, but more may have followed
    assert names(read(both[:-20], ended=False)) == ["sum_even"]
    assert names(read(both[:-20] + "(")) == ["sum_even"]  # broken, though it has ended
    assert names(read(f"{both}\nprint(sum_ev", ended=False)) == ["sum_even", "second"]
    assert read(SUM_EVEN, ended=False) == ["replies without a whole statement"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(a): return a\n", "too short or too long"),
        ("def f(a):\n" + "    a += 1\n" * 40, "too short or too long"),
        ("def f(a):\n    pass\n", "trivial"),
        ('def f(a):\n    """Only words."""\n', "trivial"),
        ("def f(a):\n    raise NotImplementedError\n", "trivial"),
        ("def f(a):\n    b = a\n    # your code here\n    return b\n", "trivial"),
        ("def f(a):\n    for b in a:\n        print(b)\n", "input and output"),
        ("def f(a):\n    b = input()\n    return a + b\n", "input and output"),
        (NEEDS_NUMPY, "unknown names"),
        ("import numpy as np\n\n" + NEEDS_NUMPY, "unknown names"),
        (SUM_EVEN.replace("sum_even", "test_sum"), "tests and examples"),
        (SUM_EVEN.replace("total", "t\u00f6tal"), "not ASCII or too wide"),
    ],
)
def test_what_is_of_no_use_is_dropped_with_a_reason(code: str, reason: str) -> None:
    assert read(code) == [reason]


def test_names_beside_a_function_are_known() -> None:
    code = "def f(a):\n    return [g(b) % LIMIT for b in a]\n"
    assert read(code) == ["unknown names"]
    beside = "from math import floor as g\nLIMIT = 9\n"
    assert names(read(beside + code)) == ["f"]


def test_a_long_docstring_is_cut_to_its_first_line() -> None:
    line = "Return the even values' sum."
    long = SUM_EVEN.replace(
        "Add up the even values.", f"\n    {line}\n" + "\n    More." * 30 + "\n    "
    )
    assert long != SUM_EVEN
    (found,) = read(long)
    assert isinstance(found, Extracted) and found.code == SUM_EVEN.replace(
        "Add up the even values.", line
    )


def test_structure_ignores_names_of_variables_alone() -> None:
    renamed = (
        re.sub(r"\bvalue\b", "one", SUM_EVEN)
        .replace("values", "a: list")
        .replace("in a: list", "in a")
    )
    assert renamed != SUM_EVEN and extract.structure(renamed) == extract.structure(SUM_EVEN)
    recursive = "def f(a):\n    return f(a[1:]) + g(a[0])\n"
    assert extract.structure(recursive) == extract.structure(recursive.replace("f(", "other("))
    assert extract.structure(recursive) != extract.structure(recursive.replace("g(", "h("))
    assert extract.structure(SUM_EVEN) != extract.structure(SUM_EVEN.replace("+=", "-="))
    assert extract.structure(SUM_EVEN) != extract.structure(SUM_EVEN.replace("2", "3"))


def test_a_file_of_new_functions_is_written(tmp_path: Path, data: Path) -> None:
    _, (held,), _ = split_functions(data, Random("0/code"))
    good = "def squares(values):\n    return [value * value for value in values]\n"
    renamed = [good.replace("value", name) for name in ("one", "two", "six", "ten")]
    texts = [
        good,
        good.replace("squares", "again"),
        *renamed,
        "def has_close(a):\n    return sorted(a)\n",
        f"def other(a, b):\n{CLOSE}",
        held.code,
        SUM_EVEN.replace("2", "4"),
        "def cut(",
    ]
    path = write_lines(tmp_path / "replies.jsonl.xz", [reply(text) for text in texts])
    out = tmp_path / "made" / "written.jsonl"
    counts = extract.write([path], data, out, 1)
    assert counts == {
        "replies": 11,
        "functions": 10,
        "extracted": 3,
        "known already": 2,  # of the replies, and of the data
        "with other variable names": 2,
        "functions of benchmarks": 2,
        "functions like held-out ones": 1,
        "replies without a whole statement": 1,
    }
    found = raw.more_functions(out)
    assert [one.code for one in found] == [good, renamed[0], renamed[1]]
    assert {(one.group, one.name, one.top) for one in found} == {("written", "squares", True)}
    assert extract.write([path], data, out, 2) == counts
    assert raw.more_functions(out) == found
    with pytest.raises(UsageError, match="give files of replies"):
        extract.write([tmp_path / "none.jsonl"], data, out, 1)


def test_a_file_of_functions_is_a_source_of_its_own() -> None:
    none = Corpus(stories=[], books=[], dialogues=[], functions=[], calls=[])
    more = {"packages": TRAIN[:2], "written": TRAIN[2:]}
    split = Split(train=none, held_out=none, dropped={})
    material = Material(
        data=Path(), seed=0, split=split, plain=[], tasks=[], nouns=[], more_functions=more
    )
    sources = {name: list(records) for name, records in text_sources(material)}
    for name, functions in more.items():
        texts = [record["text"] for record in sources[name]]
        assert sorted(texts) == sorted(one.code for one in functions)
