"""How a text can be brought to its end in few bytes.

llguidance says what may come next, not how far the end is. So the end is searched for on a
vocabulary of single bytes, the shortest paths first. Of states at the same distance that allow the
same bytes only a few are followed, and what changes anything is tried first: whoever closes all
that is open is always among them. A step is a byte, or a snippet: a text that a part of the grammar
is known to want. What is found is short, and mostly the shortest.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from dgemma.constrain.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

Allowed = np.ndarray[tuple[int], np.dtype[np.bool_]]

# First what closes or parts, then what is a whole value, last what opens something new.
CLOSING = b"}])\"'>"
IDLE = b"\\ \t\n"  # begins what brings no end nearer: escapes and spaces
PREFERRED = CLOSING + b"\n,:; 01ntfaA.-+/=|TZxe_#*23456789\\<[{("

ALIKE = 3  # states at one distance followed though they allow the same bytes
STRUCTURE = 6  # at most so many bytes may come next between values
FREE_TEXT = 24  # at least so many where any text may stand


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a search may look at."""

    width: int  # states followed at each distance
    branches: int  # bytes tried from each
    states: int  # visited in all


BRIEF = Effort(width=8, branches=12, states=1_000)
QUICK = Effort(width=12, branches=16, states=8_000)
THOROUGH = Effort(width=24, branches=256, states=8_000)


@dataclass(frozen=True, slots=True)
class _State:
    matcher: "LLMatcher"
    path: tuple[int, ...]
    allowed: Allowed
    idle: int  # bytes of the path that brought no end nearer: of free texts, of spaces

    @property
    def key(self) -> bytes:
        return self.allowed.tobytes()


class Closer:
    """Searches for ends of one grammar's texts, on the single bytes of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, snippets: Sequence[str] = ()) -> None:
        ids = vocabulary.byte_ids
        first = [ids[byte] for byte in dict.fromkeys(PREFERRED)]
        rest = [token for token in ids if token not in set(first)]
        self._order = np.array([*vocabulary.controls, *first, *rest])
        self._closing = {ids[byte] for byte in CLOSING}
        self._idle = {ids[byte] for byte in IDLE}
        self._snippets = [vocabulary.spell(text) for text in snippets]

    def search(
        self, matcher: "LLMatcher", limit: int, known: Sequence[int] = (), *, is_brief: bool = False
    ) -> list[int] | None:
        """Bytes that end the text behind the matcher's state; None: none found up to `limit`.

        `known` is an end of an earlier state: a tail of it often does. A brief search may miss
        ends, or find longer ones.
        """
        if matcher.is_accepting():
            return []
        tail = fitting_tail(matcher, known)
        if tail is not None and len(tail) <= limit:
            return tail
        found = self._descend(matcher, limit, known, likes_snippets=False)
        if found is None:
            found = self._descend(matcher, limit, known, likes_snippets=True)
        if is_brief:
            return found or self._search(matcher, limit, known, BRIEF)
        shorter = limit if found is None else len(found) - 1
        return (
            self._search(matcher, shorter, known, QUICK)
            or found
            or self._search(matcher, limit, known, THOROUGH)
        )

    def _descend(
        self, matcher: "LLMatcher", limit: int, known: Sequence[int], *, likes_snippets: bool
    ) -> list[int] | None:
        """The path of always the first choice: it is long, but nothing crowds it out."""
        state = self._state(matcher.deep_copy(), (), 0)
        visited = 0
        while len(state.path) <= limit and visited < QUICK.states:
            if state.matcher.is_accepting():
                return list(state.path)
            tail = fitting_tail(state.matcher, known)
            if tail is not None and len(state.path) + len(tail) <= limit:
                return [*state.path, *tail]
            children = self._children(state, QUICK.branches)
            visited += len(children)
            if not children:
                return None
            jumps = [child for child in children if len(child.path) > len(state.path) + 1]
            state = jumps[0] if jumps and likes_snippets else children[0]
        return None

    def _search(
        self, matcher: "LLMatcher", limit: int, known: Sequence[int], effort: Effort
    ) -> list[int] | None:
        ticket = count()  # of paths equally long and idle the one found first goes first
        heap = [(0, 0, next(ticket), self._state(matcher.deep_copy(), (), 0))]
        seen: dict[int, list[bytes]] = {}
        while heap and next(ticket) < effort.states:
            length, _, _, state = heapq.heappop(heap)
            at_distance = seen.setdefault(length, [])
            is_crowded = at_distance.count(state.key) >= ALIKE or len(at_distance) >= effort.width
            if length > limit or is_crowded:
                continue
            if state.matcher.is_accepting():
                return list(state.path)
            tail = fitting_tail(state.matcher, known) if not at_distance else None
            if tail is not None and length + len(tail) <= limit:
                return [*state.path, *tail]
            at_distance.append(state.key)
            for child in self._children(state, effort.branches):
                heapq.heappush(heap, (len(child.path), child.idle, next(ticket), child))
        return None

    def _children(self, state: _State, branches: int) -> list[_State]:
        """The states behind: what closes, then what changes anything, last what only goes on."""
        steps = [[token] for token in self._order[state.allowed][:branches].tolist()]
        near = [child for step in steps if (child := self._behind(state, step))]
        far = [child for step in self._snippets if (child := self._behind(state, step))]
        begin = len(state.path)
        changed = [child for child in [*near, *far] if child.key != state.key]
        changed.sort(key=lambda c: (c.path[begin] in self._idle, int(c.allowed.sum())))
        count = int(state.allowed.sum())
        closing = [child for child in near if child.path[begin] in self._closing]
        closing = closing if count <= STRUCTURE else []  # a bracket may be a part of a text
        if count >= FREE_TEXT:  # bytes of a text are all alike
            near = [child for child in near if child.key == state.key][:1]
        return list({child.path: child for child in [*closing, *changed, *near]}.values())

    def _behind(self, state: _State, step: list[int]) -> _State | None:
        if state.matcher.validate_tokens(step) < len(step):
            return None
        matcher = state.matcher.deep_copy()
        matcher.try_consume_tokens(step)
        forced = matcher.compute_ff_tokens()  # nobody has a choice there
        forced = forced[: matcher.try_consume_tokens(forced)] if forced else []
        path = (*state.path, *step, *forced)
        child = self._state(matcher, path, state.idle + len(step) - 1)
        is_idle = step[0] in self._idle or child.key == state.key
        return replace(child, idle=child.idle + 1) if is_idle else child

    def _state(self, matcher: "LLMatcher", path: tuple[int, ...], idle: int) -> _State:
        """A state, and which bytes and control ids may come next, the preferred first."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = (bits[self._order >> 3] >> (self._order & 7) & 1).astype(bool)
        if matcher.is_stopped():  # only a stop may come
            allowed[:] = False
        return _State(matcher, path, allowed, idle)


def fitting_tail(matcher: "LLMatcher", known: Sequence[int]) -> list[int] | None:
    """The shortest tail of a known end that ends the text here too."""
    for start in range(len(known) - 1, -1, -1):
        tail = list(known[start:])
        if matcher.validate_tokens(tail) == len(tail):
            trial = matcher.deep_copy()
            if trial.try_consume_tokens(tail) == len(tail) and trial.is_accepting():
                return tail
    return None
