"""Acceptance checks of workloads: executable judgements of an answer, by name.

A check is a function `(answer, **params) -> reason`; an empty reason accepts. Keyword parameters
of the function are the parameters that a workload file may set. None of them asks a model.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from dgemma.errors import UsageError
from dgemma.eval.infill import run_program
from dgemma.eval.replies import NOT_JSON, parse_json
from dgemma.programs.sudoku import grid

WORD = re.compile(r"[^\W_]+")
SENTENCE = re.compile(r"[^.!?\n]*[^.!?\s][^.!?\n]*[.!?]*(?:\s*\[[\d, ]+\])*")
CITATION = re.compile(r"\[(\d+(?:\s*,\s*\d+)*)\]")
COMMON = set(
    "the and for are was were with that this from has have had not but its his her their they you "
    "she him who which into than then there".split()
)
MIN_SUPPORT = 0.5  # share of a sentence's content words that its source must hold
MIN_DISTINCT_2 = 0.35  # of the adjacent word pairs of a text; below it a text repeats itself
MIN_PAIRS = 16  # in a text that is judged for repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswer:
    """The answer of an arm as the checks see it."""

    text: str
    original: str = ""  # the prompt's own text: of an edit, of holes
    swapped: str | None = None  # the answer to the prompt with its evidence swapped


Check = Callable[..., str]


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """A check and its parameters, as a workload file gives them."""

    name: str
    params: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, params: Mapping[str, Any], source: str) -> "CheckSpec":
        """Refuse parameters that the check does not have, or lacks."""
        signature = inspect.signature(CHECKS[name])
        known = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        unknown = sorted(params.keys() - {p.name for p in known})
        missing = [p.name for p in known if p.default is p.empty and p.name not in params]
        if unknown or missing:
            problem = f"has no {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
            allowed = ", ".join(p.name for p in known) or "no parameters"
            raise UsageError(f"{source}: check {name} {problem}; it takes {allowed}")
        return cls(name, params)

    @property
    def needs_swap(self) -> bool:
        return self.name == "context"

    def reason(self, answer: CheckedAnswer) -> str:
        """Return why the answer is not accepted, or nothing."""
        return CHECKS[self.name](answer, **self.params)


# --- text


def exact(answer: CheckedAnswer, *, to: str, ignore: str = "") -> str:
    """Compare with a text, but for case, white space and the characters of `ignore`."""
    found, wanted = (_plain(text, ignore) for text in (answer.text, to))
    return "" if found == wanted else f"is not {to!r}"


def contains(
    answer: CheckedAnswer,
    *,
    all: Sequence[str] = (),
    any: Sequence[str] = (),
    none: Sequence[str] = (),
) -> str:
    """Look for whole words or phrases, without regard to case."""
    missing = [word for word in all if not _holds(answer.text, word)]
    if missing:
        return f"lacks {missing[0]!r}"
    if any and not [word for word in any if _holds(answer.text, word)]:
        return f"has none of {list(any)}"
    present = [word for word in none if _holds(answer.text, word)]
    return f"holds {present[0]!r}" if present else ""


def matches(answer: CheckedAnswer, *, regex: str) -> str:
    """Match the whole answer with a regular expression."""
    found = re.fullmatch(regex, answer.text.strip(), re.DOTALL)
    return "" if found else f"does not match {regex!r}"


def words(answer: CheckedAnswer, *, min: int = 0, max: int | None = None) -> str:
    """Bound the number of words."""
    count = len(answer.text.split())
    if count < min:
        return f"has {count} words, fewer than {min}"
    return f"has {count} words, more than {max}" if max is not None and count > max else ""


def similarity(answer: CheckedAnswer, *, min: float, max: float = 1.0, to: str = "") -> str:
    """Bound the similarity of the words (difflib's ratio) to a text, or to the original."""
    ratio = _similarity(to or answer.original, answer.text)
    return "" if min <= ratio <= max else f"has similarity {ratio:.2f}, not {min} to {max}"


def varied(answer: CheckedAnswer, *, min_distinct_2: float = MIN_DISTINCT_2) -> str:
    """Refuse a text that repeats itself: the share of distinct ones among its word pairs."""
    value = distinct_n(answer.text)
    if value is None or value >= min_distinct_2:
        return ""
    return f"repeats itself: distinct-2 is {value:.2f}, below {min_distinct_2}"


def asks_back(answer: CheckedAnswer) -> str:
    """Ask for a question: the request cannot be answered without one."""
    return "" if "?" in answer.text else "asks nothing back"


# --- code


def unit_tests(answer: CheckedAnswer, *, tests: str, seconds: float = 5.0) -> str:
    """Run the answer's code, then the tests, in a subprocess with limits (see eval/infill.py)."""
    if not run_program(f"{_code(answer.text)}\n{tests}\n", seconds):
        return "fails its tests"
    return ""


def keeps_code(answer: CheckedAnswer, *, code: str = "", documented: bool = False) -> str:
    """Compare the syntax trees of answer and original; docstrings may differ."""
    try:
        trees = [ast.parse(text) for text in (code or answer.original, _code(answer.text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not Python"
    if documented and not any(ast.get_docstring(node) for node in _functions(trees[1])):
        return "has no docstring"
    old, new = (_without_docstrings(tree) for tree in trees)
    return "" if old == new else "changes the code"


# --- structure


def json_schema(answer: CheckedAnswer, *, schema: Mapping[str, Any]) -> str:
    """Validate JSON by a schema, as the constraint engine reads it."""
    from llguidance import JsonCompiler, LLMatcher, LLTokenizer

    if parse_json(answer.text) is NOT_JSON:
        return "is not JSON"
    grammar = JsonCompiler(whitespace_flexible=True).compile(json.dumps(dict(schema)))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    is_valid = matcher.consume_tokens(list(answer.text.strip().encode())) and matcher.is_accepting()
    return "" if is_valid else "does not fit the schema"


def json_equal(answer: CheckedAnswer, *, to: Any, keys: Sequence[str] = ()) -> str:
    """Compare parsed JSON, or some keys of an object; strings without regard to case."""
    value = parse_json(_code(answer.text))
    if value is NOT_JSON:
        return "is not JSON"
    if not keys:
        return "" if _folded(value) == _folded(to) else "has other values"
    if not isinstance(value, dict):
        return "is not an object"
    wrong = [key for key in keys if _folded(value.get(key)) != _folded(to.get(key))]
    return f"has another {wrong[0]!r}" if wrong else ""


def table(answer: CheckedAnswer, *, columns: int, min_rows: int = 1) -> str:
    """Read a Markdown table: a header, a rule, and rows of as many cells."""
    lines = [line.strip() for line in answer.text.strip().splitlines() if line.strip()]
    cells = [line.strip("|").split("|") for line in lines if "|" in line]
    if len(cells) < 2 or not all(set(cell.strip()) <= set(":- ") for cell in cells[1]):
        return "has no header and rule of a table"
    if len(cells) - 2 < min_rows:
        return f"has {len(cells) - 2} rows, fewer than {min_rows}"
    wrong = [row for row in cells if len(row) != columns]
    return f"has a row of {len(wrong[0])} cells, not {columns}" if wrong else ""


# --- grounding and edits


def citations(answer: CheckedAnswer, *, sources: Mapping[str, str], min: int = 1) -> str:
    """Check citations `[n]`: each exists, each sentence has one that supports its words.

    Supported: half of the sentence's content words are in the sources that it cites.
    """
    cited = 0
    for sentence in SENTENCE.findall(answer.text):
        numbers = [n.strip() for group in CITATION.findall(sentence) for n in group.split(",")]
        claim = content_words(CITATION.sub("", sentence))
        if not claim:
            continue
        if not numbers:
            return f"cites nothing for {sentence.strip()[:60]!r}"
        unknown = [n for n in numbers if n not in sources]
        if unknown:
            return f"cites [{unknown[0]}], which does not exist"
        evidence = content_words(" ".join(sources[n] for n in numbers))
        if len(claim & evidence) < MIN_SUPPORT * len(claim):
            return f"cites {numbers} for {sentence.strip()[:60]!r}, which they do not say"
        cited += 1
    return "" if cited >= min else f"has {cited} cited sentences, fewer than {min}"


def context(answer: CheckedAnswer) -> str:
    """Compare with the answer to the swapped evidence: it must be another one."""
    assert answer.swapped is not None, "the runner asks for it"
    is_same = _plain(answer.text) == _plain(answer.swapped)
    return "is the same with other evidence" if is_same else ""


def locality(answer: CheckedAnswer, *, allowed: Sequence[str] = ()) -> str:
    """Compare the words of an edit with the original; only those of `allowed` may differ."""
    old, new = answer.original.split(), answer.text.split()
    for tag, start, stop, _, _ in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        outside = [w for w in old[start:stop] if not [a for a in allowed if _holds(w, a)]]
        if tag != "equal" and (outside or not old[start:stop]):
            return f"changes {' '.join(outside)[:60]!r}" if outside else "adds words elsewhere"
    return ""


def sudoku(answer: CheckedAnswer) -> str:
    """Check a grid by the rules and the givens."""
    cells = grid.read_reply(answer.text)
    if cells is None:
        return "is not a grid"
    return "" if grid.is_solution(answer.original, cells) else "breaks a rule or a given"


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        *(exact, contains, matches, words, similarity, varied, asks_back),
        *(unit_tests, keeps_code, json_schema, json_equal, table),
        *(citations, context, locality, sudoku),
    )
}


# --- helpers


def distinct_n(text: str, n: int = 2) -> float | None:
    """Return the share of distinct n-grams of words; None for a text too short to tell."""
    found = text.lower().split()
    grams = (
        list(pairwise(found)) if n == 2 else list(zip(*(found[i:] for i in range(n)), strict=False))
    )
    return len(set(grams)) / len(grams) if len(grams) >= MIN_PAIRS else None


def content_words(text: str) -> set[str]:
    """Return the words of three letters or more, and numbers, that are not common ones."""
    found = {word.lower() for word in WORD.findall(text)}
    return {w for w in found if (len(w) > 2 or w.isdigit()) and w not in COMMON}


def _similarity(old: str, new: str) -> float:
    return SequenceMatcher(None, old.lower().split(), new.lower().split(), autojunk=False).ratio()


def _holds(text: str, phrase: str) -> bool:
    pattern = rf"(?<!\w){re.escape(phrase)}(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _plain(text: str, ignore: str = "") -> str:
    kept = "".join(char for char in text if char not in ignore)
    return " ".join(kept.split()).casefold()


def _code(text: str) -> str:
    """Return the text of the first Markdown fence, or all of it."""
    found = re.search(r"```[^\n]*\n(.*?)```", text, re.DOTALL)
    return found[1] if found else text


def _folded(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip().casefold()
    if isinstance(value, dict):
        return {key: _folded(inner) for key, inner in value.items()}
    return [_folded(inner) for inner in value] if isinstance(value, list) else value


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _without_docstrings(tree: ast.Module) -> str:
    for node in _functions(tree):
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)
