"""Parser of one tool call in the model's output.

    call:NAME{key:value,...}    value: <|"|>text<|"|> | number | true | false | null | [..] | {..}

The control token <|"|> arrives as the character QUOTE, half a surrogate pair, which decoded text
never holds; `<|"|>` spelled in a string is part of the string. Whitespace between tokens is
allowed. A bare word is refused, not read as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from dgemma.text.control_tokens import STRING_QUOTE

QUOTE = "\ud800"
MAX_DEPTH = 64
WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
SPACE = re.compile(r"\s*")
BARE = re.compile(rf"[^:,{{}}\[\]{QUOTE}]*")


class MalformedCall(Exception):
    """The body is not a call; the message is the reason."""


def parse_call(body: str) -> tuple[str, dict[str, object]]:
    """Return the name and the arguments of a call, or raise MalformedCall."""
    parser = _CallParser(body)
    opening = body.find("{")
    name = body[:opening].strip() if opening >= 0 else ""
    if not name.startswith("call:") or QUOTE in name:
        raise MalformedCall("it does not begin with call:NAME{")
    parser.position = opening
    arguments = parser.read_mapping(1)
    if parser.peek():
        parser.fail("nothing more after the closing brace")
    return name.removeprefix("call:").strip(), arguments


class _CallParser:
    """Recursive-descent parser over `text`, from `position` on."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def peek(self) -> str:
        """Skip whitespace, return the next character, or nothing at the end."""
        self._match(SPACE)
        return self.text[self.position : self.position + 1]

    def fail(self, expected: str) -> NoReturn:
        text = self.text[self.position : self.position + 20].replace(QUOTE, STRING_QUOTE)
        raise MalformedCall(f"at character {self.position}: expected {expected}, found {text!r}")

    def read_mapping(self, depth: int) -> dict[str, object]:
        self._expect("{")
        mapping: dict[str, object] = {}
        while not self._closes("}", first=not mapping):
            key = self._read_key()
            if key in mapping:
                raise MalformedCall(f"the key {key!r} appears twice")
            mapping[key] = self._read_value(depth)
        return mapping

    def _read_sequence(self, depth: int) -> list[object]:
        self._expect("[")
        items: list[object] = []
        while not self._closes("]", first=not items):
            items.append(self._read_value(depth))
        return items

    def _read_value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise MalformedCall(f"it is nested deeper than {MAX_DEPTH} levels")
        match self.peek():
            case "{":
                return self.read_mapping(depth + 1)
            case "[":
                return self._read_sequence(depth + 1)
            case char if char == QUOTE:
                return self._read_string()
        return self._read_word()

    def _read_key(self) -> str:
        if self.peek() == QUOTE:
            key = self._read_string()
        else:
            key = self._match(BARE).strip() or self.fail("a key")
        self._expect(":")
        return key

    def _read_string(self) -> str:
        self._expect(QUOTE)
        end = self.text.find(QUOTE, self.position)
        if end < 0:
            self.fail(f"a closing {STRING_QUOTE}")
        string, self.position = self.text[self.position : end], end + 1
        return string

    def _read_word(self) -> object:
        start = self.position
        word = self._match(BARE).strip()
        if word in WORDS:
            return WORDS[word]
        if NUMBER.fullmatch(word):
            return read_number(word)
        self.position = start
        self.fail(f"a number, true, false, null or a string in {STRING_QUOTE}")

    def _closes(self, bracket: str, *, first: bool) -> bool:
        """Skip the closing bracket and return True, or the comma before the next item."""
        if self.peek() == bracket:
            self.position += 1
            return True
        if not first:
            self._expect(",")
        return False

    def _expect(self, char: str) -> None:
        if self.peek() != char:
            self.fail(STRING_QUOTE if char == QUOTE else char)
        self.position += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.position)
        assert match is not None, "these patterns match the empty string"
        self.position = match.end()
        return match[0]


def read_number(word: str) -> int | float:
    try:
        number: int | float = json.loads(word)
    except ValueError as error:  # more digits than Python converts
        raise MalformedCall(f"the number is too long: {error}") from None
    if number in (float("inf"), float("-inf")):
        raise MalformedCall(f"the number {word} is out of range")
    return number
