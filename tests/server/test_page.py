"""docs/serve.md says what the server does."""

import re
import subprocess
import sys
from pathlib import Path

from dgemma.engine import Draft
from dgemma.server import app, chat_api, completions_api, edit_api, infill_api, sudoku_api
from dgemma.server.metrics import Metrics
from dgemma.server.stream import draft_data
from tests.server.conftest import Running
from tests.taught import SHORT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")


def test_the_tables_are_the_servers_own() -> None:
    check = [sys.executable, ROOT / "docs" / "make_serve.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_route_and_number_is_on_the_page() -> None:
    modules = (app, chat_api, completions_api, infill_api, edit_api, sudoku_api)
    for route in [route for module in modules for route in module.router.routes]:
        path = str(route.path).replace("{name:path}", "NAME")  # type: ignore[attr-defined]
        assert f"`{path}`" in PAGE or f" {path}`" in PAGE, path
    for family in Metrics().registry.collect():
        if family.name.startswith("dgemma_"):
            assert family.name in PAGE, family.name


def test_every_field_of_a_draft_and_of_what_an_answer_took_is_on_the_page(shared: Running) -> None:
    took = shared.ask(SHORT).json()["choices"][0]["dgemma"]
    arrays = {name: () for name in Draft.__slots__ if name not in ("block", "step")}
    empty = Draft(block=0, step=0, **arrays)
    for name in {*took, *draft_data(empty)} - {"type"}:
        assert re.search(rf"`{name}`", PAGE), name
