"""Answers that are held to a form, asked for by the real openai client.

The model knows nothing of schemas: what fits, fits because it is held to it.
"""

import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.conftest import MODEL, Running
from tests.taught import SHORT
from tests.text.small import small_tokenizer

MODES = ["diffusion", "ar", "hybrid"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
MESSAGES: Any = [{"role": "user", "content": SHORT}]


def tool(name: str, *, strict: bool = False) -> Any:
    # Short: the tiny model reads letter by letter, and its context is 256 tokens.
    parameters = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    more = {"strict": True} if strict else {}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def chat(server: Running, **fields: Any) -> Any:
    extra = {"dgemma": fields.pop("dgemma", {})}
    return server.client().chat.completions.create(
        model=MODEL, messages=MESSAGES, **{"seed": 1, "max_tokens": 64, **fields}, extra_body=extra
    )


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_fits_its_schema_whole_and_streamed(shared: Running, mode: str) -> None:
    asked = {"response_format": FORMAT, "dgemma": {"mode": mode}}
    (choice,) = chat(shared, **asked).choices
    is_forced = choice.dgemma["forced_from"] is not None  # told apart from an end of its own
    assert choice.finish_reason == ("length" if is_forced else "stop")
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = list(chat(shared, **asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)
    friend: "Pet | None"


def test_the_client_reads_an_answer_into_a_model(shared: Running) -> None:
    answer = shared.client().chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Pet, seed=1, max_tokens=160
    )
    pet = answer.choices[0].message.parsed
    assert isinstance(pet, Pet) and pet.kind in ("cat", "dog")


def test_a_json_object_is_one(shared: Running) -> None:
    for form in ({"type": "json_object"}, {"type": "json_object", "schema": SCHEMA}):
        content = chat(shared, response_format=form).choices[0].message.content
        assert isinstance(json.loads(content), dict)
    jsonschema.validate(json.loads(content), SCHEMA)
    assert chat(shared, response_format={"type": "text"}).choices[0].message.content == "one, two."


@pytest.mark.parametrize("mode", MODES)
def test_plain_completions_are_held_too(shared: Running, mode: str) -> None:
    def text(**dgemma: Any) -> str:
        answer = shared.client().completions.create(
            model=MODEL,
            prompt="the ",
            seed=1,
            max_tokens=96,
            extra_body={"dgemma": {"mode": mode, **dgemma}},
        )
        return answer.choices[0].text

    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text(regex="[0-9]{3}-[a-f]{2}"))
    assert text(choices=["yes", "no", "perhaps"]) in ("yes", "no", "perhaps")
    assert re.fullmatch(r"(a|b)(,(a|b)){2}", text(grammar='start: X "," X "," X\nX: "a" | "b"'))
    body = {"prompt": "the ", "response_format": FORMAT, "seed": 1, "max_tokens": 96}
    answer = shared.post("/v1/completions", {**body, "dgemma": {"mode": mode}}).json()
    jsonschema.validate(json.loads(answer["choices"][0]["text"]), SCHEMA)


@pytest.mark.parametrize("mode", MODES)
def test_too_little_room_is_no_text_and_says_why(shared: Running, mode: str) -> None:
    asked = {"response_format": FORMAT, "max_tokens": 5, "dgemma": {"mode": mode}}
    (choice,) = chat(shared, **asked).choices
    assert choice.finish_reason == "length" and choice.message.content == ""
    assert "5 are left" in choice.model_extra["dgemma"]["fault"]
    chunks = list(chat(shared, **asked, stream=True))
    assert not any(c.choices[0].delta.content for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        shared.client().chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Pet, max_tokens=5
        )


