"""Change a text by program: plant errors, open a hole, rename a variable.

Each function takes a text and a `random.Random` and returns the changed text, or None where the
text offers nothing to change. The instruction that a pair begins with is the caller's.
"""

import ast
import re
from collections.abc import Callable
from random import Random

from dgemma.eval.spans import WORD, parses, rename_word, sentence_spans
from dgemma.text.control_tokens import FILL_MARK

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
NEXT_KEY = {
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


def split_sentences(text: str) -> list[str]:
    return [text[start:stop] for start, stop in sentence_spans(text.strip())]


def open_hole(text: str, span: tuple[int, int], mark: str = FILL_MARK) -> str:
    return text[: span[0]] + mark + text[span[1] :]


def plant_errors(text: str, rng: Random, count: int) -> str | None:
    """Make `count` different words wrong; None where fewer could be."""
    words = list(WORD.finditer(text))
    candidates = rng.sample(range(len(words)), min(len(words), 6 * count))
    planted: dict[int, tuple[int, int, str]] = {}
    for index in candidates:
        if len(planted) == count:
            break
        # The words around an error stay right, so that each error can be seen alone.
        if {index - 1, index, index + 1} & set(planted):
            continue
        change = spoil(text, words, index, rng)
        if change is not None:
            planted[index] = change
    if len(planted) < count:
        return None
    for start, stop, wrong in sorted(planted.values(), reverse=True):
        text = text[:start] + wrong + text[stop:]
    return text


def spoil(
    text: str, words: list[re.Match[str]], index: int, rng: Random
) -> tuple[int, int, str] | None:
    """Return a span and its wrong replacement, or None where the drawn kind does not apply."""
    word = words[index][0]
    start, stop = words[index].span()
    kind = rng.random()
    if kind < 0.12 and index + 1 < len(words) and text[stop : words[index + 1].start()] == " ":
        after = words[index + 1]
        swapped = f"{after[0]} {word}"
        return None if after[0] == word else (start, after.end(), swapped)
    if kind < 0.24:
        return None if is_doubled(words, index) else (start, stop, f"{word} {word}")
    if kind < 0.36 and len(word) > 1 and "'" not in word:
        wrong = word.lower() if word[0].isupper() else word.capitalize()
        return None if wrong == word else (start, stop, wrong)
    known = SOUNDS_LIKE.get(word) or WRONG_FORMS.get(word)
    if known and rng.random() < 0.8:
        return start, stop, known
    wrong = misspell(word, rng) if len(word) > 3 else word
    return None if wrong == word else (start, stop, wrong)


def is_doubled(words: list[re.Match[str]], index: int) -> bool:
    """True if the word is next to its like already: then doubling it could be right."""
    near = [words[other][0] for other in (index - 1, index + 1) if 0 <= other < len(words)]
    return words[index][0] in near


def misspell(word: str, rng: Random) -> str:
    """Make one typing error, after the first letter."""
    at = rng.randrange(1, len(word) - 1)
    before, here, after = word[:at], word[at], word[at + 1 :]
    slips: list[Callable[[], str]] = [
        lambda: before + after,
        lambda: before + here + here + after,
        lambda: before + after[0] + here + after[1:],
        lambda: before + NEXT_KEY.get(here, here) + after,
    ]
    return rng.choice(slips)()


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
    """Return parameters and assigned names of a function, each once, in order."""
    names: dict[str, None] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.arg):
            names[node.arg] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None
    return [name for name in names if name not in ("self", "cls", "_") and not name.isupper()]
