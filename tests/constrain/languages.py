"""Constraints drawn by hypothesis, each with a judge of its own that is not llguidance."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
from hypothesis import strategies as st

PATTERNS = ["^[a-c]{2,4}$", "wifi", r"^\d+-\d+$", "x+$", "^(ab|c)*d"]
FORMATS = ["date", "uuid", "email", "ipv4", "no-such-format"]
VALUES = ["a", "bb", "the cat", "é中", "", 1, 2.5, None, True, False]
REGEXES = [
    "[a-z]{3,9}-[0-9]+",
    "(the |a )*(cat|dog)[.!]",
    "é{2,}|中+x?",
    "[^a]*wifi.*",
    r"\d{4}-(0[1-9]|1[0-2])",
    "a?b?c?",
    "(?i:yes|no)",
    r"\{[^{}]*\}",
]
LARK = """
start: row+
row: "|" CELL "|" CELL "|\\n"
CELL: /[a-z ]{1,6}/
"""


@dataclass(frozen=True, slots=True)
class Language:
    """A constraint, and whether a text belongs to it."""

    constraint: dict[str, Any]
    holds: Callable[[str], bool]


def fits(text: str, schema: Any) -> bool:
    """Whether a text is JSON that fits a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def strings() -> st.SearchStrategy[dict[str, Any]]:
    bounded = st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 4),
        st.integers(0, 4),
    )
    return st.one_of(
        st.just({"type": "string"}),
        bounded,
        st.sampled_from(PATTERNS).map(lambda p: {"type": "string", "pattern": p}),
        st.sampled_from(FORMATS).map(lambda f: {"type": "string", "format": f}),
    )


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    bounded = st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 100),
    )
    plain = st.sampled_from(
        [{"type": "integer"}, {"type": "number"}, {"type": "integer", "exclusiveMinimum": 7}]
    )
    return st.one_of(plain, bounded)


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    values = st.lists(st.sampled_from(VALUES), min_size=1, max_size=4, unique_by=repr)
    words = st.sampled_from([{"type": "boolean"}, {"type": "null"}])
    return st.one_of(strings(), numbers(), words, values.map(lambda v: {"enum": v}))


def arrays(items: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda item, low, more: {
            "type": "array",
            "items": item,
            "minItems": low,
            **({} if more is None else {"maxItems": low + more}),
        },
        items,
        st.integers(0, 2),
        st.none() | st.integers(0, 2),
    )


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.sampled_from(["k", "name", "the key", "é"])
    properties = st.dictionaries(keys, st.tuples(values, st.booleans()), max_size=3)
    return st.builds(
        lambda fields, is_closed: {
            "type": "object",
            "properties": {key: schema for key, (schema, _) in fields.items()},
            "required": [key for key, (_, is_required) in fields.items() if is_required],
            **({"additionalProperties": False} if is_closed else {}),
        },
        properties,
        st.booleans(),
    )


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    def bigger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        either = st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some})
        return st.one_of(arrays(inner), objects(inner), either)

    return st.recursive(leaves(), bigger, max_leaves=4)


def schema_language(schema: Any) -> Language:
    return Language({"schema": schema}, lambda text: fits(text, schema))


def regex_language(regex: str) -> Language:
    return Language({"regex": regex}, lambda text: re.fullmatch(regex, text) is not None)


def choice_language(choices: list[str]) -> Language:
    return Language({"choices": choices}, lambda text: text in choices)


def languages() -> st.SearchStrategy[Language]:
    table = re.compile(r"(\|[a-z ]{1,6}\|[a-z ]{1,6}\|\n)+")
    lark = Language({"grammar": LARK}, lambda text: table.fullmatch(text) is not None)
    choices = st.lists(st.sampled_from(["yes", "no", "not now", "中", "the"]), min_size=1)
    return st.one_of(
        schemas().map(schema_language),
        schemas().map(schema_language),
        st.sampled_from(REGEXES).map(regex_language),
        choices.map(choice_language),
        st.just(lark),
    )
