"""Extract functions from a teacher's replies, for `recipes.nano.data --written`.

    python -m recipes.nano.teacher.extract out/teacher/*.jsonl.xz --out out/nano/written.jsonl

A reply is a line with `prefix`, `text` (the rest, up to the closing fence or the limit) and
`ended`. Extracted are functions and methods that parse, are complete and short, do something, need
nothing but Python or names of the same reply, and are new: none may be of a benchmark, like a
held-out function (`recipes.nano.split`), in the data already, or equal to one of these but for
name, comments and docstring; of functions that differ in variable names alone, a few are kept.
Writes records as `recipes.nano.pypi` does: `p` package, `n` name, `top`, `c` code.
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
from dgemma.eval.spans import Definition, parses, split_function
from recipes.nano.pypi import (
    MAX_FUNCTION,
    Extracted,
    canonical,
    definitions,
    does_work,
    quiet,
    record,
)
from recipes.nano.raw import Function, clean_code
from recipes.nano.split import Benchmarks, HeldCode, clean_functions, split_functions
from recipes.nano.teacher.chat import FENCE
from recipes.nano.teacher.names import defined_names, unknown_names
from recipes.nano.teacher.requests import SPLIT_SEED

Reply = dict[str, Any]

NUM_LINES = range(2, 41)
MAX_DOCSTRING = 0.5  # of the characters; a longer docstring is cut to its first line
MAX_WIDTH = 100  # characters of a docstring's line
MAX_PER_STRUCTURE = 3  # functions that differ in the names of variables alone
BATCH_SIZE = 400  # replies that a process reads at once
PACKAGE = "written"
BROKEN = "replies without a whole statement"

# The beginning of a module's statement, which ends the function before it.
STATEMENT = re.compile(
    r"^(?=(?:async )?def |class |@|import |from |if |for |while |print\(|assert |#)", re.M
)
PLACEHOLDER = re.compile(
    r"your code|code here|implementation (goes )?here|\bTODO\b|rest of the (code|function)", re.I
)
UNWANTED_NAME = re.compile(r"(test|main$|example|demo)", re.I)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A function with digests that are equal for copies, and for copies with renamed variables."""

    function: Function
    copy_key: bytes
    structure_key: bytes


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """The usable functions of a batch of replies."""

    candidates: list[Candidate]
    counts: Counter[str]  # of functions, and of those dropped by reason


def code_of(reply: Reply) -> str:
    """Return the code inside the fence."""
    text: str = reply["prefix"] + reply["text"]
    return text.split(FENCE)[1].split("\n", 1)[-1].replace("\r\n", "\n").replace("\f", " ")


@dataclass(frozen=True, slots=True)
class ParsedCode:
    """A syntax tree and its source lines."""

    tree: ast.Module
    lines: list[str]


def parse_statements(code: str, *, ended: bool) -> list[ParsedCode]:
    """Parse the whole, or else each statement; without the last one if it may be cut."""
    whole = parse(code) if ended else None
    if whole is not None:
        return [whole]
    statements = [text for text in STATEMENT.split(code) if text.strip()]
    parsed = [parse(text) for text in (statements if ended else statements[:-1])]
    return [statement for statement in parsed if statement is not None]


def parse(code: str) -> ParsedCode | None:
    try:
        return ParsedCode(ast.parse(code), code.split("\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def read_reply(reply: Reply) -> Iterator[Extracted | str]:
    """Yield the functions of a reply, or for each the reason why it is dropped."""
    statements = parse_statements(code_of(reply), ended=bool(reply["ended"]))
    defined = frozenset(name for parsed in statements for name in defined_names(parsed.tree))
    if not statements:
        yield BROKEN
    for parsed in statements:
        for node, top in definitions(parsed.tree.body, top=True):
            yield read_function(node, parsed.lines, defined, top=top)


def read_function(
    node: Definition, lines: list[str], defined: frozenset[str], *, top: bool
) -> Extracted | str:
    """Return the function without its decorators, or the reason why it is dropped."""
    stop = node.end_lineno or node.lineno
    if UNWANTED_NAME.match(node.name):
        return "tests and examples"
    if stop - node.lineno + 1 not in NUM_LINES:
        return "too short or too long"
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : stop]) + "\n")
    code = clean_code(shorten_docstring(node, text)) if parses(text) else ""
    if not 0 < len(code) <= MAX_FUNCTION:
        return "too short or too long" if code else "not ASCII or too wide"
    if is_trivial(node, code, top=top):
        return "trivial"
    if only_prints(node):
        return "input and output"
    return "unknown names" if unknown_names(code, defined) else Extracted(node.name, top, code)


def shorten_docstring(node: Definition, code: str) -> str:
    """Cut a docstring that outweighs its code to its first line."""
    parts = split_function(code)
    if parts is None or not is_wordy(parts[1], code):
        return code
    head, docstring, body = parts
    line = (ast.get_docstring(node) or "").split("\n")[0].strip()
    indent = docstring[: len(docstring) - len(docstring.lstrip())]
    quoted = f'{indent}"""{line}"""\n'
    is_usable = line and len(quoted) <= MAX_WIDTH and not set('"\\\\') & set(line)
    return head + (quoted if is_usable else "") + body


