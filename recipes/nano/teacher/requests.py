"""Sample requests for a teacher model: short Python functions, no two requests alike.

    python -m recipes.nano.teacher.requests --count 400000 --out out/teacher/requests.jsonl.xz

Writes one JSON line per request: `prompt`, the user's message, and `prefix`, the beginning of the
reply. A small teacher repeats itself, so variety must come from the requests:

- style: a short training function as an example, and another problem;
- name: the name of a training function, with its signature or first sentence, and a manner;
- grid: data x task x means x twist x theme x style, drawn from `grid.toml`;
- several: two or three small functions at once, at the cost of one prompt.

No request quotes a held-out function or a benchmark: examples and names are of the training side of
`recipes.nano.split`, and `RequestFilter` checks every request. `--functions` adds examples
and names from a file by `recipes.nano.pypi`.
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
from typing import NamedTuple, TypeVar

from dgemma.eval.spans import split_function
from recipes.nano import raw
from recipes.nano.code_tasks import describe, is_problem
from recipes.nano.pypi import quiet
from recipes.nano.raw import Function, words
from recipes.nano.split import (
    Benchmarks,
    HeldCode,
    clean_functions,
    normalized,
    split_functions,
    windows,
)
from recipes.nano.teacher.chat import FENCE
from recipes.nano.teacher.names import unknown_names

Item = TypeVar("Item")

GRID = Path(__file__).with_name("grid.toml")
BUILT_IN = frozenset(dir(builtins))
SPLIT_SEED = 0  # of `recipes.nano.data`: the same functions are held out
EXAMPLE_SIZES = range(90, 601)  # characters of an example: about 25 to 150 tokens
MAX_SIGNATURE = 160  # characters
KIND_WEIGHTS = {"style": 20, "name": 32, "grid": 32, "several": 16}
PACKAGE_FRACTION = 0.6  # of examples and names: from packages rather than problems

OPENING = f"{FENCE}python\n"
DEF = "def"  # without a space: the next token brings it
LEETCODE = "As a LeetCode solution, camelCase."


class RequestText(NamedTuple):
    """A user's message and the prefix of the reply."""

    prompt: str
    prefix: str

    def key(self) -> bytes:
        return hashlib.blake2b(f"{self.prompt}\0{self.prefix}".encode(), digest_size=8).digest()


def shuffled_cycle(items: Sequence[Item], rng: Random) -> Iterator[Item]:
    """Repeat the items without end, in a new order each time round."""
    if not items:
        raise ValueError("there are no items to repeat")
    while True:
        yield from rng.sample(items, len(items))


class RequestFilter:
    """Rejects requests that name a held-out or benchmark problem, quote it, or are unsuited."""

    def __init__(self, held: Sequence[Function], data: Path) -> None:
        names = [function.name for function in held if "/" in function.group]
        names += [name for name, _ in raw.benchmark_code(data)]
        self._names = {normalized(name) for name in names}
        texts = [*raw.benchmark_texts(data), *(docstring(function.code) for function in held)]
        self._windows = set().union(*(windows(words(text)) for text in texts))

    def rejects(self, request: RequestText) -> bool:
        text = f"{request.prompt}\n{request.prefix}"
        is_named = any(normalized(name) in self._names for name in names_in(text))
        if is_named or raw.UNSUITED.search(request.prompt):
            return True
        return not self._windows.isdisjoint(windows(words(request.prompt)))


def names_in(text: str) -> list[str]:
    """Return names that are called or defined, and words in snake or camel case."""
    names = re.findall(r"(?<![.\w])\w+(?=\()|\b\w*[a-z]_\w+|\b[a-z]+[A-Z]\w*", text)
    return [name for name in names if name not in BUILT_IN]


