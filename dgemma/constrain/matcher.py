"""Matches tokens against a grammar: allowed and forced tokens, rollback, completions in budget.

V vocabulary.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dgemma.constrain.grammar import Grammar, refuse
from dgemma.constrain.shortest_completion import CompletionSearch, KnownCompletion, TokenMask
from dgemma.constrain.unique_items import UniqueItems, UniqueState
from dgemma.constrain.vocabulary import Vocabulary
from dgemma.errors import DgemmaError

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_BYTES_PER_TOKEN = 8  # mean bytes per token of a completion
MAX_COMPLETION_BYTES = 2048
MAX_PATH_TOKENS = 4000  # tokens consumed before the search of a path through pins stops
PATH_BRANCHES = 12  # single bytes tried per position
GATHER_FRACTION = 4  # below 1/4 of the vocabulary, gather instead of masking
MASKED = 1e30  # subtracted from the logits of disallowed tokens


class ConstraintFault(DgemmaError):
    """The text cannot follow its grammar: there is no path, or llguidance's limits are reached."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that complete a text, and the same as single bytes after the first `begin` bytes."""

    tokens: tuple[int, ...]
    byte_tokens: tuple[int, ...]
    begin: int


class Constraint:
    """A grammar compiled for a vocabulary. Immutable; requests may share it."""

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
        self._search = CompletionSearch(vocabulary, grammar.literals)
        unique = grammar.unique_items
        self._unique = UniqueItems(json.loads(unique)).start() if unique else None

    def matcher(self) -> "Matcher":
        """Return a matcher at the start of a text."""
        tokens, in_bytes = self._tokens.deep_copy(), self._bytes.deep_copy()
        return Matcher(self.vocabulary, self._search, tokens, in_bytes, self._unique)

    @cached_property
    def shortest(self) -> Completion | None:
        """The shortest text that the search finds."""
        return self.matcher().complete(MAX_COMPLETION_BYTES)


@lru_cache(maxsize=32)
def compile_constraint(grammar: Grammar, vocabulary: Vocabulary) -> Constraint:
    """Compile a grammar for a vocabulary, once."""
    return Constraint(grammar, vocabulary)


