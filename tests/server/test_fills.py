"""Holes, edits and puzzles over HTTP: editors' own requests, and the rules all requests keep."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dgemma.engine import Done, Engine, SamplingParams
from dgemma.programs.edit.edit import without_fence
from dgemma.programs.infill.infill import FillParams
from dgemma.server import infill_api
from dgemma.server.completions_api import CompletionBody, parse_completion
from dgemma.server.edit_api import rewrite_answer
from dgemma.server.infill_api import (
    FillBody,
    FimBody,
    InfillBody,
    hole_programs,
    parse_fill,
    parse_fim,
    parse_infill,
)
from dgemma.server.schemas import Body
from dgemma.server.sentinels import HoleContext, find_hole, read_region, read_update
from tests.server.conftest import MODEL, Running, wait_for
from tests.server.test_scheduling import Brake
from tests.taught import ANSWERS, LONG, SHORT, ask

BEFORE, AFTER = "one, ", " and 7!"
FIM_STOPS = "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|endoftext|> <PRE> [SUFFIX]".split()

# As the editors send them; the texts are short, for the tiny model reads letter by letter.
CONTINUE_FIM = {
    "model": MODEL,
    "prompt": BEFORE,
    "suffix": AFTER,
    "max_tokens": 256,
    "temperature": 0.01,
    "top_p": None,
    "frequency_penalty": None,
    "presence_penalty": None,
    "stop": [*FIM_STOPS, "\n\n", "/src/", "```"],
    "stream": True,
}
MISTRAL_FIM = {
    "model": MODEL,
    "prompt": BEFORE,
    "suffix": AFTER,
    "max_tokens": 64,
    "min_tokens": 0,
    "temperature": 0.2,
    "top_p": 1,
    "random_seed": 7,
    "stop": [],
    "stream": False,
}
MERCURY_FIM = {
    "model": MODEL,
    "prompt": BEFORE,
    "suffix": AFTER,
    "max_tokens": 512,
    "temperature": 0.0,
    "presence_penalty": 1.5,
    "top_p": 1,
    "stop": ["\n"],
    "stream": False,
}
ZED_PREDICTION = {
    "model": MODEL,
    "prompt": f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>",
    "max_tokens": 64,
    "stop": FIM_STOPS,
    "temperature": None,
}
LLAMA_VSCODE = {
    "id_slot": 0,
    "input_prefix": "\n",
    "input_suffix": AFTER,
    "input_extra": [{"text": "two", "time": 1760000000.5, "filename": "a.py"}],
    "prompt": BEFORE,
    "n_predict": 32,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "n_indent": 0,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
}
LLAMA_VSCODE_WARMS_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": [],
    "prompt": "one",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
NEXT_EDIT = (
    "<|recently_viewed_code_snippets|>\n<|/recently_viewed_code_snippets|>\n\n"
    "<|current_file_content|>\ncurrent_file_path: a.py\none\n<|code_to_edit|>\ntw<|cursor|>o\n"
    "<|/code_to_edit|>\nsix\n<|/current_file_content|>\n\n"
    "<|edit_diff_history|>\n--- a\n+++ a\n@@ -1 +1 @@\n-un\n+one\n\n<|/edit_diff_history|>"
)
ZED_MERCURY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [{"type": "text", "text": NEXT_EDIT}]}],
    "stream": False,
    "max_completion_tokens": None,
    "stop": [],
    "temperature": None,
    "tool_choice": None,
    "parallel_tool_calls": None,
    "tools": [],
    "prompt_cache_key": None,
    "reasoning_effort": None,
}
CONTINUE_NEXT_EDIT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": NEXT_EDIT}],
    "max_tokens": 1024,
    "temperature": 0.0,
    "presence_penalty": 1.0,
    "top_p": 0.8,
    "stop": ["<|/code_to_edit|>"],
    "stream": True,
}
APPLY = {
    "model": MODEL,
    "messages": [
        {
            "role": "user",
            "content": "<|original_code|>\none\n<|/original_code|>\n\n"
            "<|update_snippet|>\n// ...\ntwo\n<|/update_snippet|>",
        }
    ],
    "max_tokens": 16,
    "temperature": 0,
}


def chunks(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]


@pytest.mark.parametrize(
    "prompt",
    [
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        "<fim_prefix>a<fim_suffix>b<fim_middle>",
        "<PRE> a <SUF>b <MID>",
        "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
        "<|code_prefix|>a<|code_suffix|>b<|code_middle|>\n",
        "[SUFFIX]b[PREFIX]a",
        "a<|fill|>b",
    ],
)
def test_the_sentinels_of_editors_mark_a_hole(prompt: str) -> None:
    assert find_hole(prompt) == HoleContext("a", "b")


@pytest.mark.parametrize(
    "prompt",
    [
        "plain",
        "<|fim_prefix|>a<|fim_middle|>",
        "<|fim_suffix|>b<|fim_prefix|>a<|fim_middle|>",
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c",
        "<|fim_prefix|>a<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        "see [SUFFIX]b[PREFIX]a",
        "a<|fill|>b<|fill|>c",
    ],
)
def test_what_is_not_a_whole_hole_is_plain_text(prompt: str) -> None:
    assert find_hole(prompt) is None


def test_other_files_come_before_the_prefix() -> None:
    prompt = "<|repo_name|>r<|file_sep|>x.py\n1\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert find_hole(prompt) == HoleContext("r\nx.py\n1\na", "b")


def test_messages_of_mercury_are_read() -> None:
    region = read_region(NEXT_EDIT)
    assert (region.before, region.old, region.after) == ("one\n", "two\n", "six\n")
    assert region.history.startswith("--- a") and region.history.endswith("+one")
    message = APPLY["messages"][0]["content"]  # type: ignore[index]
    assert read_update(message) == ("one\n", "// ...\ntwo")


def test_a_completion_with_a_suffix_by_the_openai_client(shared: Running) -> None:
    client = shared.client()
    first, second = (
        client.completions.create(model=MODEL, prompt=BEFORE, suffix=AFTER, seed=3, max_tokens=8)
        for _ in range(2)
    )
    assert first.choices[0].text and first.choices[0].text == second.choices[0].text
    assert first.choices[0].finish_reason == "stop" and first.usage.completion_tokens > 0  # type: ignore[union-attr]
    stream = client.completions.create(
        model=MODEL, prompt=BEFORE, suffix=AFTER, seed=3, max_tokens=8, stream=True
    )
    assert "".join(part.choices[0].text for part in stream) == first.choices[0].text
    several = client.completions.create(
        model=MODEL, prompt=BEFORE, suffix=AFTER, seed=3, max_tokens=8, n=2
    )
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].text == first.choices[0].text
    with pytest.raises(openai.BadRequestError, match="cannot fill"):
        client.completions.create(
            model=MODEL, prompt=BEFORE, suffix=AFTER, extra_body={"dgemma": {"mode": "ar"}}
        )
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.completions.create(model=MODEL, prompt=BEFORE, suffix=AFTER, logprobs=0)


def test_one_fill_is_read_by_all_clients(shared: Running) -> None:
    same = {"seed": 5, "max_tokens": 8, "stop": []}
    mercury = shared.post("/v1/fim/completions", {**MERCURY_FIM, "temperature": 1, **same})
    assert mercury.status_code == 200, mercury.text
    (choice,) = mercury.json()["choices"]
    assert choice["text"] and choice["message"]["content"] == choice["text"]
    assert set(mercury.json()["dgemma"]["ignored"]) == {"presence_penalty", "top_p"}
    mistral = {**MISTRAL_FIM, "temperature": 1, "max_tokens": 8, "random_seed": 5}
    assert (
        shared.post("/v1/fim/completions", mistral).json()["choices"][0]["text"] == choice["text"]
    )
    zed = shared.post("/v1/completions", {**ZED_PREDICTION, **same})
    assert zed.json()["choices"][0]["text"] == choice["text"] and zed.json()["id"]
    streamed = shared.post("/v1/fim/completions", {**CONTINUE_FIM, "temperature": 1, **same})
    parts = [part["choices"][0] for part in chunks(streamed.text)]
    assert "".join(part["delta"].get("content", "") for part in parts) == choice["text"]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/fim/completions", CONTINUE_FIM),
        ("/v1/fim/completions", MISTRAL_FIM),
        ("/v1/fim/completions", MERCURY_FIM),
        ("/v1/completions", ZED_PREDICTION),
        ("/v1/completions", CONTINUE_FIM),
        ("/v1/edit/completions", CONTINUE_NEXT_EDIT),
    ],
)
def test_requests_of_editors_are_answered(
    shared: Running, path: str, body: dict[str, object]
) -> None:
    response = shared.post(path, body)
    assert response.status_code == 200, response.text
    reply = chunks(response.text)[-1] if body.get("stream") else response.json()
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_llama_cpp_clients_are_answered(shared: Running) -> None:
    answer = shared.post("/infill", LLAMA_VSCODE)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    assert reply["content"] and reply["stop"] and reply["timings"]["predicted_n"] > 0
    assert reply["tokens_predicted"] == reply["timings"]["predicted_n"]
    assert {"samplers", "n_indent", "t_max_predict_ms"} <= set(reply["dgemma"]["ignored"])
    warm = shared.post("/infill", LLAMA_VSCODE_WARMS_UP)
    assert warm.status_code == 200 and warm.json()["content"] == ""
    stream = shared.post("/infill", {**LLAMA_VSCODE, "stream": True, "seed": -1}).text
    assert [part["stop"] for part in chunks(stream)] == [False, True]


def test_infill_says_if_its_limit_was_reached(shared: Running) -> None:
    def stop_types(n_predict: int) -> set[str]:
        body = {"prompt": BEFORE, "input_suffix": AFTER, "n_predict": n_predict, "seed": 5}
        return {shared.post("/infill", body).json()["stop_type"]}

    assert stop_types(1) == {"limit"}
    assert stop_types(-1) == {"eos"}


def test_a_next_edit_is_a_fenced_region_or_none(shared: Running) -> None:
    answer = shared.post("/v1/edit/completions", ZED_MERCURY)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    assert content == "None" or (content.startswith("```\n") and content.endswith("\n```"))
    for wrong in ("no tags", "<|current_file_content|>\nx\n<|/current_file_content|>"):
        body = {"messages": [{"role": "user", "content": wrong}]}
        assert shared.post("/v1/edit/completions", body).status_code == 400
    system = {"messages": [{"role": "system", "content": NEXT_EDIT}]}
    assert shared.post("/v1/edit/completions", system).status_code == 400


@pytest.mark.parametrize(
    ("read", "body", "usual"),
    [
        (parse_fim, FimBody(prompt=BEFORE, suffix=AFTER, seed=3), "fast"),
        (parse_infill, InfillBody(prompt=BEFORE, input_suffix=AFTER, seed=3), "fast"),
        (parse_completion, CompletionBody(prompt=BEFORE, suffix=AFTER, seed=3), "fast"),
        (parse_fill, FillBody(text=[BEFORE, AFTER], seed=3), "thorough"),
    ],
)
def test_editors_are_served_fast_unless_they_ask_for_more(
    checkpoint: Path, read: Callable[..., list[Any]], body: Body, usual: str
) -> None:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")

    def steps(**chosen: str) -> int:
        (program,) = read(engine, body.model_copy(update=chosen))
        done: Done = engine.run(program)
        return done.steps

    by_effort = {effort: steps(effort=effort) for effort in ("fast", "thorough")}
    assert steps() == by_effort[usual] and by_effort["fast"] < by_effort["thorough"]


def test_of_several_fills_the_first_alone_takes_what_knows_no_seed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    taken: list[FillParams] = []
    monkeypatch.setattr(infill_api, "fill_answer", lambda engine, document, own: taken.append(own))
    body = CompletionBody(model=MODEL, prompt=BEFORE, suffix=AFTER, seed=3, n=3)
    assert len(hole_programs(engine, body, HoleContext(BEFORE, AFTER))) == 3
    assert [own.seed for own in taken] == [3, 4, 5]
    assert [own.num_proposals for own in taken] == [FillParams().num_proposals, 0, 0]


def test_an_update_is_written_from_the_old_file(checkpoint: Path) -> None:
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    fresh = engine.generate(ask(SHORT), SamplingParams(seed=1))
    task = engine.generation(ask(SHORT), SamplingParams(seed=1))
    promised, done = engine.follow(rewrite_answer(engine, task, ANSWERS[SHORT]))
    assert promised.text == ANSWERS[SHORT] == done.text
    assert done.steps <= fresh.steps


def test_an_update_is_applied_if_it_fits(shared: Running) -> None:
    small = shared.post("/v1/apply/completions", APPLY).json()["choices"][0]
    assert isinstance(small["message"]["content"], str) and small["dgemma"]["steps"] > 0
    message = str(APPLY["messages"][0]["content"]).replace("one", "1" * 300)  # type: ignore[index]
    large = {**APPLY, "messages": [{"role": "user", "content": message}]}
    refused = shared.post("/v1/apply/completions", large)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_the_fence_around_a_file_is_taken_off() -> None:
    assert without_fence("```python\nx = 1\n```") == "x = 1"
    assert without_fence("x = '```'") == "x = '```'"


def test_what_stands_outside_holes_and_edits_stays(shared: Running) -> None:
    pieces = ["  x\t= (", ") + ", "\r\n\n# é 😀"]
    body = {"text": pieces, "seed": 1, "max_tokens": 3}
    reply = shared.post("/v1/dgemma/fill", body).json()
    texts = [hole["text"] for hole in reply["holes"]]
    assert len(texts) == 2 and all(texts)
    assert reply["text"] == pieces[0] + texts[0] + pieces[1] + texts[1] + pieces[2]
    for hole in reply["holes"]:
        assert reply["text"][hole["start"] : hole["end"]] == hole["text"]
    marked = shared.post("/v1/dgemma/fill", {**body, "text": "<|fill|>".join(pieces)})
    assert marked.json()["text"] == reply["text"]

    text = "one 😀 two\nsix"
    edit = {"text": text, "selection": [[6, 9]], "seed": 1, "passes": 1}
    edited = shared.post("/v1/dgemma/edit", edit).json()
    assert edited["text"].startswith("one 😀 ") and edited["text"].endswith("\nsix")
    for change in edited["changed"]:
        assert text[change["old_start"] : change["old_end"]] == change["old"]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/dgemma/fill", {"text": "no hole"}, "has no hole"),
        ("/v1/dgemma/fill", {"text": "a<|fill|>", "n": 2}, "'n' is not known"),
        ("/v1/dgemma/fill", {"text": "a<|fill|>", "dgemma": {"mode": "ar"}}, "cannot fill"),
        ("/v1/dgemma/fill", {"text": "a<|fill|>", "dgemma": {"drafts": True}}, "need stream"),
        ("/v1/dgemma/fill", {"text": "a<|fill|>", "dgemma": {"retries": 1}}, "retries is refused"),
        ("/v1/dgemma/fill", {"text": "a<|fill|>", "dgemma": {"retries": 0}}, "retries is refused"),
        ("/v1/dgemma/edit", {"text": "a", "lines": [2, 3]}, "lin"),
        ("/v1/dgemma/edit", {"text": "a", "selection": [[0, 2]]}, "span"),
        ("/v1/dgemma/edit", {"text": "a", "selection": [[0, 1]], "lines": [1, 1]}, "not both"),
        ("/v1/dgemma/edit", {"text": "a", "strenght": 1}, "did you mean 'strength'"),
        ("/v1/dgemma/sudoku", {"puzzle": "1" * 81}, "two 1s"),
        ("/v1/dgemma/sudoku", {"puzzle": "0" * 82}, "82 cells"),
        ("/v1/dgemma/sudoku", {"puzzle": "0" * 81, "dgemma": {"mode": "hybrid"}}, "not for Sudoku"),
        ("/v1/fim/completions", {"prompt": "", "suffix": ""}, "are empty"),
        ("/v1/fim/completions", {"prompt": "a", "seed": 1, "random_seed": 2}, "differ"),
        ("/v1/fim/completions", {"prompt": "a", "suffx": "b"}, "did you mean 'suffix'"),
        ("/v1/completions", {"prompt": [5], "suffix": "b"}, "not of token ids"),
        ("/v1/completions", {"prompt": "a", "effort": "fast"}, "effort is for a hole"),
        ("/v1/fim/completions", {"prompt": "a", "effort": "thorough"}, "effort is for a hole"),
        ("/infill", {"prompt": "a", "n_probs": 3}, "n_probs is refused"),
        ("/infill", {}, "no text around"),
        ("/infill", {"prompt": "a", "effort": "slow"}, "effort"),
        ("/v1/dgemma/fill", {"text": "a<|fill|>", "effort": "slow"}, "effort"),
        ("/v1/apply/completions", {"messages": [{"role": "user", "content": "x"}]}, "original"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    shared: Running, path: str, body: dict[str, object], reason: str
) -> None:
    response = shared.post(path, body)
    assert response.status_code == 400, response.text
    assert reason in response.json()["error"]["message"]


def test_the_drafts_of_a_fill_come_before_its_result(shared: Running) -> None:
    body = {"text": f"{BEFORE}<|fill|>{AFTER}", "seed": 2, "stream": True, "max_tokens": 4}
    stream = chunks(shared.post("/v1/dgemma/fill", {**body, "dgemma": {"drafts": True}}).text)
    drafts = [part["dgemma"] for part in stream[:-1]]
    assert drafts and {draft["type"] for draft in drafts} == {"draft"}
    assert all(any(draft["pinned"]) for draft in drafts)
    blocks = [draft["block"] for draft in drafts]
    assert blocks == sorted(blocks) and blocks[0] == 0
    for before, after in pairwise(drafts):
        assert after["block"] > before["block"] or after["step"] == before["step"] + 1
    assert stream[-1]["object"] == "dgemma.fill" and stream[-1]["holes"][0]["text"]


def test_fills_and_chats_share_passes_and_keep_their_answers(shared: Running) -> None:
    fill = {"text": f"{BEFORE}<|fill|>{AFTER}", "seed": 4, "max_tokens": 6}
    alone = shared.post("/v1/dgemma/fill", fill).json()["text"]
    with ThreadPoolExecutor(8) as pool:
        fills = [pool.submit(shared.post, "/v1/dgemma/fill", fill) for _ in range(3)]
        chats = [pool.submit(shared.ask, LONG, seed=1) for _ in range(3)]
        assert {one.result().json()["text"] for one in fills} == {alone}
        answers = {one.result().json()["choices"][0]["message"]["content"] for one in chats}
    assert answers == {ANSWERS[LONG]}
    worker = shared.service.worker
    wait_for(lambda: not worker.num_running)
    assert not worker.engine.scheduler.requests


def long_fill() -> dict[str, object]:
    return {"text": "a<|fill|>b" * 40, "seed": 1, "stream": True, "dgemma": {"drafts": True}}


def test_a_fill_ends_when_its_client_leaves(serve: Callable[..., Running]) -> None:
    server = serve()
    worker = server.service.worker
    with httpx.stream("POST", server.url + "/v1/dgemma/fill", json=long_fill(), timeout=30) as got:
        next(got.iter_lines())
        assert worker.num_running == 1
    wait_for(lambda: not worker.num_running)
    assert not worker.engine.scheduler.requests
    assert server.ask(SHORT, seed=1).json()["choices"][0]["message"]["content"] == ANSWERS[SHORT]


def test_a_fill_that_takes_too_long_is_a_503(serve: Callable[..., Running]) -> None:
    server = serve()
    body = {**long_fill(), "stream": False, "dgemma": {"max_seconds": 0.2}}
    begun = time.monotonic()
    late = server.post("/v1/dgemma/fill", body)
    assert late.status_code == 503 and late.json()["error"]["code"] == "timeout"
    assert time.monotonic() - begun < 10
    wait_for(lambda: not server.service.worker.engine.scheduler.requests)


def test_an_error_in_a_fill_is_its_own(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()

    def broken(*arguments: object) -> object:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("dgemma.programs.infill.infill.InfillRun.run", broken)
    response = server.post("/v1/dgemma/fill", {"text": "a<|fill|>b"})
    assert response.status_code == 500 and "broken" not in response.text
    assert server.ask(SHORT, seed=1).json()["choices"][0]["message"]["content"] == ANSWERS[SHORT]


def test_a_stopping_server_finishes_its_fills(serve: Callable[..., Running]) -> None:
    server = serve()
    brake = Brake(server.service.engine)
    fill = {"text": f"{BEFORE}<|fill|>{AFTER}", "seed": 4}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/dgemma/fill", fill)
        wait_for(lambda: bool(server.service.worker.num_running))
        server.service.drain.begin()
        assert server.post("/v1/dgemma/fill", fill).status_code == 503
        brake.off()
        assert running.result().status_code == 200
