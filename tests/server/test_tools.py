"""Calls of tools, by a tiny model that was taught to make them."""

import json
from typing import Any

from tests.server.conftest import QUESTION, TOOLS, Running


def ask(server: Running, **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    return server.client().chat.completions.create(
        model="caller", messages=messages, tools=TOOLS, seed=1, **fields
    )


def test_calls_are_read_and_named(caller: Running) -> None:
    (choice,) = ask(caller).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = [
        (c.type, c.function.name, json.loads(c.function.arguments))
        for c in choice.message.tool_calls
    ]
    assert calls == [("function", "the", {"a": "é"}), ("function", "the", {"b": [1, True]})]
    first, second = (call.id for call in choice.message.tool_calls)
    assert first != second
    again = ask(caller).choices[0].message.tool_calls[0].id
    assert again != first, "no two replies of a conversation share an id"


def test_calls_are_streamed_whole(caller: Running) -> None:
    chunks = list(ask(caller, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": "é"}, {"b": [1, True]}]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_one_call_at_a_time_if_asked_for(caller: Running) -> None:
    (choice,) = ask(caller, parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1


def test_a_reply_with_calls_can_be_sent_back(caller: Running) -> None:
    message = ask(caller).choices[0].message
    history: list[Any] = [
        {"role": "user", "content": QUESTION},
        message.model_dump(),
        *({"role": "tool", "tool_call_id": c.id, "content": "7"} for c in message.tool_calls),
    ]
    answer = caller.client().chat.completions.create(
        model="caller", messages=history, tools=TOOLS, max_tokens=4
    )
    assert answer.choices


def test_a_broken_call_is_shown(caller: Running) -> None:
    (choice,) = ask(caller, max_tokens=5).choices
    assert choice.finish_reason == "length"
    (broken,) = choice.model_extra["dgemma"]["broken_calls"]
    assert "not closed" in broken["reason"]
    assert broken["raw"].startswith("call:the")
