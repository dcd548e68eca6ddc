"""Documentation: generated help is current, links and files exist, the code of a page runs."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "LOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_command_line_page_is_what_the_commands_say() -> None:
    check = [sys.executable, ROOT / "docs" / "make_cli.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_environment_variable_is_on_its_page() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    reads = re.compile(r'(?:environ|environment)(?:\.get|\.setdefault)?[\[(]"(\w+)"')
    own = re.compile(r'"(DGEMMA_[A-Z_]+)"')
    names = {
        name
        for path in (ROOT / "dgemma").rglob("*.py")
        for pattern in (reads, own)
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert {"DGEMMA_PLAIN", "XDG_CACHE_HOME"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_table_of_recipe_keys_is_that_of_the_recipe() -> None:
    check = [sys.executable, ROOT / "docs" / "make_training.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_link_between_pages_leads_to_a_file() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_every_script_a_page_names_exists() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(
            r"\b(?:bench|examples|docs|tests)/[\w/]+\.py", page.read_text("utf-8")
        )
        if not (ROOT / name).exists()
    ]
    assert not missing


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["python.md", "fill-and-edit.md", "structure.md"])
def test_the_examples_of_a_page_print_what_it_shows(name: str) -> None:
    """Run its Python and its commands with nano, in float32."""
    check = [sys.executable, ROOT / "docs" / "make_outputs.py", "--check", f"docs/{name}"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_shown_output_that_differs_is_refused(tmp_path: Path) -> None:
    page = "```python\n1 + 1\n# 3\n```\n\n```\n$ cat a.txt\none\n$ wc -l a.txt\n2 a.txt\n```\n"
    (tmp_path / "page.md").write_text(page, "utf-8")
    call = [sys.executable, ROOT / "docs" / "make_outputs.py", tmp_path / "page.md"]
    done = subprocess.run([*call, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "# 2" in done.stderr and "1 a.txt" in done.stderr
    assert (tmp_path / "page.md").read_text("utf-8") == page
    subprocess.run(call, check=True, capture_output=True)
    assert (tmp_path / "page.md").read_text("utf-8") == page.replace("# 3", "# 2").replace(
        "2 a", "1 a"
    )
    subprocess.run([*call, "--check"], check=True, capture_output=True)


def test_every_file_of_the_package_that_a_page_names_exists() -> None:
    packages = "|".join(path.name for path in (ROOT / "dgemma").iterdir() if path.is_dir())
    pattern = rf"`(?:dgemma/)?((?:{packages})/[\w/]+\.py)\b"
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(pattern, page.read_text("utf-8"))
        if not (ROOT / "dgemma" / name).exists()
    ]
    assert not missing


@pytest.mark.parametrize(
    ("page", "heading", "name"),
    [
        ("python.md", "Fields of `SamplingParams`:", "SamplingParams"),
        ("fill-and-edit.md", "| `FillParams` (option) | |", "FillParams"),
        ("fill-and-edit.md", "| `EditParams` (option) | |", "EditParams"),
    ],
)
def test_a_table_of_parameters_has_every_field(page: str, heading: str, name: str) -> None:
    import dgemma

    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(heading)[2]
    rows = re.findall(r"^\|(.*?)\|", text.lstrip("\n").partition("\n\n")[0], flags=re.MULTILINE)
    listed = {field for row in rows for field in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in fields(getattr(dgemma, name))} <= listed
