"""Documentation: generated help is current, links and files exist, the code of a page runs."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_command_line_page_is_what_the_commands_say() -> None:
    check = [sys.executable, ROOT / "docs" / "make_cli.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
        for name in re.findall(r"(?:bench|examples|docs|tests)/\w+\.py", page.read_text("utf-8"))
        if not (ROOT / name).exists()
    ]
    assert not missing


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["python.md", "fill-and-edit.md", "structure.md"])
def test_the_python_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all blocks of a page in order, with nano in the place of other models."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks:
        for model in ("path/to/checkpoint", "google/diffusiongemma-26B-A4B-it"):
            block = block.replace(f'"{model}"', repr(str(ROOT / "dgemma" / "models" / "nano")))
        exec(compile(block, name, "exec"), namespace)


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
