"""Requests for a teacher model: short Python functions, each asked for in another way.

    python -m recipes.teacher.ask --count 400000 --seed 1 --out out/teacher/asks.jsonl.xz

Writes one JSON line per request: `ask`, the user's message, and `begin`, what the reply is made to
begin with. A small teacher repeats itself, so that what differs must come from the requests:

- style: a short training function as an example, and another problem;
- name: the name of a training function, with its signature or first sentence, and a manner;
- grid: data x task x means x twist x theme x style, drawn from `grid.toml`;
- several: two or three small functions at once, which shares the cost of the request.

Nothing of a held-out function or of a benchmark is in a request: examples and names are of the
training side of `recipes.nano_split`, and `Guard` looks at every request once more. `--functions`
adds examples and names out of a file that `recipes.nano_pypi` wrote.
"""

from __future__ import annotations

import argparse
import builtins
import hashlib
import json
import lzma
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import TypeVar

from dgemma.train import rewrite
from recipes import nano_raw
from recipes.nano_code import describe, is_problem
from recipes.nano_pypi import quiet
from recipes.nano_raw import Function
from recipes.nano_split import (
    Benchmarks,
    HeldCode,
    clean_functions,
    same_name,
    split_functions,
    windows,
    words,
)
from recipes.teacher.names import unknown_names
from recipes.teacher.spell import FENCE

Item = TypeVar("Item")

GRID = Path(__file__).with_name("grid.toml")
BUILT_IN = frozenset(dir(builtins))
SPLIT_SEED = 0  # of `recipes.nano_data`: what is held out there is held out here
EXAMPLE = range(90, 601)  # characters of a function that shows a style: about 25 to 150 tokens
HEAD = 160  # characters of a signature worth giving
SHARES = {"style": 20, "name": 32, "grid": 32, "several": 16}
PACKAGE_SHARE = 0.6  # of examples and names that are of packages rather than of problems

OPENING = f"{FENCE}python\n"
DEF = "def"  # the blank behind a word is the next token's: given here, there would be two
LEETCODE = "As a LeetCode solution, camelCase."


@dataclass(frozen=True, slots=True)
class Ask:
    ask: str
    begin: str

    def key(self) -> bytes:
        return hashlib.blake2b(f"{self.ask}\0{self.begin}".encode(), digest_size=8).digest()


def deck(items: Sequence[Item], rng: Random) -> Iterator[Item]:
    """The items without end, in a new order each time round, so that none comes much oftener."""
    if not items:
        raise ValueError("a deck needs items")
    while True:
        yield from rng.sample(items, len(items))


class Guard:
    """Refuses requests that name a held-out problem or a benchmark's, or quote its text."""

    def __init__(self, held: Sequence[Function], data: Path) -> None:
        names = [function.name for function in held if "/" in function.group]
        names += [name for name, _ in nano_raw.benchmark_code(data)]
        self._names = {same_name(name) for name in names}
        texts = [*nano_raw.benchmark_texts(data), *(docstring(function.code) for function in held)]
        self._windows = set().union(*(windows(words(text)) for text in texts))

    def refuses(self, ask: Ask) -> bool:
        text = f"{ask.ask}\n{ask.begin}"
        if any(same_name(name) in self._names for name in names_in(text)):
            return True
        return not self._windows.isdisjoint(windows(words(ask.ask)))

    def knows(self, name: str) -> bool:
        return same_name(name) in self._names


def names_in(text: str) -> list[str]:
    """What is called or defined, and words that no prose has: plain words are no names there."""
    found = re.findall(r"(?<![.\w])\w+(?=\()|\b\w*[a-z]_\w+|\b[a-z]+[A-Z]\w*", text)
    return [name for name in found if name not in BUILT_IN]


