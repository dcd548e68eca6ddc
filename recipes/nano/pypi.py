"""Extract short functions from PyPI packages to train on, with the licence of each checked.

    python -m recipes.nano.pypi --data ../shared/data --wheels out/pypi --out out/nano/more.jsonl

Reads pypi.txt (`run name==version licence`, one a line) or `--list`, fetches missing wheels with
`pip download` (wheels only: no code of a package is ever run) and writes records as
`py_funcs.jsonl` has them: `p` package, `n` name, `top`, `c` code, for `recipes.nano.data
--functions`. Tests, vendored packages and generated code are skipped. The same list and data give
the same file. `--skip-missing` leaves out packages that the index no longer has.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import re
import subprocess
import sys
import textwrap
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from functools import partial
from pathlib import Path, PurePosixPath

from dgemma.errors import UsageError
from dgemma.eval.spans import Definition, split_function
from recipes.nano import raw
from recipes.nano.raw import clean_code

LIST = Path(__file__).with_name("pypi.txt")
MAX_FUNCTION = 1600  # characters
NUM_LINES = range(4, 41)
MAX_FILE = 400_000  # characters; a longer one is a table or generated
MAX_PER_PACKAGE = 4000
MAX_PER_PATTERN = 4  # functions of a package that differ in names and constants alone
MAX_DOCSTRING = 0.65  # of the characters: code is to be learnt
DOWNLOADS = 3  # at a time
MIN_METHOD = 48  # characters of a method's body: a shorter one only delegates

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
GENERATED = re.compile(
    r"do not (edit|modify)|auto-?generated|automatically (generated|created)|@generated|"
    r"(file|code|module) (is|was|has been) generated|generated (by|from|with)\b",
    re.IGNORECASE,
)
OTHER_LICENCE = re.compile(
    r"\b(GPL|LGPL|AGPL|GPLv\d|LGPLv\d|General Public License|Mozilla Public|MPL|CeCILL|EPL|"
    r"Eclipse Public|CC[- ]BY|Creative Commons|proprietary|all rights are reserved)\b"
)
OPENING = 3000  # characters of a file that may say either
EXPRESSIONS = frozenset(
    "MIT MIT-0 BSD-2-Clause BSD-3-Clause 0BSD Apache-2.0 ISC PSF-2.0 Python-2.0 Unlicense "
    "CC0-1.0".split()
)
CLASSIFIERS = {
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": "CC0-1.0",
}
COPYLEFT = re.compile(r"GPL|General Public|Mozilla|MPL|CeCILL|Eclipse|non-?commercial", re.I)


@dataclass(frozen=True, slots=True)
class Extracted:
    """A function as a package's source has it."""

    name: str
    top: bool  # a plain function, not a method
    code: str


def is_package_code(path: str) -> bool:
    """True for a Python file that is the package's own code and no test."""
    *folders, name = PurePosixPath(path).parts
    if not name.endswith(".py") or SKIPPED_FILES.match(name):
        return False
    return not any(SKIPPED_FOLDERS.match(folder) for folder in folders)


def is_original(text: str) -> bool:
    """True if the file is neither generated nor under another licence."""
    opening = text[:OPENING]
    return (
        len(text) <= MAX_FILE
        and not GENERATED.search(opening)
        and not OTHER_LICENCE.search(opening)
    )


def read_source(text: str) -> list[Extracted]:
    """Extract the functions of a file that are short, documented and do something."""
    if not is_original(text):
        return []
    text = text.replace("\r\n", "\n").replace("\f", " ")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.split("\n")
    nodes = definitions(tree.body, top=True)
    functions = (read_function(node, lines, top=top) for node, top in nodes)
    return [function for function in functions if function is not None]


def definitions(body: Iterable[ast.stmt], *, top: bool) -> Iterator[tuple[Definition, bool]]:
    """Yield functions of a module and methods of its classes, no nested functions."""
    for node in body:
        if isinstance(node, Definition):
            yield node, top
        elif isinstance(node, ast.ClassDef):
            yield from definitions(node.body, top=False)
        elif isinstance(node, ast.If):
            yield from definitions([*node.body, *node.orelse], top=top)
        elif isinstance(node, ast.Try):
            rest = [statement for handler in node.handlers for statement in handler.body]
            yield from definitions([*node.body, *rest, *node.orelse], top=top)


