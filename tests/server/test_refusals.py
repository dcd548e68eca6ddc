"""What is not served: one sentence in OpenAI's error shape, and the status that fits."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dgemma.errors import UsageError
from dgemma.server.auth import Keys, check_listening, names_of, read_keys
from dgemma.server.chat_api import ChatBody
from dgemma.server.completions_api import CompletionBody
from dgemma.server.schemas import Body, Extension
from tests.server.conftest import MODEL, Running
from tests.taught import SHORT

USER = [{"role": "user", "content": SHORT}]


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    found: dict[str, Any] = body["error"]
    return found


# As sglang-router and vllm-router add them to every request.
GATEWAY = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
    "return_hidden_states": False,
}


def test_the_fields_that_gateways_add_pass_at_their_usual_values(shared: Running) -> None:
    assert shared.ask(SHORT, **GATEWAY, seed=1).json()["choices"][0]["message"]["content"]
    assert shared.post("/v1/completions", {"prompt": "a", "max_tokens": 1, **GATEWAY}).is_success
    for name, value in GATEWAY.items():
        refused = error(shared.ask(SHORT, **{**GATEWAY, name: not value}), 400)
        assert refused["param"] == name and "is refused" in refused["message"]


@pytest.mark.parametrize(
    ("change", "sentence", "param"),
    [
        ({"max_token": 5}, "'max_token' is not known; did you mean 'max_tokens'?", "max_token"),
        ({"guided_json": {}}, "the field 'guided_json' is not known", "guided_json"),
        ({"dgemma": {"steps": 5}}, "'dgemma.steps' is not known; docs/serve.md", "dgemma.steps"),
        ({"dgemma": {"mode": "fast"}}, "dgemma.mode is 'fast'", "dgemma.mode"),
        (
            {"dgemma": {"max_denoising_steps": 10**9}},
            "dgemma.max_denoising_steps is 1000000000",
            "dgemma.max_denoising_steps",
        ),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "stream_options.usage"),
        ({"temperature": "hot"}, "temperature is 'hot'", "temperature"),
        ({"temperature": 2.5}, "less than or equal to 2", "temperature"),
        ({"n": 0}, "n is 0", "n"),
        ({"n": 9}, "n is 9", "n"),
        ({"n": True}, "n is True", "n"),
        ({"seed": -1}, "seed is -1", "seed"),
        ({"stop": [""]}, "stop[0] is ''", "stop[0]"),
        ({"stop": ["x"] * 65}, "stop is", "stop"),
        ({"stop": 5}, "stop is 5", "stop"),
        ({"messages": []}, "messages is []", "messages"),
        ({"logit_bias": {"5": 1}}, "logit_bias is refused", "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs is refused", "top_logprobs"),
        ({"tool_choice": {"type": "function"}}, "it must be auto, none", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "use tools", "functions"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "give one of them", "max_tokens"),
        ({"diffusing": True}, "diffusing needs stream", "diffusing"),
        ({"dgemma": {"drafts": True}}, "need stream", "dgemma"),
        ({"stream": True, "diffusing": True, "dgemma": {"pace": 9}}, "cannot be paced", "dgemma"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "give one of them",
            "reasoning_effort",
        ),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]: a message's role", None),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "url is None; it must be a string",
            None,
        ),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "has 'weight'", None),
        ({"dgemma": {"heat": 0.5}}, "'dgemma.heat' is not known", "dgemma.heat"),
        ({"dgemma": {"mode": "ar", "max_denoising_steps": 5}}, "AR mode has no canvas", None),
        ({"dgemma": {"preset": "best"}}, "'quality', 'balanced' or 'fast'", "dgemma.preset"),
        ({"dgemma": {"mode": "ar", "preset": "fast"}}, "cannot honour a preset", None),
        ({"dgemma": {"canvas_length": 99}}, "canvas length is 99", None),
        ({"dgemma": {"t_max": 0.1}}, "t_max is 0.1", None),
        ({"dgemma": {"rule": "confidence", "entropy_bound": 1}}, "no entropies", "dgemma"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    shared: Running, change: dict[str, Any], sentence: str, param: str | None
) -> None:
    body = json.dumps({"messages": USER, **change})
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{shared.url}/v1/chat/completions", content=body, headers=headers)
    found = error(response, 400)
    assert sentence in found["message"]
    assert found["param"] == param
    assert found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"suffix": "x", "logprobs": 0}, "a hole is filled without logprobs"),
        ({"echo": True}, "with echo it must be 0 or 1"),
        ({"echo": True, "max_tokens": 1, "stream": True}, "echo takes no stream"),
        ({"max_tokens": 0}, "it must be 1 or more without echo"),
        ({"logprobs": 1}, "it must be 0 without echo"),
        ({"logprobs": 5}, "logprobs is 5"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": ["a", ""]}, "prompt is empty"),
        ({"prompt": []}, "or 1 to 16 of one kind"),
        ({"prompt": {}}, "prompt is {}"),
        ({"prompt": [[1], "x"]}, "or 1 to 16 of one kind"),
        ({"prompt": ["x"] * 17}, "or 1 to 16 of one kind"),
        ({"prompt": [10**6]}, "1000000 is not a token id"),
        ({"prompt": [1, "x"]}, "prompt is [1, 'x']; it must be a text"),
        ({"messages": USER}, "'messages' is not known"),
    ],
)
def test_a_wrong_completion_is_told_what_is_wrong(
    shared: Running, change: dict[str, Any], sentence: str
) -> None:
    response = shared.post("/v1/completions", {"prompt": "the", **change})
    assert sentence in error(response, 400)["message"]


def test_a_body_that_is_no_json_object_is_told_so(shared: Running) -> None:
    url, headers = f"{shared.url}/v1/chat/completions", {"content-type": "application/json"}
    for content in (b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"n":' + b"9" * 5000):
        error(httpx.post(url, content=content, headers=headers), 400)
    plain = httpx.post(url, content=json.dumps({"messages": USER}))
    assert "application/json" in error(plain, 400)["message"], "a form of another site cannot ask"


def test_a_prompt_that_does_not_fit_has_its_code(shared: Running) -> None:
    found = error(shared.ask("x" * 300), 400)
    assert found["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="the context holds 256"):
        shared.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 300}], stream=True
        )


def test_models_are_listed_and_others_are_not_found(shared: Running) -> None:
    client = shared.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert shared.ask(SHORT, model="alias").json()["model"] == "alias"
    found = error(shared.ask(SHORT, model="../../etc/passwd"), 404)
    assert found["code"] == "model_not_found"
    error(shared.ask(SHORT, model="\N{SNOWMAN}"), 404)
    error(shared.get("/v1/models/other/name"), 404)
    error(shared.get("/nothing"), 404)
    assert error(shared.get("/v1/chat/completions"), 405)["message"].endswith("use POST")


def test_harmless_fields_are_named_in_the_reply(shared: Running) -> None:
    given = {"top_p": 0.9, "user": "me", "store": False, "metadata": None}
    response = shared.ask(SHORT, **given)
    assert response.json()["dgemma"]["ignored"] == ["top_p", "user", "store"]
    assert response.headers["x-dgemma-ignored"] == "top_p, user, store"
    assert "x-dgemma-ignored" not in shared.ask(SHORT, logit_bias={}, top_logprobs=0).headers
    stream = shared.ask(SHORT, stream=True, **given).text
    assert '"ignored":["top_p","user","store"]' in stream


@pytest.mark.parametrize("mode", ["ar", "hybrid"])
@pytest.mark.parametrize(
    "given",
    [
        {"top_p": 0.9, "temperature": 0.5},
        {"top_k": 40, "temperature": 0.5},
        {"min_p": 0.1, "temperature": 1},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
    ],
)
def test_what_would_change_a_draw_in_ar_is_refused_by_name(
    shared: Running, mode: str, given: dict[str, Any]
) -> None:
    name = next(iter(given))
    found = error(shared.ask(SHORT, **given, dgemma={"mode": mode}), 400)
    assert found["param"] == name and found["code"] == "unsupported_parameter"
    assert f"{name} is refused in mode {mode}" in found["message"]
    assert shared.ask(SHORT, **given).status_code == 200, "a canvas does not depend on it"


def test_values_without_effect_on_a_draw_pass_in_ar(shared: Running) -> None:
    neutral = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "top_k": -1}
    for given in (neutral, {**neutral, "temperature": 0.5}, {"top_p": 0.9}, {"top_p": None}):
        response = shared.ask(SHORT, **given, max_tokens=4, dgemma={"mode": "ar"})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_the_table_of_fields_is_what_bodies_read(body: type[Body]) -> None:
    honoured = {name for name, field in body.table.items() if field.kind == "honoured"}
    assert honoured == body.model_fields.keys()
    assert all(field.note for field in body.table.values())
    assert all(field.description for field in Extension.model_fields.values())


def test_tokens_and_back(shared: Running) -> None:
    text = "the <|turn> 中😀"
    plain = shared.post("/tokenize", {"content": text, "parse_special": False}).json()["tokens"]
    assert plain == shared.service.engine.tokenizer.encode(text)
    assert shared.post("/detokenize", {"tokens": plain}).json() == {"content": text}
    special = shared.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"]
    assert special[0] == 2 and len(special) < len(plain)
    pieces = shared.post("/tokenize", {"content": "the😀", "with_pieces": True}).json()["tokens"]
    assert pieces[0]["piece"] == "the"
    assert bytes(byte for piece in pieces[1:] for byte in piece["piece"]).decode() == "😀"
    assert "not a token id" in error(shared.post("/detokenize", {"tokens": [-1]}), 400)["message"]


def test_keys_open_the_door(serve: Callable[..., Running]) -> None:
    server = serve(keys=Keys.of(["first-secret", "second-secret"]))
    for key in ("first-secret", "second-secret"):
        assert server.client(key).models.list().data
    with pytest.raises(openai.AuthenticationError, match="not known"):
        server.client("first-secret!").models.list()
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        response = server.get(path)
        assert error(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert server.get("/health").json()["status"] == "ok"
    assert server.get("/ready").json()["status"] == "ready"


def test_keys_are_read_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\nfrom-a-file\n\n", encoding="utf-8")
    keys = read_keys(file, {"DGEMMA_API_KEYS": "from-the-place, and-another"})
    owners = [keys.owner(key) for key in ("from-a-file", "from-the-place", "and-another")]
    assert len(set(owners)) == 3 and None not in owners
    assert keys.owner("# mine") is None and keys.owner("") is None
    assert not read_keys(None, {})
    file.write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys(file, {})
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "absent", {})
    with pytest.raises(UsageError, match="shorter than 8"):
        Keys.of(["short"])


def test_who_listens_beyond_the_machine_needs_keys_or_says_so() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_listening(host, Keys(), allow_anonymous=False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(UsageError, match="a key is needed"):
            check_listening(host, Keys(), allow_anonymous=False)
        check_listening(host, Keys(), allow_anonymous=True)
        check_listening(host, Keys.of(["long-enough"]), allow_anonymous=False)


def test_a_page_that_gives_its_own_name_to_this_machine_gets_nothing(
    serve: Callable[..., Running],
) -> None:
    server = serve(hosts=names_of("127.0.0.1", ["Mine.local"]))
    error(server.get("/v1/models", headers={"host": "evil.example"}), 403)
    error(server.get("/health", headers={"host": "evil.example:8080"}), 403)
    for host in ("localhost", "127.0.0.1:99", "[::1]:80", "mine.local"):
        assert server.get("/v1/models", headers={"host": host}).status_code == 200
    assert names_of("0.0.0.0", []) == frozenset()


def test_other_sites_may_ask_only_if_they_are_named(
    shared: Running, serve: Callable[..., Running]
) -> None:
    asking = {"origin": "https://page.example", "access-control-request-method": "POST"}
    refused = httpx.options(f"{shared.url}/v1/chat/completions", headers=asking)
    assert "access-control-allow-origin" not in refused.headers
    open_server = serve(cors_origins=("https://page.example",), keys=Keys.of(["long-enough"]))
    allowed = httpx.options(f"{open_server.url}/v1/chat/completions", headers=asking)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.options(
        f"{open_server.url}/v1/chat/completions",
        headers={**asking, "origin": "https://other.example"},
    )
    assert "access-control-allow-origin" not in other.headers


def test_bodies_are_bounded_in_size_and_time(serve: Callable[..., Running]) -> None:
    server = serve(limits={"max_body": 1000, "body_seconds": 0.3})
    assert "over 1000 bytes" in error(server.ask("x" * 2000), 413)["message"]

    def pieces() -> Any:
        for _ in range(50):
            yield b"x" * 100

    url = f"{server.url}/v1/chat/completions"
    error(httpx.post(url, content=pieces()), 413)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        begun = time.monotonic()
        slow.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b"408" in slow.recv(4000)
        assert time.monotonic() - begun < 5
    assert server.get("/health").status_code == 200


def test_a_client_may_name_its_request(shared: Running) -> None:
    named = shared.get("/health", headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    odd = shared.get("/health", headers={"x-request-id": "a b;c"})
    assert odd.headers["x-request-id"].startswith("req_")
