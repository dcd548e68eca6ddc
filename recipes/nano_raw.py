"""Read the raw files of the data directory as clean documents, each with the group it belongs to.

Owns the formats of those files. A group (a story, a package, a problem, a dialogue) is what a
held-out split must not cut through.
"""

from __future__ import annotations

import ast
import gzip
import html
import json
import lzma
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgemma.errors import UsageError

# The model is shipped and talks like a children's book: sentences with these words stay out.
UNSUITED = re.compile(
    r"\b(sex\w*|fuck\w*|shit\w*|bitch\w*|rape[ds]?|rapist|nigg\w*|whore\w*|slut\w*|porn\w*|penis|"
    r"vagina|dick|cock|cunt|fag\w*|nazi\w*|suicide|hitler|orgasm\w*|prostitut\w*|naked|nude)\b",
    re.IGNORECASE,
)
BANDS = 40
WRAPPED = 90  # no line of a hard-wrapped file is longer


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    group: str


@dataclass(frozen=True, slots=True)
class Function:
    code: str
    group: str
    name: str
    top: bool  # a plain function, not a method


def read_xz(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"no {path.name} in {path.parent}; --data takes the data directory")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def read_lines(path: Path) -> Iterator[Any]:
    """The records of a .jsonl or .jsonl.xz file."""
    text = read_xz(path) if path.suffix == ".xz" else path.read_text(encoding="utf-8")
    # Not splitlines, which also splits at separators that JSON strings may hold.
    return (json.loads(line) for line in text.split("\n") if line.strip())


def sentences(data: Path) -> list[str]:
    """Single sentences, cleaned, without repetitions, in file order."""
    found: dict[str, None] = {}
    for name in ("tatoeba_en", "cv_en"):
        for line in read_xz(data / "train" / f"{name}.txt.xz").splitlines():
            text = plain(line)
            if 8 <= len(text) <= 240 and text.isascii() and not UNSUITED.search(text):
                found[text] = None
    return list(found)


def plain(text: str) -> str:
    """Typographic quotes and dashes as a keyboard has them; single spaces."""
    text = html.unescape(text).replace("’", "'").replace("‘", "'")
    text = text.replace("“", '"').replace("”", '"').replace("…", "...").replace("\u00a0", " ")
    return re.sub(r"[ \t]+", " ", text).strip()


def paragraphs(text: str) -> list[str]:
    """Blank lines end a paragraph; lines within it were only wrapped."""
    blocks = re.split(r"\n\s*\n", text)
    found = [plain(" ".join(block.split())).replace("_", "") for block in blocks]
    return [paragraph for paragraph in found if re.search(r"[A-Za-z]{2}", paragraph)]


def storybook(data: Path) -> list[Document]:
    """African Storybook and Pratham Books: a heading and short paragraphs, gathered to longer."""
    parts = re.split(r"^# (.*)\n", read_xz(data / "train" / "asp_pb_en.txt.xz"), flags=re.MULTILINE)
    return [
        Document("\n\n".join(gather(paragraphs(body), 240)), f"asp/{title.strip().lower()}")
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
        if paragraphs(body)
    ]


def gather(parts: list[str], least: int) -> list[str]:
    """Join neighbouring paragraphs until each has at least `least` characters."""
    joined: list[str] = []
    for part in parts:
        if joined and len(joined[-1]) < least:
            joined[-1] += " " + part
        else:
            joined.append(part)
    return joined


def tales(data: Path) -> list[Document]:
    """FairytaleQA: nothing marks where a story ends, so the file is cut into bands."""
    blocks = read_xz(data / "train" / "fairytaleqa_stories.txt.xz").split("\n\n")
    found = [paragraph for block in blocks for paragraph in unwrap(block)]
    joined = gather([paragraph for paragraph in found if paragraph], 160)
    size = -(-len(joined) // BANDS)
    bands = [joined[start : start + size] for start in range(0, len(joined), size)]
    return [Document("\n\n".join(band), f"tale/{index}") for index, band in enumerate(bands)]


def unwrap(block: str) -> list[str]:
    """The paragraphs of a block whose lines are either wrapped or paragraphs themselves."""
    lines = block.splitlines()
    wrapped = bool(lines) and max(map(len, lines)) < WRAPPED
    return [plain(" ".join(lines))] if wrapped else [plain(line) for line in lines]


def books(data: Path) -> list[Document]:
    """Children's classics, one document per book; headings and front matter are left out."""
    text = read_xz(data / "train" / "kids_books.txt.xz")
    parts = re.split(r"^# ([^\n]*\.md)\n", text, flags=re.MULTILINE)
    found = []
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        kept = [line for line in body.splitlines() if not re.match(r"\s*(#|---|\*\*\*)", line)]
        found.append(Document("\n\n".join(paragraphs("\n".join(kept))), f"book/{name}"))
    return found


def dialogues(data: Path) -> list[Document]:
    parts = read_xz(data / "train" / "sgd_dialogues.txt.xz").split("\n\n")
    return [
        Document(plain_lines(part), f"dialogue/{index}")
        for index, part in enumerate(parts)
        if part.strip()
    ]


def plain_lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.splitlines() if line.strip())


def functions(data: Path) -> list[Function]:
    """Python functions that parse, dedented, four spaces a level; one of each."""
    found: dict[str, Function] = {}
    for record in read_lines(data / "train" / "algos.jsonl.xz"):
        group = f"{record['s'].split()[0]}/{record['n']}"
        add_function(found, record, group, top="(self" not in record["c"])
    for record in read_lines(data / "train" / "py_funcs.jsonl.xz"):
        add_function(found, record, record["p"], top=bool(record["top"]))
    return list(found.values())


def further_functions(path: Path) -> list[Function]:
    """Functions of the same form from a file of their own, as `recipes.nano_pypi` writes one."""
    if not path.is_file():
        makers = "`python -m recipes.nano_pypi` or `python -m recipes.teacher.take`"
        raise UsageError(f"no {path}; {makers} makes a file of functions")
    found: dict[str, Function] = {}
    for record in read_lines(path):
        add_function(found, record, record["p"], top=bool(record["top"]))
    return list(found.values())


def add_function(found: dict[str, Function], record: Any, group: str, *, top: bool) -> None:
    code = clean_code(record["c"])
    key = re.sub(r"\s+", "", code)
    if code and key not in found:
        found[key] = Function(code, group, record["n"], top)


def clean_code(text: str) -> str:
    """Spaces for tabs and no trailing ones; empty when Python cannot read it."""
    text = textwrap.dedent(text.expandtabs(4).replace("\r", ""))
    text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
    if not text.isascii() or max(map(len, text.splitlines())) > 120:
        return ""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return text


def benchmark_code(data: Path) -> list[tuple[str, str]]:
    """Name and solution of every problem of HumanEval and MBPP."""
    human_eval, mbpp = benchmark_problems(data)
    found = [(item["entry_point"], item["canonical_solution"]) for item in human_eval]
    for item in mbpp:
        found += [(name, item["code"]) for name in re.findall(r"^def (\w+)", item["code"], re.M)]
    return found


def benchmark_texts(data: Path) -> list[str]:
    """The same problems in words."""
    human_eval, mbpp = benchmark_problems(data)
    return [*(item["prompt"] for item in human_eval), *(item["text"] for item in mbpp)]


def benchmark_problems(data: Path) -> tuple[list[Any], list[Any]]:
    """Those of HumanEval and of MBPP, as their files have them."""
    folder = data / "eval"
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        human_eval = [json.loads(line) for line in file]
    return human_eval, list(read_lines(folder / "mbpp.jsonl"))
