"""Spans of a document to hide or change: sentences, a few words, lines of a Python function.

A span is a pair of character offsets. Evaluation cuts its holes with these rules, and so do the
recipes that make training data, so that both ask for the same kind of thing.
"""

import ast
import re
from random import Random

Definition = ast.FunctionDef | ast.AsyncFunctionDef

WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')]*(\s+)(?=[\"'A-Z(])")
MIN_WORDS = 8  # of a text that a hole is cut into


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Return the span of each sentence, without the spaces between; a rule, not a parser."""
    breaks = [match.span(1) for match in SENTENCE_END.finditer(text)]
    starts = [0, *(stop for _, stop in breaks)]
    stops = [*(start for start, _ in breaks), len(text)]
    return list(zip(starts, stops, strict=True))


def draw_hole(text: str, rng: Random) -> tuple[int, int] | None:
    """Draw the span of a few words, a sentence or two; None where the text is too short."""
    words = list(WORD.finditer(text))
    if len(words) < MIN_WORDS:
        return None
    if rng.random() < 0.5:
        size = rng.randint(1, min(8, len(words) // 3))
        first = rng.randrange(1, len(words) - size)
        return words[first].start(), words[first + size - 1].end()
    spans = sentence_spans(text)[1:-1]
    if not spans:
        return None
    first = rng.randrange(len(spans))
    last = min(first + rng.choice((0, 0, 1)), len(spans) - 1)
    return spans[first][0], spans[last][1]


def rename_word(text: str, old: str, new: str) -> str:
    """Replace a word wherever it occurs as a whole word."""
    return re.sub(rf"\b{re.escape(old)}\b", lambda _: new, text)


def parses(code: str) -> bool:
    """True if Python can parse the code."""
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def split_function(code: str) -> tuple[str, str, str] | None:
    """Split a function into head (decorators and signature), docstring and body.

    The three join to the code again. None if the code is not one function of several lines.
    """
    tree = ast.parse(code)
    if len(tree.body) != 1 or not isinstance(tree.body[0], Definition):
        return None
    function = tree.body[0]
    lines = code.splitlines(keepends=True)
    first, *rest = function.body
    if first.lineno <= function.lineno:
        return None
    if ast.get_docstring(function, clean=False) is None:
        # A comment above the first statement belongs to the body.
        start = _head_end(function, lines)
        return "".join(lines[:start]), "", "".join(lines[start:])
    if not rest:
        return None
    start, stop = first.lineno - 1, first.end_lineno or first.lineno
    return "".join(lines[:start]), "".join(lines[start:stop]), "".join(lines[stop:])


def _head_end(function: Definition, lines: list[str]) -> int:
    """Return the number of lines of the signature: the first that ends it with a colon."""
    for number in range(function.lineno, function.body[0].lineno):
        if re.search(r":\s*(#.*)?$", lines[number - 1]) and parses(
            "".join(lines[:number]) + " " * 99 + "pass\n"
        ):
            return number
    return function.body[0].lineno - 1


def body_lines(code: str) -> list[tuple[int, int]]:
    """Return the spans of a function's body lines worth guessing, without their indentation."""
    parts = split_function(code)
    if parts is None:
        return []
    head, docstring, _ = parts
    in_string = string_lines(code)
    spans, offset = [], 0
    for number, line in enumerate(code.splitlines(keepends=True), 1):
        content = line.strip()
        start = offset + len(line) - len(line.lstrip())
        is_body = offset >= len(head) + len(docstring) and number not in in_string
        if is_body and _is_statement(content):
            spans.append((start, start + len(content)))
        offset += len(line)
    return spans


def _is_statement(line: str) -> bool:
    """False for a comment, a lone bracket, `pass`, `else:` and the like."""
    if len(line) < 4 or line.startswith("#") or line in ("pass", "else:", "try:", "finally:"):
        return False
    return re.search(r"\w", line) is not None


def string_lines(code: str) -> set[int]:
    """Return the numbers of the lines that strings of several lines cover."""
    return {
        number
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if node.end_lineno != node.lineno
    }