def read_function(node: Definition, lines: list[str], *, top: bool) -> Extracted | None:
    """Read a function without its decorators; None if it is too long, too short or trivial."""
    stop = node.end_lineno or node.lineno
    if stop - node.lineno + 1 not in NUM_LINES or node.name.lower().startswith("test"):
        return None
    if ast.get_docstring(node, clean=False) is None or not does_work(node.body[1:], top=top):
        return None
    code = clean_code(textwrap.dedent("\n".join(lines[node.lineno - 1 : stop])))
    parts = split_function(code) if 0 < len(code) <= MAX_FUNCTION else None
    if parts is None or len(parts[1]) > MAX_DOCSTRING * len(code):
        return None
    return Extracted(node.name, top, code)


def does_work(body: list[ast.stmt], *, top: bool) -> bool:
    """True if a body is more than a placeholder, and in a method more than delegation."""
    if not body:
        return False
    if len(body) > 1:
        return True
    (only,) = body
    if isinstance(only, ast.Pass | ast.Raise):
        return False
    if isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant):
        return False
    return top or len(ast.unparse(only)) >= MIN_METHOD


def canonical(code: str) -> str:
    """Return a key that is equal for functions that differ in name, docstring and comments only."""
    node = ast.parse(code).body[0]
    if not isinstance(node, Definition):
        return re.sub(r"\s+", "", code)
    documented = ast.get_docstring(node, clean=False) is not None
    body = node.body[1:] if documented and len(node.body) > 1 else node.body
    return ast.unparse(node.args) + "\n" + "\n".join(map(ast.unparse, body))


def pattern(key: str) -> str:
    """Return a key that is equal for functions of one template: without names and constants."""
    text = re.sub(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"", "s", key)
    return re.sub(r"\w+", lambda word: word[0] if word[0] in KEYWORDS else "w", text)


KEYWORDS = frozenset("if for while return in not and or try with yield lambda else".split())


def choose(functions: Iterable[Extracted], known: set[str]) -> list[Extracted]:
    """Choose the new functions of a package, plain and short ones first, up to limits.

    `known` holds the `canonical` key of every function so far, and grows by what is chosen.
    """
    chosen: list[Extracted] = []
    patterns: Counter[str] = Counter()
    for function in sorted(functions, key=lambda f: (not f.top, len(f.code))):
        key = canonical(function.code)
        template = pattern(key)
        is_new = key not in known and patterns[template] < MAX_PER_PATTERN
        if len(chosen) < MAX_PER_PACKAGE and is_new:
            known.add(key)
            patterns[template] += 1
            chosen.append(function)
    return chosen


@dataclass(frozen=True, slots=True)
class Package:
    """A line of the list."""

    name: str
    version: str
    licence: str

    @property
    def stem(self) -> str:
        """Return the beginning of a wheel's file name."""
        return f"{plain_name(self.name)}-{self.version}-"


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def read_list(path: Path, last_run: int | None = None) -> list[Package]:
    """Read the packages of a list, or those that a run had read; each may be named once."""
    packages: dict[str, Package] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"(\d+) ([\w.-]+)==(\S+) (\S.*)", line)
        if match is None:
            raise UsageError(
                f"{path.name} line {number}: {line!r} is not `run name==version licence`"
            )
        run, *fields = match.groups()
        package = Package(*fields)
        name = plain_name(package.name)
        if name in packages:
            raise UsageError(f"{path.name} line {number} names {name} twice; leave one line of it")
        if last_run is None or int(run) <= last_run:
            packages[name] = package
    return list(packages.values())


def licence_of(metadata: Message) -> str | None:
    """Return the licence by expression, or by classifiers; None unless all are permissive."""
    if COPYLEFT.search((metadata["License"] or "")[:200]):
        return None
    expression = metadata["License-Expression"]
    if expression:
        names = re.findall(r"[^\s()]+", re.sub(r"\b(AND|OR)\b", " ", expression))
        return expression if all(name in EXPRESSIONS for name in names) else None
    lines = [line for line in metadata.get_all("Classifier", []) if line.startswith("License ::")]
    ends = [line.split(" :: ")[-1] for line in lines if line != "License :: OSI Approved"]
    if not ends or any(end not in CLASSIFIERS for end in ends):
        return None
    return " and ".join(sorted({CLASSIFIERS[end] for end in ends}))


def find_wheel(package: Package, folder: Path) -> Path | None:
    wheels = sorted(folder.glob(f"*-{package.version}-*.whl"))  # not all: there are thousands
    return next((path for path in wheels if same_wheel(path.name, package)), None)


