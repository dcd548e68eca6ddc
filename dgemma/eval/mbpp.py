"""Lines of MBPP's test problems as holes: a held-out set that anybody can cut again.

Mostly Basic Python Problems are small functions that solve a stated problem. Only the code is
read, as it stands, imports and helpers included; the words of the problem are not.
"""

import ast
import warnings
from collections.abc import Iterator
from typing import Any

from dgemma.eval.holes import Hole
from dgemma.train.rewrite import body_lines

FILE = "mbpp.jsonl"
TEST = range(11, 511)  # task_ids, as the set's authors split it
LONGEST = 1600  # characters, as of the other held-out functions


def line_holes(record: dict[str, Any]) -> list[Hole]:
    """A hole for every body line of a problem of the test split, in order."""
    # The file ends most lines as Windows does, which is no part of the solution.
    code = record["code"].replace("\r", "")
    if record["task_id"] not in TEST or len(code) > LONGEST:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in others' code
        spans = list(_spans(code))
    return [Hole(code[:start], code[start:stop], code[stop:]) for start, stop in spans]


def _spans(code: str) -> Iterator[tuple[int, int]]:
    """The body lines of each function that is not within another or in a class."""
    lines = code.splitlines(keepends=True)
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            before = len("".join(lines[: node.lineno - 1]))
            function = "".join(lines[node.lineno - 1 : node.end_lineno])
            yield from ((before + start, before + stop) for start, stop in body_lines(function))
