"""Texts that parts of a grammar are known to want: they help the search for an end.

A pattern that may stand anywhere in a string gives nothing away byte by byte: all bytes are allowed
until it is complete. A shortest match of it is one step instead. Nothing here decides what is
allowed; a snippet that is wrong is never taken.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MOST = 48  # snippets of one grammar
LONGEST = 200  # characters of one
OF_FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@b.c",
    "hostname": "a",
    "ipv4": "1.1.1.1",
    "ipv6": "::",
    "time": "00:00:00Z",
    "uri": "a:b",
    "uuid": "00000000-0000-0000-0000-000000000000",
}
# Regexes and texts in a Lark grammar.
LARK_REGEX = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
LARK_TEXT = re.compile(r'"((?:[^"\\\n]|\\.)+)"')


def of_schema(schema: Any) -> tuple[str, ...]:
    """Matches of the patterns and formats anywhere in a JSON Schema, and the keys it requires."""
    return _few(text for value in _objects(schema) for text in _of_object(value))


def of_regex(regex: str) -> tuple[str, ...]:
    return _few(_matches(regex))


def of_lark(lark: str) -> tuple[str, ...]:
    """Matches of the regexes of a Lark grammar, and its literal texts."""
    regexes = (text for found in LARK_REGEX.finditer(lark) for text in _matches(found[1]))
    return _few([*regexes, *(found[1] for found in LARK_TEXT.finditer(lark))])


def shortest_match(regex: str) -> str | None:
    """A shortest text that a regular expression matches; None for what Python cannot read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _shortest(_parser.parse(regex))
    except (re.error, RecursionError, OverflowError, _Unknown):
        return None


class _Unknown(Exception):
    """Something in a regular expression that this module does not know."""


def _matches(regex: str) -> Iterator[str]:
    text = shortest_match(regex)
    if text:
        yield text


def _of_object(value: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(pattern := value.get("pattern"), str):
        yield from _matches(pattern)
    if isinstance(form := value.get("format"), str) and form in OF_FORMATS:
        yield OF_FORMATS[form]
    if isinstance(names := value.get("required"), list):
        yield from (json.dumps(name)[1:] for name in names if isinstance(name, str))


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _few(texts: Any) -> tuple[str, ...]:
    short = (text for text in texts if len(text) <= LONGEST)
    return tuple(sorted(dict.fromkeys(short), key=len))[:MOST]


def _shortest(parts: Any) -> str:
    return "".join(_shortest_part(operation, value) for operation, value in parts)


def _shortest_part(operation: Any, value: Any) -> str:
    match operation:
        case sre.LITERAL:
            return chr(value)
        case sre.NOT_LITERAL:
            return "a" if value != ord("a") else "b"
        case sre.ANY:
            return "a"
        case sre.AT | sre.ASSERT | sre.ASSERT_NOT:
            return ""
        case sre.IN:
            return _member(value)
        case sre.BRANCH:
            return min([_shortest(one) for one in value[1]], key=len)
        case sre.SUBPATTERN:
            return _shortest(value[-1])
        case sre.MAX_REPEAT | sre.MIN_REPEAT | sre.POSSESSIVE_REPEAT:
            least, _, parts = value
            return _shortest(parts) * min(int(least), LONGEST + 1)
        case sre.ATOMIC_GROUP:
            return _shortest(value)
    raise _Unknown


def _member(items: Any) -> str:
    """Some character of a class, a letter or digit if it has one."""
    if items[0][0] is sre.NEGATE:
        excluded = re.compile(f"[{''.join(map(_as_class, items[1:]))}]")
        return next((c for c in "a0 -_.\n" if not excluded.match(c)), "b")
    operation, value = items[0]
    if operation is sre.LITERAL:
        return chr(value)
    if operation is sre.RANGE:
        return chr(value[0])
    if operation is sre.CATEGORY:
        words = {sre.CATEGORY_DIGIT: "0", sre.CATEGORY_SPACE: " ", sre.CATEGORY_WORD: "a"}
        return words.get(value, "-")
    raise _Unknown


def _as_class(item: tuple[Any, Any]) -> str:
    operation, value = item
    if operation is sre.LITERAL:
        return f"\\u{value:04x}" if value < 1 << 16 else chr(value)
    if operation is sre.RANGE:
        low, high = value
        return f"\\U{low:08x}-\\U{high:08x}"
    classes = {
        sre.CATEGORY_DIGIT: r"\d",
        sre.CATEGORY_NOT_DIGIT: r"\D",
        sre.CATEGORY_SPACE: r"\s",
        sre.CATEGORY_NOT_SPACE: r"\S",
        sre.CATEGORY_WORD: r"\w",
        sre.CATEGORY_NOT_WORD: r"\W",
    }
    return classes[value]
