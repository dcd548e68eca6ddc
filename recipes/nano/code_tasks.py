"""Make tasks from Python functions: fill, complete, write, edit; and the held-out holes."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

from dgemma.eval.spans import body_lines, parses, rename_word, split_function, string_lines
from dgemma.text.control_tokens import FILL_MARK
from recipes.nano.raw import Function, Pair
from recipes.nano.rewrite import local_names, open_hole, rename_variable

COMPLETE = ["Complete this function.", "Complete the function.", "Write the body of this function."]
FILL_CODE = [
    f"Replace {FILL_MARK} and reply with the whole code.",
    f"Fill in {FILL_MARK}. Reply with the completed code.",
    "Complete the document.",
]
MAX_PROBLEM_LINES = 4  # held out of one function that solves a problem
NEW_NAMES = "value item result data index count total key name items left right first last".split()


def pair(instruction: str, text: str, reply: str) -> Pair:
    """Join instruction and text; without final line ends, which the chat template trims."""
    return {"prompt": instruction + "\n\n" + text.rstrip("\n"), "reply": reply.rstrip("\n")}


def draw_code_hole(code: str, rng: Random) -> tuple[int, int] | None:
    """Draw the span of a line, of some lines, of a line's end, or of the whole body."""
    spans = body_lines(code)
    if not spans:
        return None
    kind = rng.random()
    first = rng.randrange(len(spans))
    start, stop = spans[first]
    if kind < 0.5:
        return start, stop
    if kind < 0.75:
        return start, spans[min(first + rng.randint(1, 3), len(spans) - 1)][1]
    if kind < 0.9:
        offsets = [match.end() for match in re.finditer(r"\W+", code[start:stop])][:-1]
        return (start + rng.choice(offsets), stop) if offsets else (start, stop)
    return spans[0][0], spans[-1][1]


def fills(functions: Sequence[Function], rng: Random) -> Iterator[Pair]:
    """Show each function with a hole and ask for the whole."""
    for function in functions:
        span = draw_code_hole(function.code, rng)
        if span is not None:
            text = open_hole(function.code, span)
            yield pair(rng.choice(FILL_CODE), text, function.code)


def requests(functions: Sequence[Function], rng: Random) -> Iterator[Pair]:
    """Ask for the function given its head, or given a description, then without a docstring."""
    for function in functions:
        parts = split_function(function.code)
        if parts is None or FILL_MARK in function.code:
            continue
        head, docstring, body = parts
        if len(body.strip()) < 12:
            continue
        summary = describe(function.code)
        if summary and rng.random() < 0.4:
            request = rng.choice(
                [
                    f"Write a short Python function `{function.name}` that does this: {summary}",
                    f"Write a Python function `{function.name}`. {summary}",
                ]
            )
            yield {"prompt": request, "reply": (head + body).rstrip("\n")}
        else:
            yield pair(rng.choice(COMPLETE), head + docstring, function.code)


def describe(code: str) -> str:
    """Return the first sentence of the docstring, or nothing where it says nothing."""
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    text = (ast.get_docstring(node) or "").split("\n\n")[0]
    text = " ".join(text.split())
    return text if 15 <= len(text) <= 160 and text[0].isalpha() and ">>>" not in text else ""


def edits(functions: Sequence[Function], rng: Random) -> Iterator[Pair]:
    """Ask for a renaming, or for a docstring or comments to be added or removed."""
    makers: list[Callable[[str, Random], tuple[str, str] | None]] = [
        rename_local,
        rename_local,
        rename_function,
        remove_docstring,
        add_docstring,
        remove_comments,
    ]
    for function in functions:
        code = function.code
        maker = rng.choice(makers)
        changed = maker(code, rng)
        if changed is not None:
            instruction, new = changed
            old = without_docstring(code) if maker is add_docstring else code
            yield pair(instruction, old, new)


def rename_local(code: str, rng: Random) -> tuple[str, str] | None:
    names = local_names(code)
    if not names:
        return None
    old, new = rng.choice(names), rng.choice(NEW_NAMES)
    changed = rename_variable(code, old, new)
    forms = [f"Rename {old} to {new}.", f"Rename the variable {old} to {new}."]
    return None if changed is None else (rng.choice(forms), changed)


def rename_function(code: str, rng: Random) -> tuple[str, str] | None:
    match = re.search(r"^(?:async )?def (\w+)", code, re.MULTILINE)
    if match is None or match[1].startswith("__"):
        return None
    words = match[1].strip("_").split("_")
    new = "_".join([rng.choice(("get", "make", "find", "do", "my", "run")), *words[-2:]])
    if new == match[1]:
        return None
    return f"Rename the function to {new}.", rename_word(code, match[1], new)


def without_docstring(code: str) -> str:
    parts = split_function(code)
    return code if parts is None else (parts[0] + parts[2].lstrip("\n"))


def remove_docstring(code: str, rng: Random) -> tuple[str, str] | None:
    changed = without_docstring(code)
    return None if changed == code else ("Remove the docstring.", changed)


def add_docstring(code: str, rng: Random) -> tuple[str, str] | None:
    parts = split_function(code)
    is_short = parts is not None and 0 < len(parts[1]) <= 240
    return ("Add a docstring.", code) if is_short else None


def remove_comments(code: str, rng: Random) -> tuple[str, str] | None:
    lines = code.splitlines(keepends=True)
    in_string = string_lines(code)
    code_lines = [
        line
        for number, line in enumerate(lines, 1)
        if number in in_string or not line.lstrip().startswith("#")
    ]
    changed = "".join(code_lines)
    is_good = changed != code and parses(changed)
    return ("Remove the comments.", changed) if is_good else None


def held_out_lines(
    functions: Sequence[Function], count_tokens: Callable[[str], int], rng: Random
) -> Iterator[Pair]:
    """Cut one or two lines of each function, of at least three tokens."""
    for function in functions:
        spans = long_lines(function.code, count_tokens)
        for span in sorted(rng.sample(spans, min(len(spans), rng.randint(1, 2)))):
            yield held_out_hole(function, span)


def problem_lines(
    functions: Sequence[Function], count_tokens: Callable[[str], int], rng: Random
) -> Iterator[Pair]:
    """Cut lines of the functions that solve a problem, more of each, since those are few."""
    for function in functions:
        if is_problem(function.group):
            spans = long_lines(function.code, count_tokens)
            for span in sorted(rng.sample(spans, min(len(spans), MAX_PROBLEM_LINES))):
                yield held_out_hole(function, span)


def is_problem(group: str) -> bool:
    """True if the group is a name in a collection of solutions, not a package or Python's own."""
    return "/" in group and not group.startswith("stdlib/")


def long_lines(code: str, count_tokens: Callable[[str], int]) -> list[tuple[int, int]]:
    """Return the spans of the body's lines of at least three tokens."""
    return [span for span in body_lines(code) if count_tokens(code[slice(*span)]) >= 3]


def held_out_hole(function: Function, span: tuple[int, int]) -> Pair:
    start, stop = span
    code = function.code
    return {
        "prefix": code[:start],
        "middle": code[start:stop],
        "suffix": code[stop:],
        "group": function.group,
    }
