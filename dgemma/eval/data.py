"""Where a task's cases come from: two directories, and how their files are read."""

import gzip
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dgemma.errors import DgemmaError

# Where the recipes write what they hold out, and read what others have made.
HELDOUT, SHARED = Path("out/nano/heldout"), Path("../shared/data")
HOW_TO = "docs/evaluation.md tells how to get it"

T = TypeVar("T")


class MissingData(DgemmaError):
    """A task cannot run for want of a file or a part; it is reported as skipped, and why."""


@dataclass(frozen=True, slots=True)
class Data:
    """The held-out files of the training data, and the shared evaluation sets. None: not here."""

    heldout: Path | None
    shared: Path | None

    @classmethod
    def find(cls, heldout: Path | None, shared: Path | None) -> "Data":
        """The directories that were named, or else the recipes' own where there are such."""
        return cls(heldout or _usual(HELDOUT), shared or _usual(SHARED))

    def records(self, name: str, limit: int | None) -> list[dict[str, Any]]:
        """Records of a held-out JSONL file, in order; `limit` at most, spread over the file."""
        return read_jsonl(_require(self.heldout, name, "--heldout"), limit)

    def texts(self, name: str, limit: int | None) -> list[str]:
        return [record["text"] for record in self.records(name, limit)]

    def puzzles(self, pattern: str) -> list[Path]:
        """Held-out files whose names match, the last one first."""
        found = [] if self.heldout is None else sorted(self.heldout.glob(pattern), reverse=True)
        if not found:
            raise _missing(self.heldout, pattern, "--heldout")
        return found

    def evaluation(self, name: str) -> Path:
        return _require(self.shared, f"eval/{name}", "--data")

    def training(self, name: str) -> Path:
        return _require(self.shared, f"train/{name}", "--data")


def _usual(directory: Path) -> Path | None:
    return directory if directory.is_dir() else None


def _require(directory: Path | None, name: str, option: str) -> Path:
    if directory is None or not (directory / name).exists():
        raise _missing(directory, name, option)
    return directory / name


def _missing(directory: Path | None, name: str, option: str) -> MissingData:
    """Which file, which option names its directory, and where to read how to get it."""
    lack = f"{name} is needed" if directory is None else f"{directory} has no {name}"
    return MissingData(f"{lack}; name a directory that has it by {option} ({HOW_TO})")


def read_jsonl(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """JSON lines, plain or gzip; `limit` at most, spread over the file."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in spread(_lines(text), limit)]


def read_zip(path: Path, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """The records of each JSONL file in an archive, by name; the first `limit` of each."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            # An archive made on a Mac holds a shadow of each file.
            if name.endswith(".jsonl") and not name.startswith("__MACOSX"):
                text = archive.read(name).decode("utf-8")
                yield [json.loads(line) for line in _lines(text)[:limit]]


def spread(items: Sequence[T], limit: int | None) -> Sequence[T]:
    """`limit` of the items, evenly spread: files are often in the order of their sources."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def _lines(text: str) -> list[str]:
    # Not splitlines, which also splits at separators that JSON strings may hold.
    return [line for line in text.split("\n") if line.strip()]
