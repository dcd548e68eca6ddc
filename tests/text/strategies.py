"""What hypothesis draws for the text tests."""

import random

from hypothesis import settings
from hypothesis import strategies as st

from dgemma.text.tokenizer import SPACE_MARK
from tests.text.small import CONTROL

many = settings(max_examples=500, deadline=None, database=None)
some = settings(max_examples=100, deadline=None, database=None)
quick = settings(max_examples=60, deadline=None, database=None)

ASCII = ["", " ", "\n", "  \n\t", "a", "the thought", "call:f{x:1}", "<0x41>", "<", "|>", "{}", "}"]
ODD = [
    "é",
    "e\u0301",
    "中文",
    "ЖЖ",
    "👩‍👩‍👧",
    "\u200f\u202e",
    "\u00a0",
    "\u2028",
    "\x00",
    "\r\n",
    "\x85",
]
snippets = st.sampled_from([*ASCII, *ODD])
# Left out where transformers is the judge, which reads them otherwise: the space mark, as a space,
# and spelled control tokens, which hypothesis finds in our source.
plain_text = (
    st.lists(
        snippets | st.text(st.characters(codec="utf-8", exclude_characters=SPACE_MARK), max_size=8),
        max_size=4,
    )
    .map("".join)
    .filter(lambda text: not any(name in text for name in CONTROL))
)
any_text = st.lists(
    st.one_of(
        snippets, st.sampled_from([*CONTROL, SPACE_MARK]), st.text(st.characters(codec="utf-8"))
    ),
    max_size=6,
).map("".join)


def json_values(text: st.SearchStrategy[str]) -> st.SearchStrategy[object]:
    keys = st.text("abcXYZ_09é-. ", min_size=1, max_size=6).map(lambda key: key.strip() or "k")
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def arguments(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, object]]:
    keys = st.sampled_from(["a", "B", "b", "query", "é", "a_b", "Z"])
    return st.dictionaries(keys, json_values(text), max_size=4)


@st.composite
def conversations(draw: st.DrawFn, text: st.SearchStrategy[str] = plain_text) -> list[dict]:
    """OpenAI-style messages in an order that chats have, with tool rounds in between."""
    parts = st.lists(text, max_size=3).map(
        lambda texts: [{"type": "text", "text": t} for t in texts]
    )
    content = text | parts
    messages: list[dict] = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append({"role": role, "content": draw(content)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(content)})
        for _ in range(draw(st.integers(0, 2))):
            messages += draw(tool_round(text))
        if draw(st.booleans()):
            answer = {"role": "assistant", "content": draw(content)}
            thought = draw(text)
            messages.append(answer | ({"reasoning_content": thought} if thought else {}))
    return messages


@st.composite
def tool_round(draw: st.DrawFn, text: st.SearchStrategy[str]) -> list[dict]:
    names = draw(st.lists(st.sampled_from(["f", "get_weather", "a.b"]), min_size=1, max_size=3))
    calls = [
        {
            "id": f"id{i}",
            "type": "function",
            "function": {"name": n, "arguments": draw(arguments(text))},
        }
        for i, n in enumerate(names)
    ]
    call = {
        "role": "assistant",
        "content": draw(text),
        "reasoning": draw(text),
        "tool_calls": calls,
    }
    answers = [
        {"role": "tool", "tool_call_id": f"id{i}", "content": draw(text)} for i in range(len(names))
    ]
    return [call, *answers[: draw(st.integers(0, len(answers)))]]


@st.composite
def schemas(draw: st.DrawFn, text: st.SearchStrategy[str] = plain_text, depth: int = 0) -> dict:
    """A JSON schema of one property, nested at most twice."""
    kinds = ["string", "integer", "boolean"] + (["array", "object"] if depth < 2 else [])
    kind = draw(st.sampled_from(kinds))
    schema: dict[str, object] = {"type": kind}
    if draw(st.booleans()):
        schema["description"] = draw(text)
    if draw(st.booleans()):
        schema["nullable"] = True
    if kind == "string" and draw(st.booleans()):
        schema["enum"] = draw(st.lists(text, min_size=1, max_size=3))
    if kind == "array":
        schema["items"] = draw(schemas(text, depth + 1))
    if kind == "object":
        schema |= draw(properties(text, depth + 1))
    return schema


@st.composite
def properties(draw: st.DrawFn, text: st.SearchStrategy[str], depth: int) -> dict:
    names = draw(
        st.lists(st.sampled_from(["x", "Y", "city", "type", "é"]), max_size=3, unique=True)
    )
    required = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    return {"properties": {n: draw(schemas(text, depth)) for n in names}, "required": required}


@st.composite
def tool_lists(draw: st.DrawFn, text: st.SearchStrategy[str] = plain_text) -> list[dict]:
    tools = []
    for name in draw(st.lists(st.sampled_from(["f", "get_weather"]), max_size=2, unique=True)):
        function: dict[str, object] = {"name": name}
        if draw(st.booleans()):
            function["description"] = draw(text)
        if draw(st.booleans()):
            function["parameters"] = {"type": "object"} | draw(properties(text, 1))
        tools.append({"type": "function", "function": function})
    return tools


def cut(ids: list[int], seed: int) -> list[list[int]]:
    """Cut ids into blocks at places that `seed` decides; some blocks are empty."""
    source = random.Random(seed)
    places = sorted(source.choices(range(len(ids) + 1), k=source.randint(0, 8)))
    return [ids[a:b] for a, b in zip([0, *places], [*places, len(ids)], strict=True)]
