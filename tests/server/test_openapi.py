"""The document says what the server does: drawn requests never meet an answer it does not list."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dgemma.server.limits import Limits
from dgemma.server.service import Settings
from tests.server.conftest import MODEL, Running, load, running

OPERATIONS = [
    "POST /v1/chat/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "POST /api/chat",
    "POST /api/generate",
    "GET /api/tags",
    "POST /api/show",
    "GET /api/version",
    "POST /v1/completions",
    "POST /v1/fim/completions",
    "POST /infill",
    "POST /v1/edit/completions",
    "POST /v1/apply/completions",
    "POST /v1/dgemma/fill",
    "POST /v1/dgemma/edit",
    "POST /v1/dgemma/sudoku",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /metrics",
]
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


def not_a_failure(context: Any, response: Any, case: Any) -> bool | None:
    """No 5xx, but for a deadline that was too short: in the queue, or for a hole to be whole."""
    # Of the three error forms only one has a code; a server that stops says so instead.
    is_late = response.status_code == 503 and "try again" in response.text
    return None if is_late else not_a_server_error(context, response, case)


@pytest.fixture(scope="module")
def hasty(checkpoint: Path) -> Iterator[Running]:
    """A server that gives a request little time, so that drawn ones end."""
    engine = load(checkpoint)
    with running(
        engine, Settings(names=(MODEL,), limits=Limits(max_seconds=0.2, max_batch_size=128))
    ) as server:
        yield server


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_answer_is_one_the_document_lists(hasty: Running, operation: str) -> None:
    method, path = operation.split()
    document = schemathesis.openapi.from_url(f"{hasty.url}/openapi.json")

    @settings(
        max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=document[path][method].as_strategy())
    def draw(case: Any) -> None:
        case.call_and_validate(checks=[not_a_failure, *CHECKS])

    draw()


def test_the_document_lists_what_is_there(hasty: Running) -> None:
    paths = hasty.get("/openapi.json").json()["paths"]
    listed = {f"{method.upper()} {path}" for path in paths for method in paths[path]}
    assert listed == set(OPERATIONS)
    chat = paths["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "413", "429", "503"} <= chat.keys() and "422" not in chat
    assert chat["200"]["content"].keys() == {"application/json", "text/event-stream"}
