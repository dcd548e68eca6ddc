"""What is held out, and what must leave the training text because of it or of a benchmark.

Whole groups are held out: packages and function names for code, stories and books for prose, the
end of the file for dialogues. Two rules then clean the training side:

- code goes when it defines a function with the name of a HumanEval or MBPP function (case and
  underscores do not count) or of a held-out problem, or holds at least half, and at least three, of
  the 8-token windows of one of their solutions or of a held-out function;
- prose goes when a tenth of a chunk's 8-word windows stand in held-out prose.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from dgemma.train.rewrite import split_function, split_sentences
from recipes import nano_raw
from recipes.nano_raw import Document, Function

Window = tuple[str, ...]
Item = TypeVar("Item")

WINDOW = 8
HELD_OUT_DIALOGUES = 700
HELD_OUT_BOOKS = ("Oscar Wilde/", "Edith Nesbit/The Book of Dragons", "L. Frank Baum/A Kidnapped")
HELD_OUT_BANDS = 3  # of nano_raw.BANDS, at the end of the file
HELD_OUT_PACKAGES = 0.06
LARGEST_PACKAGE = 400  # functions; a larger one would cost training too much
CHUNK = 2000  # characters: about 500 tokens


@dataclass(frozen=True, slots=True)
class Call:
    """A dialogue up to the point where the assistant calls a function, and the call."""

    dialogue: str
    call: dict[str, object]
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    stories: list[Document]
    books: list[Document]
    dialogues: list[Document]
    functions: list[Function]
    calls: list[Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    train: Corpus
    held_out: Corpus
    dropped: dict[str, int]  # how much of the training text each rule took


def make_split(data: Path, seed: int) -> Split:
    stories, held_stories = split_stories(nano_raw.storybook(data), Random(f"{seed}/stories"))
    bands = nano_raw.tales(data)
    books, held_books = part(nano_raw.books(data), lambda d: held_book(d.group))
    held_prose = chunked([*held_stories, *bands[-HELD_OUT_BANDS:], *held_books], CHUNK)
    stories, lost_stories = clean_prose([*stories, *bands[:-HELD_OUT_BANDS]], held_prose)
    books, lost_books = clean_prose(books, held_prose)
    dialogues = nano_raw.dialogues(data)
    calls = locate_calls(data, dialogues)
    held_talk = {document.group for document in dialogues[-HELD_OUT_DIALOGUES:]}
    functions, held_functions, lost = split_functions(data, Random(f"{seed}/code"))
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
    dropped = {"prose chunks like held-out ones": lost_stories + lost_books, **lost}
    return Split(train=train, held_out=held_out, dropped=dropped)


def part(items: Iterable[Item], is_held: Callable[[Item], bool]) -> tuple[list[Item], list[Item]]:
    """Those that stay and those that are held."""
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        sides[is_held(item)].append(item)
    return sides


def held_book(group: str) -> bool:
    return group.removeprefix("book/").startswith(HELD_OUT_BOOKS)


def split_stories(found: list[Document], rng: Random) -> tuple[list[Document], list[Document]]:
    titles = sorted({document.group for document in found})
    held = set(rng.sample(titles, len(titles) // 16))
    return part(found, lambda document: document.group in held)


def chunked(documents: Iterable[Document], most: int) -> list[Document]:
    return [Document(text, d.group) for d in documents for text in chunks(d.text, most)]


def chunks(text: str, most: int) -> list[str]:
    """Pieces of at most `most` characters, cut at paragraph ends, or else at sentence ends."""
    found: list[str] = []
    for paragraph in text.split("\n\n"):
        small = len(paragraph) <= most
        for index, piece in enumerate([paragraph] if small else split_sentences(paragraph)):
            gap = " " if index else "\n\n"
            if found and len(found[-1]) + len(gap) + len(piece) <= most:
                found[-1] += gap + piece
            else:
                found.append(piece)
    return [piece for piece in found if 60 <= len(piece) <= most]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def code_tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def windows(tokens: Sequence[str]) -> set[Window]:
    return set(zip(*(tokens[at:] for at in range(WINDOW)), strict=False))


def clean_prose(documents: list[Document], held_out: list[Document]) -> tuple[list[Document], int]:
    """Chunks of the documents without those that stand in held-out text too."""
    known = set[Window]().union(*(windows(words(document.text)) for document in held_out))
    found = chunked(documents, CHUNK)
    kept = []
    for document in found:
        own = windows(words(document.text))
        if len(own & known) < max(1, len(own) // 10):
            kept.append(document)
    return kept, len(found) - len(kept)


class Solutions:
    """Code that training must not hold, found again by its windows."""

    def __init__(self, solutions: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._where: dict[Window, list[int]] = defaultdict(list)
        for index, code in enumerate(solutions):
            found = windows(code_tokens(code))
            self._sizes.append(len(found))
            for window in found:
                self._where[window].append(index)

    def hold(self, found: set[Window]) -> bool:
        shared = [window for window in found if window in self._where]
        counts = Counter(index for window in shared for index in self._where[window])
        return any(n >= max(3, self._sizes[index] / 2) for index, n in counts.items())


def same_name(name: str) -> str:
    return name.replace("_", "").lower()


class Benchmarks:
    """HumanEval and MBPP, by name and by solution."""

    def __init__(self, data: Path) -> None:
        problems = nano_raw.benchmark_code(data)
        self._names = {same_name(name) for name, _ in problems}
        self._solutions = Solutions(code for _, code in problems)

    def hold(self, code: str, found: set[Window] | None = None) -> bool:
        names = re.findall(r"\bdef (\w+)", code)
        if any(same_name(name) in self._names for name in names):
            return True
        return self._solutions.hold(windows(code_tokens(code)) if found is None else found)


class HeldCode:
    """Held-out functions, by code and, where they solve a problem, by name."""

    def __init__(self, held: Sequence[Function]) -> None:
        self._names = {function.name for function in held if "/" in function.group}
        self._groups = {function.group for function in held}
        self._solutions = Solutions(body(function.code) for function in held)

    def named(self, code: str) -> bool:
        return any(name in self._names for name in re.findall(r"\bdef (\w+)", code))

    def hold(self, function: Function, found: set[Window]) -> bool:
        is_known = function.group in self._groups or self.named(function.code)
        return is_known or self._solutions.hold(found)


def split_functions(
    data: Path, rng: Random
) -> tuple[list[Function], list[Function], dict[str, int]]:
    """By package; where there is no package, by function name."""
    benchmarks = Benchmarks(data)
    found = nano_raw.functions(data)
    held_groups = choose_groups(found, rng)
    others, held = part(found, lambda function: function.group in held_groups)
    held = [function for function in held if not benchmarks.hold(function.code)]
    train, lost = clean_functions(others, benchmarks, HeldCode(held))
    return train, held, lost


def clean_functions(
    functions: Iterable[Function], benchmarks: Benchmarks, held: HeldCode
) -> tuple[list[Function], dict[str, int]]:
    """Those that training may hold, and how many each rule took."""
    train, lost = [], {"functions of benchmarks": 0, "functions like held-out ones": 0}
    for function in functions:
        own = windows(code_tokens(function.code))
        if benchmarks.hold(function.code, own):
            lost["functions of benchmarks"] += 1
        elif held.hold(function, own):
            lost["functions like held-out ones"] += 1
        else:
            train.append(function)
    return train, lost


def choose_groups(functions: list[Function], rng: Random) -> set[str]:
    sizes = Counter(function.group for function in functions)
    packages = sorted(group for group in sizes if "/" not in group)
    small = [group for group in packages if sizes[group] <= LARGEST_PACKAGE]
    held = set(rng.sample(small, round(HELD_OUT_PACKAGES * len(packages))))
    common = Counter(function.name for function in functions)
    names = sorted({f.name for f in functions if "/" in f.group and common[f.name] <= 8})
    chosen = set(rng.sample(names, len(names) // 40))
    return held | {f.group for f in functions if "/" in f.group and f.name in chosen}


def body(code: str) -> str:
    """The code without its docstring, which copies of a function often change."""
    parts = split_function(code)
    return code if parts is None else parts[0] + parts[2]


def locate_calls(data: Path, dialogues: list[Document]) -> list[Call]:
    """Find each call's last turns in the dialogues: what came before says what was asked."""
    lines = [document.text.splitlines() for document in dialogues]
    where: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, turns in enumerate(lines):
        for at, turn in enumerate(turns):
            where[turn].append((index, at))
    found, current = [], 0
    for record in nano_raw.read_lines(data / "train" / "sgd_calls.jsonl.xz"):
        last = [nano_raw.plain(turn) for turn in record["h"]]
        # Both files have the same order, so the next dialogue that fits is the one.
        places = (place for place in where[last[-1]] if place[0] >= current)
        fits = (p for p in places if lines[p[0]][p[1] + 1 - len(last) : p[1] + 1] == last)
        place = next(fits, None)
        if place is not None:
            current = place[0]
            text = "\n".join(lines[current][: place[1] + 1])
            found.append(Call(text, record["call"], dialogues[current].group))
    return found