def same_wheel(file: str, package: Package) -> bool:
    name, version, *_ = file.split("-")
    return f"{plain_name(name)}-{version}-" == package.stem


def fetch(package: Package, folder: Path) -> Path:
    """Return the package's wheel, downloaded if it is missing."""
    wheel = find_wheel(package, folder)
    if wheel is None:
        requirement = f"{package.name}=={package.version}"
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", *options, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = find_wheel(package, folder)
        if wheel is None:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise UsageError(
                f"no wheel of {requirement}: {reason}; take it off the list or get the file"
            )
    return wheel


def fetch_all(packages: Sequence[Package], folder: Path, *, skip_missing: bool) -> list[Package]:
    """Download missing wheels, few at a time to spare the index; returns those that are there.

    With `skip_missing`, packages that the index no longer has are printed and left out.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def has_wheel(package: Package) -> bool:
        try:
            fetch(package, folder)
        except UsageError as error:
            if not skip_missing:
                raise
            print(error, flush=True)
            return False
        return True

    with ThreadPoolExecutor(DOWNLOADS) as pool:
        found = list(pool.map(has_wheel, packages))
    return [package for package, is_there in zip(packages, found, strict=True) if is_there]


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        # Deeper directories may hold the metadata of vendored packages.
        names = [n for n in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        text = file.read(names[0]).decode("utf-8", "replace") if names else ""
    return HeaderParser().parsestr(text)


def check_licence(package: Package, wheel: Path) -> None:
    licence = licence_of(metadata_of(wheel))
    if licence is None:
        raise UsageError(
            f"{wheel.name} does not say that it is under a permissive licence; allowed are "
            f"{', '.join(sorted(EXPRESSIONS))}: take it off the list"
        )
    if licence != package.licence:
        raise UsageError(
            f"{wheel.name} is under {licence}; the list says {package.licence}: correct it"
        )


def sources(wheel: Path) -> Iterator[str]:
    """Yield the package's own Python files, by path."""
    with zipfile.ZipFile(wheel) as file:
        for name in sorted(file.namelist()):
            if is_package_code(name):
                yield file.read(name).decode("utf-8", "replace")


def extract(package: Package, folder: Path) -> list[Extracted]:
    wheel = fetch(package, folder)
    check_licence(package, wheel)
    with quiet():
        return [function for text in sources(wheel) for function in read_source(text)]


def extract_all(packages: list[Package], folder: Path, workers: int) -> Iterator[list[Extracted]]:
    work = partial(extract, folder=folder)
    if workers <= 1:
        yield from map(work, packages)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, packages)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of escapes in other people's strings (deprecations in Python 3.11)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def known_code(data: Path) -> set[str]:
    return {canonical(function.code) for function in raw.functions(data)}


def refuse_known(packages: Iterable[Package], data: Path) -> None:
    """Refuse packages that the data directory has: they may be held out."""
    lines = (data / "train" / "py_funcs_licences.json").read_text(encoding="utf-8")
    known = {plain_name(name) for name, *_ in json.loads(lines)}
    again = [package.name for package in packages if plain_name(package.name) in known]
    if again:
        raise UsageError(f"{', '.join(again)}: in py_funcs already; take them off the list")


def write(data: Path, folder: Path, packages: list[Package], out: Path, workers: int) -> None:
    refuse_known(packages, data)
    lines: list[str] = []
    with quiet():
        known = known_code(data)
        extracted = extract_all(packages, folder, workers)
        for package, functions in zip(packages, extracted, strict=True):
            chosen = choose(functions, known)
            name = plain_name(package.name)
            lines += [json.dumps(record(name, function)) + "\n" for function in chosen]
            print(f"{package.name}: {len(chosen)} of {len(functions)} functions", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
    print(f"{len(lines)} functions of {len(packages)} packages")


def record(package: str, function: Extracted | raw.Function) -> dict[str, str | bool]:
    return {"p": package, "n": function.name, "top": function.top, "c": function.code}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--wheels", type=Path, default=Path("out/pypi"))
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--run", type=int, help="only packages that this run of nano had read")
    parser.add_argument("--out", type=Path, default=Path("out/nano/more.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--skip-missing", action="store_true", help="leave out what pip cannot get")
    options = parser.parse_args()
    packages = read_list(options.list, options.run)
    packages = fetch_all(packages, options.wheels, skip_missing=options.skip_missing)
    write(options.data, options.wheels, packages, options.out, options.workers)


if __name__ == "__main__":
    main()
