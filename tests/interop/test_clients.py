"""Clients of other projects, each unchanged, against a server with the built-in model."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgemma.engine import Engine
from dgemma.server.service import Settings
from dgemma.weights.hub import NANO_DIRECTORY
from tests.server.conftest import Running, running

ROOT = Path(__file__).resolve().parents[2]
# They want other versions of what we pin, so they have an environment of their own.
PYTHON = Path(os.environ.get("DGEMMA_CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "unused-key",
}


@pytest.fixture(scope="module")
def nano() -> Iterator[Running]:
    if not PYTHON.exists():
        pytest.skip("the clients are not installed; see make interop")
    with running(Engine.load("nano", device="cpu"), Settings(names=("nano",))) as server:
        yield server


@pytest.mark.parametrize("client", ["litellm", "langchain", "lm_eval", "lm_eval_tasks"])
def test_a_client_does_its_work(nano: Running, client: str) -> None:
    script = ROOT / "tests" / "interop" / "clients.py"
    command = [str(PYTHON), str(script), client, nano.url, "nano", str(NANO_DIRECTORY)]
    environment = {**os.environ, **OFFLINE}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(json.loads(done.stdout.splitlines()[-1]))
