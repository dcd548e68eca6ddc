"""The canvas as it converges, over HTTP: for those who ask, and harmless to those who do not."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from dgemma.server import service
from tests.server.conftest import Running
from tests.taught import ANSWERS, CANVAS, LONG, SHORT, THOUGHT


def events(server: Running, question: str, **fields: Any) -> list[dict[str, Any]]:
    text = server.ask(question, stream=True, **fields).text
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]


def contents(stream: list[dict[str, Any]], name: str = "content") -> list[str]:
    deltas = [chunk["choices"][0]["delta"] for chunk in stream if chunk["choices"]]
    return [delta[name] for delta in deltas if delta.get(name)]


def test_drafts_show_every_step_and_the_last_is_what_is_promised(shared: Running) -> None:
    stream = events(shared, LONG, seed=1, dgemma={"drafts": True})
    drafts = [c["dgemma"] for c in stream if c.get("dgemma", {}).get("type") == "draft"]
    took = stream[-1]["choices"][0]["dgemma"]
    assert len(drafts) == took["steps"]
    assert {draft["block"] for draft in drafts} == {0, 1, 2}
    for draft in drafts:
        for name in ("ids", "tokens", "guess", "guess_tokens", "entropy", "accepted", "pinned"):
            assert len(draft[name]) == CANVAS, name
        assert draft["text"] == "".join(draft["guess_tokens"])
        assert not any(draft["pinned"])
        assert all(nats >= 0 for nats in draft["entropy"])
    steps = [draft["step"] for draft in drafts if draft["block"] == 0]
    assert steps == list(range(1, len(steps) + 1))
    last = [draft for draft in drafts if draft["block"] == 0][-1]
    assert ANSWERS[LONG].startswith(last["text"].rstrip("�"))


def test_who_appends_deltas_sees_promised_text_alone(shared: Running) -> None:
    stream = events(shared, LONG, seed=1, dgemma={"drafts": True})
    assert "".join(contents(stream)) == ANSWERS[LONG]
    client = shared.client()
    with client.chat.completions.create(
        model="taught",
        messages=[{"role": "user", "content": LONG}],
        seed=1,
        stream=True,
        extra_body={"dgemma": {"drafts": True}},
    ) as chunks:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == ANSWERS[LONG]


def test_who_replaces_sees_the_text_converge(shared: Running) -> None:
    odd = "what?"  # nothing it was taught, so that its guesses change
    whole = shared.ask(odd, seed=1).json()["choices"][0]["message"]["content"]
    stream = events(shared, odd, seed=1, diffusing=True)
    texts = contents(stream)
    assert texts[-1] == whole
    assert len(set(texts)) > 3, "it changes before it stands"
    assert any(not whole.startswith(text) for text in texts)
    taught = contents(events(shared, LONG, seed=1, diffusing=True))
    assert taught[-1] == ANSWERS[LONG]
    assert len(taught) > 10, "once for each step and each block"


def test_who_replaces_sees_thought_and_stops_apart(shared: Running) -> None:
    stream = events(shared, THOUGHT, seed=1, diffusing=True)
    assert contents(stream)[-1] == "yes"
    assert contents(stream, "reasoning_content")[-1] == "hm"
    cut = events(shared, LONG, seed=1, diffusing=True, stop=["then"])
    assert contents(cut)[-1] == ANSWERS[LONG].partition("then")[0]
    assert not any("then" in text for text in contents(cut))


def test_who_replaces_in_autoregression_sees_it_grow(shared: Running) -> None:
    texts = contents(events(shared, SHORT, diffusing=True, dgemma={"mode": "ar"}))
    assert texts[-1] == ANSWERS[SHORT]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    hybrid = contents(events(shared, THOUGHT, seed=1, diffusing=True, dgemma={"mode": "hybrid"}))
    assert hybrid[-1] == "yes"


def test_a_plain_completion_has_drafts_too(shared: Running) -> None:
    brief = {"max_denoising_steps": 6, "retries": 0}
    body = {"prompt": "the ", "max_tokens": 8, "seed": 1, "stream": True, "dgemma": brief}
    text = shared.post("/v1/completions", {**body, "dgemma": {**brief, "drafts": True}}).text
    stream = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    assert any(chunk.get("dgemma", {}).get("type") == "draft" for chunk in stream)
    whole = shared.post("/v1/completions", {**body, "stream": False}).json()
    assert "".join(c["choices"][0]["text"] for c in stream) == whole["choices"][0]["text"]


def test_a_slow_reader_loses_drafts_and_no_text(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_BACKLOG", 0)
    stream = events(shared, LONG, seed=1, dgemma={"drafts": True, "pace": 100})
    assert "".join(contents(stream)) == ANSWERS[LONG]
    drafts = [c for c in stream if c.get("dgemma", {}).get("type") == "draft"]
    assert len(drafts) < stream[-1]["choices"][0]["dgemma"]["steps"]


def test_canvases_that_went_wrong_are_reported(serve: Callable[..., Running]) -> None:
    """Weights that are not numbers make every canvas wrong: all retries are used, then it fails."""
    server = serve()
    with torch.no_grad():
        server.service.engine.model.norm.weight.fill_(float("nan"))
    text = server.ask(SHORT, stream=True, dgemma={"drafts": True, "max_denoising_steps": 4}).text
    stream = [json.loads(line[6:]) for line in text.split("\n\n")[:-1]]
    retries = [c["dgemma"] for c in stream if c.get("dgemma", {}).get("type") == "retry"]
    assert [retry["retry"] for retry in retries] == [1, 2]
    assert {retry["reason"] for retry in retries} == {"not a number"}
    drafts = [c["dgemma"] for c in stream if c.get("dgemma", {}).get("type") == "draft"]
    assert drafts[0]["entropy"] == [None] * CANVAS, "JSON has no such number"
    assert stream[-1]["error"]["code"] == "fault"
    assert server.ask(SHORT, dgemma={"max_denoising_steps": 4}).status_code == 500
