"""A coding agent's conversation, replayed in the forms that such agents send, by real clients."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dgemma.engine import Engine
from dgemma.server.service import Settings
from dgemma.text.chat import ChatTemplate
from dgemma.weights.load import random_model
from tests.server.conftest import Running, running
from tests.taught import GENERATION, taught_config
from tests.text.small import TEMPLATE, small_tokenizer

CACHED = {"cache_control": {"type": "ephemeral"}}
SYSTEM: Any = [
    {"type": "text", "text": "You are an agent that edits code.", **CACHED},
    {"type": "text", "text": "Folder: project\nPlatform: linux\nDate: 2026-11-18", **CACHED},
]
# name, description, parameters: those that must be given first, then a bar
DECLARED = [
    ("Read", "Reads a file.", "file_path | offset limit"),
    ("Write", "Writes a file.", "file_path content"),
    ("Edit", "Replaces text in a file.", "file_path old_string new_string | replace_all"),
    ("Bash", "Runs a command.", "command | timeout description run_in_background"),
    ("Glob", "Finds files by name.", "pattern | path"),
    ("Grep", "Finds text in files.", "pattern | path glob output_mode"),
    ("TodoWrite", "Keeps a list of tasks.", "todos"),
    ("WebFetch", "Reads a page.", "url prompt"),
    ("Task", "Starts another agent.", "description prompt | model"),
    ("NotebookEdit", "Changes a cell.", "notebook_path new_source | cell_id edit_mode"),
]
# What was said and done, turn by turn: a request, then calls with their results, then an end.
REQUEST = "<reminder>Today is Wednesday.</reminder>", "Fix the test in calc.py."
STEPS: list[tuple[str, str, dict[str, Any], str, bool]] = [
    (
        "I look at the file.",
        "Read",
        {"file_path": "calc.py"},
        "1\tdef add(a, b):\n2\t    ...",
        False,
    ),
    ("", "Edit", {"file_path": "calc.py", "old_string": "...", "new_string": "x"}, "no", True),
    ("I run the tests.", "Bash", {"command": "pytest -q", "timeout": 60000}, "1 passed", False),
]
NUM_TURNS = len(STEPS) + 1


def schema(parameters: str) -> dict[str, Any]:
    required, _, optional = parameters.partition("|")
    names = [*required.split(), *optional.split()]
    properties = {name: {"type": "string", "description": f"The {name}."} for name in names}
    return {"type": "object", "properties": properties, "required": required.split()}


def anthropic_body(turn: int) -> dict[str, Any]:
    """The request of a turn, as an agent sends it over /v1/messages."""
    texts = [{"type": "text", "text": text} for text in REQUEST]
    messages: list[Any] = [{"role": "user", "content": texts}]
    for number, (said, name, given, result, failed) in enumerate(STEPS[:turn]):
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": given}
        thought = {"type": "thinking", "thinking": "Next.", "signature": "c2ln"}
        text = [{"type": "text", "text": said}] if said else []
        messages.append({"role": "assistant", "content": [thought, *text, call]})
        block = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": result}
        block |= {"is_error": True} if failed else {}
        messages.append({"role": "user", "content": [block]})
    messages[-1]["content"][-1] |= CACHED
    tools = [{"name": n, "description": d, "input_schema": schema(p)} for n, d, p in DECLARED]
    tools[-1] |= CACHED
    return {
        "model": "agent",
        "max_tokens": 32,
        "system": SYSTEM,
        "messages": messages,
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "user_1_session_2"},
        "extra_body": {"temperature": 1, "context_management": {"edits": []}},
        "extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14"},
    }


def responses_body(turn: int) -> dict[str, Any]:
    """The same request, as an agent sends it over /v1/responses."""
    content = [{"type": "input_text", "text": text} for text in REQUEST]
    items: list[Any] = [{"type": "message", "role": "user", "content": content}]
    for number, (said, name, given, result, _) in enumerate(STEPS[:turn]):
        items.append({"type": "reasoning", "summary": [], "encrypted_content": "c2ln"})
        if said:
            part = {"type": "output_text", "text": said}
            items.append({"type": "message", "role": "assistant", "content": [part]})
        call: dict[str, Any] = {"type": "function_call", "call_id": f"call_{number}", "name": name}
        items.append({**call, "arguments": json.dumps(given)})
        answered = {"type": "function_call_output", "call_id": f"call_{number}"}
        items.append({**answered, "output": json.dumps({"output": result})})
    tools = [
        {"type": "function", "name": n, "description": d, "parameters": schema(p), "strict": False}
        for n, d, p in DECLARED
    ]
    return {
        "model": "agent",
        "instructions": "\n\n".join(block["text"] for block in SYSTEM),
        "input": items,
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session-2",
        "max_output_tokens": 32,
    }


@pytest.fixture(scope="module")
def agent() -> Iterator[Running]:
    """A server of a random model with room for an agent's prompt."""
    tokenizer = small_tokenizer()
    model = random_model(replace(taught_config(), max_position_embeddings=16384), seed=0)
    engine = Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), GENERATION)
    engine.sampler = replace(engine.sampler, max_denoising_steps=2)
    with running(engine, Settings(names=("agent",))) as server:
        yield server


def test_a_recorded_conversation_is_answered_over_messages(agent: Running) -> None:
    client, lengths = agent.anthropic(), []
    for turn in range(NUM_TURNS):
        with client.messages.stream(**anthropic_body(turn)) as stream:
            message = stream.get_final_message()
        usage, cached = message.usage, message.usage.cache_read_input_tokens or 0
        lengths.append(usage.input_tokens + cached)
        assert message.stop_reason in ("end_turn", "max_tokens")
        assert turn == 0 or cached > 1000, "tools and system are found in the cache"
    assert lengths == sorted(set(lengths)) and lengths[0] > 2000


def test_a_recorded_conversation_is_answered_over_responses(agent: Running) -> None:
    client, lengths = agent.client(), []
    for turn in range(NUM_TURNS):
        with client.responses.stream(**responses_body(turn)) as stream:
            kinds = [event.type for event in stream]
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete")
        whole = client.responses.create(**responses_body(turn))
        assert whole.usage is not None
        lengths.append(whole.usage.input_tokens)
        assert whole.usage.input_tokens_details.cached_tokens > 1000
    assert lengths == sorted(set(lengths)) and lengths[0] > 2000


def test_a_live_loop_calls_a_tool_and_reads_its_result(agent: Running) -> None:
    body = anthropic_body(0)
    body["tools"] = [tool for tool in body["tools"] if tool["name"] in ("Glob", "WebFetch")]
    forced = {**body, "max_tokens": 400, "tool_choice": {"type": "tool", "name": "Glob"}}
    first = agent.anthropic().messages.create(**forced)
    assert first.stop_reason == "tool_use"
    call: Any = first.content[-1]
    assert call.name == "Glob" and isinstance(call.input["pattern"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "calc.py"}
    history = [*body["messages"], first.to_param(), {"role": "user", "content": [result]}]
    second = agent.anthropic().messages.create(**{**body, "messages": history})
    assert (second.usage.cache_read_input_tokens or 0) > 100
