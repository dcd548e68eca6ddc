"""Hold out whole groups, and remove from training what resembles them or a benchmark.

Held out are packages and function names for code, stories and books for prose, the end of the file
for dialogues. Two rules then clean the training side:

- code is dropped if it defines a function with the name of a HumanEval or MBPP function (case and
  underscores do not count) or of a held-out problem, or contains at least half, and at least three,
  of the 8-token windows of one of their solutions or of a held-out function;
- prose is dropped if a tenth of a chunk's 8-word windows occur in held-out prose.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from dgemma.eval.spans import split_function
from recipes.nano import raw
from recipes.nano.raw import Call, Document, Function, words
from recipes.nano.rewrite import split_sentences

Window = tuple[str, ...]
Item = TypeVar("Item")

WINDOW = 8
HELD_OUT_DIALOGUES = 700
HELD_OUT_BOOKS = ("Oscar Wilde/", "Edith Nesbit/The Book of Dragons", "L. Frank Baum/A Kidnapped")
HELD_OUT_BANDS = 3  # of raw.BANDS, at the end of the file
HELD_OUT_PACKAGES = 0.06
MAX_HELD_OUT_PACKAGE = 400  # functions; a larger one would cost training too much
CHUNK = 2000  # characters: about 500 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """One side of the split."""

    stories: list[Document]
    books: list[Document]
    dialogues: list[Document]
    functions: list[Function]
    calls: list[Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Training and held-out text."""

    train: Corpus
    held_out: Corpus
    dropped: dict[str, int]  # by rule: how much of the training text it took


def make_split(data: Path, seed: int) -> Split:
    """Split the data directory; the same data and seed give the same split."""
    stories, held_stories = split_stories(raw.storybook(data), Random(f"{seed}/stories"))
    bands = raw.tales(data)
    books, held_books = partition(raw.books(data), lambda d: is_held_book(d.group))
    held_prose = chunked([*held_stories, *bands[-HELD_OUT_BANDS:], *held_books], CHUNK)
    stories, dropped_stories = clean_prose([*stories, *bands[:-HELD_OUT_BANDS]], held_prose)
    books, dropped_books = clean_prose(books, held_prose)
    dialogues = raw.dialogues(data)
    calls = locate_calls(data, dialogues)
    held_talk = {document.group for document in dialogues[-HELD_OUT_DIALOGUES:]}
    functions, held_functions, dropped = split_functions(data, Random(f"{seed}/code"))
    train = Corpus(
        stories=stories,
        books=books,
        dialogues=[document for document in dialogues if document.group not in held_talk],
        functions=functions,
        calls=[call for call in calls if call.group not in held_talk],
    )
    held_out = Corpus(
        stories=held_prose,
        books=[],
        dialogues=[document for document in dialogues if document.group in held_talk],
        functions=held_functions,
        calls=[call for call in calls if call.group in held_talk],
    )
    prose = {"prose chunks like held-out ones": dropped_stories + dropped_books}
    return Split(train=train, held_out=held_out, dropped={**prose, **dropped})


def partition(
    items: Iterable[Item], is_held: Callable[[Item], bool]
) -> tuple[list[Item], list[Item]]:
    """Return the items for training and those held out."""
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        sides[is_held(item)].append(item)
    return sides


def is_held_book(group: str) -> bool:
    return group.removeprefix("book/").startswith(HELD_OUT_BOOKS)


