"""Searches a short completion of a text: bytes after which its grammar accepts.

llguidance tells which bytes may come next, not how far the end is. So the end is searched on the
byte vocabulary, shortest paths first. Of states at the same distance that allow the same bytes only
a few are expanded, and steps that change the state come first: the path that closes everything open
is always among them. A step is a byte or a literal, a text that some part of the grammar requires.
The result is short, and usually the shortest.

Literals are shortcuts for patterns that may match anywhere in a string: all bytes are allowed until
the pattern is complete, so single bytes give no direction. Literals never decide what is allowed.
"""

import heapq
import json
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

import numpy as np

from dgemma.constrain.schema_logic import objects
from dgemma.constrain.unique_items import UniqueState
from dgemma.constrain.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenMask = np.ndarray[tuple[int], np.dtype[np.bool_]]

# First bytes that close or separate, then those of whole values, last those that open a value.
CLOSING = b"}])\"'>"
IDLE = b"\\ \t\n"  # escapes and spaces bring the end no nearer
PREFERRED = CLOSING + b"\n,:; 01ntfaA.-+/=|TZxe_#*23456789\\<[{("

MAX_ALIKE = 3  # states expanded per distance and set of allowed bytes
MAX_STRUCTURAL = 6  # allowed bytes between values
MIN_FREE_TEXT = 24  # allowed bytes inside free text


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits of a search."""

    width: int  # states expanded at each distance
    branches: int  # bytes tested from each
    states: int  # visited in all


MAX_SECONDS = 5.0  # limit of a full search: some grammars make each state expensive
MAX_TAIL_WORK = (1 << 14, 1 << 15, 1 << 15)  # bytes tested in known completions, per search
BRIEF = SearchLimits(width=8, branches=12, states=1_000)
QUICK = SearchLimits(width=12, branches=16, states=8_000)
THOROUGH = SearchLimits(width=24, branches=256, states=8_000)


@dataclass(frozen=True, slots=True)
class _State:
    matcher: "LLMatcher"
    path: tuple[int, ...]
    allowed: TokenMask
    idle: int  # bytes of the path without progress: free text, spaces
    unique: UniqueState | None

    @property
    def key(self) -> bytes:
        return self.allowed.tobytes()

    @property
    def crowd(self) -> tuple[bytes, int]:
        """Key of states that are alike; few of each are expanded."""
        return self.key, 0 if self.unique is None else hash(self.unique.open_items)


class CompletionSearch:
    """Searches completions of one grammar's texts, on the byte vocabulary."""

    def __init__(self, vocabulary: Vocabulary, literals: Sequence[str] = ()) -> None:
        ids = vocabulary.byte_ids
        first = [ids[byte] for byte in dict.fromkeys(PREFERRED)]
        rest = [token for token in ids if token not in set(first)]
        self._order = np.array([*vocabulary.controls, *first, *rest])
        self._closing = {ids[byte] for byte in CLOSING}
        self._idle = {ids[byte] for byte in IDLE}
        self._literals = [vocabulary.byte_tokens(text) for text in literals]
        self._bytes = {token: bytes((byte,)) for byte, token in enumerate(ids)}

    def run(
        self,
        matcher: "LLMatcher",
        limit: int,
        known: "KnownCompletion | None" = None,
        *,
        is_brief: bool = False,
        unique: UniqueState | None = None,
    ) -> list[int] | None:
        """Return bytes that complete the text; None if none are found within `limit`.

        A brief search may miss completions or return longer ones. `unique` is the `uniqueItems`
        state of the text.
        """
        if matcher.is_accepting():
            return []
        start = self._state(matcher.deep_copy(), (), 0, unique)
        tail = self._tail(start, known)
        if tail is not None and len(tail) <= limit:
            return tail
        limits = BRIEF if is_brief else QUICK
        path = self._descend(start, limit, known, limits.states)
        if path is None:
            path = self._descend(start, limit, known, limits.states, prefer_literals=True)
        if is_brief:
            return path or self._search(start, limit, known, BRIEF)
        deadline = time.monotonic() + MAX_SECONDS
        shorter = limit if path is None else len(path) - 1
        return (
            self._search(start, shorter, known, QUICK, deadline)
            or path
            or self._search(start, limit, known, THOROUGH, deadline)
        )

    def _descend(
        self,
        state: _State,
        limit: int,
        known: "KnownCompletion | None",
        max_states: int,
        prefer_literals: bool = False,
    ) -> list[int] | None:
        """Follow the first child greedily: a long path that no width limit cuts off."""
        visited = 0
        while len(state.path) <= limit and visited < max_states:
            if state.matcher.is_accepting():
                return list(state.path)
            tail = self._tail(state, known)
            if tail is not None and len(state.path) + len(tail) <= limit:
                return [*state.path, *tail]
            children = self._children(state, QUICK.branches)
            visited += len(children)
            if not children:
                return None
            jumps = [child for child in children if len(child.path) > len(state.path) + 1]
            state = jumps[0] if jumps and prefer_literals else children[0]
        return None

    def _search(
        self,
        start: _State,
        limit: int,
        known: "KnownCompletion | None",
        limits: SearchLimits,
        deadline: float = inf,
    ) -> list[int] | None:
        serial = count()  # breaks ties in the order of discovery
        heap = [(0, 0, next(serial), start)]
        seen: dict[int, list[tuple[bytes, int]]] = {}
        while heap and next(serial) < limits.states and time.monotonic() < deadline:
            length, _, _, state = heapq.heappop(heap)
            crowds = seen.setdefault(length, [])
            is_crowded = crowds.count(state.crowd) >= MAX_ALIKE or len(crowds) >= limits.width
            if length > limit or is_crowded:
                continue
            if state.matcher.is_accepting():
                return list(state.path)
            tail = self._tail(state, known) if not crowds else None
            if tail is not None and length + len(tail) <= limit:
                return [*state.path, *tail]
            crowds.append(state.crowd)
            for child in self._children(state, limits.branches):
                heapq.heappush(heap, (len(child.path), child.idle, next(serial), child))
        return None

    def _children(self, state: _State, branches: int) -> list[_State]:
        """Return the next states: closing bytes, then changes of state, last the others."""
        steps = [[token] for token in self._order[state.allowed][:branches].tolist()]
        near = [child for step in steps if (child := self._step(state, step))]
        far = [child for step in self._literals if (child := self._step(state, step))]
        begin = len(state.path)
        changed = [child for child in [*near, *far] if child.key != state.key]
        changed.sort(key=lambda c: (c.path[begin] in self._idle, int(c.allowed.sum())))
        num_allowed = int(state.allowed.sum())
        closing = [child for child in near if child.path[begin] in self._closing]
        closing = closing if num_allowed <= MAX_STRUCTURAL else []  # else it may be text
        if num_allowed >= MIN_FREE_TEXT:  # bytes of a free text are all alike
            near = [child for child in near if child.key == state.key][:1]
        return list({child.path: child for child in [*closing, *changed, *near]}.values())

    def _step(self, state: _State, step: list[int]) -> _State | None:
        if state.matcher.validate_tokens(step) < len(step):
            return None
        matcher = state.matcher.deep_copy()
        matcher.try_consume_tokens(step)
        forced = matcher.compute_ff_tokens()
        forced = forced[: matcher.try_consume_tokens(forced)] if forced else []
        unique = self._feed(state.unique, [*step, *forced])
        if unique is not None and unique.is_violated:
            return None
        path = (*state.path, *step, *forced)
        child = self._state(matcher, path, state.idle + len(step) - 1, unique)
        is_idle = step[0] in self._idle or child.key == state.key
        return replace(child, idle=child.idle + 1) if is_idle else child

    def _tail(self, state: _State, known: "KnownCompletion | None") -> list[int] | None:
        tail = None if known is None else known.tail(state.matcher, len(state.path))
        unique = self._feed(state.unique, tail or ())
        return None if unique is not None and unique.is_violated else tail

    def _feed(self, unique: UniqueState | None, tokens: Sequence[int]) -> UniqueState | None:
        if unique is None:
            return None
        return unique.feed(b"".join(self._bytes.get(token, b"") for token in tokens))

    def _state(
        self, matcher: "LLMatcher", path: tuple[int, ...], idle: int, unique: UniqueState | None
    ) -> _State:
        """Return a state with the bytes and control ids that may come next, preferred first."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = (bits[self._order >> 3] >> (self._order & 7) & 1).astype(bool)
        if matcher.is_stopped():  # only a stop may come
            allowed[:] = False
        return _State(matcher, path, allowed, idle, unique)


class KnownCompletion:
    """A completion of an earlier state of the same text, for one search: its tail may fit here.

    `offset` is the number of bytes added to the text since.
    """

    def __init__(self, byte_tokens: Sequence[int], offset: int) -> None:
        self.byte_tokens, self.offset = list(byte_tokens), offset
        self._work = list(MAX_TAIL_WORK)  # work left for each order of tails

    def tail(self, matcher: "LLMatcher", num_more: int) -> list[int] | None:
        """Return a tail that completes the text extended by `num_more` bytes.

        It is the shortest one unless testing all, which is quadratic, exceeds the work limit. Then
        it is one that lacks no more bytes than the text has grown by: the shortest if found in
        time, else the longest.
        """
        grown, length = self.offset + num_more, len(self.byte_tokens)
        orders = range(length - 1, -1, -1), range(grown, -1, -1), range(min(grown, length))
        for number, starts in enumerate(orders):
            for start in starts:
                if self._work[number] <= 0:
                    break
                if self._completes(matcher, self.byte_tokens[start:], number):
                    return self.byte_tokens[start:]
            else:
                return None  # the rest would repeat what was tested
        return None

    def _completes(self, matcher: "LLMatcher", tail: list[int], number: int) -> bool:
        num_valid = matcher.validate_tokens(tail)
        self._work[number] -= num_valid + len(tail) // 16 + 1
        if not 0 < num_valid == len(tail):
            return False
        probe = matcher.deep_copy()
        return probe.try_consume_tokens(tail) == len(tail) and probe.is_accepting()


# --- literals

MAX_LITERALS = 48  # of one grammar
MAX_LITERAL_LENGTH = 200  # characters
FORMAT_LITERALS = {
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
LARK_REGEX = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
LARK_TEXT = re.compile(r'"((?:[^"\\\n]|\\.)+)"')


def schema_literals(schema: Any) -> tuple[str, ...]:
    """Return matches of the patterns and formats of a JSON Schema, and its required keys."""
    return _shortest_first(text for value in objects(schema) for text in _of_object(value))


def regex_literals(regex: str) -> tuple[str, ...]:
    return _shortest_first(_matches(regex))


def lark_literals(lark: str) -> tuple[str, ...]:
    """Return matches of the regexes of a Lark grammar, and its literal texts."""
    regexes = (text for match in LARK_REGEX.finditer(lark) for text in _matches(match[1]))
    return _shortest_first([*regexes, *(match[1] for match in LARK_TEXT.finditer(lark))])


def shortest_match(regex: str) -> str | None:
    """Return a shortest text that a regex matches; None if Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _shortest(_parser.parse(regex))
    except (re.error, RecursionError, OverflowError, _UnknownRegexOp):
        return None


