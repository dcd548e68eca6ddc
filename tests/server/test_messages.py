"""Anthropic's form over a real socket, asked by the real anthropic client."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import jsonschema
import pytest

from dgemma.server.auth import Keys
from tests.server.conftest import MODEL, QUESTION, Running
from tests.server.test_structure import SCHEMA
from tests.taught import ANSWERS, LONG, SHORT, THOUGHT

TOOLS: Any = [{"name": "the", "input_schema": {"type": "object"}, "cache_control": None}]


def ask(server: Running, question: str, **fields: Any) -> Any:
    asked = {"max_tokens": 64, "extra_body": {"seed": 1}, **fields}
    messages: Any = [{"role": "user", "content": question}]
    return server.anthropic().messages.create(model=MODEL, messages=messages, **asked)


def test_an_answer_is_that_of_chat(shared: Running) -> None:
    reply = ask(shared, LONG)
    (block,) = reply.content
    assert (block.type, block.text) == ("text", ANSWERS[LONG])
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    chat = shared.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": LONG}], seed=1
    )
    assert chat.usage is not None
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    assert reply.model_extra["dgemma"]["blocks"] == 3


def test_a_stream_has_anthropic_s_events_and_joins_to_the_answer(shared: Running) -> None:
    messages: Any = [{"role": "user", "content": THOUGHT}]
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 64}
    with shared.anthropic().messages.stream(**asked, extra_body={"seed": 1}) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "thinking")]
        message = stream.get_final_message()
    part = ["content_block_start", "content_block_delta", "content_block_stop"]
    thought = [*part[:2], "signature", *part[1:]]
    assert [kind for kind in kinds if kind != "signature"] == [
        "message_start",
        *(kind for kind in thought if kind != "signature"),
        *part,
        "message_delta",
        "message_stop",
    ]
    assert [(b.type, getattr(b, "thinking", None)) for b in message.content] == [
        ("thinking", "hm"),
        ("text", None),
    ]
    assert message.content[0].signature == message.id  # type: ignore[union-attr]
    assert message.content[1].text == "yes"  # type: ignore[union-attr]
    whole = ask(shared, THOUGHT)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert message.stop_reason == whole.stop_reason == "end_turn"
    assert message.usage.output_tokens == whole.usage.output_tokens


def test_the_lines_of_a_stream_are_named_and_begin_with_a_ping(shared: Running) -> None:
    body = {"model": MODEL, "max_tokens": 32, "messages": [{"role": "user", "content": SHORT}]}
    text = shared.post("/v1/messages?beta=true", {**body, "stream": True}).text
    events = [event.partition("\n") for event in text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _, _ in events]
    data = [json.loads(line.removeprefix("data: ")) for _, _, line in events]
    assert names == [entry["type"] for entry in data]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"
    assert "[DONE]" not in text
    assert data[0]["message"]["usage"]["input_tokens"] > 0


def test_a_hidden_thought_has_a_signature_and_no_text(shared: Running) -> None:
    body = {"max_tokens": 64, "messages": [{"role": "user", "content": THOUGHT}], "seed": 1}
    thinking = {"type": "disabled", "display": "omitted"}
    reply = shared.post("/v1/messages", {**body, "thinking": thinking}).json()
    assert [b["type"] for b in reply["content"]] == ["thinking", "text"]
    assert reply["content"][0]["thinking"] == "" and reply["content"][0]["signature"]


def test_stop_sequences_and_limits_are_reported(shared: Running) -> None:
    stopped = ask(shared, LONG, stop_sequences=["none", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == ANSWERS[LONG].partition("STOP")[0]
    cut = ask(shared, LONG, max_tokens=4)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 4


def test_calls_are_tool_use_blocks_whole_and_streamed(caller: Running) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": "caller", "messages": messages, "tools": TOOLS, "max_tokens": 64}
    reply = caller.anthropic().messages.create(**asked, extra_body={"seed": 1})
    assert reply.stop_reason == "tool_use"
    calls = [(block.type, block.name, block.input) for block in reply.content]  # type: ignore[union-attr]
    assert calls == [("tool_use", "the", {"a": "é"}), ("tool_use", "the", {"b": [1, True]})]
    with caller.anthropic().messages.stream(**asked, extra_body={"seed": 1}) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content] == [{"a": "é"}, {"b": [1, True]}]  # type: ignore[union-attr]
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    single = caller.anthropic().messages.create(**asked, tool_choice=one, extra_body={"seed": 1})
    assert len(single.content) == 1
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": "7"} for b in reply.content]  # type: ignore[union-attr]
    history = [*messages, reply.to_param(), {"role": "user", "content": results}]
    more = caller.anthropic().messages.create(**{**asked, "messages": history, "max_tokens": 4})
    assert more.usage.input_tokens + (more.usage.cache_read_input_tokens or 0) > 40


def test_a_forced_call_and_a_schema_are_held_to(shared: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool: Any = [{"name": "f", "input_schema": schema}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        reply = ask(shared, SHORT, tools=tool, tool_choice=choice)
        assert reply.stop_reason == "tool_use"
        assert isinstance(reply.content[-1].input["n"], int)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    reply = ask(shared, SHORT, output_config=form)
    jsonschema.validate(json.loads(reply.content[0].text), SCHEMA)


def test_tokens_are_counted_as_they_are_used(shared: Running) -> None:
    asked: Any = {
        "model": MODEL,
        "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": SHORT}]}],
        "tools": TOOLS,
    }
    counted = shared.anthropic().messages.count_tokens(**asked).input_tokens
    usage = shared.anthropic().messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    del asked["tools"], asked["system"]
    assert shared.anthropic().messages.count_tokens(**asked).input_tokens < counted


def test_harmless_fields_are_named(shared: Running) -> None:
    system: Any = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    tools: Any = [{**TOOLS[0], "cache_control": {"type": "ephemeral"}}]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    more: Any = {"top_k": 5, "context_management": {"edits": []}}
    reply = ask(
        shared, SHORT, system=system, tools=tools, thinking=thinking, extra_body=more, max_tokens=1
    )
    assert reply.model_extra["dgemma"]["ignored"] == [
        *more,
        "system[].cache_control",
        "thinking.budget_tokens",
        "tools[].cache_control",
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"stop": ["x"]}, "the field 'stop' is not known"),
    ({"n": 2}, "the field 'n' is not known"),
    ({"mcp_servers": [{}]}, "mcp_servers is refused"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "type is 'bash_20250124'"),
    ({"tools": [*TOOLS, *TOOLS]}, "two tools share a name"),
    ({"tool_choice": {"type": "tool"}}, "has a name if its type is tool"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "end with user"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "role is 'tool'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "an image's source is None",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "must be 'text'"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "the context holds 256"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]},
        "answers a tool call",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_refusal_says_why_in_anthropic_s_form(
    shared: Running, fields: dict[str, Any], sentence: str
) -> None:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": SHORT}], **fields}
    response = shared.post("/v1/messages", body)
    assert response.status_code == 400
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert sentence in error["error"]["message"]
    assert error["request_id"] == response.headers["x-request-id"]


def test_the_client_raises_what_anthropic_s_server_would(shared: Running) -> None:
    assert [model.display_name for model in shared.anthropic().models.list()] == [MODEL]
    with pytest.raises(anthropic.NotFoundError, match="not served here") as missing:
        shared.anthropic().messages.create(
            model="claude", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    old = {"anthropic-version": "2023-01-01"}
    with pytest.raises(anthropic.BadRequestError, match="speaks 2023-06-01 and"):
        ask(shared, SHORT, extra_headers=old)


def test_a_key_may_be_sent_as_anthropic_s_clients_send_it(serve: Callable[..., Running]) -> None:
    server = serve(keys=Keys.of(["correct-key"]))
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": SHORT}]}
    assert server.anthropic(api_key="correct-key").messages.create(**asked, max_tokens=32).content
    bearer = server.anthropic(auth_token="correct-key")
    assert bearer.messages.count_tokens(**asked).input_tokens
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key") as wrong:
        server.anthropic(api_key="another-key").messages.create(**asked, max_tokens=32)
    assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