def test_who_replaces_a_held_text_ends_with_it(shared: Running) -> None:
    whole = chat(shared, response_format=FORMAT).choices[0].message.content
    assert len(small_tokenizer().encode(whole)) > 16, "it goes over several canvases"
    drafts = {"drafts": True}
    stream = shared.ask(
        SHORT,
        response_format=FORMAT,
        seed=1,
        max_tokens=96,
        stream=True,
        diffusing=True,
        dgemma=drafts,
    ).text
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n")[:-2]]
    texts = [c["choices"][0]["delta"].get("content") for c in chunks]
    shown = [text for text in texts if text]
    assert shown[-1] == whole
    assert all(text.startswith('{"kind":') for text in shown)
    assert any(c.get("dgemma", {}).get("pinned", [0])[0] for c in chunks), (
        "what is forced is pinned"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_call_can_be_asked_for(shared: Running, mode: str) -> None:
    tools, named = [tool("f"), tool("g")], {"type": "function", "function": {"name": "g"}}
    for choice, names in (("required", "fg"), (named, "g")):
        asked = {"tools": tools, "tool_choice": choice, "dgemma": {"mode": mode}}
        (answer,) = chat(shared, **asked).choices
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        check_arguments(call.function.arguments)
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
    deltas = [c.choices[0].delta for c in chat(shared, **asked, stream=True)]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert streamed.function.model_dump() == call.function.model_dump()
    assert not any(delta.content for delta in deltas)


def check_arguments(text: str) -> None:
    assert json.loads(text).keys() == {"n"}
    jsonschema.validate(json.loads(text), tool("f")["function"]["parameters"])


def test_strict_tools_leave_the_choice_and_hold_the_calls(shared: Running) -> None:
    for seed in range(3):
        (choice,) = chat(shared, tools=[tool("f", strict=True)], seed=seed).choices
        assert choice.model_extra["dgemma"]["broken_calls"] == []
        for call in choice.message.tool_calls or []:
            check_arguments(call.function.arguments)
        assert choice.message.tool_calls or choice.message.content is not None

    class Shown(BaseModel):
        n: int

    answer = shared.client().chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Shown, name="show")],
        tool_choice="required",
        max_tokens=96,
    )
    assert answer.choices[0].message.tool_calls is not None
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Shown)


SEVERAL = {"type": "array", "contains": {"type": "null"}, "minContains": 2}
NOT_HELD = {"type": "json_schema", "json_schema": {"name": "x", "schema": SEVERAL}}
WIDE = {"type": "json_object", "schema": {"enum": ["x" * 70_000]}}
ODD_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"contains": 1}}},
    },
}


@pytest.mark.parametrize(
    ("change", "sentence", "param"),
    [
        ({"response_format": NOT_HELD}, "minContains", "response_format"),
        ({"response_format": WIDE}, "at most 65536", "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type is 'yaml'", None),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema", "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "only as json_object", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema is missing",
            None,
        ),
        ({"response_format": FORMAT, "stop": "x"}, "a stop string would cut", None),
        ({"response_format": FORMAT, "tools": [tool("f")]}, "use tool_choice none", None),
        ({"response_format": FORMAT, "dgemma": {"regex": "a"}}, "give one of them", None),
        ({"dgemma": {"regex": "(?=a)"}}, "the regex cannot be held to", "dgemma.regex"),
        ({"dgemma": {"regex": "("}}, "the regex cannot be held to", "dgemma.regex"),
        ({"dgemma": {"grammar": "begin: 1"}}, "the grammar cannot", "dgemma.grammar"),
        ({"dgemma": {"choices": []}}, "dgemma.choices is []", "dgemma.choices"),
        ({"dgemma": {"choices": ["x"] * 257}}, "dgemma.choices", "dgemma.choices"),
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        (
            {
                "tools": [tool("f")],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "the tool 'g' is not declared",
            "tool_choice",
        ),
        ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "it must be auto", None),
        ({"tools": [ODD_TOOL], "tool_choice": "required"}, "'contains'", "tools"),
    ],
)
def test_a_form_that_cannot_be_held_to_is_refused(
    shared: Running, change: dict[str, Any], sentence: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(shared, **change)
    assert sentence in refused.value.message
    assert param in (None, refused.value.param)


def test_holes_and_puzzles_have_forms_of_their_own(shared: Running) -> None:
    body: dict[str, Any] = {"prompt": "the ", "suffix": " b", "response_format": FORMAT}
    assert shared.post("/v1/completions", body).status_code == 400
    for path, more in (
        ("/v1/fim/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/dgemma/edit", {"text": "a"}),
        ("/v1/dgemma/sudoku", {"puzzle": "0" * 81}),
    ):
        answer = shared.post(path, {**more, "dgemma": {"regex": "a"}})
        assert answer.status_code == 400 and "dgemma.regex is refused" in answer.text
    plain = {"prompt": "a", "dgemma": {"regex": "[xy]{2}"}}
    answer = shared.post("/v1/fim/completions", plain).json()
    assert re.fullmatch("[xy]{2}", answer["choices"][0]["text"])
