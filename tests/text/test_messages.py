"""Reading of OpenAI-style messages and tools: everything is understood or refused by name."""

import pytest

from dgemma.errors import UsageError
from dgemma.text.messages import (
    Message,
    Tool,
    ToolCall,
    check_conversation,
    read_messages,
    read_tools,
)

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "y"]}'}}


def test_each_role_is_read() -> None:
    raw = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "a", "name": "f"},
    ]
    call = ToolCall(id="a", name="f", arguments={"x": [1, "y"]})
    assert read_messages(raw) == (
        Message(role="system", content="s"),
        Message(role="developer", content=("d",)),
        Message(role="user", content=("a", "b")),
        Message(role="assistant", thought="hm", tool_calls=(call,)),
        Message(role="tool", content="r", tool_call_id="a", name="f"),
    )


def test_a_message_echoed_by_the_openai_client_is_read() -> None:
    raw = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None}
    raw |= {"function_call": None, "tool_calls": None}
    assert Message.from_dict(raw) == Message(role="assistant", content="hi")


@pytest.mark.parametrize("arguments", ["", "  ", "{}", None, {}])
def test_a_call_without_arguments_is_read(arguments: object) -> None:
    raw = {"function": {"name": "f", "arguments": arguments}}
    assert ToolCall.from_dict(raw) == ToolCall(name="f")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("hi", "a message is 'hi'; it must be an object"),
        (
            {"content": "x"},
            "role is None; it must be one of system, developer, user, assistant, tool",
        ),
        ({"role": "model", "content": "x"}, "role is 'model'; it must be one of"),
        ({"role": ["user"], "content": "x"}, "role is ['user']"),
        ({"role": "user"}, "a message of role user has no content"),
        ({"role": "user", "content": None}, "has no content"),
        ({"role": "assistant"}, "has no content"),
        (
            {"role": "user", "content": 5},
            "content is 5; it must be a string or a list of text parts",
        ),
        ({"role": "user", "content": "x", "name": "Al"}, "user has 'name'; allowed: content, role"),
        ({"role": "user", "content": "x", "colour": None}, "has 'colour'; allowed: content, role"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "has 'refusal'; allowed"),
        (
            {"role": "assistant", "content": "x", "tool_calls": 3},
            "tool_calls is 3; it must be a list",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, "tool_call_id is 7"),
        (
            {"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"},
            "reasoning and reasoning_content differ",
        ),
    ],
)
def test_a_wrong_message_is_refused_by_name(raw: object, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_messages([raw])
    assert str(caught.value).startswith("messages[0]: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "an image_url is not a data: URL"),
        ({"type": "image_url", "image_url": "http://x/y.png"}, "no address is opened"),
        ({"type": "input_image", "image_url": "HTTPS://x"}, "no address is opened"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no file is opened"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "an image_url is not a data: URL"),
        ({"type": "image_url", "image_url": "data:image/png,x"}, "must be data:image/...;base64"),
        ({"type": "image_url", "image_url": "data:;base64,???"}, "not valid base64"),
        ({"type": "image_url", "image_url": {"url": 1}}, "url is 1; it must be a string"),
        ({"type": "image_url"}, "url is None; it must be a string"),
        ({"type": "image_url", "image_url": {"url": "data:", "x": 1}}, "has 'x'"),
        (
            {"type": "image_url", "image_url": {"url": "data:;base64,AA==", "detail": "vast"}},
            "detail is 'vast'; it must be one of low, auto, high, original",
        ),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio' are not taken: the model has"),
        ({"type": "video"}, "'video' are not taken: send its frames as video_url"),
        ({"type": "file", "file": {}}, "'file' are not taken: files are not read"),
        ({"type": "image"}, "'image' are not taken: use"),
        (
            {"type": "poem", "text": "x"},
            "type is 'poem'; it must be 'text', 'image_url' or 'video_url'",
        ),
        ({"type": ["text"], "text": "x"}, "type is ['text']"),
        ({"type": "text", "text": None}, "text is None; it must be a string"),
        (
            {"type": "text", "text": "x", "cache_control": {}},
            "has 'cache_control'; allowed: text, type",
        ),
        ("x", "a content part is 'x'; it must be an object"),
    ],
)
def test_a_wrong_content_part_is_refused(part: object, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        Message.from_dict({"role": "user", "content": [part]})
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{", "arguments are not JSON"),
        ("[1]", "must be a JSON object"),
        ("NaN", "NaN is not a JSON number"),
        ('{"a": Infinity}', "Infinity is not a JSON number"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
        (5, "must be a JSON object"),
    ],
)
def test_wrong_arguments_are_refused(arguments: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        ToolCall.from_dict({"function": {"name": "f", "arguments": arguments}})


@pytest.mark.parametrize("name", ["", "two words", "f{", "a\nb"])
def test_a_tool_name_is_one_word(name: str) -> None:
    with pytest.raises(UsageError, match="one word"):
        Tool(name=name)
    with pytest.raises(UsageError, match="one word"):
        ToolCall(name=name)


def test_a_tool_is_read_with_its_schema() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
    assert read_tools([{"type": "function", "function": function}]) == (
        Tool(name="f", description="d", parameters=schema, strict=True),
    )
    assert read_tools(None) == ()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({}, "tools is {}; it must be a list"),
        ([{"type": "retrieval"}], "type is 'retrieval'; it must be 'function'"),
        ([{"type": "function", "name": "f"}], "a tool has 'name'; allowed: function, type"),
        ([{"type": "function"}], "a tool's function is None; it must be an object"),
        ([{"function": {"name": "f", "parameters": []}}], "parameters is []; it must be an object"),
        ([{"function": {"name": "f", "strict": 1}}], "strict is 1; it must be true or false"),
        ([{"function": {"name": "f"}}, {"function": {"name": "f"}}], "two tools share a name"),
    ],
)
def test_a_wrong_tool_is_refused(raw: object, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_tools(raw)
    assert reason in str(caught.value)


def test_only_the_right_role_holds_calls_and_ids() -> None:
    with pytest.raises(UsageError, match="only assistant may"):
        Message(role="user", thought="hm")
    with pytest.raises(UsageError, match="only tool may"):
        Message(role="user", name="Al")
    with pytest.raises(UsageError, match="give each its own"):
        Message(role="assistant", tool_calls=(ToolCall(name="f"), ToolCall(name="g")))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([Message(role="tool", content="r")], "no assistant message with tool_calls"),
        (
            [
                Message(role="assistant", tool_calls=(ToolCall(id="a", name="f"),)),
                Message(role="user", content="x"),
                Message(role="tool", tool_call_id="a"),
            ],
            r"messages\[2\] answers a tool call",
        ),
        (
            [
                Message(role="assistant", tool_calls=(ToolCall(id="a", name="f"),)),
                Message(role="tool", tool_call_id="b"),
            ],
            r"messages\[1\] has tool_call_id 'b'; the calls before it have \['a'\]",
        ),
    ],
)
def test_an_answer_to_no_call_is_refused(messages: list[Message], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_conversation(messages)
