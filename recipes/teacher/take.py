"""Functions out of a teacher's replies, as `recipes.nano_data --written` reads them.

    python -m recipes.teacher.take out/teacher/replies*.jsonl.xz --out out/nano/written.jsonl

A reply is a line with `begin`, `text` (what the teacher wrote behind it, up to the closing fence or
the limit) and `ended`. Taken are functions and methods that parse, are complete and short, do
something, need nothing but Python or what stands beside them, and are new: none may be of a
benchmark, like a held-out function (`recipes.nano_split`), in the data already, or there before but
for its name, comments and docstring; what differs in variable names alone comes in a few times.
Writes records as `recipes.nano_pypi` does: `p` package, `n` name, `top`, `c` code.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import lzma
import multiprocessing
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from dgemma.errors import UsageError
from dgemma.train import rewrite
from recipes.nano_extract import (
    LONGEST,
    Definition,
    Found,
    definitions,
    same_code,
    works,
)
from recipes.nano_pypi import quiet, record
from recipes.nano_raw import Function, clean_code
from recipes.nano_split import Benchmarks, HeldCode, clean_functions, split_functions
from recipes.teacher.ask import SPLIT_SEED
from recipes.teacher.names import given_names, unknown_names
from recipes.teacher.spell import FENCE

Reply = dict[str, Any]

LINES = range(2, 41)
MOST_DOCSTRING = 0.5  # of the characters; a longer docstring is cut to its first line
WIDEST = 100  # characters of a docstring's line
PER_FORM = 3  # functions that differ in the names of variables alone
BATCH = 400  # replies that a process reads at once
PACKAGE = "written"
BROKEN = "replies without a whole statement"

# What begins a statement of a module, and so ends the function before it.
STATEMENT = re.compile(
    r"^(?=(?:async )?def |class |@|import |from |if |for |while |print\(|assert |#)", re.M
)
NOT_WRITTEN = re.compile(
    r"your code|code here|implementation (goes )?here|\bTODO\b|rest of the (code|function)", re.I
)
UNWANTED_NAME = re.compile(r"(test|main$|example|demo)", re.I)


@dataclass(frozen=True, slots=True)
class Taken:
    """A function with digests that are equal for copies, and for copies with renamed variables."""

    function: Function
    same: bytes
    form: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    taken: list[Taken]
    counts: Counter[str]  # functions, and why some were dropped


def code_of(reply: Reply) -> str:
    """What stands within the fence."""
    text: str = reply["begin"] + reply["text"]
    return text.split(FENCE)[1].split("\n", 1)[-1].replace("\r\n", "\n").replace("\f", " ")


@dataclass(frozen=True, slots=True)
class Piece:
    tree: ast.Module
    lines: list[str]


def pieces(code: str, *, ended: bool) -> list[Piece]:
    """The whole, or else the statements that parse by themselves; not the last if it may be cut."""
    whole = parsed(code) if ended else None
    if whole is not None:
        return [whole]
    parts = [part for part in STATEMENT.split(code) if part.strip()]
    found = [parsed(part) for part in (parts if ended else parts[:-1])]
    return [piece for piece in found if piece is not None]


def parsed(code: str) -> Piece | None:
    try:
        return Piece(ast.parse(code), code.split("\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def read_reply(reply: Reply) -> Iterator[Found | str]:
    """The functions of a reply, or why one is of no use."""
    found = pieces(code_of(reply), ended=bool(reply["ended"]))
    given = frozenset(name for piece in found for name in given_names(piece.tree))
    if not found:
        yield BROKEN
    for piece in found:
        for node, top in definitions(piece.tree.body, top=True):
            yield read_function(node, piece.lines, given, top=top)


def read_function(
    node: Definition, lines: list[str], given: frozenset[str], *, top: bool
) -> Found | str:
    """Without its decorators, or the reason why it is of no use."""
    stop = node.end_lineno or node.lineno
    if UNWANTED_NAME.match(node.name):
        return "tests and examples"
    if stop - node.lineno + 1 not in LINES:
        return "too short or too long"
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : stop]) + "\n")
    code = clean_code(brief(node, text)) if rewrite.parses(text) else ""
    if not 0 < len(code) <= LONGEST:
        return "too short or too long" if code else "not ASCII or too wide"
    if is_trivial(node, code, top=top):
        return "trivial"
    if only_prints(node):
        return "input and output"
    return "unknown names" if unknown_names(code, given) else Found(node.name, top, code)


def brief(node: Definition, code: str) -> str:
    """With one line of the docstring where it outweighs the code, which is what is to be learnt."""
    parts = rewrite.split_function(code)
    if parts is None or not is_wordy(parts[1], code):
        return code
    head, docstring, body = parts
    line = (ast.get_docstring(node) or "").split("\n")[0].strip()
    indent = docstring[: len(docstring) - len(docstring.lstrip())]
    quoted = f'{indent}"""{line}"""\n'
    good = line and len(quoted) <= WIDEST and not set('"\\\\') & set(line)
    return head + (quoted if good else "") + body


def is_wordy(docstring: str, code: str) -> bool:
    widest = max(map(len, docstring.splitlines()), default=0)
    return len(docstring) > MOST_DOCSTRING * len(code) or widest > WIDEST


def is_trivial(node: Definition, code: str, *, top: bool) -> bool:
    documented = ast.get_docstring(node, clean=False) is not None
    return not works(node.body[documented:], top=top) or NOT_WRITTEN.search(code) is not None


def only_prints(node: Definition) -> bool:
    """Whether it asks a person, or prints and gives nothing back."""
    inside = list(ast.walk(node))
    calls = {n.func.id for n in inside if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    gives = any(
        isinstance(n, ast.Yield | ast.YieldFrom) or (isinstance(n, ast.Return) and n.value)
        for n in inside
    )
    return "input" in calls or ("print" in calls and not gives)


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def form(code: str) -> str:
    """Equal for functions that differ in the names of variables, in hints and docstrings alone."""
    node = ast.parse(code).body[0]
    assert isinstance(node, Definition)
    numbers: dict[str, str] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            inner.annotation = None
            numbers.setdefault(inner.arg, f"v{len(numbers)}")
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            numbers.setdefault(inner.id, f"v{len(numbers)}")
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            inner.arg = numbers[inner.arg]
        elif isinstance(inner, ast.Name):
            inner.id = "f" if inner.id == node.name else numbers.get(inner.id, inner.id)
    documented = ast.get_docstring(node, clean=False) is not None
    return ast.unparse(node.args) + "\n" + "\n".join(map(ast.unparse, node.body[documented:]))


class Reader:
    """Reads batches of replies; knows what must not come in."""

    def __init__(self, data: Path, held: Sequence[Function]) -> None:
        self._benchmarks = Benchmarks(data)
        self._held = HeldCode(held)

    def read(self, lines: Sequence[str]) -> Batch:
        counts = Counter[str]({"replies": len(lines)})
        functions = []
        with quiet():
            for found in (found for line in lines for found in read_reply(json.loads(line))):
                counts["functions"] += found != BROKEN
                if isinstance(found, Found):
                    functions.append(Function(found.code, PACKAGE, found.name, found.top))
                else:
                    counts[found] += 1
            kept, lost = clean_functions(functions, self._benchmarks, self._held)
            taken = [Taken(f, digest(same_code(f.code)), digest(form(f.code))) for f in kept]
        counts.update(lost)
        return Batch(taken, counts)


# A process's own reader: building one takes seconds, and it is too large to be sent each time.
_readers: list[Reader] = []


def _start(data: Path, held: Sequence[Function]) -> None:
    _readers.append(Reader(data, held))


def _read(lines: Sequence[str]) -> Batch:
    return _readers[-1].read(lines)


def read_all(
    batches: Iterable[Sequence[str]], data: Path, held: Sequence[Function], workers: int
) -> Iterator[Batch]:
    """Every batch as functions, in order."""
    if workers <= 1:
        yield from map(Reader(data, held).read, batches)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _start, (data, held)) as pool:
        yield from pool.map(_read, batches)


def reply_batches(paths: Iterable[Path], size: int = BATCH) -> Iterator[list[str]]:
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no {path}; give files of replies, as .jsonl or .jsonl.xz")
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            lines = (line for line in file if line.strip())
            while batch := list(islice(lines, size)):
                yield batch


def choose(batches: Iterable[Batch], known: set[bytes], counts: Counter[str]) -> Iterator[Function]:
    """What is new; `known`, digests of `same_code`, and `counts` grow by what is read."""
    forms = Counter[bytes]()
    for batch in batches:
        counts.update(batch.counts)
        for taken in batch.taken:
            if taken.same in known:
                counts["known already"] += 1
            elif forms[taken.form] >= PER_FORM:
                counts["with other variable names"] += 1
            else:
                known.add(taken.same)
                forms[taken.form] += 1
                counts["taken"] += 1
                yield taken.function


def write(paths: Sequence[Path], data: Path, out: Path, workers: int) -> Counter[str]:
    """The file of functions, and what became of all others."""
    with quiet():
        train, held, _ = split_functions(data, Random(f"{SPLIT_SEED}/code"))
        known = {digest(same_code(function.code)) for function in (*train, *held)}
    counts = Counter[str]()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="\n") as file:
        batches = told(read_all(reply_batches(paths), data, held, workers))
        for f in choose(batches, known, counts):
            file.write(json.dumps(record(PACKAGE, f)) + "\n")
    return counts


def told(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, with a line of progress now and then."""
    for number, batch in enumerate(batches, 1):
        if number % 50 == 0:
            print(f"{number * BATCH} replies", file=sys.stderr, flush=True)
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("replies", type=Path, nargs="+", help="files of replies")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("out/nano/written.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    counts = write(given.replies, given.data, given.out, given.workers)
    for reason, count in counts.most_common():
        print(f"{count:9,} {reason}")


if __name__ == "__main__":
    main()
