"""Requests as editors and agents send them: odd fields, many stops, nulls, echoed replies."""

import json
from typing import Any

import pytest

from tests.server.conftest import MODEL, Running
from tests.taught import ANSWERS, SHORT

FIM_STOPS = (
    "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<|endoftext|> <PRE> <SUF> <MID> [PREFIX] [SUFFIX] <fim_prefix> <fim_suffix>"
).split()
# Short: the tiny model reads letter by letter, and its context is 256 tokens.
READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_abc",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a.py"}'},
}

CONTINUE_CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "<important_rules>\n  Be brief.\n</important_rules>"},
        {"role": "user", "content": [{"type": "text", "text": SHORT}]},
    ],
    "max_tokens": 4096,
    "temperature": 0.5,
    "top_p": 0.95,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["<|im_end|>", "<|im_start|>", "\n\n\n"],
    "tools": [READ_FILE],
    "prediction": {"type": "content", "content": "def f(): ..."},
}
ZED_AGENT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You are an agent."}]},
        {"role": "user", "content": [{"type": "text", "text": "Read it."}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "x = 1"}],
            "tool_call_id": "call_abc",
        },
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 8,
    "stop": [],
    "temperature": 1.0,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "tools": [READ_FILE],
    "prompt_cache_key": "thread-1",
    "reasoning_effort": None,
}
CURSOR_LIKE = {
    "model": MODEL,
    "user": "an-id",
    "temperature": 0,
    "top_p": 1,
    "n": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "metadata": {"session": "1"},
    "store": False,
    "service_tier": "auto",
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "max_tokens": 16,
    "messages": [
        {"role": "user", "name": "me", "content": SHORT},
        {
            "role": "assistant",
            "content": "",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [{"index": 0, **CALL}],
        },
        {"role": "tool", "tool_call_id": "call_abc", "name": "read_file", "content": "x = 1"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}],
        },
    ],
}
MERCURY_CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": SHORT}],
    "max_tokens": 8192,
    "temperature": 0.75,
    "stream": True,
    "diffusing": True,
    "stream_options": {"include_usage": True},
    "reasoning_effort": "instant",
    "reasoning_summary": True,
    "reasoning_summary_wait": False,
    "stop": ["never"],
}
ZED_PREDICTION = {
    "model": MODEL,
    "prompt": "<|fim_prefix|>def f(\n<|fim_suffix|>\n<|fim_middle|>",
    "max_tokens": 16,
    "stop": FIM_STOPS,
    "temperature": None,
}
CONTINUE_COMPLETION = {
    "model": MODEL,
    "prompt": "def f(",
    "max_tokens": 16,
    "temperature": 0.01,
    "top_p": None,
    "frequency_penalty": None,
    "presence_penalty": None,
    "stop": [*FIM_STOPS, "\n\n", "/src/", "#- coding: utf-8", "```"],
    "stream": True,
}
CHATS = {
    "Continue": CONTINUE_CHAT,
    "Zed": ZED_AGENT,
    "like Cursor": CURSOR_LIKE,
    "Mercury": MERCURY_CHAT,
}


def chunks(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]


@pytest.mark.parametrize("editor", CHATS)
def test_a_chat_of_an_editor_is_answered(shared: Running, editor: str) -> None:
    response = shared.post("/v1/chat/completions", CHATS[editor])
    assert response.status_code == 200, response.text
    stream = chunks(response.text)
    assert stream[0]["choices"][0]["delta"]["role"] == "assistant"
    ends = [c["choices"][0]["finish_reason"] for c in stream if c["choices"]]
    assert ends[-1] in ("stop", "length") and not any(ends[:-1])
    assert stream[-1]["choices"] == [] and stream[-1]["usage"]["total_tokens"] > 0


def test_what_was_left_out_is_told(shared: Running) -> None:
    stream = chunks(shared.post("/v1/chat/completions", CURSOR_LIKE).text)
    (note,) = [c["dgemma"] for c in stream if "ignored" in c.get("dgemma", {})]
    assert set(note["ignored"]) == {
        "user",
        "top_p",
        "metadata",
        "store",
        "service_tier",
        "messages[].name",
        "messages[].content[].cache_control",
        "messages[].tool_calls[].index",
    }


def test_a_mercury_client_replaces_its_text(shared: Running) -> None:
    stream = chunks(shared.post("/v1/chat/completions", {**MERCURY_CHAT, "seed": 1}).text)
    content = ""
    for chunk in stream:
        for choice in chunk["choices"]:
            content = choice["delta"].get("content", content)
    assert content == ANSWERS[SHORT]


def test_a_completion_of_an_editor_is_answered(shared: Running) -> None:
    zed = shared.post("/v1/completions", ZED_PREDICTION)
    assert zed.status_code == 200, zed.text
    assert zed.json()["id"] and isinstance(zed.json()["choices"][0]["text"], str)
    other = shared.post("/v1/completions", CONTINUE_COMPLETION)
    assert other.status_code == 200, other.text
    assert all(chunk["object"] == "text_completion" for chunk in chunks(other.text))
