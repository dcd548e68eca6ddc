"""Where a text stands in its grammar: what may come next, what must, and how it can end in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from dgemma.constrain.closing import Allowed, Closer
from dgemma.constrain.grammar import Grammar, refuse
from dgemma.constrain.vocabulary import Vocabulary
from dgemma.errors import DgemmaError

if TYPE_CHECKING:
    from llguidance import LLMatcher

BYTES_PER_TOKEN = 8  # an end of so many tokens is looked for among ends of at most so many bytes
LONGEST_END = 2048  # bytes


class GuideFault(DgemmaError):
    """A grammar cannot be followed any further: it is too complex for its limits, or has no way."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Tokens that end a text, and the same in single bytes."""

    tokens: tuple[int, ...]
    spelled: tuple[int, ...]


class Guide:
    """A grammar compiled for a vocabulary. It never changes; requests may share it."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        from llguidance import LLMatcher

        self.grammar, self.vocabulary = grammar, vocabulary
        self._tokens = LLMatcher(vocabulary.tokens, grammar.source, log_level=0)
        self._bytes = LLMatcher(vocabulary.bytes, grammar.source, log_level=0)
        for matcher in (self._tokens, self._bytes):
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                refuse(grammar.kind, matcher.get_error())
            if matcher.is_stopped() and not matcher.is_accepting():
                refuse(grammar.kind, "no text fits it")
        self._closer = Closer(vocabulary, grammar.snippets)

    def open(self) -> "Matcher":
        """A matcher before the first token of a text."""
        return Matcher(
            self.vocabulary, self._closer, self._tokens.deep_copy(), self._bytes.deep_copy()
        )

    @cached_property
    def shortest(self) -> Ending | None:
        """A shortest text, as far as one can be found."""
        return self.open().end(LONGEST_END)


@lru_cache(maxsize=32)
def compile_guide(grammar: Grammar, vocabulary: Vocabulary) -> Guide:
    """A grammar made ready for a vocabulary; the same one each time."""
    return Guide(grammar, vocabulary)


class Matcher:
    """The state of one text. Single bytes follow tokens only when an end is asked for."""

    def __init__(
        self, vocabulary: Vocabulary, closer: Closer, tokens: "LLMatcher", spelled: "LLMatcher"
    ) -> None:
        self.vocabulary, self._closer = vocabulary, closer
        self._tokens, self._bytes = tokens, spelled
        self._behind: list[int] = []  # tokens that the bytes have not followed yet
        self._lengths: list[int] = []  # in bytes, of the tokens they have followed
        self.is_blind = False  # bytes came to llguidance's limits: no more ends can be found

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._tokens.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Whether the text must end here."""
        return self._tokens.is_stopped() and self._tokens.is_accepting()

    def consume(self, ids: Sequence[int]) -> int:
        """Go on by as many of these tokens as the grammar allows; returns how many.

        A stop is never consumed: it is not part of the text.
        """
        ids = list(takewhile(lambda token: token not in self.vocabulary.stops, ids))
        count = self._tokens.try_consume_tokens(ids)
        self._behind += ids[:count]
        self._check()
        return count

    def back(self, count: int) -> None:
        """Undo the last tokens."""
        if count == 0:
            return
        self._tokens.rollback(count)
        fresh = min(count, len(self._behind))
        del self._behind[len(self._behind) - fresh :]
        followed = self._lengths[len(self._lengths) - (count - fresh) :] if count > fresh else []
        del self._lengths[len(self._lengths) - len(followed) :]
        if followed and not self.is_blind:
            self._bytes.rollback(sum(followed))

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever a model says."""
        forced = self._tokens.compute_ff_tokens()
        self._check()
        return forced

    def forced_byte(self) -> list[int]:
        """The next forced byte as a token of its own, where there is one: the slowest spelling."""
        forced = self._tokens.compute_ff_bytes()[:1]
        self._check()
        is_text = forced not in (b"", b"\xff")  # what is forced may be a control id
        return self.vocabulary.spell(forced) if is_text else []

    def allowed(self) -> Allowed:
        """Whether each token of the vocabulary may come next; a stop where the text may end."""
        bits = np.frombuffer(self._tokens.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self.vocabulary.size, bitorder="little").view(np.bool_)
        allowed[list(self.vocabulary.stops)] = self.is_accepting
        return allowed

    def end(
        self, limit: int, known: Ending | None = None, *, is_brief: bool = False
    ) -> Ending | None:
        """A short way to the end of the text, of at most `limit` tokens; None: none was found.

        `known` is the end of an earlier state of the same text; it saves most of the search. A
        brief search may miss ends.
        """
        self._follow()
        if self.is_blind:
            return None
        is_brief |= known is not None
        longest = min(LONGEST_END, BYTES_PER_TOKEN * limit)
        spelled = () if known is None else known.spelled
        found = self._closer.search(self._bytes, longest, spelled, is_brief=is_brief)
        ending = None if found is None else self._in_tokens(found)
        if ending is None or len(ending.tokens) <= limit:
            return ending
        return None if known is None else self.end(limit, is_brief=True)

    def _in_tokens(self, spelled: list[int]) -> Ending:
        for tokens in (self.vocabulary.join(spelled), spelled):
            if self._tokens.validate_tokens(tokens) == len(tokens):
                return Ending(tuple(tokens), tuple(spelled))
        raise GuideFault("the grammar reads a text differently as bytes and as tokens")

    def _follow(self) -> None:
        """Bring the bytes to where the tokens are."""
        for token in self._behind:
            spelled = self.vocabulary.spell_ids([token])
            if not self.is_blind:
                self.is_blind = self._bytes.try_consume_tokens(spelled) < len(spelled)
            self._lengths.append(len(spelled))
        self._behind.clear()

    def _check(self) -> None:
        if self._tokens.is_error():
            words = " ".join(self._tokens.get_error().split("<state>")[0].split())
            raise GuideFault(f"the grammar cannot be followed: {words[:200]}")
