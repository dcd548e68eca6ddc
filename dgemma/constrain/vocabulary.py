"""A tokenizer's vocabulary as llguidance reads it: bytes for text, names for control ids.

There are two vocabularies with the same ids. The full one matches tokens. The byte vocabulary has
only single bytes and control ids, so that a grammar can be searched byte by byte.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dgemma.errors import UsageError
from dgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MISSING_LLGUIDANCE = (
    "constraints need the package llguidance, which is not installed; run pip install llguidance"
)


class Vocabulary:
    """The two vocabularies of a tokenizer; `vocabulary` builds each once."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[int, ...]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.size = tokenizer.vocab_size
        pieces = [tokenizer.token_bytes(token) for token in range(self.size)]
        self.controls = tuple(sorted(tokenizer.control_ids.values()))
        self.byte_ids = _byte_ids(pieces, set(self.controls))
        in_bytes = {*self.controls, *self.byte_ids}
        single = [piece if token in in_bytes else b"" for token, piece in enumerate(pieces)]
        self.tokens = self._build(pieces, self._encode)
        self.bytes = self._build(single, self.byte_tokens)

    def byte_tokens(self, text: str | bytes) -> list[int]:
        """Return the ids of the single bytes of a text."""
        return [self.byte_ids[byte] for byte in _as_bytes(text)]

    def split(self, ids: Sequence[int]) -> list[int]:
        """Split ids into single bytes and control ids."""
        split: list[int] = []
        for token in ids:
            is_control = self.tokenizer.is_control(token)
            split += [token] if is_control else self.byte_tokens(self.tokenizer.token_bytes(token))
        return split

    def merge(self, split: Sequence[int]) -> list[int]:
        """Merge single bytes into the tokens that the tokenizer would use."""
        ids: list[int] = []
        run = bytearray()
        for token in split:
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
            raise UsageError(MISSING_LLGUIDANCE) from None
        adapter = _TokenizerAdapter(pieces, self.controls, self.stops[0], encode)
        return LLTokenizer(adapter, eos_token=list(self.stops))  # type: ignore[arg-type]


class _TokenizerAdapter:
    """The tokenizer attributes that llguidance reads."""

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
    """Return the vocabulary of a tokenizer and its stop ids, built once."""
    return Vocabulary(tokenizer, stops)


def _byte_ids(pieces: Sequence[bytes], controls: set[int]) -> tuple[int, ...]:
    """Return an id for every byte: a text piece of one byte, if there is one."""
    ids: dict[int, int] = {}
    for token, piece in enumerate(pieces):
        if len(piece) == 1 and token not in controls:
            ids[piece[0]] = token  # text pieces have higher ids than the byte tokens
    return tuple(ids[byte] for byte in range(256))


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
