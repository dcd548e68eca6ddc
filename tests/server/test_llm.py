"""The plugin of `llm`, run by the real llm against a real server."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running
from tests.taught import ANSWERS, LONG, SHORT

llm = pytest.importorskip("llm")
PLUGIN = Path(__file__).parents[2] / "clients" / "llm-dgemma"


@pytest.fixture
def plugin(shared: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """llm with the plugin, in a directory of its own."""
    from llm.plugins import load_plugins, pm

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("DGEMMA_URL", shared.url)
    monkeypatch.syspath_prepend(PLUGIN)
    load_plugins()
    import llm_dgemma

    pm.register(llm_dgemma, "dgemma")
    yield llm_dgemma
    pm.unregister(llm_dgemma)
    del sys.modules["llm_dgemma"]


def test_a_model_answers_whole_and_streamed(plugin: Any) -> None:
    model = llm.get_model("dgemma")
    assert model.prompt(SHORT, stream=False, seed=1).text() == ANSWERS[SHORT]
    response = model.prompt(LONG, seed=1)
    pieces = list(response)
    assert "".join(pieces) == ANSWERS[LONG] and len(pieces) == 3, "a block at a time"
    assert response.usage().output > 10


def test_options_reach_the_server(plugin: Any) -> None:
    model = llm.get_model("dgemma")
    response = model.prompt(SHORT, stream=False, seed=1, mode="ar", max_tokens=4, thinking=True)
    assert response.text()
    took = response.response_json["choices"][0]["dgemma"]
    assert took["mode"] == "ar" and took["seed"] == 1
    assert model.prompt(SHORT, stream=False, regex="[0-9]{3}").text().isdigit()
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    assert json.loads(model.prompt(SHORT, schema=schema, max_tokens=48).text())["a"] in (1, 2)


def test_a_conversation_goes_on(plugin: Any) -> None:
    talk = llm.get_model("dgemma").conversation()
    assert talk.prompt(SHORT, seed=1, stream=False).text() == ANSWERS[SHORT]
    assert talk.prompt(SHORT, seed=1, stream=False).usage().input > 30


def test_servers_are_noted_by_the_command(plugin: Any, shared: Running) -> None:
    from click.testing import CliRunner
    from llm.cli import cli

    def run(*words: str) -> Any:
        return CliRunner().invoke(cli, list(words))

    plugin.register_commands(cli)
    assert run("dgemma", "add", "mine", shared.url).exit_code == 0
    assert run("dgemma", "list").output == f"dgemma/mine {shared.url}\n"
    assert run("dgemma", "add", "odd", "example.org").exit_code == 1
    asked = run("-m", "dgemma/mine", SHORT, "-o", "seed", "1", "--no-log")
    assert asked.output.strip() == ANSWERS[SHORT], asked.output
    assert run("dgemma", "remove", "mine").exit_code == 0
    assert run("dgemma", "remove", "mine").exit_code == 1
    plugin.write_servers({"gone": "http://127.0.0.1:9"})
    assert "no answer from" in run("-m", "dgemma/gone", SHORT).output