def is_wordy(docstring: str, code: str) -> bool:
    width = max(map(len, docstring.splitlines()), default=0)
    return len(docstring) > MAX_DOCSTRING * len(code) or width > MAX_WIDTH


def is_trivial(node: Definition, code: str, *, top: bool) -> bool:
    documented = ast.get_docstring(node, clean=False) is not None
    return not does_work(node.body[documented:], top=top) or PLACEHOLDER.search(code) is not None


def only_prints(node: Definition) -> bool:
    """True if the function reads input, or prints and returns nothing."""
    inside = list(ast.walk(node))
    calls = {n.func.id for n in inside if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    returns = any(
        isinstance(n, ast.Yield | ast.YieldFrom) or (isinstance(n, ast.Return) and n.value)
        for n in inside
    )
    return "input" in calls or ("print" in calls and not returns)


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def structure(code: str) -> str:
    """Return a key that ignores variable names, type hints and the docstring."""
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


class ReplyReader:
    """Reads batches of replies, without benchmark and held-out code."""

    def __init__(self, data: Path, held: Sequence[Function]) -> None:
        self._benchmarks = Benchmarks(data)
        self._held = HeldCode(held)

    def read(self, lines: Sequence[str]) -> ReadBatch:
        counts = Counter[str]({"replies": len(lines)})
        functions = []
        with quiet():
            for result in (result for line in lines for result in read_reply(json.loads(line))):
                counts["functions"] += result != BROKEN
                if isinstance(result, Extracted):
                    functions.append(Function(result.code, PACKAGE, result.name, result.top))
                else:
                    counts[result] += 1
            clean, dropped = clean_functions(functions, self._benchmarks, self._held)
            candidates = [
                Candidate(f, digest(canonical(f.code)), digest(structure(f.code))) for f in clean
            ]
        counts.update(dropped)
        return ReadBatch(candidates, counts)


# One reader per process: building one takes seconds, and it is too large to be sent each time.
_readers: list[ReplyReader] = []


def _start(data: Path, held: Sequence[Function]) -> None:
    _readers.append(ReplyReader(data, held))


def _read(lines: Sequence[str]) -> ReadBatch:
    return _readers[-1].read(lines)


def read_all(
    batches: Iterable[Sequence[str]], data: Path, held: Sequence[Function], workers: int
) -> Iterator[ReadBatch]:
    """Read every batch, in order."""
    if workers <= 1:
        yield from map(ReplyReader(data, held).read, batches)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _start, (data, held)) as pool:
        yield from pool.map(_read, batches)


def reply_batches(paths: Iterable[Path], size: int = BATCH_SIZE) -> Iterator[list[str]]:
    """Read the lines of all files in batches."""
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no {path}; give files of replies, as .jsonl or .jsonl.xz")
        opened = lzma.open if path.suffix == ".xz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            lines = (line for line in file if line.strip())
            while batch := list(islice(lines, size)):
                yield batch


def choose_new(
    batches: Iterable[ReadBatch], known: set[bytes], counts: Counter[str]
) -> Iterator[Function]:
    """Yield new functions. `known`, digests of canonical code, and `counts` are updated."""
    structures = Counter[bytes]()
    for batch in batches:
        counts.update(batch.counts)
        for candidate in batch.candidates:
            if candidate.copy_key in known:
                counts["known already"] += 1
            elif structures[candidate.structure_key] >= MAX_PER_STRUCTURE:
                counts["with other variable names"] += 1
            else:
                known.add(candidate.copy_key)
                structures[candidate.structure_key] += 1
                counts["extracted"] += 1
                yield candidate.function


def write(paths: Sequence[Path], data: Path, out: Path, workers: int) -> Counter[str]:
    """Write the file of functions; return counts of all, by what became of them."""
    with quiet():
        train, held, _ = split_functions(data, Random(f"{SPLIT_SEED}/code"))
        known = {digest(canonical(function.code)) for function in (*train, *held)}
    counts = Counter[str]()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="\n") as file:
        batches = with_progress(read_all(reply_batches(paths), data, held, workers))
        for function in choose_new(batches, known, counts):
            file.write(json.dumps(record(PACKAGE, function)) + "\n")
    return counts


def with_progress(batches: Iterable[ReadBatch]) -> Iterator[ReadBatch]:
    """Pass the batches on, with a line of progress now and then."""
    for number, batch in enumerate(batches, 1):
        if number % 50 == 0:
            print(f"{number * BATCH_SIZE} replies", file=sys.stderr, flush=True)
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("replies", type=Path, nargs="+", help="files of replies")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("out/nano/written.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    counts = write(options.replies, options.data, options.out, options.workers)
    for reason, count in counts.most_common():
        print(f"{count:9,} {reason}")


if __name__ == "__main__":
    main()
