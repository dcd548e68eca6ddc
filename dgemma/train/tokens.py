"""Token stores of a recipe's files; a .jsonl file is tokenized once and kept by its content."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dgemma.errors import UsageError
from dgemma.train.sources import tokenize_file
from dgemma.train.store import Store

Progress = Callable[[int, int], None]  # lines done, lines in all
READ_BY_TOKENIZING = ("tokenizer.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Where tokens are kept, and what they are made with."""

    directory: Path
    tokenizer: Path  # a directory
    workers: int | None = None
    progress: Progress | None = None


def load_tokens(path: Path, max_tokens: int, shelf: Shelf) -> tuple[Store, int]:
    """The examples of a file, and how many were left out as too long when they were tokenized."""
    if path.suffix == ".npz":
        return Store.load(path), 0
    if path.suffix != ".jsonl":
        raise UsageError(f"{path} is no data; give tokens (.npz), or text, pairs or chats (.jsonl)")
    if not path.is_file():
        raise UsageError(f"no file {path}; a recipe's paths are relative to it, or begin with ./")
    kept = shelf.directory / f"{path.stem}-{_content(path, max_tokens, shelf)}.npz"
    dropped = kept.with_suffix(".dropped")
    if not kept.exists():
        made = tokenize_file(
            path,
            shelf.tokenizer,
            max_tokens=max_tokens,
            workers=shelf.workers,
            progress=shelf.progress,
        )
        # The count first: where there are tokens, nothing is counted again.
        shelf.directory.mkdir(parents=True, exist_ok=True)
        dropped.write_text(str(made.dropped), encoding="utf-8")
        made.store.save(kept)
    count = int(dropped.read_text(encoding="utf-8")) if dropped.exists() else 0
    store = Store.load(kept)
    if not len(store):
        reason = f"its {count} are all over {max_tokens} tokens; raise max_tokens or [batch] rows"
        raise UsageError(f"{path} has no example: {reason if count else 'it has no lines'}")
    return store, count


def _content(path: Path, max_tokens: int, shelf: Shelf) -> str:
    """A name for all that the tokens depend on."""
    digest = hashlib.sha256(str(max_tokens).encode())
    files = [path, *(shelf.tokenizer / name for name in READ_BY_TOKENIZING)]
    for file in files:
        if file.is_file():
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:16]
