"""The ids of a tokenizer as llguidance knows them: exact bytes for text, names for control ids.

Two vocabularies share the same numbers. The whole one judges tokens. In the other only single bytes
are left, beside the control ids: on it a grammar can be searched a byte at a time for little money.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dgemma.errors import UsageError
from dgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """Built once for a tokenizer: see `vocabulary`."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[int, ...]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.size = tokenizer.vocab_size
        pieces = [tokenizer.token_bytes(token) for token in range(self.size)]
        self.controls = tuple(sorted(tokenizer.control_ids.values()))
        self.byte_ids = _byte_ids(pieces, set(self.controls))
        kept = {*self.controls, *self.byte_ids}
        single = [piece if token in kept else b"" for token, piece in enumerate(pieces)]
        self.tokens = self._build(pieces, self._encode)
        self.bytes = self._build(single, self.spell)

    def spell(self, text: str | bytes) -> list[int]:
        """The ids of single bytes that make up a text."""
        return [self.byte_ids[byte] for byte in _as_bytes(text)]

    def spell_ids(self, ids: Sequence[int]) -> list[int]:
        """Ids as single bytes and control ids."""
        spelled: list[int] = []
        for token in ids:
            is_control = self.tokenizer.is_control(token)
            spelled += [token] if is_control else self.spell(self.tokenizer.token_bytes(token))
        return spelled

    def join(self, spelled: Sequence[int]) -> list[int]:
        """The inverse: as few ids as the tokenizer itself would take."""
        ids: list[int] = []
        run = bytearray()
        for token in spelled:
            if self.tokenizer.is_control(token):
                ids += [*self.tokens.tokenize_bytes(bytes(run)), token]
                run.clear()
            else:
                run += self.tokenizer.token_bytes(token)
        return ids + self.tokens.tokenize_bytes(bytes(run))

    def _encode(self, text: str | bytes) -> list[int]:
        return self.tokenizer.encode(_as_bytes(text).decode())

    def _build(
        self, pieces: Sequence[bytes], encode: Callable[[str | bytes], list[int]]
    ) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise UsageError(
                "constraints need the package llguidance, which is not installed; "
                "run pip install llguidance"
            ) from None
        source = _Source(pieces, self.controls, self.stops[0], encode)
        return LLTokenizer(source, eos_token=list(self.stops))  # type: ignore[arg-type]


class _Source:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        pieces: Sequence[bytes],
        controls: Sequence[int],
        eos: int,
        encode: Callable[[str | bytes], list[int]],
    ) -> None:
        self.tokens, self.special_token_ids = pieces, controls
        self.eos_token_id, self._encode = eos, encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text)


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer, stops: tuple[int, ...]) -> Vocabulary:
    """The vocabulary of a tokenizer and its stop ids; the same one each time."""
    return Vocabulary(tokenizer, stops)


def _byte_ids(pieces: Sequence[bytes], controls: set[int]) -> tuple[int, ...]:
    """For every byte an id that stands for it alone: a piece of text, if there is one."""
    found: dict[int, int] = {}
    for token, piece in enumerate(pieces):
        if len(piece) == 1 and token not in controls:
            found[piece[0]] = token  # pieces of text come behind the byte tokens
    return tuple(found[byte] for byte in range(256))


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
