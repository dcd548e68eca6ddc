"""Pairs made by program: text with planted errors, with a hole, with one thing changed.

Each function takes a text and a `random.Random` and gives the changed text, or None where the text
offers nothing to change. What is asked of the model, in words, is the recipe's matter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from random import Random

FILL = "<|fill|>"  # plain text that readers split on, never a token
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"')]*(\s+)(?=[\"'A-Z(])")

HOMOPHONES = [
    ("their", "there"),
    ("your", "you're"),
    ("its", "it's"),
    ("to", "too"),
    ("then", "than"),
    ("were", "where"),
    ("hear", "here"),
    ("know", "no"),
    ("knew", "new"),
    ("right", "write"),
    ("by", "buy"),
    ("see", "sea"),
    ("for", "four"),
    ("whole", "hole"),
    ("week", "weak"),
    ("one", "won"),
    ("of", "off"),
    ("quiet", "quite"),
    ("lose", "loose"),
    ("who's", "whose"),
]
SOUNDS_LIKE = {a: b for pair in HOMOPHONES for a, b in (pair, pair[::-1])}
NEIGHBOURS = {
    letter: near
    for row in ("qwertyuiop", "asdfghjkl", "zxcvbnm")
    for letter, near in zip(row, (row[1:] + row[-2]), strict=True)
}
WRONG_FORMS = {
    "is": "are",
    "are": "is",
    "was": "were",
    "were": "was",
    "has": "have",
    "have": "has",
    "a": "an",
    "an": "a",
    "went": "goed",
    "came": "comed",
    "said": "sayed",
    "does": "do",
    "saw": "seed",
    "ran": "runned",
    "took": "taked",
    "made": "maked",
}


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Where each sentence begins and ends, without the spaces between; a rule, not a parser."""
    breaks = [match.span(1) for match in SENTENCE_END.finditer(text)]
    starts = [0, *(stop for _, stop in breaks)]
    stops = [*(start for start, _ in breaks), len(text)]
    return list(zip(starts, stops, strict=True))


def split_sentences(text: str) -> list[str]:
    return [text[start:stop] for start, stop in sentence_spans(text.strip())]


def plant_errors(text: str, rng: Random, count: int) -> str | None:
    """`count` different words made wrong; None where fewer could be."""
    words = list(WORD.finditer(text))
    places = rng.sample(range(len(words)), min(len(words), 6 * count))
    planted: dict[int, tuple[int, int, str]] = {}
    for place in places:
        if len(planted) == count:
            break
        # Neighbours stay whole, so that each error can be seen alone.
        if {place - 1, place, place + 1} & set(planted):
            continue
        change = spoil(text, words, place, rng)
        if change is not None:
            planted[place] = change
    if len(planted) < count:
        return None
    for start, stop, wrong in sorted(planted.values(), reverse=True):
        text = text[:start] + wrong + text[stop:]
    return text


def spoil(
    text: str, words: list[re.Match[str]], place: int, rng: Random
) -> tuple[int, int, str] | None:
    """A span and what to put there instead."""
    word = words[place][0]
    start, stop = words[place].span()
    choice = rng.random()
    if choice < 0.12 and place + 1 < len(words) and text[stop : words[place + 1].start()] == " ":
        after = words[place + 1]
        swapped = f"{after[0]} {word}"
        return None if after[0] == word else (start, after.end(), swapped)
    if choice < 0.24:
        return None if double(text, words, place) else (start, stop, f"{word} {word}")
    if choice < 0.36 and len(word) > 1 and "'" not in word:
        wrong = word.lower() if word[0].isupper() else word.capitalize()
        return None if wrong == word else (start, stop, wrong)
    known = SOUNDS_LIKE.get(word) or WRONG_FORMS.get(word)
    if known and rng.random() < 0.8:
        return start, stop, known
    wrong = misspell(word, rng) if len(word) > 3 else word
    return None if wrong == word else (start, stop, wrong)


def double(text: str, words: list[re.Match[str]], place: int) -> bool:
    """Whether the word stands twice in the text already: then doubling it could be right."""
    near = [words[other][0] for other in (place - 1, place + 1) if 0 <= other < len(words)]
    return words[place][0] in near