def docstring(code: str) -> str:
    parts = rewrite.split_function(code)
    return "" if parts is None else parts[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A function that is to be written anew."""

    name: str
    head: str  # the signature, with its end of line
    summary: str  # the first sentence of its docstring, or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of data, what may be done with it, and which groups of means fit."""

    name: str
    means: list[str]
    data: list[str]
    tasks: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    means: dict[str, list[str]]
    twists: list[str]
    themes: list[str]
    sizes: list[str]
    algorithms: list[str]
    docstrings: list[str]
    styles: list[str]
    manners: list[str]
    others: list[str]
    endings: list[str]
    families: list[Family]

    @classmethod
    def read(cls, path: Path = GRID) -> Grid:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        families = [Family(**family) for family in found.pop("family")]
        return cls(families=families, **found)


def examples(functions: Iterable[Function], *, packages: bool) -> list[str]:
    """Short functions that need nothing but Python, of problems or of packages."""
    return [
        modern(function.code)
        for function in functions
        if len(function.code) in EXAMPLE
        and is_source(function, packages=packages)
        and has_steps(function.code)
        and not unknown_names(function.code)
    ]


def has_steps(code: str) -> bool:
    """Whether it loops or decides, and is not mostly docstring: little else shows a style."""
    parts = rewrite.split_function(code)
    if parts is None or len(parts[1]) > len(code) / 2:
        return False
    return re.search(r"\b(for|while|if)\b", parts[2]) is not None


def is_source(function: Function, *, packages: bool) -> bool:
    """Plain functions, and of LeetCode's collection the methods too, whose `self` means nothing."""
    if not is_telling(function.name):
        return False
    if packages:
        return function.top and not is_problem(function.group)
    return is_problem(function.group) and (function.top or function.group.startswith("kamyu/"))


def modern(code: str) -> str:
    return re.sub(r"\bxrange\b", "range", code)


def named(
    functions: Iterable[Function], held: Sequence[Function], *, packages: bool
) -> list[Named]:
    """What can be asked for by its name: problems, and functions of packages that say what for."""
    taken = {same_name(function.name) for function in held}
    found: dict[str, Named] = {}
    for function in functions:
        fits = is_source(function, packages=packages) and has_steps(function.code)
        if fits and same_name(function.name) not in taken:
            made = name_of(function)
            says = made is not None and (made.summary or (not packages and names_in(made.name)))
            if made is not None and says and not (packages and unknown_names(function.code)):
                found.setdefault(made.name + made.summary, made)
    return list(found.values())


def is_telling(name: str) -> bool:
    return len(name) > 3 and name.isidentifier() and not re.match(r"__|test|main$|solution$", name)


def name_of(function: Function) -> Named | None:
    parts = rewrite.split_function(function.code)
    if parts is None or len(parts[0]) > HEAD or not re.match(r"def \w+\((self, )?\w", parts[0]):
        return None
    if unknown_names(parts[0] + "    pass\n"):
        return None
    summary = describe(function.code)
    is_sentence = not re.search(r"-----|:param|^(Parameters|Args|Returns?:)", summary)
    return Named(name=function.name, head=parts[0], summary=summary if is_sentence else "")


class Writer:
    """Draws requests of each kind from the decks of examples, names and tasks."""

    def __init__(self, train: Sequence[Function], held: Sequence[Function], rng: Random) -> None:
        self.rng = rng
        self.grid = grid = Grid.read()
        (self._classes,) = (family for family in grid.families if family.name == "classes")
        families = [family for family in grid.families if family.name != "classes"]
        self._tasks = deck([(family, task) for family in families for task in family.tasks], rng)
        self._algorithms = deck(grid.algorithms, rng)
        self._examples = [deck(examples(train, packages=p), rng) for p in (False, True)]
        self._names = [deck(named(train, held, packages=p), rng) for p in (False, True)]
        self.kinds: dict[str, Callable[[], Ask]] = {
            "style": self.style,
            "name": self.name,
            "grid": self.single,
            "several": self.several,
        }

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, items: Sequence[str], share: float = 1.0) -> list[str]:
        """One of the items, or none."""
        return [self.rng.choice(items)] if self.chance(share) else []

    def theme(self, share: float) -> list[str]:
        return [f"Theme: {self.rng.choice(self.grid.themes)}."] if self.chance(share) else []

    def manner(self) -> list[str]:
        """How the code is to look."""
        return [*self.looks(0.6), *self.pick(self.grid.sizes, 0.2), *self.pick(self.grid.endings)]

    def looks(self, share: float) -> list[str]:
        return [*self.pick(self.grid.docstrings, share), *self.pick(self.grid.styles, share)]

    def problem(self) -> str:
        """What is to be solved, as a sentence."""
        if self.chance(0.2):
            return next(self._algorithms) + "."
        family, task = next(self._tasks)
        return f"given {self.rng.choice(family.data)}, {task}{self.how(family)}."

    def how(self, family: Family) -> str:
        return f", {self.means(family)}" if self.chance(0.6) else ""

    def means(self, family: Family) -> str:
        return self.rng.choice(self.grid.means[self.rng.choice(family.means)])

    def style(self) -> Ask:
        code = next(self._examples[self.chance(PACKAGE_SHARE)])
        other = self.rng.choice(self.grid.others)
        request = f"Write another Python function in the same style for {other}:"
        parts = [request, self.problem(), *self.theme(0.4), *self.pick(self.grid.endings)]
        return Ask(f"{OPENING}{code}{FENCE}\n{' '.join(parts)}", OPENING + DEF)

    def name(self) -> Ask:
        """By name alone, or with the signature, which only the reply's beginning needs to hold."""
        wanted = next(self._names[self.chance(PACKAGE_SHARE)])
        request = f"Write the Python function `{wanted.name}`."
        parts = [request, *self.summary(wanted), *self.pick(self.grid.manners)]
        parts += [*self.looks(0.4), *self.pick(self.grid.endings)]
        head = modern(wanted.head) if self.chance(0.6) else f"def {wanted.name}("
        return Ask(" ".join(parts), OPENING + head)

    def summary(self, wanted: Named) -> list[str]:
        return [wanted.summary.rstrip(".") + "."] if wanted.summary else []

    def single(self) -> Ask:
        if self.chance(0.06):
            return self.design()
        parts = [f"Write a Python function: {self.problem()}", *self.pick(self.grid.twists, 0.5)]
        parts += self.theme(0.4)
        if self.chance(0.15):
            return Ask(" ".join([*parts, LEETCODE]), OPENING + "class Solution:\n    " + DEF)
        begin = OPENING if self.chance(0.1) else OPENING + DEF
        return Ask(" ".join([*parts, *self.manner()]), begin)

    def design(self) -> Ask:
        """A small class, whose methods are taken one by one."""
        classes = self._classes
        request = f"Write a small Python class: {self.rng.choice(classes.data)}, "
        parts = [request + self.rng.choice(classes.tasks) + ".", *self.theme(0.4), *self.manner()]
        return Ask(" ".join(parts), OPENING + "class")

    def several(self) -> Ask:
        if self.chance(0.3):
            return self.variants()
        family, task = next(self._tasks)
        others = self.rng.sample([t for t in family.tasks if t != task], self.rng.choice((1, 1, 2)))
        count = "two" if len(others) == 1 else "three"
        jobs = ", ".join(f"one to {job}" for job in (task, *others))
        request = (
            f"Write {count} short Python functions for {self.rng.choice(family.data)}: {jobs}."
        )
        parts = [request, *self.theme(0.5), *self.manner()]
        return Ask(" ".join(parts), OPENING + DEF)

    def variants(self) -> Ask:
        """One problem solved in two ways."""
        family, task = next(self._tasks)
        ways = f"one {self.means(family)}, one {self.means(family)}."
        request = (
            f"Given {self.rng.choice(family.data)}, {task}: write two short Python functions, "
        )
        parts = [request + ways, *self.theme(0.4), *self.manner()]
        return Ask(" ".join(parts), OPENING + DEF)


