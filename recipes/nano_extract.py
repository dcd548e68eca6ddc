"""Short documented functions out of a package's source, as `py_funcs.jsonl` has them.

Owns which files and functions are worth reading: no tests, no copies of other packages, nothing
that a program wrote. Knows nothing of where a package comes from or under which licence.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from dgemma.train import rewrite
from recipes.nano_raw import clean_code

Definition = ast.FunctionDef | ast.AsyncFunctionDef

LONGEST = 1600  # characters, as of the functions trained on before
LINES = range(4, 41)
LARGEST_FILE = 400_000  # characters; beyond that it is a table or was written by a program
PER_PACKAGE = 4000
PER_SHAPE = 4  # functions of a package that differ in names and constants alone
MOST_DOCSTRING = 0.65  # of the characters: what is to be learnt is code
SHORTEST_METHOD = 48  # characters of a method's body: below that it only hands something on

SKIPPED_FOLDERS = re.compile(
    r"^_*(tests?|testing|testsuite|unittests?|vendor(ed|ized)?|extern(al|als)?|third_?party|"
    r"bundled|thirdparty|migrations?|generated|gen|autogen|locales?|protos?|openapi_client|"
    r"node_modules|.*\.data|.*\.dist-info)$",
    re.IGNORECASE,
)
SKIPPED_FILES = re.compile(
    r"^(test_.*|.*_tests?|tests?|conftest|setup|versioneer|_?version|.*_pb2.*|.*_pb|six|"
    r".*parsetab|.*lextab|ez_setup|.*_generated|.*_autogen)\.py$",
    re.IGNORECASE,
)
WRITTEN_BY_A_PROGRAM = re.compile(
    r"do not (edit|modify)|auto-?generated|automatically (generated|created)|@generated|"
    r"(file|code|module) (is|was|has been) generated|generated (by|from|with)\b",
    re.IGNORECASE,
)
OTHER_LICENCE = re.compile(
    r"\b(GPL|LGPL|AGPL|GPLv\d|LGPLv\d|General Public License|Mozilla Public|MPL|CeCILL|EPL|"
    r"Eclipse Public|CC[- ]BY|Creative Commons|proprietary|all rights are reserved)\b"
)
OPENING = 3000  # characters of a file that may say so


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    top: bool  # a plain function, not a method
    code: str


def wanted_file(path: str) -> bool:
    """Whether a path within a package is its own code, and no test of it."""
    *folders, name = PurePosixPath(path).parts
    if not name.endswith(".py") or SKIPPED_FILES.match(name):
        return False
    return not any(SKIPPED_FOLDERS.match(folder) for folder in folders)


def wanted_source(text: str) -> bool:
    """Whether a person wrote it, under the package's own licence."""
    opening = text[:OPENING]
    return (
        len(text) <= LARGEST_FILE
        and not WRITTEN_BY_A_PROGRAM.search(opening)
        and not OTHER_LICENCE.search(opening)
    )


def read_source(text: str) -> list[Found]:
    """The functions of a file that are short, documented and do something."""
    if not wanted_source(text):
        return []
    text = text.replace("\r\n", "\n").replace("\f", " ")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.split("\n")
    made = (read_function(node, lines, top=top) for node, top in definitions(tree.body, top=True))
    return [found for found in made if found is not None]


def definitions(body: Iterable[ast.stmt], *, top: bool) -> Iterator[tuple[Definition, bool]]:
    """Functions of a module and methods of its classes; not what stands within a function."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, top
        elif isinstance(node, ast.ClassDef):
            yield from definitions(node.body, top=False)
        elif isinstance(node, ast.If):
            yield from definitions([*node.body, *node.orelse], top=top)
        elif isinstance(node, ast.Try):
            rest = [statement for handler in node.handlers for statement in handler.body]
            yield from definitions([*node.body, *rest, *node.orelse], top=top)


def read_function(node: Definition, lines: list[str], *, top: bool) -> Found | None:
    """Without its decorators; None where it is no use."""
    stop = node.end_lineno or node.lineno
    if stop - node.lineno + 1 not in LINES or node.name.lower().startswith("test"):
        return None
    if ast.get_docstring(node, clean=False) is None or not works(node.body[1:], top=top):
        return None
    code = clean_code(textwrap.dedent("\n".join(lines[node.lineno - 1 : stop])))
    parts = rewrite.split_function(code) if 0 < len(code) <= LONGEST else None
    if parts is None or len(parts[1]) > MOST_DOCSTRING * len(code):
        return None
    return Found(node.name, top, code)


def works(body: list[ast.stmt], *, top: bool) -> bool:
    """Whether there is more than a placeholder, and in a method more than handing on."""
    if not body:
        return False
    if len(body) > 1:
        return True
    (only,) = body
    if isinstance(only, ast.Pass | ast.Raise):
        return False
    if isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant):
        return False
    return top or len(ast.unparse(only)) >= SHORTEST_METHOD


def same_code(code: str) -> str:
    """Equal for functions that differ in their name, docstring, comments and spaces alone."""
    node = ast.parse(code).body[0]
    if not isinstance(node, Definition):
        return re.sub(r"\s+", "", code)
    documented = ast.get_docstring(node, clean=False) is not None
    body = node.body[1:] if documented and len(node.body) > 1 else node.body
    return ast.unparse(node.args) + "\n" + "\n".join(map(ast.unparse, body))


def shape(same: str) -> str:
    """Equal for functions that a template might have made: without names and constants."""
    text = re.sub(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"", "s", same)
    return re.sub(r"\w+", lambda word: word[0] if word[0] in KEYWORDS else "w", text)


KEYWORDS = frozenset("if for while return in not and or try with yield lambda else".split())


def choose(found: Iterable[Found], known: set[str]) -> list[Found]:
    """At most so many of a package, plain and short ones first; `known` grows by what is chosen.

    `known` holds `same_code` of everything there is already.
    """
    chosen: list[Found] = []
    shapes: Counter[str] = Counter()
    for function in sorted(found, key=lambda f: (not f.top, len(f.code))):
        same = same_code(function.code)
        form = shape(same)
        if len(chosen) < PER_PACKAGE and same not in known and shapes[form] < PER_SHAPE:
            known.add(same)
            shapes[form] += 1
            chosen.append(function)
    return chosen