def misspell(word: str, rng: Random) -> str:
    """One slip of the fingers, after the first letter."""
    place = rng.randrange(1, len(word) - 1)
    before, here, after = word[:place], word[place], word[place + 1 :]
    slips: list[Callable[[], str]] = [
        lambda: before + after,
        lambda: before + here + here + after,
        lambda: before + after[0] + here + after[1:],
        lambda: before + NEIGHBOURS.get(here, here) + after,
    ]
    return rng.choice(slips)()


def make_hole(text: str, rng: Random) -> tuple[int, int] | None:
    """The span of a few words, a sentence, or several: what a person would leave open."""
    words = list(WORD.finditer(text))
    if len(words) < 8:
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


def open_hole(text: str, span: tuple[int, int], mark: str = FILL) -> str:
    return text[: span[0]] + mark + text[span[1] :]


def rename_word(text: str, old: str, new: str) -> str:
    return re.sub(rf"\b{re.escape(old)}\b", lambda _: new, text)


def rename_variable(code: str, old: str, new: str) -> str | None:
    """Rename a local name everywhere; None where that could touch an attribute or a string."""
    if re.search(rf"\b{re.escape(new)}\b", code):
        return None
    if re.search(rf"\.{re.escape(old)}\b|[\"'`][^\"'\n]*\b{re.escape(old)}\b", code):
        return None
    if re.search(rf"\b{re.escape(old)}=", code) or re.search(rf"#.*\b{re.escape(old)}\b", code):
        return None
    changed = rename_word(code, old, new)
    return changed if changed != code and parses(changed) else None


def local_names(code: str) -> list[str]:
    """Parameters and assigned names of a function, each once, in order."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.arg):
            found[node.arg] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
    return [name for name in found if name not in ("self", "cls", "_") and not name.isupper()]


def parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def split_function(code: str) -> tuple[str, str, str] | None:
    """Head (decorators and signature), docstring and body, as written, to be joined again."""
    tree = ast.parse(code)
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    function = tree.body[0]
    lines = code.splitlines(keepends=True)
    first, *rest = function.body
    if first.lineno <= function.lineno:
        return None
    documented = ast.get_docstring(function, clean=False) is not None
    if not documented:
        # A comment above the first statement belongs to the body.
        start = head_end(function, lines)
        return "".join(lines[:start]), "", "".join(lines[start:])
    if not rest:
        return None
    stop = first.end_lineno or first.lineno
    return "".join(lines[: first.lineno - 1]), *_texts(lines, first.lineno - 1, stop)


def head_end(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """The number of lines of the signature: the first that ends it with a colon."""
    for number in range(function.lineno, function.body[0].lineno):
        if re.search(r":\s*(#.*)?$", lines[number - 1]) and parses(
            "".join(lines[:number]) + " " * 99 + "pass\n"
        ):
            return number
    return function.body[0].lineno - 1


def _texts(lines: list[str], start: int, stop: int) -> tuple[str, str]:
    return "".join(lines[start:stop]), "".join(lines[stop:])


def body_lines(code: str) -> list[tuple[int, int]]:
    """Spans of the body's lines worth guessing, without their indentation."""
    parts = split_function(code)
    if parts is None:
        return []
    head, docstring, _ = parts
    inner = strings_inside(code)
    spans, offset = [], 0
    for number, line in enumerate(code.splitlines(keepends=True), 1):
        content = line.strip()
        start = offset + len(line) - len(line.lstrip())
        if offset >= len(head) + len(docstring) and number not in inner and worth(content):
            spans.append((start, start + len(content)))
        offset += len(line)
    return spans


def worth(line: str) -> bool:
    """Whether a line says something of its own: no comment, lone bracket, `pass` or `else:`."""
    if len(line) < 4 or line.startswith("#") or line in ("pass", "else:", "try:", "finally:"):
        return False
    return re.search(r"\w", line) is not None


def strings_inside(code: str) -> set[int]:
    """Numbers of the lines that a string of several lines covers."""
    return {
        number
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if node.end_lineno != node.lineno
    }
