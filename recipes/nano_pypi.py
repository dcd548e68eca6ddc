"""Functions of further packages to train on: wheels to JSONL, with the licence of each checked.

    python -m recipes.nano_pypi --data ../shared/data --wheels out/pypi --out out/nano/further.jsonl

Reads the lists beside it (`name==version licence`, one a line) or those of `--list`, fetches what
is missing with `pip download` (wheels only: nothing of a package is ever run) and writes records as
`py_funcs.jsonl` has them: `p` package, `n` name, `top`, `c` code. `recipes.nano_data --functions`
takes the file. The same lists and data give the same file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from functools import partial
from pathlib import Path

from dgemma.errors import UsageError
from recipes import nano_raw
from recipes.nano_extract import Found, choose, read_source, same_code, wanted_file

LISTS = tuple(
    Path(__file__).with_name(name)
    for name in ("nano_pypi.txt", "nano_pypi_2.txt", "nano_pypi_3.txt")
)
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
class Package:
    name: str
    version: str
    licence: str

    @property
    def stem(self) -> str:
        """How a wheel's name begins."""
        return f"{plain_name(self.name)}-{self.version}-"


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def read_lists(paths: Iterable[Path]) -> list[Package]:
    """The packages of all lists, each of which may be named once."""
    found = [package for path in paths for package in read_list(path)]
    twice = [name for name, n in Counter(plain_name(p.name) for p in found).items() if n > 1]
    if twice:
        raise UsageError(f"the lists name {', '.join(twice)} twice; leave one line of each")
    return found


def read_list(path: Path) -> list[Package]:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([\w.-]+)==(\S+) (\S.*)", line)
        if match is None:
            raise UsageError(f"{path.name} line {number}: {line!r} is not `name==version licence`")
        found.append(Package(*match.groups()))
    return found


def licence_of(metadata: Message) -> str | None:
    """The licence by expression or else by classifiers; None unless all of them are permissive."""
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
    """The package's wheel, downloaded where it is not there yet."""
    wheel = find_wheel(package, folder)
    if wheel is None:
        wish = f"{package.name}=={package.version}"
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", *options, wish]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = find_wheel(package, folder)
        if wheel is None:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise UsageError(f"no wheel of {wish}: {reason}; take it off the list or get the file")
    return wheel


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        # Further down there may be the metadata of packages it carries along.
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
    """The package's own Python files, by path."""
    with zipfile.ZipFile(wheel) as file:
        for name in sorted(file.namelist()):
            if wanted_file(name):
                yield file.read(name).decode("utf-8", "replace")


def extract(package: Package, folder: Path) -> list[Found]:
    wheel = fetch(package, folder)
    check_licence(package, wheel)
    with quiet():
        return [function for text in sources(wheel) for function in read_source(text)]


def extract_all(packages: list[Package], folder: Path, workers: int) -> Iterator[list[Found]]:
    work = partial(extract, folder=folder)
    if workers <= 1:
        yield from map(work, packages)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, packages)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of escapes in other people's strings (Python 3.11 names them otherwise)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def known_code(data: Path) -> set[str]:
    return {same_code(function.code) for function in nano_raw.functions(data)}


def refuse_known(packages: Iterable[Package], data: Path) -> None:
    """A package that is in the data already may be held out: it must not come in again."""
    lines = (data / "train" / "py_funcs_licences.json").read_text(encoding="utf-8")
    had = {plain_name(name) for name, *_ in json.loads(lines)}
    again = [package.name for package in packages if plain_name(package.name) in had]
    if again:
        raise UsageError(f"{', '.join(again)}: in py_funcs already; take them off the list")


def write(data: Path, folder: Path, packages: list[Package], out: Path, workers: int) -> None:
    refuse_known(packages, data)
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:  # one at a time, to be gentle to whoever serves them
        fetch(package, folder)
    lines: list[str] = []
    with quiet():
        known = known_code(data)
        for package, found in zip(packages, extract_all(packages, folder, workers), strict=True):
            chosen = choose(found, known)
            lines += [
                json.dumps(record(plain_name(package.name), function)) + "\n" for function in chosen
            ]
            print(f"{package.name}: {len(chosen)} of {len(found)} functions", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
    print(f"{len(lines)} functions of {len(packages)} packages")


def record(package: str, function: Found | nano_raw.Function) -> dict[str, str | bool]:
    return {"p": package, "n": function.name, "top": function.top, "c": function.code}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--wheels", type=Path, default=Path("out/pypi"))
    parser.add_argument("--list", type=Path, nargs="+", default=LISTS)
    parser.add_argument("--out", type=Path, default=Path("out/nano/further.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    write(given.data, given.wheels, read_lists(given.list), given.out, given.workers)


if __name__ == "__main__":
    main()
