"""The subset of Ollama's API over a real socket, asked by the real ollama client."""

import json
from typing import Any

import httpx
import jsonschema
import ollama
import pytest

from tests.server.conftest import MODEL, QUESTION, TOOLS, Running, opened
from tests.server.test_structure import SCHEMA
from tests.taught import ANSWERS, LONG, SHORT, THOUGHT

SEEDED = {"seed": 1}


def client(server: Running) -> ollama.Client:
    made = ollama.Client(host=server.url, timeout=60)
    opened(made._client)
    return made


def chat(server: Running, question: str, **fields: Any) -> Any:
    asked = {"model": MODEL, "options": SEEDED, **fields}
    return client(server).chat(messages=[{"role": "user", "content": question}], **asked)


def test_an_answer_is_that_of_openai_s_chat(shared: Running) -> None:
    reply = chat(shared, LONG)
    assert reply.message.content == ANSWERS[LONG]
    assert (reply.done, reply.done_reason, reply.model) == (True, "stop", MODEL)
    usage = shared.ask(LONG, seed=1).json()["usage"]
    counts = (reply.prompt_eval_count, reply.eval_count)
    assert counts == (usage["prompt_tokens"], usage["completion_tokens"])
    assert reply.total_duration >= reply.eval_duration > 0
    thought = chat(shared, THOUGHT, model=f"{MODEL}:latest")
    assert (thought.message.thinking, thought.message.content) == ("hm", "yes")


def test_a_stream_is_lines_that_join_to_the_answer(shared: Running) -> None:
    parts = list(chat(shared, THOUGHT, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "hm"
    assert "".join(part.message.content or "" for part in parts) == "yes"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    body = {"messages": [{"role": "user", "content": SHORT}]}
    response = shared.post("/api/chat", body)
    assert response.headers["content-type"].startswith("application/x-ndjson"), "the default"
    assert all(json.loads(line)["created_at"] for line in response.text.splitlines())


def test_calls_have_arguments_as_objects_and_results_are_read(caller: Running) -> None:
    asked: Any = {"model": "caller", "tools": TOOLS}
    reply = chat(caller, QUESTION, **asked)
    calls = [(call.function.name, call.function.arguments) for call in reply.message.tool_calls]
    assert calls == [("the", {"a": "é"}), ("the", {"b": [1, True]})]
    parts = list(chat(caller, QUESTION, **asked, stream=True))
    assert [len(part.message.tool_calls) for part in parts if part.message.tool_calls] == [2]
    results = [
        {"role": "tool", "content": "7", "tool_name": "the"},
        {"role": "tool", "content": "8"},
    ]
    history = [{"role": "user", "content": QUESTION}, reply.message, *results]
    more = client(caller).chat(messages=history, **asked, options={"num_predict": 2})
    assert more.prompt_eval_count > reply.prompt_eval_count


def test_a_format_is_held_to(shared: Running) -> None:
    jsonschema.validate(json.loads(chat(shared, SHORT, format=SCHEMA).message.content), SCHEMA)
    asked: Any = {"model": MODEL, "prompt": SHORT, "format": "json", "options": SEEDED}
    assert isinstance(json.loads(client(shared).generate(**asked).response), dict)


def test_prompts_are_answered_continued_and_filled(shared: Running) -> None:
    asked: Any = {"model": MODEL, "options": {"seed": 1, "stop": ["two"]}}
    assert client(shared).generate(prompt=SHORT, **asked).response == "one, "
    parts = client(shared).generate(prompt=SHORT, model=MODEL, options=SEEDED, stream=True)
    assert "".join(part.response for part in parts) == ANSWERS[SHORT]
    few: Any = {"model": MODEL, "options": {"num_predict": 2}}
    assert client(shared).generate(prompt="the ", raw=True, **few).eval_count == 2
    assert client(shared).generate(prompt="the ", suffix=" end", **few).done
    assert client(shared).generate(model=MODEL).done_reason == "load"


def test_a_body_need_not_say_that_it_is_json(shared: Running) -> None:
    body, url = json.dumps({"model": MODEL, "prompt": ""}).encode(), f"{shared.url}/api/generate"
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert httpx.post(url, content=body, headers=form).json()["done_reason"] == "load"
    foreign = {**form, "origin": "http://elsewhere.example"}
    assert httpx.post(url, content=body, headers=foreign).status_code == 403


def test_models_are_listed_and_shown(shared: Running) -> None:
    models = client(shared).list().models
    assert [model.model for model in models] == [MODEL, "alias"] and models[0].size
    shown = client(shared).show(MODEL)
    assert shown.modelinfo["diffusion_gemma.context_length"] == 256
    assert shown.capabilities == ["completion", "tools", "thinking", "insert"]
    assert shared.get("/api/version").json()["version"]


def test_harmless_options_are_named(shared: Running) -> None:
    options = {"num_ctx": 4096, "top_k": 40, "seed": -1, "num_predict": -1}
    body = {"messages": [{"role": "user", "content": SHORT}], "stream": False, "options": options}
    reply = shared.post("/api/chat", {**body, "keep_alive": "5m"}).json()
    assert reply["dgemma"]["ignored"] == ["keep_alive", "options.num_ctx", "options.top_k"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"options": {"num_predicted": 4}}, "did you mean 'num_predict'"),
    ("chat", {"options": {"temperature": 9}}, "temperature is 9"),
    ("chat", {"format": "xml"}, "format must be json"),
    (
        "chat",
        {"dgemma": {"mode": "ar"}, "options": {"repeat_penalty": 1.1}},
        "refused in mode ar",
    ),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "not valid base64"),
    (
        "chat",
        {"messages": [{"role": "user", "content": "x", "images": [1]}]},
        "a picture in base64",
    ),
    ("chat", {"messages": [{"role": "tool", "content": "7"}]}, "answers a tool call"),
    ("chat", {"max_tokens": 5}, "the field 'max_tokens' is not known"),
    ("generate", {"prompt": "x", "context": [1]}, "nothing is stored"),
    ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is refused"),
    ("generate", {"prompt": "x", "suffix": "y", "format": "json"}, "a hole takes no format"),
]


@pytest.mark.parametrize(("route", "fields", "sentence"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_refusal_says_why_in_ollama_s_form(
    shared: Running, route: str, fields: dict[str, Any], sentence: str
) -> None:
    messages = {"messages": [{"role": "user", "content": SHORT}]} if route == "chat" else {}
    response = shared.post(f"/api/{route}", {**messages, **fields})
    assert response.status_code == 400 and sentence in response.json()["error"]


def test_the_client_raises_what_ollama_s_server_would(shared: Running) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here") as missing:
        chat(shared, SHORT, model="llama")
    assert missing.value.status_code == 404