def split_stories(stories: list[Document], rng: Random) -> tuple[list[Document], list[Document]]:
    titles = sorted({document.group for document in stories})
    held = set(rng.sample(titles, len(titles) // 16))
    return partition(stories, lambda document: document.group in held)


def chunked(documents: Iterable[Document], max_size: int) -> list[Document]:
    return [Document(text, d.group) for d in documents for text in chunks(d.text, max_size)]


def chunks(text: str, max_size: int) -> list[str]:
    """Cut at paragraph ends, or else at sentence ends, into pieces of at most `max_size`."""
    pieces: list[str] = []
    for paragraph in text.split("\n\n"):
        fits = len(paragraph) <= max_size
        for index, piece in enumerate([paragraph] if fits else split_sentences(paragraph)):
            gap = " " if index else "\n\n"
            if pieces and len(pieces[-1]) + len(gap) + len(piece) <= max_size:
                pieces[-1] += gap + piece
            else:
                pieces.append(piece)
    return [piece for piece in pieces if 60 <= len(piece) <= max_size]


def code_tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def windows(tokens: Sequence[str]) -> set[Window]:
    return set(zip(*(tokens[at:] for at in range(WINDOW)), strict=False))


def clean_prose(documents: list[Document], held_out: list[Document]) -> tuple[list[Document], int]:
    """Return chunks that do not overlap held-out text, and how many were dropped."""
    held_windows = set[Window]().union(*(windows(words(document.text)) for document in held_out))
    candidates = chunked(documents, CHUNK)
    clean = []
    for document in candidates:
        text_windows = windows(words(document.text))
        if len(text_windows & held_windows) < max(1, len(text_windows) // 10):
            clean.append(document)
    return clean, len(candidates) - len(clean)


class Solutions:
    """Code that training must not contain, recognized by its windows."""

    def __init__(self, solutions: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._solutions_with: dict[Window, list[int]] = defaultdict(list)
        for index, code in enumerate(solutions):
            code_windows = windows(code_tokens(code))
            self._sizes.append(len(code_windows))
            for window in code_windows:
                self._solutions_with[window].append(index)

    def contain(self, code_windows: set[Window]) -> bool:
        """True if a solution shares half of its windows, and at least three."""
        shared = [window for window in code_windows if window in self._solutions_with]
        counts = Counter(index for window in shared for index in self._solutions_with[window])
        return any(n >= max(3, self._sizes[index] / 2) for index, n in counts.items())


def normalized(name: str) -> str:
    """Return a name without case and underscores."""
    return name.replace("_", "").lower()


class Benchmarks:
    """HumanEval and MBPP, by name and by solution."""

    def __init__(self, data: Path) -> None:
        problems = raw.benchmark_code(data)
        self._names = {normalized(name) for name, _ in problems}
        self._solutions = Solutions(code for _, code in problems)

    def contain(self, code: str, code_windows: set[Window] | None = None) -> bool:
        """True if the code defines a problem's function or resembles a solution."""
        names = re.findall(r"\bdef (\w+)", code)
        if any(normalized(name) in self._names for name in names):
            return True
        if code_windows is None:
            code_windows = windows(code_tokens(code))
        return self._solutions.contain(code_windows)


class HeldCode:
    """Held-out functions, by code and, where they solve a problem, by name."""

    def __init__(self, held: Sequence[Function]) -> None:
        self._names = {function.name for function in held if "/" in function.group}
        self._groups = {function.group for function in held}
        self._solutions = Solutions(body(function.code) for function in held)

    def name_in(self, code: str) -> bool:
        """True if the code defines a function with the name of a held-out problem."""
        return any(name in self._names for name in re.findall(r"\bdef (\w+)", code))

    def contain(self, function: Function, code_windows: set[Window]) -> bool:
        """True if the function is of a held-out group, or has a held-out name or code."""
        is_known = function.group in self._groups or self.name_in(function.code)
        return is_known or self._solutions.contain(code_windows)


def split_functions(
    data: Path, rng: Random
) -> tuple[list[Function], list[Function], dict[str, int]]:
    """Split by package, or by function name where there is no package; count what is dropped."""
    benchmarks = Benchmarks(data)
    functions = raw.functions(data)
    held_groups = choose_groups(functions, rng)
    others, held = partition(functions, lambda function: function.group in held_groups)
    held = [function for function in held if not benchmarks.contain(function.code)]
    train, dropped = clean_functions(others, benchmarks, HeldCode(held))
    return train, held, dropped


def clean_functions(
    functions: Iterable[Function], benchmarks: Benchmarks, held: HeldCode
) -> tuple[list[Function], dict[str, int]]:
    """Return the functions that training may contain, and how many each rule dropped."""
    train, dropped = [], {"functions of benchmarks": 0, "functions like held-out ones": 0}
    for function in functions:
        code_windows = windows(code_tokens(function.code))
        if benchmarks.contain(function.code, code_windows):
            dropped["functions of benchmarks"] += 1
        elif held.contain(function, code_windows):
            dropped["functions like held-out ones"] += 1
        else:
            train.append(function)
    return train, dropped


def choose_groups(functions: list[Function], rng: Random) -> set[str]:
    """Draw the groups to hold out: packages, and names in all collections of problems at once."""
    sizes = Counter(function.group for function in functions)
    packages = sorted(group for group in sizes if "/" not in group)
    small = [group for group in packages if sizes[group] <= MAX_HELD_OUT_PACKAGE]
    held = set(rng.sample(small, round(HELD_OUT_PACKAGES * len(packages))))
    common = Counter(function.name for function in functions)
    names = sorted({f.name for f in functions if "/" in f.group and common[f.name] <= 8})
    chosen = set(rng.sample(names, len(names) // 40))
    return held | {f.group for f in functions if "/" in f.group and f.name in chosen}


def body(code: str) -> str:
    """Return the code without its docstring, which copies of a function often change."""
    parts = split_function(code)
    return code if parts is None else parts[0] + parts[2]


def locate_calls(data: Path, dialogues: list[Document]) -> list[Call]:
    """Find each call's last turns in the dialogues, to have the turns before them as well."""
    lines = [document.text.splitlines() for document in dialogues]
    positions: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, dialogue in enumerate(lines):
        for at, line in enumerate(dialogue):
            positions[line].append((index, at))
    calls, current = [], 0
    for record in raw.read_lines(data / "train" / "sgd_calls.jsonl.xz"):
        last = [raw.plain(line) for line in record["h"]]
        # Both files have the same order, so the next dialogue that matches is the right one.
        later = (position for position in positions[last[-1]] if position[0] >= current)
        matches = (p for p in later if lines[p[0]][p[1] + 1 - len(last) : p[1] + 1] == last)
        match = next(matches, None)
        if match is not None:
            current = match[0]
            text = "\n".join(lines[current][: match[1] + 1])
            calls.append(Call(text, record["call"], dialogues[current].group))
    return calls