def docstring(code: str) -> str:
    parts = split_function(code)
    return "" if parts is None else parts[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A training function that the teacher is to write anew."""

    name: str
    head: str  # the signature, with its end of line
    summary: str  # the first sentence of its docstring, or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFamily:
    """A kind of data, tasks on it, and the groups of means that fit."""

    name: str
    means: list[str]
    data: list[str]
    tasks: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The lists of `grid.toml`."""

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
    families: list[DataFamily]

    @classmethod
    def read(cls, path: Path = GRID) -> Grid:
        lists = tomllib.loads(path.read_text(encoding="utf-8"))
        families = [DataFamily(**family) for family in lists.pop("family")]
        return cls(families=families, **lists)


def examples(functions: Iterable[Function], *, packages: bool) -> list[str]:
    """Return short self-contained functions, of problems or of packages."""
    return [
        modern(function.code)
        for function in functions
        if len(function.code) in EXAMPLE_SIZES
        and is_source(function, packages=packages)
        and has_steps(function.code)
        and not unknown_names(function.code)
    ]


def has_steps(code: str) -> bool:
    """True if the code loops or branches and is not mostly docstring."""
    parts = split_function(code)
    if parts is None or len(parts[1]) > len(code) / 2:
        return False
    return re.search(r"\b(for|while|if)\b", parts[2]) is not None


def is_source(function: Function, *, packages: bool) -> bool:
    """True for plain functions, and for LeetCode's methods, whose `self` means nothing."""
    if not is_descriptive(function.name):
        return False
    if packages:
        return function.top and not is_problem(function.group)
    return is_problem(function.group) and (function.top or function.group.startswith("kamyu/"))


def modern(code: str) -> str:
    return re.sub(r"\bxrange\b", "range", code)


def function_specs(
    functions: Iterable[Function], held: Sequence[Function], *, packages: bool
) -> list[FunctionSpec]:
    """Return functions that can be requested by name: problems, and documented package code."""
    held_names = {normalized(function.name) for function in held}
    specs: dict[str, FunctionSpec] = {}
    for function in functions:
        is_usable = is_source(function, packages=packages) and has_steps(function.code)
        if not is_usable or normalized(function.name) in held_names:
            continue
        spec = specify(function)
        if spec is None or (packages and unknown_names(function.code)):
            continue
        if spec.summary or (not packages and names_in(spec.name)):
            specs.setdefault(spec.name + spec.summary, spec)
    return list(specs.values())


def is_descriptive(name: str) -> bool:
    return len(name) > 3 and name.isidentifier() and not re.match(r"__|test|main$|solution$", name)


def specify(function: Function) -> FunctionSpec | None:
    """Return name, signature and summary; None if the signature is long or not self-contained."""
    parts = split_function(function.code)
    if (
        parts is None
        or len(parts[0]) > MAX_SIGNATURE
        or not re.match(r"def \w+\((self, )?\w", parts[0])
    ):
        return None
    if unknown_names(parts[0] + "    pass\n"):
        return None
    summary = describe(function.code)
    is_sentence = not re.search(r"-----|:param|^(Parameters|Args|Returns?:)", summary)
    return FunctionSpec(name=function.name, head=parts[0], summary=summary if is_sentence else "")


class RequestSampler:
    """Samples requests of each kind from examples, names and the grid's tasks."""

    def __init__(self, train: Sequence[Function], held: Sequence[Function], rng: Random) -> None:
        self.rng = rng
        self.grid = grid = Grid.read()
        (self._classes,) = (family for family in grid.families if family.name == "classes")
        families = [family for family in grid.families if family.name != "classes"]
        self._tasks = shuffled_cycle(
            [(family, task) for family in families for task in family.tasks], rng
        )
        self._algorithms = shuffled_cycle(grid.algorithms, rng)
        self._examples = [shuffled_cycle(examples(train, packages=p), rng) for p in (False, True)]
        self._specs = [
            shuffled_cycle(function_specs(train, held, packages=p), rng) for p in (False, True)
        ]
        self.kinds: dict[str, Callable[[], RequestText]] = {
            "style": self.style,
            "name": self.name,
            "grid": self.single,
            "several": self.several,
        }

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, items: Sequence[str], probability: float = 1.0) -> list[str]:
        """Return one of the items, or none."""
        return [self.rng.choice(items)] if self.chance(probability) else []

    def theme(self, probability: float) -> list[str]:
        themes = self.grid.themes
        return [f"Theme: {self.rng.choice(themes)}."] if self.chance(probability) else []

    def manner(self) -> list[str]:
        """Return demands on style and length."""
        return [*self.looks(0.6), *self.pick(self.grid.sizes, 0.2), *self.pick(self.grid.endings)]

    def looks(self, probability: float) -> list[str]:
        grid = self.grid
        return [*self.pick(grid.docstrings, probability), *self.pick(grid.styles, probability)]

    def problem(self) -> str:
        """Return a problem as a sentence."""
        if self.chance(0.2):
            return next(self._algorithms) + "."
        family, task = next(self._tasks)
        return f"given {self.rng.choice(family.data)}, {task}{self.how(family)}."

    def how(self, family: DataFamily) -> str:
        return f", {self.means(family)}" if self.chance(0.6) else ""

    def means(self, family: DataFamily) -> str:
        return self.rng.choice(self.grid.means[self.rng.choice(family.means)])

    def style(self) -> RequestText:
        code = next(self._examples[self.chance(PACKAGE_FRACTION)])
        other = self.rng.choice(self.grid.others)
        request = f"Write another Python function in the same style for {other}:"
        parts = [request, self.problem(), *self.theme(0.4), *self.pick(self.grid.endings)]
        return RequestText(f"{OPENING}{code}{FENCE}\n{' '.join(parts)}", OPENING + DEF)

    def name(self) -> RequestText:
        """Request a function by name; the signature, if given, is in the prefix alone."""
        spec = next(self._specs[self.chance(PACKAGE_FRACTION)])
        request = f"Write the Python function `{spec.name}`."
        parts = [request, *self.summary(spec), *self.pick(self.grid.manners)]
        parts += [*self.looks(0.4), *self.pick(self.grid.endings)]
        head = modern(spec.head) if self.chance(0.6) else f"def {spec.name}("
        return RequestText(" ".join(parts), OPENING + head)

    def summary(self, spec: FunctionSpec) -> list[str]:
        return [spec.summary.rstrip(".") + "."] if spec.summary else []

    def single(self) -> RequestText:
        if self.chance(0.06):
            return self.design()
        parts = [f"Write a Python function: {self.problem()}", *self.pick(self.grid.twists, 0.5)]
        parts += self.theme(0.4)
        if self.chance(0.15):
            return RequestText(
                " ".join([*parts, LEETCODE]), OPENING + "class Solution:\n    " + DEF
            )
        prefix = OPENING if self.chance(0.1) else OPENING + DEF
        return RequestText(" ".join([*parts, *self.manner()]), prefix)

    def design(self) -> RequestText:
        """Request a small class, whose methods are extracted one by one."""
        classes = self._classes
        request = f"Write a small Python class: {self.rng.choice(classes.data)}, "
        parts = [request + self.rng.choice(classes.tasks) + ".", *self.theme(0.4), *self.manner()]
        return RequestText(" ".join(parts), OPENING + "class")

    def several(self) -> RequestText:
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
        return RequestText(" ".join(parts), OPENING + DEF)

    def variants(self) -> RequestText:
        """Request two solutions of one problem."""
        family, task = next(self._tasks)
        ways = f"one {self.means(family)}, one {self.means(family)}."
        request = (
            f"Given {self.rng.choice(family.data)}, {task}: write two short Python functions, "
        )
        parts = [request + ways, *self.theme(0.4), *self.manner()]
        return RequestText(" ".join(parts), OPENING + DEF)


