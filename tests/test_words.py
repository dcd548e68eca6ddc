"""Names and prose of the package: the field's words, one name per type, modules worth a file."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dgemma"
READ_TOO = ("bench", "examples", "recipes")  # for their docstrings
OPENERS = {"What", "Whether", "How", "Where", "Which", "Why", "Who", "When"}
# Words of earlier versions; CHANGELOG.md has the names that replaced them.
RETIRED = set(
    "turns heat multiplied shares choices places spot cuts eight joined ahead entrance rehearse "
    "rehearsal judge verdicts recall remember keepers walker frontier errand errands guest lent "
    "rough roughs asked asking ticket took lots told newcomers carried sight shelf ingredient "
    "tally noted masters holed owed trial tried laid shrink survivors suffice lanes lockstep "
    "stepper teller committer doubt apart steady".split()
)
# Of the package and of the tests.
RETIRED_EVERYWHERE = set("settle settles settled settling unsettled heat surest knob knobs".split())
# `choices` is a field of OpenAI's replies and a kind of constraint, as in vLLM and llguidance.
FIELD_NAMES = {"choices"}
MAX_LINES = 450
MAX_MODULES, MAX_ONE_IMPORTER = 241, 43  # the goal is 190
MIN_LINES_OF_ONE_IMPORTER = 40


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def words(name: str) -> list[str]:
    """Split an identifier into lower-case words, without its shape suffix."""
    name = re.sub(r"_[A-Z0-9]{1,4}$", "", name)
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "lineno", 1), docstring


def importers() -> dict[str, set[str]]:
    """Modules of the package by the modules that import them."""
    by_name: dict[str, set[str]] = defaultdict(set)
    for path in modules("dgemma"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                by_name[name].add(module_name(path))
    return by_name


def one_importer() -> dict[Path, str]:
    by_name = importers()
    return {
        path: next(iter(by_name[name] - {name}))
        for path in modules("dgemma")
        if len(by_name[name := module_name(path)] - {name}) == 1
    }


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_identifiers_are_split_into_words() -> None:
    assert words("num_choicesLeft_TV") == ["num", "choices", "left"]
    assert words("GPUCuts_8") == ["gpu", "cuts"]


@pytest.mark.parametrize(
    ("folder", "retired"), [("dgemma", RETIRED | RETIRED_EVERYWHERE), ("tests", RETIRED_EVERYWHERE)]
)
def test_retired_words_do_not_return(folder: str, retired: set[str]) -> None:
    uses = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in modules(folder)
        for line, name in identifiers(parse(path))
        if retired & set(words(name)) - FIELD_NAMES
    ]
    assert not uses, "\n".join(uses)


@pytest.mark.parametrize("folder", ["dgemma", *READ_TOO])
def test_docstrings_open_with_a_verb_or_a_noun(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {docstring.splitlines()[0]}"
        for path in modules(folder)
        for line, docstring in documented(parse(path))
        if docstring.split()[0].strip(",.:;") in OPENERS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_type_name_is_defined_in_two_modules() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in modules("dgemma"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(module_name(path))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id  # an alias; constants have capitals alone
                if name[0].isupper() and not name.isupper():
                    homes[name].add(module_name(path))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_a_small_module_with_one_importer_belongs_to_it() -> None:
    small = {
        module_name(path): user
        for path, user in one_importer().items()
        if num_lines(path) < MIN_LINES_OF_ONE_IMPORTER and path.name != "__init__.py"
    }
    assert small == {}


def test_the_tree_has_few_modules_and_few_that_serve_one_other() -> None:
    assert len(modules("dgemma")) <= MAX_MODULES
    single = one_importer()
    assert len(single) <= MAX_ONE_IMPORTER, "\n".join(
        f"{path.relative_to(ROOT)} <- {user}" for path, user in single.items()
    )


def test_no_file_is_too_long() -> None:
    lengths = Counter({str(path.relative_to(ROOT)): num_lines(path) for path in modules("dgemma")})
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
