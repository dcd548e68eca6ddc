"""Text to ids and back, byte for byte, and the ids that steer the model.

Owns the vocabulary of one checkpoint. Knows nothing of chats, templates or streaming.

Two kinds of ids exist. A *text* id stands for bytes: a piece of UTF-8, or one byte (`<0xE2>`). A
*control* id (`<|turn>`, `<eos>`, ...) stands for itself. `encode` gives text ids only, whatever the
text spells, so nobody can write a control id; `encode_control` reads them, for text of our own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dgemma.errors import CheckpointError, ConfigError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# The vocabulary writes a space as this character, so the character itself has to be spelled in
# bytes: any other way it comes back as a space.
SPACE_MARK = "▁"
PROBE = f"A b\n\n  c {SPACE_MARK} é\U0001f600\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopIds:
    """The ids that end a reply; a block is cut before the first of them."""

    ids: tuple[int, ...]

    @classmethod
    def read(cls, eos_token_id: int | Sequence[int]) -> StopIds:
        """Take `eos_token_id` as generation_config.json gives it: one id or a list."""
        ids = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
        if not ids or min(ids) < 0:
            raise ConfigError(
                f"eos_token_id is {eos_token_id}; it must be a token id or a list of them"
            )
        return cls(ids=ids)

    def cut(self, block: Sequence[int]) -> tuple[list[int], int | None]:
        """Return the ids before the first stop id, and that stop id or None."""
        for position, token in enumerate(block):
            if token in self.ids:
                return list(block[:position]), token
        return list(block), None


class Tokenizer:
    """A byte-fallback BPE with control tokens, as the released checkpoint has."""

    def __init__(self, backend: Backend) -> None:
        # Set once and never toggled: a switch around each call would race between server threads.
        backend.encode_special_tokens = True
        # A file may carry the limits of whoever saved it last; lengths are the engine's matter.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.control_ids: Mapping[str, int] = MappingProxyType(
            {token.content: index for index, token in added.items() if token.special}
        )
        self._control_names = {index: name for name, index in self.control_ids.items()}
        self._byte_ids = [self._byte_id(byte) for byte in range(256)]
        self._bytes = {index: bytes([byte]) for byte, index in enumerate(self._byte_ids)}
        self._texts: dict[int, str] = {}  # of single tokens, as drafts show them
        self._space_mark_ids = [self._byte_ids[byte] for byte in SPACE_MARK.encode()]
        self._check_exact()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json` of a checkpoint directory."""
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"no tokenizer.json in {directory}; give a checkpoint directory")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:
            # The library raises exactly Exception for a file it cannot read.
            if type(error) is not Exception:
                raise
            raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error
        return cls(backend)

    def encode(self, text: str) -> list[int]:
        """Encode plain text; a control token spelled in it becomes ordinary text ids."""
        refuse_surrogates(text)
        ids: list[int] = []
        for position, piece in enumerate(text.split(SPACE_MARK)):
            if position:
                ids += self._space_mark_ids
            ids += self._backend.encode(piece, add_special_tokens=False).ids
        return ids

    def encode_control(self, text: str, *, mark: str = "") -> list[int]:
        """Encode text of our own making, where control tokens after `mark` are control ids."""
        ids: list[int] = []
        # A split on one group alternates: text, control, text, ..., text.
        for position, piece in enumerate(self.control_pattern(mark).split(text)):
            ids += [self.control_ids[piece]] if position % 2 else self.encode(piece)
        return ids

    def control_pattern(self, mark: str = "") -> re.Pattern[str]:
        """Match a control token written after `mark`; the longest wins where two begin alike."""
        names = sorted(self.control_ids, key=len, reverse=True)
        return re.compile(f"{re.escape(mark)}({'|'.join(map(re.escape, names)) or '(?!)'})")

    def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
        """Decode ids, control ids as their names or not at all; invalid bytes become U+FFFD."""
        return self.decode_bytes(ids, skip_control=skip_control).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """Decode one id; a control id gives nothing."""
        if token not in self._texts:
            self._texts[token] = self.decode([token], skip_control=True)
        return self._texts[token]

    def decode_bytes(self, ids: Iterable[int], *, skip_control: bool = False) -> bytes:
        """The bytes of `ids`, which need not end with a whole character."""
        skipped = self._control_names if skip_control else {}
        return b"".join(self.token_bytes(token) for token in ids if token not in skipped)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; a control id gives its name."""
        if token in self._bytes:
            return self._bytes[token]
        piece = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if piece is None:
            raise CheckpointError(
                f"token id {token} is not in the tokenizer, which has {self.vocab_size} tokens; "
                "tokenizer.json and the weights belong to different models"
            )
        return piece.replace(SPACE_MARK, " ").encode()

    def is_control(self, token: int) -> bool:
        return token in self._control_names

    def _byte_id(self, byte: int) -> int:
        index = self._backend.token_to_id(f"<0x{byte:02X}>")
        if index is None:
            raise CheckpointError(
                f"tokenizer.json has no token <0x{byte:02X}>; "
                "this build reads byte-fallback vocabularies only"
            )
        return index

    def _check_exact(self) -> None:
        """Refuse a tokenizer that changes text, or that spells control ids from plain text."""
        if self.decode(self.encode(PROBE)) != PROBE:
            raise CheckpointError(
                "tokenizer.json does not give text back as it was; is it of this model?"
            )
        spelled = [
            name for name in self.control_ids if any(map(self.is_control, self.encode(name)))
        ]
        if spelled:
            raise CheckpointError(f"tokenizer.json makes control tokens from plain text: {spelled}")


def refuse_surrogates(text: str) -> None:
    """Refuse text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text holds half a surrogate pair, U+{ord(text[error.start]):04X}, "
            f"at character {error.start}; send whole Unicode characters"
        ) from None