class Matcher:
    """The state of one text. The byte matcher catches up only when a completion is searched."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        search: CompletionSearch,
        tokens: "LLMatcher",
        in_bytes: "LLMatcher",
        unique: UniqueState | None = None,
    ) -> None:
        self.vocabulary, self._search = vocabulary, search
        self._unique = [unique]  # state before the first token and after each one
        self._tokens, self._bytes = tokens, in_bytes
        self._pending: list[int] = []  # tokens not yet consumed by the byte matcher
        self._byte_counts: list[int] = []  # byte counts of the tokens it has consumed
        self.search_exhausted = False  # the byte matcher reached llguidance's limits

    @property
    def is_accepting(self) -> bool:
        """True if the text may end here."""
        return self._tokens.is_accepting() and not self._is_violated

    @property
    def is_complete(self) -> bool:
        """True if the text must end here."""
        return self.is_stopped and self.is_accepting

    @property
    def is_stopped(self) -> bool:
        """True if no token may follow."""
        return self._tokens.is_stopped()

    @property
    def _is_violated(self) -> bool:
        unique = self._unique[-1]
        return unique is not None and unique.is_violated

    def consume(self, ids: Sequence[int]) -> int:
        """Consume as many of these tokens as the grammar allows; return how many.

        Stop ids are never consumed: they are not part of the text.
        """
        ids = list(takewhile(lambda token: token not in self.vocabulary.stops, ids))
        count = self._tokens.try_consume_tokens(ids)
        self._pending += ids[:count]
        self._check()
        for token in ids[:count]:
            unique = self._unique[-1]
            data = b"" if unique is None else self.vocabulary.tokenizer.token_bytes(token)
            self._unique.append(None if unique is None else unique.feed(data))
        return count

    def rollback(self, count: int) -> None:
        """Undo the last tokens."""
        if count == 0:
            return
        self._tokens.rollback(count)
        del self._unique[len(self._unique) - count :]
        num_pending = min(count, len(self._pending))
        del self._pending[len(self._pending) - num_pending :]
        remaining = count - num_pending
        undone = self._byte_counts[len(self._byte_counts) - remaining :] if remaining else []
        del self._byte_counts[len(self._byte_counts) - len(undone) :]
        if undone and not self.search_exhausted:
            self._bytes.rollback(sum(undone))

    def forced(self) -> list[int]:
        """Return the tokens that must come next."""
        forced = self._tokens.compute_ff_tokens()
        self._check()
        return forced

    def forced_byte(self) -> list[int]:
        """Return the next forced byte as a token, if there is one."""
        forced = self._tokens.compute_ff_bytes()[:1]
        self._check()
        is_text = forced not in (b"", b"\xff")  # a control id may be forced
        return self.vocabulary.byte_tokens(forced) if is_text else []

    def allowed(self) -> TokenMask:
        """Return the mask of tokens that may come next; stops where the text may end."""
        bits = np.frombuffer(self._tokens.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self.vocabulary.size, bitorder="little").view(np.bool_)
        allowed[list(self.vocabulary.stops)] = self.is_accepting
        return allowed

    def complete(
        self, limit: int, known: Completion | None = None, *, is_brief: bool = False
    ) -> Completion | None:
        """Search a completion of at most `limit` tokens; None if none is found.

        `known`, the completion of an earlier state of the same text, saves most of the search. A
        brief search may miss completions.
        """
        self._catch_up()
        if self.search_exhausted or self._is_violated:
            return None
        is_brief |= known is not None
        max_bytes = min(MAX_COMPLETION_BYTES, MAX_BYTES_PER_TOKEN * limit)
        begin, earlier = sum(self._byte_counts), None
        if known is not None:
            earlier = KnownCompletion(known.byte_tokens, begin - known.begin)
        unique = self._unique[-1]
        ending = self._search.run(self._bytes, max_bytes, earlier, is_brief=is_brief, unique=unique)
        completion = None if ending is None else self._in_tokens(ending)
        if completion is None or len(completion.tokens) <= limit:
            return completion
        return None if known is None else self.complete(limit, is_brief=True)

    def _in_tokens(self, byte_tokens: list[int]) -> Completion:
        for tokens in (self.vocabulary.merge(byte_tokens), byte_tokens):
            if self._tokens.validate_tokens(tokens) == len(tokens):
                return Completion(tuple(tokens), tuple(byte_tokens), sum(self._byte_counts))
        raise ConstraintFault("the grammar reads a text differently as bytes and as tokens")

    def _catch_up(self) -> None:
        """Let the byte matcher consume the tokens it has not seen."""
        for token in self._pending:
            byte_tokens = self.vocabulary.split([token])
            if not self.search_exhausted:
                consumed = self._bytes.try_consume_tokens(byte_tokens)
                self.search_exhausted = consumed < len(byte_tokens)
            self._byte_counts.append(len(byte_tokens))
        self._pending.clear()

    def _check(self) -> None:
        if self._tokens.is_error():
            words = " ".join(self._tokens.get_error().split("<state>")[0].split())
            raise ConstraintFault(f"the grammar cannot be followed: {words[:200]}")


def most_likely(logits_V: Tensor, allowed: TokenMask) -> tuple[int, float]:
    """Return the most likely allowed token, and its probability among the allowed ones."""
    ids = np.flatnonzero(allowed)
    if len(ids) <= len(allowed) // GATHER_FRACTION:
        p, index = logits_V[torch.from_numpy(ids).to(logits_V.device)].softmax(-1).max(-1)
        return int(ids[int(index)]), float(p)
    # Arithmetic instead of `where`: its branches mispredict here. numpy's argmax is ten times as
    # fast as torch's on a CPU.
    allowed_V = torch.from_numpy(allowed).to(logits_V.device).to(logits_V.dtype)
    masked_V = allowed_V.sub_(1).mul_(MASKED).add_(logits_V)
    token = int(masked_V.numpy().argmax() if masked_V.is_cpu else masked_V.argmax())
    return token, float(masked_V.softmax(-1)[token])


def mask_logits(logits_V: Tensor, allowed: TokenMask) -> Tensor:
    """Set the logits of tokens that are not allowed to -inf."""
    allowed_V = torch.from_numpy(allowed).to(logits_V.device)
    return torch.where(allowed_V, logits_V, -torch.inf)


def path_through_pins(
    matcher: Matcher, tops: Sequence[int], pins: Sequence[int | None], known: Sequence[int]
) -> list[int] | None:
    """Find a token for each position of `pins` (None: open) and consume them.

    Depth-first: the model's tokens (`tops`) first, then those of the `known` path, then forced
    text, then single bytes. Returns None if there is no path; the matcher is then unchanged.
    """
    path: list[int] = []
    branches = [_branches(matcher, 0, tops, pins, known)]
    for _ in range(MAX_PATH_TOKENS):
        token = next(branches[-1], None)
        if token is None:
            branches.pop()
            if not branches:
                return None
            path.pop()
            matcher.rollback(1)
        elif matcher.consume([token]):
            path.append(token)
            if len(path) == len(pins):
                return path
            branches.append(_branches(matcher, len(path), tops, pins, known))
    matcher.rollback(len(path))
    return None


def _branches(
    matcher: Matcher,
    index: int,
    tops: Sequence[int],
    pins: Sequence[int | None],
    known: Sequence[int],
) -> Iterator[int]:
    pin = pins[index]
    if pin is not None:
        yield pin
        return
    likely = [tops[index], *known[index : index + 1], *matcher.forced()[:1], *matcher.forced_byte()]
    first = dict.fromkeys(likely)
    yield from first
    allowed = matcher.allowed()
    single = [token for token in matcher.vocabulary.byte_ids if allowed[token]]
    others = [token for token in single if token not in first]
    yield from others[:PATH_BRANCHES]
    yield from others[PATH_BRANCHES:][:: PATH_BRANCHES // 2]  # with lead bytes of characters
    longer = np.flatnonzero(allowed)[:PATH_BRANCHES].tolist()
    yield from [token for token in longer if token not in first and token not in single]