class _UnknownRegexOp(Exception):
    """An operation of a regular expression that this module does not handle."""


def _matches(regex: str) -> Iterator[str]:
    text = shortest_match(regex)
    if text:
        yield text


def _of_object(value: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(pattern := value.get("pattern"), str):
        yield from _matches(pattern)
    if isinstance(name := value.get("format"), str) and name in FORMAT_LITERALS:
        yield FORMAT_LITERALS[name]
    if isinstance(names := value.get("required"), list):
        yield from (json.dumps(name)[1:] for name in names if isinstance(name, str))


def _shortest_first(texts: Iterable[str]) -> tuple[str, ...]:
    short = (text for text in texts if len(text) <= MAX_LITERAL_LENGTH)
    return tuple(sorted(dict.fromkeys(short), key=len))[:MAX_LITERALS]


def _shortest(parsed: Any) -> str:
    return "".join(_shortest_of(operation, value) for operation, value in parsed)


def _shortest_of(operation: Any, value: Any) -> str:
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
            return min([_shortest(branch) for branch in value[1]], key=len)
        case sre.SUBPATTERN:
            return _shortest(value[-1])
        case sre.MAX_REPEAT | sre.MIN_REPEAT | sre.POSSESSIVE_REPEAT:
            minimum, _, repeated = value
            return _shortest(repeated) * min(int(minimum), MAX_LITERAL_LENGTH + 1)
        case sre.ATOMIC_GROUP:
            return _shortest(value)
    raise _UnknownRegexOp


def _member(items: Any) -> str:
    """Return some character of a class, a letter or digit if it has one."""
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
    raise _UnknownRegexOp


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