def sample_requests(
    sampler: RequestSampler, request_filter: RequestFilter
) -> Iterator[tuple[str, RequestText]]:
    """Sample requests without end, each with its kind; none twice and none that is rejected."""
    seen = set[bytes]()
    kinds, weights = list(KIND_WEIGHTS), list(KIND_WEIGHTS.values())
    while True:
        (kind,) = sampler.rng.choices(kinds, weights)
        request = sampler.kinds[kind]()
        while request.key() in seen or request_filter.rejects(request):
            request = sampler.kinds[kind]()
        seen.add(request.key())
        yield kind, request


def gather(data: Path, more: Path | None) -> tuple[list[Function], list[Function]]:
    """Return functions for requests, and those that are held out."""
    train, held, _ = split_functions(data, Random(f"{SPLIT_SEED}/code"))
    if more is not None:
        functions = [function for function in raw.more_functions(more) if function.top]
        train += clean_functions(functions, Benchmarks(data), HeldCode(held))[0]
    return train, held


def write(requests: Iterable[tuple[str, RequestText]], out: Path, count: int) -> Counter[str]:
    """Write the file of requests; return how many of each kind."""
    counts = Counter[str]()
    out.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(out, "wt", preset=3, encoding="utf-8", newline="\n") as file:
        for number, (kind, request) in enumerate(islice(requests, count), 1):
            record = {"prompt": request.prompt, "prefix": request.prefix}
            file.write(json.dumps(record) + "\n")
            counts[kind] += 1
            if number % 20_000 == 0 or number == count:
                print(f"{number} of {count} requests", file=sys.stderr, flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("out/teacher/requests.jsonl.xz"))
    parser.add_argument("--count", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--functions", type=Path, help="functions of more packages, as JSONL")
    options = parser.parse_args()
    with quiet():
        train, held = gather(options.data, options.functions)
        sampler = RequestSampler(train, held, Random(f"{options.seed}/asks"))
    requests = sample_requests(sampler, RequestFilter(held, options.data))
    counts = write(requests, options.out, options.count)
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