def asks(writer: Writer, guard: Guard) -> Iterator[tuple[str, Ask]]:
    """Requests without end, each with its kind; none twice and none that the guard refuses."""
    seen = set[bytes]()
    kinds, shares = list(SHARES), list(SHARES.values())
    while True:
        (kind,) = writer.rng.choices(kinds, shares)
        made = writer.kinds[kind]()
        while made.key() in seen or guard.refuses(made) or nano_raw.UNSUITED.search(made.ask):
            made = writer.kinds[kind]()
        seen.add(made.key())
        yield kind, made


def gather(data: Path, further: Path | None) -> tuple[list[Function], list[Function]]:
    """Functions to ask with, and those that are held out."""
    train, held, _ = split_functions(data, Random(f"{SPLIT_SEED}/code"))
    if further is not None:
        found = [function for function in nano_raw.further_functions(further) if function.top]
        train += clean_functions(found, Benchmarks(data), HeldCode(held))[0]
    return train, held


def write(made: Iterable[tuple[str, Ask]], out: Path, count: int) -> Counter[str]:
    """The file of requests, and how many of each kind."""
    counts = Counter[str]()
    out.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(out, "wt", preset=3, encoding="utf-8", newline="\n") as file:
        for number, (kind, ask) in enumerate(islice(made, count), 1):
            file.write(json.dumps({"ask": ask.ask, "begin": ask.begin}) + "\n")
            counts[kind] += 1
            if number % 20_000 == 0 or number == count:
                print(f"{number} of {count} requests", file=sys.stderr, flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("out/teacher/asks.jsonl.xz"))
    parser.add_argument("--count", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--functions", type=Path, help="further functions, as JSONL")
    given = parser.parse_args()
    with quiet():
        train, held = gather(given.data, given.functions)
        writer = Writer(train, held, Random(f"{given.seed}/asks"))
    counts = write(asks(writer, Guard(held, given.data)), given.out, given.count)
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
