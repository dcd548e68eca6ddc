"""Tokenized examples on disk: one file per source, small enough to carry to another machine.

Owns the layout of a source's tokens and nothing else: it knows no tokenizer, no mixing and no
packing. An example is a prompt and a reply, end to end in one array; plain text has no prompt.
"""

from __future__ import annotations

import lzma
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dgemma.errors import CheckpointError, UsageError

# A zip entry carries a date; one fixed date makes equal stores equal files.
DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Tokenized examples of one source, end to end."""

    tokens_N: np.ndarray  # uint16 when the vocabulary fits, else uint32
    starts_E: np.ndarray  # int64, one more than there are examples
    prompts_E: np.ndarray  # int32: how many of each example's tokens are its prompt

    def __post_init__(self) -> None:
        lengths = np.diff(self.starts_E)
        if len(self.starts_E) != len(self.prompts_E) + 1 or self.starts_E[0] != 0:
            raise CheckpointError("a token store's starts and prompts do not belong together")
        if self.starts_E[-1] != len(self.tokens_N) or (lengths < self.prompts_E).any():
            raise CheckpointError("a token store's starts do not fit its tokens; build it again")

    def __len__(self) -> int:
        return len(self.prompts_E)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the reply of one example, as views."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of a store of {len(self)}")
        index %= len(self)
        start, stop = self.starts_E[index], self.starts_E[index + 1]
        middle = start + self.prompts_E[index]
        return self.tokens_N[start:middle], self.tokens_N[middle:stop]

    @classmethod
    def build(
        cls, examples: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int
    ) -> Store:
        """Lay out examples in the order given."""
        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        parts, lengths, prompts = [], [0], []
        for prompt, reply in examples:
            parts.append(np.asarray([*prompt, *reply], dtype=np.int64))
            lengths.append(len(parts[-1]))
            prompts.append(len(prompt))
        tokens_N = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        if len(tokens_N) and not 0 <= tokens_N.min() <= tokens_N.max() < vocab_size:
            raise UsageError(
                f"the examples hold token ids {tokens_N.min()} to {tokens_N.max()}; "
                f"the vocabulary has {vocab_size}: tokenize with the model's own tokenizer"
            )
        return cls(
            tokens_N=tokens_N.astype(dtype),
            starts_E=np.cumsum(lengths, dtype=np.int64),
            prompts_E=np.asarray(prompts, dtype=np.int32),
        )

    def save(self, path: Path) -> None:
        """Write an .npz that `numpy.load` reads too; compressed with LZMA, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".part")
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_LZMA) as archive:
            # Lengths compress far better than starts.
            for name, array in self._stored().items():
                entry = zipfile.ZipInfo(f"{name}.npy", DATE)
                entry.compress_type = zipfile.ZIP_LZMA
                with archive.open(entry, "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        partial.replace(path)

    def _stored(self) -> dict[str, np.ndarray]:
        lengths = np.diff(self.starts_E).astype(np.int32)
        return {"tokens_N": self.tokens_N, "lengths_E": lengths, "prompts_E": self.prompts_E}

    @classmethod
    def load(cls, path: Path) -> Store:
        """Read what `save` wrote."""
        if not path.is_file():
            raise UsageError(f"no token store at {path}; tokenize its source first")
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is not a token store; build it again")
        try:
            with np.load(path, allow_pickle=False) as archive:
                lengths, tokens_N = archive["lengths_E"], archive["tokens_N"]
                prompts_E = archive["prompts_E"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, lzma.LZMAError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); build it again") from None
        starts_E = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return cls(tokens_N=tokens_N, starts_E=starts_E.astype(np.int64), prompts_E=prompts_E)
