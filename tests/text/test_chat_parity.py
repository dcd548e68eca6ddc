"""Prompts from the released template, id for id those of transformers."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma.text.chat import ChatTemplate, Prompt
from dgemma.text.messages import read_messages, read_tools
from dgemma.text.tokenizer import Tokenizer
from tests.text.languages import texts_by_language
from tests.text.strategies import conversations, quick, tool_lists

Peer = Callable[..., list[int]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place, now or later.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {
                    "type": "object",
                    "description": "Where",
                    "properties": {
                        "city": {"type": "string", "description": "Name"},
                        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
                    },
                    "required": ["city"],
                },
                "unit": {"type": "string", "enum": ["C", "F"], "nullable": True},
                "days": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"n": {"type": "integer"}},
                        "required": ["n"],
                    },
                },
                "either": {"type": ["string", "null"]},
                "free": {"type": "object", "additionalProperties": True},
            },
            "required": ["place"],
        },
    },
}
BARE = {"type": "function", "function": {"name": "now"}}


def call(identity: str, name: str, arguments: object) -> dict:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


ROUND = [
    {"role": "user", "content": "Weather in Łódź?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should look.\n",
        "tool_calls": [
            call(
                "1", "get_weather", {"place": {"city": "Łódź", "tags": []}, "Unit": "C", "n": 1.5}
            ),
            call("2", "now", {}),
        ],
    },
    {"role": "tool", "tool_call_id": "2", "content": "12:00"},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": ' {"t": 3} '}]},
]
HANDWRITTEN = {
    "one user": [{"role": "user", "content": "Why is the sky blue?"}],
    "white space": [{"role": "user", "content": "  \n\tspace  all around \n\n"}],
    "empty user": [{"role": "user", "content": ""}],
    "only spaces": [{"role": "user", "content": "   "}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "hi"}],
    "developer": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    "system only": [{"role": "system", "content": "Be brief."}],
    "system in parts": [
        {
            "role": "system",
            "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}],
        },
        {
            "role": "user",
            "content": [{"type": "text", "text": " c "}, {"type": "text", "text": " d"}],
        },
    ],
    "late system": [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "developer", "content": "c"},
    ],
    "thoughts in history": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<|channel>thought\nold\n<channel|>b", "reasoning": "x"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning": "kept"},
    ],
    "unfinished channel": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b<channel|>c<|channel>d"},
        {"role": "user", "content": "e"},
    ],
    "two assistants": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
    ],
    "call pending": ROUND[:2],
    "calls answered": ROUND,
    "calls answered and spoken": [*ROUND, {"role": "assistant", "content": "3 degrees."}],
    "calls, then more": [
        *ROUND,
        {"role": "assistant", "content": "3 degrees."},
        {"role": "user", "content": "And now?"},
        *ROUND[1:],
    ],
    "calls twice": [*ROUND, *ROUND[1:]],
    "answer by name": [
        *ROUND[:2],
        {"role": "tool", "name": "now", "content": ""},
    ],
    "odd values": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [
                call(
                    "x", "f", {"b": None, "A": True, "a": [], "c": {}, "d": [[1e22, -0.0]], "": ""}
                )
            ],
        },
    ],
    "odd unicode": [
        {
            "role": "user",
            "content": "e\u0301 👩‍👩‍👧 \u200f\u202e \x00 \u2028 \x85 ﷽ \ufeff \U000e0041",
        }
    ],
    "html and bytes": [
        {"role": "user", "content": "<b>x</b><table> <0x41> <unused3> [multimodal]"}
    ],
}
OPTIONS = [
    {},
    {"enable_thinking": True},
    {"preserve_thinking": True},
    {"enable_thinking": True, "preserve_thinking": True},
    {"add_generation_prompt": False},
]


@pytest.fixture(scope="session")
def released_chat(released_files: Path, released: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(released_files, released)


def ours(chat: ChatTemplate, messages: list[dict], tools: list[dict], **options: bool) -> Prompt:
    return chat.prompt(read_messages(messages), read_tools(tools), **options)


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_handwritten_conversations_give_the_same_ids(
    released_chat: ChatTemplate, released: Tokenizer, peer: Peer, name: str
) -> None:
    for tools in ([], [WEATHER, BARE]):
        for options in OPTIONS:
            messages = copy.deepcopy(HANDWRITTEN[name])
            prompt = ours(released_chat, messages, tools, **options)
            assert list(prompt.ids) == peer(messages, tools or None, **options), options
            assert released.decode(prompt.ids) == prompt.text


options_drawn = st.fixed_dictionaries(
    {
        "enable_thinking": st.booleans(),
        "preserve_thinking": st.booleans(),
        "add_generation_prompt": st.booleans(),
    }
)


@quick
@given(messages=conversations(), tools=tool_lists(), options=options_drawn)
def test_drawn_conversations_give_the_same_ids(
    released_chat: ChatTemplate,
    peer: Peer,
    messages: list[dict],
    tools: list[dict],
    options: dict[str, bool],
) -> None:
    prompt = ours(released_chat, messages, tools, **options)
    assert list(prompt.ids) == peer(messages, tools or None, **options)


def test_conversations_in_all_languages_give_the_same_ids(
    released_chat: ChatTemplate, peer: Peer
) -> None:
    texts = list(texts_by_language().values())
    for system, user in zip(texts[::2], texts[1::2], strict=False):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        assert list(ours(released_chat, messages, []).ids) == peer(messages)


def test_arguments_given_as_json_text_render_as_the_object(
    released_chat: ChatTemplate, peer: Peer
) -> None:
    def messages(arguments: object) -> list[dict]:
        return [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call("1", "f", arguments)]},
        ]

    text = '{"b": "é", "a": [1, 2.5, null, true, {"c": "\\u00e9"}]}'
    prompt = ours(released_chat, messages(text), [])
    assert list(prompt.ids) == peer(messages({"b": "é", "a": [1, 2.5, None, True, {"c": "é"}]}))


def test_the_space_mark_is_kept_where_transformers_reads_a_space(
    released_chat: ChatTemplate, released: Tokenizer, peer: Peer
) -> None:
    messages = [{"role": "user", "content": "a▁b"}]
    assert "a▁b" in released.decode(ours(released_chat, messages, []).ids)
    assert "a b" in released.decode(peer(messages))
