"""What a teacher is asked, and what is taken of its replies."""

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
from recipes import nano_data, nano_raw
from recipes.nano_extract import Found
from recipes.nano_raw import Function
from recipes.nano_split import Corpus, Split, split_functions
from recipes.teacher import take
from recipes.teacher.ask import Ask, Grid, Guard, Writer, asks, deck, examples, named
from recipes.teacher.ask import write as write_asks
from recipes.teacher.names import free_names, unknown_names

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


def reply(text: str, *, begin: str = "```python\n", ended: bool = True) -> dict[str, object]:
    return {"number": 0, "begin": begin, "text": text, "ended": ended}


def read(text: str, *, begin: str = "```python\n", ended: bool = True) -> list[Found | str]:
    return list(take.read_reply(reply(text, begin=begin, ended=ended)))


def names(found: list[Found | str]) -> list[str]:
    return [one.name if isinstance(one, Found) else one for one in found]


def drawn(data: Path, count: int, seed: int = 1) -> list[tuple[str, Ask]]:
    writer = Writer(TRAIN, HELD_OUT, Random(seed))
    return list(islice(asks(writer, Guard(HELD_OUT, data)), count))


def test_the_same_seed_gives_the_same_requests_and_none_twice(data: Path) -> None:
    made = drawn(data, 400)
    assert made == drawn(data, 400) != drawn(data, 400, seed=2)
    assert len({ask.key() for _, ask in made}) == 400
    kinds = Counter(kind for kind, _ in made)
    assert set(kinds) == {"style", "name", "grid", "several"} and kinds["style"] < 130
    assert all(ask.begin.startswith("```python\n") for _, ask in made)


def test_requests_hold_nothing_held_out(data: Path) -> None:
    text = "\n".join(ask.ask + ask.begin for _, ask in drawn(data, 400))
    assert "sum_even" in text and "sumEven" in text and "add_even" in text
    assert not re.search(r"hide_?letters|mask_?letters|has_?close|mean_even", text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("text", "refused"),
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
def test_guard_refuses_names_and_quotations(data: Path, text: str, refused: bool) -> None:
    assert Guard(HELD_OUT, data).refuses(Ask(text, "```python\n")) is refused


def test_examples_need_nothing_but_python() -> None:
    assert examples(TRAIN, packages=False) == [SUM_EVEN, SOLVE]
    assert len(examples(TRAIN, packages=True)) == 2
    asked = named(TRAIN, [], packages=True)
    assert [one.name for one in asked] == ["add_even", "hideLetters"]
    assert [one.name for one in named(TRAIN, HELD_OUT, packages=True)] == ["add_even"]
    assert asked[0].head == "def add_even(values):\n"
    assert asked[0].summary == "Add up the even values."


def test_a_deck_gives_every_item_before_any_comes_again() -> None:
    items = list(range(9))
    first = list(islice(deck(items, Random(0)), 27))
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
    out = tmp_path / "made" / "asks.jsonl.xz"
    made = drawn(data, 30)
    counts = write_asks(made, out, 20)
    assert sum(counts.values()) == 20
    records = list(nano_raw.read_lines(out))
    assert records == [{"ask": ask.ask, "begin": ask.begin} for _, ask in made[:20]]


def test_free_names() -> None:
    inner = "    def g(c):\n        return f(c) + d\n"
    code = f"def f(a: T, *, b=C):\n{inner}    return [e for e in g(a)]\n"
    assert free_names(code) == {"T", "C", "d"}
    assert unknown_names("def f(a):\n    return deque(math.sqrt(b) for b in a)\n") == set()
    assert unknown_names("def f(a):\n    import numpy as np\n    return np.sum(a)\n") == {"numpy"}
    assert unknown_names("def f(a):\n    from . import b\n    return b(a)\n") == {"."}
    assert unknown_names("def f():\n    nonlocal a\n    a = 1\n") == {"nonlocal"}


def test_functions_and_methods_of_a_reply_are_taken_one_by_one() -> None:
    inner = "\n".join("    " + line if line else "" for line in SOLVE.splitlines())
    text = (
        f"import math\n\n@cache\n{SUM_EVEN}\nclass Solution:\n{inner}\n\nprint(sum_even([2]))\n```"
    )
    found = read(text)
    assert found == [Found("sum_even", True, SUM_EVEN), Found("sumEven", False, SOLVE)]
    cut = "def sum_even("
    assert read(SUM_EVEN.removeprefix(cut), begin=f"```python\n{cut}") == found[:1]


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
    assert isinstance(found, Found) and found.code == SUM_EVEN.replace(
        "Add up the even values.", line
    )


def test_form_is_blind_to_names_of_variables_alone() -> None:
    renamed = (
        re.sub(r"\bvalue\b", "one", SUM_EVEN)
        .replace("values", "a: list")
        .replace("in a: list", "in a")
    )
    assert renamed != SUM_EVEN and take.form(renamed) == take.form(SUM_EVEN)
    recursive = "def f(a):\n    return f(a[1:]) + g(a[0])\n"
    assert take.form(recursive) == take.form(recursive.replace("f(", "other("))
    assert take.form(recursive) != take.form(recursive.replace("g(", "h("))
    assert take.form(SUM_EVEN) != take.form(SUM_EVEN.replace("+=", "-="))
    assert take.form(SUM_EVEN) != take.form(SUM_EVEN.replace("2", "3"))


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
    counts = take.write([path], data, out, 1)
    assert counts == {
        "replies": 11,
        "functions": 10,
        "taken": 3,
        "known already": 2,  # of the replies, and of the data
        "with other variable names": 2,
        "functions of benchmarks": 2,
        "functions like held-out ones": 1,
        "replies without a whole statement": 1,
    }
    found = nano_raw.further_functions(out)
    assert [one.code for one in found] == [good, renamed[0], renamed[1]]
    assert {(one.group, one.name, one.top) for one in found} == {("written", "squares", True)}
    assert take.write([path], data, out, 2) == counts
    assert nano_raw.further_functions(out) == found
    with pytest.raises(UsageError, match="give files of replies"):
        take.write([tmp_path / "none.jsonl"], data, out, 1)


def test_a_file_of_functions_is_a_source_of_its_own() -> None:
    none = Corpus(stories=[], books=[], dialogues=[], functions=[], calls=[])
    further = {"code2": TRAIN[:2], "written": TRAIN[2:]}
    split = Split(train=none, held_out=none, dropped={})
    material = nano_data.Material(
        data=Path(), seed=0, split=split, plain=[], tasks=[], nouns=[], further=further
    )
    made = {name: list(records) for name, records in nano_data.text_sources(material)}
    for name, functions in further.items():
        texts = [record["text"] for record in made[name]]
        assert sorted(texts) == sorted(one.code for one in functions)
