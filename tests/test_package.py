"""What is shipped: a wheel that works on its own, and files that fit any machine."""

import ast
import io
import os
import shutil
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dgemma"
SHIPPED = ["dgemma", "pyproject.toml", "README.md", "LICENSE"]
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy so that the checkout stays clean."""
    missing = [name for name in SHIPPED if not (ROOT / name).exists()]
    assert not missing, f"the build needs {missing}"
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = (source / "dist").glob("*.whl")
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
