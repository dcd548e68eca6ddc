"""The tokenizer of a checkpoint: text to ids and back, byte for byte, and its control ids.

Two kinds of ids exist. A *text* id stands for bytes: a piece of UTF-8, or one byte (`<0xE2>`). A
*control* id (`<|turn>`, `<eos>`, ...) stands for itself. `encode` returns text ids only, whatever
the text spells, so content cannot inject a control id; `encode_control` reads them, for text that
is not content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from dgemma.config.strict_json import read_regular
from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.text.template import control_pattern

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# The vocabulary writes a space as this character, so the character itself is encoded as bytes:
# otherwise it would decode to a space.
SPACE_MARK = "▁"
# Characters from which a text is encoded without the interpreter's lock, so that other threads run:
# a MiB takes up to half a second. Only the batch call of `tokenizers` releases it.
MIN_UNLOCKED = 1 << 14
MAX_TOKENIZER_BYTES = 256 << 20  # the released file has 31 MiB
MAX_STAGE_BYTES = 1000
ESCAPED_LETTER = re.compile(rb"\\u00(?:4[1-9a-fA-F]|5[0-9aAfF]|6[1-9a-fA-F]|7[0-9aA])")
# Stages of `tokenizer.json` that change or split text, with the values that this build runs.
SPLIT = {"type": "Split", "behavior": "MergedWithPrevious", "invert": False}
STAGES: Mapping[str, list[object]] = {
    "normalizer": [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}],
    "pre_tokenizer": [
        {**SPLIT, "pattern": {"String": " "}},
        {**SPLIT, "pattern": {"Regex": " "}},
        None,
    ],
    "dropout": [None, 0.0],
}
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
        # A file may contain the truncation limits of its writer; the engine checks lengths.
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
        self._texts: dict[int, str] = {}  # of single tokens, for drafts
        self._space_mark_ids = [self._byte_ids[byte] for byte in SPACE_MARK.encode()]
        self._check_exact()

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json` of a checkpoint directory."""
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"no tokenizer.json in {directory}; give a checkpoint directory")
        data = read_regular(path, MAX_TOKENIZER_BYTES)
        check_stages(data, path)
        try:
            return cls(Backend.from_str(data.decode("utf-8")))
        except BaseException as error:
            # The library raises exactly Exception for a file it cannot read, and for one that it
            # did not expect an error that is no Exception.
            known = (Exception, UnicodeDecodeError)
            if type(error) not in known and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from None

    def encode(self, text: str) -> list[int]:
        """Encode plain text; a control token spelled in it becomes ordinary text ids."""
        refuse_surrogates(text)
        ids: list[int] = []
        for position, piece in enumerate(text.split(SPACE_MARK)):
            if position:
                ids += self._space_mark_ids
            if len(piece) >= MIN_UNLOCKED:
                ids += self._backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            elif piece:
                ids += self._backend.encode(piece, add_special_tokens=False).ids
        return ids

    def encode_control(self, text: str, *, mark: str = "") -> list[int]:
        """Encode trusted text, where control tokens after `mark` become control ids."""
        ids: list[int] = []
        # A split on one group alternates: text, control, text, ..., text.
        for position, piece in enumerate(self.control_pattern(mark).split(text)):
            ids += [self.control_ids[piece]] if position % 2 else self.encode(piece)
        return ids

    def control_pattern(self, mark: str = "") -> re.Pattern[str]:
        """Match a control token written after `mark`; the longest wins where two begin alike."""
        return control_pattern(tuple(self.control_ids), mark)

    def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
        """Decode ids, control ids as their names or not at all; invalid bytes become U+FFFD."""
        return self.decode_bytes(ids, skip_control=skip_control).decode("utf-8", "replace")

    def token_text(self, token: int) -> str:
        """Decode one id; a control id gives the empty string."""
        if token not in self._texts:
            self._texts[token] = self.decode([token], skip_control=True)
        return self._texts[token]

    def decode_bytes(self, ids: Iterable[int], *, skip_control: bool = False) -> bytes:
        """Return the bytes of `ids`, which may end within a character."""
        skipped = self._control_names if skip_control else {}
        return b"".join(self.token_bytes(token) for token in ids if token not in skipped)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id; a control id gives its name."""
        if token in self._bytes:
            return self._bytes[token]
        piece = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if piece is None:
            raise CheckpointError(
                f"token id {token} is not in the tokenizer, which has {self.vocab_size} tokens; "
                "tokenizer.json and the weights belong to different models"
            )
        return piece.replace(SPACE_MARK, " ").encode()

    @cached_property
    def max_token_length(self) -> int:
        """Characters of the longest token: a text has at least length / this many tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

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


def check_stages(data: bytes, path: Path) -> None:
    """Refuse a `tokenizer.json` that rewrites text otherwise than the released one.

    Other stages may not give the text back, and a few chained replacements turn a letter into
    gigabytes, even while the file is loaded. So they are read before, each value of these keys
    wherever it is: to parse the whole file would take seconds.
    """
    if ESCAPED_LETTER.search(data):
        raise CheckpointError(f"{path} spells ASCII letters by escapes; write it again without")
    decoder = json.JSONDecoder()
    for key, allowed in STAGES.items():
        for match in re.finditer(rb'"%s"\s*:\s*' % key.encode(), data):
            text = data[match.end() : match.end() + MAX_STAGE_BYTES].decode("utf-8", "replace")
            try:
                value, _ = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                value = f"{text[:60]}..."
            # A number is the id of a piece that is spelled like the key.
            if type(value) is not int and value not in allowed:
                raise CheckpointError(
                    f"{path}: its {key} is {str(value)[:200]}; this build runs {allowed[0]}"
                )


def refuse_surrogates(text: str) -> None:
    """Refuse text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text holds half a surrogate pair, U+{ord(text[error.start]):04X}, "
            f"at character {error.start}; send whole Unicode characters"
        ) from None
