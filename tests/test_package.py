"""What is shipped: a wheel that works on its own, and files that fit any machine."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tokenize
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dgemma"
SHIPPED = ["dgemma", "pyproject.toml", "MANIFEST.in", "constraints.txt"]
SHIPPED += ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"]
MAX_BYTES = 40 << 20  # of a wheel; the built-in model is nearly all of it
MAX_LINES = 400  # of code
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# In pieces, so that this file does not name them itself.
MACHINE_PATHS = ["/" + name + "/" for name in ("work", "root", "tmp")]
TEXT_ENDINGS = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jinja", ".svg", ".cfg"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel made from it, built offline from a copy of the checkout."""
    missing = [name for name in SHIPPED if not (ROOT / name).exists()]
    assert not missing, f"the build needs {missing}"
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place of its own where the wheel is unpacked by pip, and nothing else is."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(target), str(wheel)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return target


def run_installed(installed: Path, *command: str) -> str:
    """Run outside of the checkout, with the installed package first on the path."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    run = subprocess.run(
        command, cwd=installed.parent, env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout


def test_the_sdist_holds_the_package_and_what_builds_it(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in SHIPPED if name != "dgemma"} <= names
    assert "dgemma/server/page/index.html" in names and "dgemma/models/nano/config.json" in names
    extra = {name.partition("/")[0] for name in names} - {*SHIPPED, "dgemma.egg-info"}
    assert extra <= {"", "PKG-INFO", "setup.cfg"}


def test_a_distribution_is_small_enough_for_an_index(dist: Path) -> None:
    assert {path.name: path.stat().st_size < MAX_BYTES for path in dist.iterdir()} == {
        path.name: True for path in dist.iterdir()
    }


def test_the_wheel_holds_every_module_and_the_typing_mark(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "dgemma/py.typed" in names
    for path in modules():
        assert path.relative_to(ROOT).as_posix() in names
    assert not [name for name in names if name.startswith(("tests/", "bench/", "examples/"))]
    assert any(name.endswith("LICENSE") for name in names)


def test_every_data_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    """A checkpoint that is built in, for one, must not stay behind."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    data = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert PACKAGE / "py.typed" in data
    for path in data:
        assert path.relative_to(ROOT).as_posix() in names


def test_an_installed_wheel_runs_outside_of_the_checkout(installed: Path) -> None:
    where = "import dgemma; print(dgemma.__file__, dgemma.__version__)"
    file, version = run_installed(installed, sys.executable, "-c", where).split()
    assert Path(file).is_relative_to(installed), "the checkout was imported instead"
    script = installed / "bin" / "dgemma"
    assert run_installed(installed, sys.executable, str(script), "--version") == (
        f"dgemma {version}\n"
    )
    assert "generate" in run_installed(installed, sys.executable, str(script), "--help")
    asked = ["generate", "Hello", "--max-tokens", "4", "--seed", "1", "--device", "cpu", "--json"]
    answer = json.loads(run_installed(installed, sys.executable, str(script), *asked))
    assert answer["tokens"] <= 4 and answer["model"] == "nano"


def test_the_version_is_stated_alike_everywhere(wheel: Path) -> None:
    from dgemma import __version__

    assert wheel.name.startswith(f"dgemma-{__version__}-py3-none-any")


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def code_lines(source: str) -> int:
    """Lines that hold more than a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_comments_and_docstrings_are_no_code() -> None:
    page = '"""A page.\n\nOf text."""\n\n# A reason.\n'
    assert code_lines(page) == 0
    assert code_lines(page + 'x = """\n\n"""  # all three\n') == 3


def test_no_file_of_the_package_is_too_long_to_read() -> None:
    lengths = {path: code_lines(path.read_text(encoding="utf-8")) for path in modules()}
    assert {str(path): n for path, n in lengths.items() if n > MAX_LINES} == {}


def tracked() -> list[Path]:
    run = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        pytest.skip("this is not a git checkout")
    return [ROOT / name for name in run.stdout.split("\0") if name]


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    found = []
    for path in tracked():
        if path.is_file() and (path.suffix in TEXT_ENDINGS or not path.suffix):
            text = path.read_text(encoding="utf-8")
            found += [f"{path.name}: {place}" for place in MACHINE_PATHS if place in text]
    assert found == []


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is in torch's wheels for Linux")
@pytest.mark.parametrize(
    ("chosen", "spin"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_threads_spin_shortly_unless_the_user_has_chosen(chosen: dict[str, str], spin: str) -> None:
    """Ask OpenMP itself, which prints its settings when torch loads it."""
    names = ("OMP_", "GOMP_", "KMP_")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    done = subprocess.run(
        [sys.executable, "-c", "import dgemma, torch"],
        env={**plain, "OMP_DISPLAY_ENV": "VERBOSE", "OMP_NUM_THREADS": "2", **chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{spin}'" in done.stderr
