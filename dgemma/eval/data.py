"""Data files of the tasks: their two directories, and readers of JSONL, gzip and zip."""

import gzip
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dgemma.errors import DgemmaError

# The recipes write held-out data to the first and read published data from the second.
HELDOUT, SHARED = Path("out/nano/heldout"), Path("../shared/data")
HOW_TO = "docs/evaluation.md tells how to get it"

T = TypeVar("T")


class MissingData(DgemmaError):
    """A file that a task needs is missing; the task is reported as skipped, with the reason."""


@dataclass(frozen=True, slots=True)
class Data:
    """The directories of held-out training data and of published sets; None: there is none."""

    heldout: Path | None
    shared: Path | None

    @classmethod
    def find(cls, heldout: Path | None, shared: Path | None) -> "Data":
        """Take the given directories, or else those of the recipes if they exist."""
        return cls(heldout or _if_exists(HELDOUT), shared or _if_exists(SHARED))

    def records(self, name: str, limit: int | None) -> list[dict[str, Any]]:
        """Return at most `limit` records of a held-out JSONL file, spread over the file."""
        return read_jsonl(_require(self.heldout, name, "--heldout"), limit)

    def texts(self, name: str, limit: int | None) -> list[str]:
        return [record["text"] for record in self.records(name, limit)]

    def puzzles(self, pattern: str) -> list[Path]:
        """Return the held-out files whose names match, the last one first."""
        paths = [] if self.heldout is None else sorted(self.heldout.glob(pattern), reverse=True)
        if not paths:
            raise _missing(self.heldout, pattern, "--heldout")
        return paths

    def evaluation(self, name: str) -> Path:
        return _require(self.shared, f"eval/{name}", "--data")

    def training(self, name: str) -> Path:
        return _require(self.shared, f"train/{name}", "--data")


def _if_exists(directory: Path) -> Path | None:
    return directory if directory.is_dir() else None


def _require(directory: Path | None, name: str, option: str) -> Path:
    if directory is None or not (directory / name).exists():
        raise _missing(directory, name, option)
    return directory / name


def _missing(directory: Path | None, name: str, option: str) -> MissingData:
    """Name the file, the option for its directory, and the page that tells how to get it."""
    problem = f"{name} is needed" if directory is None else f"{directory} has no {name}"
    return MissingData(f"{problem}; name a directory that has it by {option} ({HOW_TO})")


def read_jsonl(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """Read JSON lines, plain or gzip; at most `limit`, spread over the file."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in spread(_lines(text), limit)]


def read_zip(path: Path, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """Read each JSONL file of an archive, by name; the first `limit` records of each."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            # An archive made on a Mac holds a shadow of each file.
            if name.endswith(".jsonl") and not name.startswith("__MACOSX"):
                text = archive.read(name).decode("utf-8")
                yield [json.loads(line) for line in _lines(text)[:limit]]


def spread(items: Sequence[T], limit: int | None) -> Sequence[T]:
    """Take `limit` items, evenly spread: files are often in the order of their sources."""
    if limit is None or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def _lines(text: str) -> list[str]:
    # Not splitlines, which also splits at separators that JSON strings may hold.
    return [line for line in text.split("\n") if line.strip()]
