"""OpenAI's Responses API over a real socket, asked by the real openai client."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.conftest import MODEL, QUESTION, Running
from tests.server.test_structure import SCHEMA, Pet
from tests.taught import ANSWERS, LONG, SHORT, THOUGHT

TOOLS: Any = [{"type": "function", "name": "the", "parameters": {"type": "object"}}]
SEEDED = {"seed": 1}


def ask(server: Running, given: Any, **fields: Any) -> Any:
    asked = {"model": MODEL, "extra_body": SEEDED, **fields}
    return server.client().responses.create(input=given, **asked)


def test_an_answer_is_that_of_chat(shared: Running) -> None:
    response = ask(shared, LONG)
    assert response.output_text == ANSWERS[LONG]
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    chat = shared.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": LONG}], seed=1
    )
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.model_extra["dgemma"]["blocks"] == 3
    cut = ask(shared, LONG, max_output_tokens=4)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream_has_the_api_s_events_and_joins_to_the_answer(shared: Running) -> None:
    client = shared.client()
    with client.responses.stream(model=MODEL, input=THOUGHT, extra_body=SEEDED) as stream:
        events: Any = list(stream)
        final = stream.get_final_response()

    def part(kind: str) -> list[str]:
        return [
            "output_item.added",
            "content_part.added",
            f"{kind}.delta",
            f"{kind}.done",
            "content_part.done",
            "output_item.done",
        ]

    names = ["created", "in_progress", *part("reasoning_text"), *part("output_text"), "completed"]
    assert [event.type for event in events] == [f"response.{name}" for name in names]
    assert [event.sequence_number for event in events] == list(range(len(names)))
    assert final.output_text == "yes"
    thought, message = final.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")  # type: ignore[union-attr,index]
    whole = ask(shared, THOUGHT)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert final.usage is not None
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    back: Any = [
        {"role": "user", "content": THOUGHT},
        thought.model_dump(exclude_none=True),
        message.model_dump(exclude_none=True),
        {"role": "user", "content": SHORT},
    ]
    assert ask(shared, back, max_output_tokens=2).output


def test_calls_are_items_and_their_outputs_are_read(caller: Running) -> None:
    asked: Any = {"model": "caller", "tools": TOOLS}
    response = ask(caller, QUESTION, **asked)
    calls = response.output
    assert [(c.type, c.name, json.loads(c.arguments)) for c in calls] == [
        ("function_call", "the", {"a": "é"}),
        ("function_call", "the", {"b": [1, True]}),
    ]
    client = caller.client()
    with client.responses.stream(input=QUESTION, **asked, extra_body=SEEDED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [json.loads(call.arguments) for call in final.output] == [{"a": "é"}, {"b": [1, True]}]  # type: ignore[union-attr]
    assert len(ask(caller, QUESTION, **asked, parallel_tool_calls=False).output) == 1
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls
    ]
    history = [{"role": "user", "content": QUESTION}, *calls, *outputs]
    assert ask(caller, history, **asked, max_output_tokens=4).output


def test_a_forced_call_and_a_schema_are_held_to(shared: Running) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = {"type": "function", "name": "f", "parameters": parameters}
    for choice in ("required", {"type": "function", "name": "f"}):
        (call,) = ask(shared, SHORT, tools=[tool], tool_choice=choice).output
        assert isinstance(json.loads(call.arguments)["n"], int)
    form: Any = {"type": "json_schema", "name": "pet", "schema": SCHEMA, "strict": True}
    jsonschema.validate(json.loads(ask(shared, SHORT, text={"format": form}).output_text), SCHEMA)
    parsed = shared.client().responses.parse(
        model=MODEL, input=SHORT, text_format=Pet, extra_body={"seed": 1}, max_output_tokens=160
    )
    assert isinstance(parsed.output_parsed, Pet)


def test_instructions_and_roles_are_read(shared: Running) -> None:
    items: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "user", "content": SHORT},
    ]
    plain = ask(shared, SHORT, max_output_tokens=1)
    more = ask(shared, items, instructions="Be brief.", max_output_tokens=1)
    assert more.usage.input_tokens > plain.usage.input_tokens
    assert more.instructions == "Be brief."
    thinking = ask(shared, SHORT, reasoning={"effort": "high"}, max_output_tokens=1)
    assert thinking.usage.input_tokens > plain.usage.input_tokens


def test_harmless_fields_are_named(shared: Running) -> None:
    fields: Any = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "none", "summary": "auto"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "k",
        "truncation": "disabled",
    }
    response = ask(shared, SHORT, **fields)
    assert response.model_extra["dgemma"]["ignored"] == [
        "prompt_cache_key",
        "store",
        "include",
        "reasoning.summary",
        "text.verbosity",
    ]
    assert response.store is False


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "nothing is stored"),
    ({"conversation": "conv_1"}, "nothing is stored"),
    ({"background": True}, "background is refused"),
    ({"truncation": "auto"}, "nothing is left out"),
    ({"max_tokens": 4}, "did you mean 'max_output_tokens'"),
    ({"include": ["message.output_text.logprobs"]}, "include has"),
    ({"tools": [{"type": "web_search"}]}, "type is 'web_search'"),
    ({"tool_choice": "f"}, "tool_choice is 'f'"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"text": {"format": {"type": "json_schema"}}}, "only then"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: an item's type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "url is None"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "7"}]}, "answers"),
    ({"input": []}, "no messages"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_refusal_says_why(shared: Running, fields: dict[str, Any], sentence: str) -> None:
    response = shared.post("/v1/responses", {"input": SHORT, **fields})
    assert response.status_code == 400
    assert sentence in response.json()["error"]["message"]


def test_the_client_raises_what_openai_s_server_would(shared: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        ask(shared, SHORT, model="gpt")
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        ask(shared, SHORT, previous_response_id="resp_1")
