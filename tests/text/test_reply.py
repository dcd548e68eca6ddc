"""Replies by token id: the same answer, thought and calls however the blocks fall."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.text.chat import ChatTemplate, Message, ToolCall
from dgemma.text.reply import (
    AnswerText,
    BrokenCall,
    Reply,
    ReplyParser,
    ThoughtText,
    parse_reply,
)
from dgemma.text.tokenizer import Tokenizer
from dgemma.text.tool_calls import MAX_DEPTH, QUOTE, MalformedCall, parse_call
from tests.text.small import CONTROL, small_tokenizer
from tests.text.strategies import any_text, arguments, cut, quick

protocol_pieces = st.one_of(
    st.sampled_from(CONTROL),
    st.sampled_from(["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'] * 3),
    st.sampled_from(
        ["thought\n", "thought", "tho", "ught\n", "\n", "é中", "call:f{", "x:1", "}", ","]
    ),
)


def parse(tokenizer: Tokenizer, text: str, *, in_thought: bool = False) -> Reply:
    return parse_reply(tokenizer, tokenizer.encode_control(text), in_thought=in_thought)


def parse_cut(tokenizer: Tokenizer, blocks: list[list[int]], *, in_thought: bool) -> Reply:
    parser = ReplyParser(tokenizer, in_thought=in_thought)
    events = [event for block in blocks for event in parser.feed(block)]
    return Reply.collect(events + parser.finish())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Reply()),
        ("Hello", Reply(answer="Hello")),
        ("Hello<turn|>\n<pad>x", Reply(answer="Hello")),
        ("<|channel>thought\na\nb\n<channel|>Hi<turn|>", Reply(thought="a\nb", answer="Hi")),
        ("<|channel>thought\n<channel|>Hi", Reply(answer="Hi")),
        ("<|channel>thought<channel|>Hi", Reply(answer="Hi")),
        ("<|channel><channel|>Hi", Reply(answer="Hi")),
        ("<|channel>thought\n\n\na\n\n<channel|>Hi", Reply(thought="\n\na\n", answer="Hi")),
        ("<|channel>thinking\na<channel|>Hi", Reply(thought="thinking\na", answer="Hi")),
        ("<|channel>thou<channel|>Hi", Reply(thought="thou", answer="Hi")),
        ("<|channel>thought\ncut off\n", Reply(thought="cut off")),
        (
            "<|channel>thought\na\n<channel|>b<|channel>thought\nc\n<channel|>d",
            Reply(thought="a\nc", answer="bd"),
        ),
        ("<|channel>thought\na<|channel>thought\nb<channel|>c", Reply(thought="a\nb", answer="c")),
        ("a<channel|>b", Reply(answer="ab", stray_tokens=("<channel|>",))),
        (
            "a<pad>b<|image|><tool_call|>",
            Reply(answer="ab", stray_tokens=("<pad>", "<|image|>", "<tool_call|>")),
        ),
        ('say <|"|>x', Reply(answer="say x", stray_tokens=('<|"|>',))),
        ("thought\na", Reply(answer="thought\na")),
    ],
)
def test_answers_and_thoughts_are_parted(tokenizer: Tokenizer, text: str, expected: Reply) -> None:
    assert parse(tokenizer, text) == expected


def test_a_thought_the_prompt_opened_goes_on(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, "a\n<channel|>b", in_thought=True) == Reply(thought="a", answer="b")
    assert parse(tokenizer, "thought\na", in_thought=True) == Reply(thought="thought\na")


def test_calls_are_read_and_numbered(tokenizer: Tokenizer) -> None:
    text = (
        "<|channel>thought\nhm\n<channel|>"
        '<|tool_call>call:get_weather{b:true,city:<|"|>Łódź, {x}:[y]<|"|>,l:[1,<|"|>a<|"|>,[]],'
        "n:-1.5e3,o:{k:{}},z:null}<tool_call|>"
        "<|tool_call>call:now{}<tool_call|><|tool_response>ignored"
    )
    first = {
        "b": True,
        "city": "Łódź, {x}:[y]",
        "l": [1, "a", []],
        "n": -1500.0,
        "o": {"k": {}},
        "z": None,
    }
    assert parse(tokenizer, text) == Reply(
        thought="hm",
        tool_calls=(
            ToolCall(id="call_0", name="get_weather", arguments=first),
            ToolCall(id="call_1", name="now", arguments={}),
        ),
    )


def test_a_quote_token_spelled_in_a_string_is_content(tokenizer: Tokenizer) -> None:
    quote = [tokenizer.control_ids['<|"|>']]
    ids = [tokenizer.control_ids["<|tool_call>"], *tokenizer.encode("call:f{x:"), *quote]
    ids += [*tokenizer.encode('a<|"|>,y:<tool_call|>'), *quote, *tokenizer.encode("}")]
    ids += [tokenizer.control_ids["<tool_call|>"]]
    call = ToolCall(id="call_0", name="f", arguments={"x": 'a<|"|>,y:<tool_call|>'})
    assert parse_reply(tokenizer, ids) == Reply(tool_calls=(call,))


@pytest.mark.parametrize(
    ("text", "raw", "reason"),
    [
        ("<|tool_call>call:f{x:1", "call:f{x:1", "not closed"),
        ("<|tool_call>call:f{x:1<turn|>", "call:f{x:1", "not closed"),
        (
            "<|tool_call>call:f{x:<pad>1}<tool_call|>",
            "call:f{x:<pad>1}",
            "contains the control token <pad>",
        ),
        ("<|tool_call>call:f{x:word}<tool_call|>", "call:f{x:word}", "expected a number, true"),
        ('<|tool_call>call:f{x:<|"|>a}<tool_call|>', 'call:f{x:<|"|>a}', 'a closing <|"|>'),
        ('<|tool_call>call:f<|"|>{}<tool_call|>', 'call:f<|"|>{}', "call:NAME{"),
        ("<|tool_call>call:two words{}<tool_call|>", "call:two words{}", "one word"),
        ("<|tool_call>call:{}<tool_call|>", "call:{}", "one word"),
        ("<|tool_call><tool_call|>", "", "call:NAME{"),
    ],
)
def test_a_broken_call_is_reported_with_its_text(
    tokenizer: Tokenizer, text: str, raw: str, reason: str
) -> None:
    reply = parse(tokenizer, f"a{text}")
    assert (reply.answer, reply.tool_calls) == ("a", ())
    (broken,) = reply.broken_calls
    assert broken.raw == raw
    assert reason in broken.reason


def test_a_broken_call_does_not_hide_what_follows(tokenizer: Tokenizer) -> None:
    text = "<|tool_call>call:f{<|tool_call>call:g{}<tool_call|>x"
    text += "<|tool_call>y<|channel>thought\nz\n<channel|>!"
    reply = parse(tokenizer, text)
    assert [broken.raw for broken in reply.broken_calls] == ["call:f{", "y"]
    assert reply.tool_calls == (ToolCall(id="call_0", name="g"),)
    assert (reply.answer, reply.thought) == ("x!", "z")


def test_a_call_inside_a_thought_does_not_end_it(tokenizer: Tokenizer) -> None:
    text = "<|channel>thought\na <|tool_call>call:f{}<tool_call|>b\n<channel|>c"
    reply = parse(tokenizer, text)
    assert (reply.thought, reply.answer, len(reply.tool_calls)) == ("a b", "c", 1)


def test_events_come_as_soon_as_they_are_sure(small: Tokenizer) -> None:
    parser = ReplyParser(small)
    assert parser.feed(small.encode_control("<|channel>tho")) == []
    assert parser.feed(small.encode("ught\nab\n")) == [ThoughtText(text="ab")]
    assert parser.feed(small.encode_control("c<channel|>d")) == [
        ThoughtText(text="\nc"),
        AnswerText(text="d"),
    ]
    assert parser.feed(small.encode_control("<|tool_call>call:f")) == []
    assert parser.feed(small.encode_control("{}<tool_call|>")) == [ToolCall(id="call_0", name="f")]
    assert parser.feed(small.encode_control("<turn|>more")) == []
    assert parser.feed(small.encode("even more")) == []
    assert parser.finish() == []


def test_a_character_cut_by_a_control_token_is_replaced(small: Tokenizer) -> None:
    first, second = small.encode("ß")
    ids = [first, small.control_ids["<pad>"], second]
    assert parse_reply(small, ids).answer == "\ufffd\ufffd"
    assert parse_cut(small, [[first], [second]], in_thought=False).answer == "ß"


@quick
@given(
    pieces=st.lists(st.one_of(protocol_pieces, any_text), max_size=16),
    seed=st.integers(0, 999),
    in_thought=st.booleans(),
)
def test_any_split_parses_as_the_whole(
    small: Tokenizer, pieces: list[str], seed: int, in_thought: bool
) -> None:
    ids = small.encode_control("".join(pieces))
    whole = parse_reply(small, ids, in_thought=in_thought)
    assert parse_cut(small, cut(ids, seed), in_thought=in_thought) == whole
    assert parse_cut(small, [[token] for token in ids], in_thought=in_thought) == whole


@quick
@given(data=st.data(), seed=st.integers(0, 999), in_thought=st.booleans())
def test_any_ids_at_all_parse_and_split(
    tokenizer: Tokenizer, data: st.DataObject, seed: int, in_thought: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, 320), max_size=40))
    whole = parse_reply(tokenizer, ids, in_thought=in_thought)
    assert parse_cut(tokenizer, cut(ids, seed), in_thought=in_thought) == whole


@quick
@given(values=arguments(any_text), thought=any_text, answer=any_text, seed=st.integers(0, 999))
def test_what_the_template_writes_is_read_back(
    chat: ChatTemplate,
    tokenizer: Tokenizer,
    values: dict[str, object],
    thought: str,
    answer: str,
    seed: int,
) -> None:
    user = Message(role="user", content="q")
    call = ToolCall(id="call_0", name="f", arguments=values)
    history = [user, Message(role="assistant", thought=thought, tool_calls=(call,))]
    written = list(chat.prompt(history, add_generation_prompt=False).ids)
    reply_ids = written[len(chat.prompt([user]).ids) :]
    reply = parse_cut(tokenizer, cut(reply_ids, seed), in_thought=False)
    assert reply == Reply(thought=thought, tool_calls=(call,))
    assert parse_reply(tokenizer, tokenizer.encode(answer)) == Reply(answer=answer)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("call:f{}", ("f", {})),
        (" call: f { a : 1 , b : [ 1 , 2 ] } ", ("f", {"a": 1, "b": [1, 2]})),
        ('call:f{"a":"b":c}'.replace('"', QUOTE), None),
        ('call:f{"a b":"c"}'.replace('"', QUOTE), ("f", {"a b": "c"})),
        ('call:f{a:""}'.replace('"', QUOTE), ("f", {"a": ""})),
        ("call:ns:f.g{a-b:-0.5}", ("ns:f.g", {"a-b": -0.5})),
        ("call:f{a:1}}", None),
        ("call:f{a:1,}", None),
        ("call:f{,}", None),
        ("call:f{a:[1,]}", None),
        ("call:f{a:[,1]}", None),
        ("call:f{a:[1 2]}", None),
        ("call:f{a}", None),
        ("call:f{a:}", None),
        ("call:f{:1}", None),
        ("call:f{a:1,a:2}", None),
        ("call:f{a:01}", None),
        ("call:f{a:NaN}", None),
        ("call:f{a:1e999}", None),
        ("call:f{a:" + "9" * 5000 + "}", None),
        ('call:f{a:"b"}', None),
        ("call:f{a:1", None),
        ("call:f", None),
        ("f{}", None),
        ("", None),
        ("call:f{a:" + "[" * 100_000, None),
        ("call:f{a:" + "{a:" * 100_000, None),
    ],
)
def test_a_call_is_read_whole_or_refused(body: str, expected: tuple[str, dict] | None) -> None:
    if expected is not None:
        assert parse_call(body) == expected
        return
    with pytest.raises(MalformedCall) as caught:
        parse_call(body)
    str(caught.value).encode()


@quick
@given(body=st.text(f"{QUOTE}call:f{{}}[],.-01e truefalsn\n", max_size=40))
def test_no_body_crashes_the_reading(body: str) -> None:
    for text in (body, f"call:f{{{body}}}", f"call:f{{a:{body}}}"):
        try:
            parse_call(text)
        except MalformedCall as error:
            str(error).encode()


def test_calls_may_nest_up_to_the_limit() -> None:
    depth = MAX_DEPTH - 1
    _, arguments = parse_call("call:f{a:" + "[" * depth + "]" * depth + "}")
    assert arguments["a"]


def test_a_reply_can_be_sent_back_as_history(chat: ChatTemplate, tokenizer: Tokenizer) -> None:
    reply = parse(
        tokenizer, '<|tool_call>call:f{x:<|"|>1<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>'
    )
    messages = [
        Message(role="user", content="q"),
        Message(role="assistant", tool_calls=reply.tool_calls),
        Message(role="tool", tool_call_id="call_1", content="r1"),
        Message(role="tool", tool_call_id="call_0", content="r0"),
    ]
    text = chat.prompt(messages).text
    assert 'response:g{value:<|"|>r1<|"|>}' in text
    assert 'response:f{value:<|"|>r0<|"|>}' in text


def test_invalid_bytes_in_a_call_do_not_crash(small: Tokenizer) -> None:
    lone = small_tokenizer()._backend.token_to_id("<0xE2>")
    ids = [small.control_ids["<|tool_call>"], lone, small.control_ids["<tool_call|>"]]
    assert parse_reply(small, ids).broken_calls == (
        BrokenCall(raw="\ufffd", reason="it does not begin with call:NAME{"),
    )
