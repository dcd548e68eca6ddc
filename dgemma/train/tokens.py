"""Tokenized training data: JSONL and JSON files to token stores, in parallel, cached by content.

A JSONL file holds one record a line, a JSON file a list of them (`dgemma/train/records.py`). A chat
is one example; plain text is cut into pieces of at most `max_tokens`.
Chats over `max_tokens` are dropped and counted: half a reply would teach a wrong end.

A store holds all examples of a file in one array, each a prompt and a reply (plain text has no
prompt), small enough to copy to another machine.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import multiprocessing
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import islice
from pathlib import Path

import numpy as np

from dgemma.errors import CheckpointError, UsageError
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.control_tokens import BOS, EOS, TOOL_RESPONSE, TURN_END
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.corruption import EOS_ID
from dgemma.train.records import FORMS, TrainingChat, read_record
from dgemma.weights.files import OnProgress

TokenPair = tuple[Sequence[int], Sequence[int]]  # prompt and reply

# A zip entry carries a date; one fixed date makes equal stores equal files.
ZIP_DATE = (1980, 1, 1, 0, 0, 0)
LINES_PER_TASK = 512
DATA_SUFFIXES = (".jsonl", ".json")
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja")

# --- the store


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of some examples as arrays, which travel between processes faster than lists."""

    tokens_N: np.ndarray
    lengths_E: np.ndarray
    prompts_E: np.ndarray
    dropped: int = 0  # examples over `max_tokens`

    @classmethod
    def of(cls, examples: Sequence[TokenPair], dropped: int = 0) -> TokenChunk:
        return cls(
            tokens_N=np.asarray([token for pair in examples for ids in pair for token in ids], int),
            lengths_E=np.asarray([sum(map(len, pair)) for pair in examples], dtype=np.int64),
            prompts_E=np.asarray([len(prompt) for prompt, _ in examples], dtype=np.int64),
            dropped=dropped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """Tokenized examples of one file, concatenated."""

    tokens_N: np.ndarray  # uint16 when the vocabulary fits, else uint32
    starts_E: np.ndarray  # int64, one more than there are examples
    prompts_E: np.ndarray  # int32: length of each example's prompt

    def __post_init__(self) -> None:
        lengths = np.diff(self.starts_E)
        if len(self.starts_E) != len(self.prompts_E) + 1 or self.starts_E[0] != 0:
            raise CheckpointError("a token store's starts and prompts do not belong together")
        if self.starts_E[-1] != len(self.tokens_N) or (lengths < self.prompts_E).any():
            raise CheckpointError("a token store's starts do not fit its tokens; build it again")

    def __len__(self) -> int:
        return len(self.prompts_E)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the prompt and the reply of one example, as views."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of a store of {len(self)}")
        index %= len(self)
        start, stop = self.starts_E[index], self.starts_E[index + 1]
        middle = start + self.prompts_E[index]
        return self.tokens_N[start:middle], self.tokens_N[middle:stop]

    def split(self, fraction: float, seed: int) -> tuple[TokenStore, TokenStore]:
        """Hold out a random fraction of the examples by seed; returns the others first."""
        order_E = np.random.default_rng(seed).permutation(len(self))
        count = max(1, round(fraction * len(self)))
        return self._select(np.sort(order_E[count:])), self._select(np.sort(order_E[:count]))

    def _select(self, index_E: np.ndarray) -> TokenStore:
        parts = [self.tokens_N[self.starts_E[i] : self.starts_E[i + 1]] for i in index_E]
        lengths_E = np.diff(self.starts_E)[index_E]
        return TokenStore(
            tokens_N=np.concatenate([self.tokens_N[:0], *parts]),
            starts_E=np.concatenate([[0], np.cumsum(lengths_E)]).astype(np.int64),
            prompts_E=self.prompts_E[index_E],
        )

    @classmethod
    def build(cls, examples: Iterable[TokenPair], vocab_size: int) -> TokenStore:
        """Store examples in the order given."""
        return cls.concat([TokenChunk.of(list(examples))], vocab_size)

    @classmethod
    def concat(cls, chunks: Sequence[TokenChunk], vocab_size: int) -> TokenStore:
        empty = np.zeros(0, dtype=np.int64)
        tokens_N = np.concatenate([empty, *(chunk.tokens_N for chunk in chunks)])
        if len(tokens_N) and not 0 <= tokens_N.min() <= tokens_N.max() < vocab_size:
            raise UsageError(
                f"the examples hold token ids {tokens_N.min()} to {tokens_N.max()}; "
                f"the vocabulary has {vocab_size}: tokenize with the model's own tokenizer"
            )
        lengths = np.concatenate([[0], *(chunk.lengths_E for chunk in chunks)])
        prompts_E = np.concatenate([empty, *(chunk.prompts_E for chunk in chunks)])
        return cls(
            tokens_N=tokens_N.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32),
            starts_E=np.cumsum(lengths, dtype=np.int64),
            prompts_E=prompts_E.astype(np.int32),
        )

    def save(self, path: Path) -> None:
        """Write an .npz that `numpy.load` reads too, LZMA-compressed; atomic."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".part")
        # Lengths compress far better than starts.
        lengths_E = np.diff(self.starts_E).astype(np.int32)
        arrays = {"tokens_N": self.tokens_N, "lengths_E": lengths_E, "prompts_E": self.prompts_E}
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_LZMA) as archive:
            for name, array in arrays.items():
                entry = zipfile.ZipInfo(f"{name}.npy", ZIP_DATE)
                entry.compress_type = zipfile.ZIP_LZMA
                with archive.open(entry, "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> TokenStore:
        """Read a file that `save` wrote."""
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


# --- the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCache:
    """A directory of tokenized files, and the tokenizer used."""

    directory: Path
    tokenizer: Path  # a directory
    progress: OnProgress | None = None

    def load(self, path: Path, max_tokens: int) -> tuple[TokenStore, int]:
        """Return the examples of a file, and how many were dropped by tokenization."""
        if path.suffix == ".npz":
            return TokenStore.load(path), 0
        if path.suffix not in DATA_SUFFIXES:
            raise UsageError(
                f"{path} is not training data; use .npz tokens, or .jsonl/.json texts or chats"
            )
        if not path.is_file():
            raise UsageError(
                f"no file {path}; a recipe's paths are relative to it, or begin with ./"
            )
        cached = self.directory / f"{path.stem}-{self._content_hash(path, max_tokens)}.npz"
        dropped = cached.with_suffix(".dropped")
        if not cached.exists():
            self._tokenize(path, max_tokens, cached, dropped)
        count = int(dropped.read_text(encoding="utf-8")) if dropped.exists() else 0
        store = TokenStore.load(cached)
        if not len(store):
            reason = (
                f"its {count} are all over {max_tokens} tokens; raise max_tokens or [batch] rows"
            )
            raise UsageError(f"{path} has no example: {reason if count else 'it has no lines'}")
        return store, count

    def _tokenize(self, path: Path, max_tokens: int, cached: Path, dropped: Path) -> None:
        made = tokenize_file(path, self.tokenizer, max_tokens=max_tokens, progress=self.progress)
        # The count first: once the tokens exist, nothing is recounted.
        self.directory.mkdir(parents=True, exist_ok=True)
        dropped.write_text(str(made.dropped), encoding="utf-8")
        made.store.save(cached)

    def _content_hash(self, path: Path, max_tokens: int) -> str:
        """Hash everything the tokens depend on."""
        digest = hashlib.sha256(str(max_tokens).encode())
        for file in (path, *(self.tokenizer / name for name in TOKENIZER_FILES)):
            if file.is_file():
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:16]


# --- tokenizing


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedFile:
    store: TokenStore
    dropped: int  # examples over `max_tokens`


def tokenize_file(
    path: Path,
    tokenizer_dir: Path,
    *,
    max_tokens: int = 1024,
    workers: int | None = None,
    progress: OnProgress | None = None,
) -> TokenizedFile:
    """Tokenize a JSONL file; the result does not depend on the number of workers."""
    if max_tokens < 8:
        raise UsageError(f"max_tokens is {max_tokens}; it must be at least 8")
    if not path.is_file():
        raise UsageError(f"no file {path}; give a .jsonl or .json file of objects with {FORMS}")
    encoder = Encoder.load(tokenizer_dir, max_tokens)
    total = sum(len(lines) for _, lines in _read_tasks(path))
    workers = workers or min(os.cpu_count() or 1, 16)
    chunks: list[TokenChunk] = []
    done = 0
    for count, chunk in _encode_chunks(path, encoder, min(workers, -(-total // LINES_PER_TASK))):
        chunks.append(chunk)
        done += count
        if progress is not None:
            progress(done, total)
    store = TokenStore.concat(chunks, encoder.vocab_size)
    return TokenizedFile(store=store, dropped=sum(chunk.dropped for chunk in chunks))


def _encode_chunks(path: Path, encoder: Encoder, workers: int) -> Iterator[tuple[int, TokenChunk]]:
    """Yield the number of lines and their tokens, in file order."""
    tasks = _read_tasks(path)
    if workers <= 1:
        yield from ((len(lines), encoder.chunk(path, first, lines)) for first, lines in tasks)
        return
    # A forked child may inherit a lock of torch or of the tokenizer's own threads.
    context = multiprocessing.get_context("spawn")
    encode = partial(_encode_in_worker, encoder.directory, encoder.max_tokens, path)
    with ProcessPoolExecutor(workers, context) as pool:

        def submit(task: tuple[int, list[str]]) -> tuple[int, Future[TokenChunk]]:
            return len(task[1]), pool.submit(encode, *task)

        waiting = [submit(task) for task in islice(tasks, 4 * workers)]
        while waiting:
            count, future = waiting.pop(0)
            yield count, future.result()
            waiting += [submit(task) for task in islice(tasks, 1)]


def _read_tasks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the lines, a task at a time.

    Entries of a JSON list count as lines.
    """
    if path.suffix == ".json":
        entries = _json_entries(path)
        for start in range(0, len(entries), LINES_PER_TASK):
            chosen = entries[start : start + LINES_PER_TASK]
            yield start + 1, [json.dumps(entry) for entry in chosen]
        return
    first = 1
    with path.open("rb") as file:
        while lines := list(islice(file, LINES_PER_TASK)):
            yield first, [_decode(path, number, line) for number, line in enumerate(lines, first)]
            first += len(lines)


def _json_entries(path: Path) -> list[object]:
    """Read a whole JSON file, as used by Alpaca and ShareGPT."""
    try:
        entries = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: no UTF-8 at byte {error.start}; write it in UTF-8") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}, line {error.lineno}: no JSON ({error.msg}); write a list of objects, or one "
            "object a line in a .jsonl file"
        ) from None
    if not isinstance(entries, list):
        raise UsageError(
            f"{path} holds one {type(entries).__name__}; a .json file must hold a list of objects, "
            "a .jsonl file one object a line"
        )
    return entries


def _decode(path: Path, number: int, line: bytes) -> str:
    try:
        # Some editors begin a file with a byte order mark.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}, line {number}: no UTF-8 at byte {error.start}; write the file in UTF-8"
        ) from None


@cache
def _worker_encoder(directory: Path, max_tokens: int) -> Encoder:
    """Load a worker process's encoder, once, since that costs more than a task."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return Encoder.load(directory, max_tokens)


def _encode_in_worker(
    directory: Path, max_tokens: int, path: Path, first: int, lines: list[str]
) -> TokenChunk:
    return _worker_encoder(directory, max_tokens).chunk(path, first, lines)


class Encoder:
    """Encodes JSONL lines with one checkpoint's tokenizer and chat template."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.directory = directory
        self.max_tokens = max_tokens
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._bos, self._eos, self._turn_end = (
            _control_id(tokenizer, name) for name in (BOS, EOS, TURN_END)
        )

    @classmethod
    def load(cls, directory: Path, max_tokens: int = 1024) -> Encoder:
        return cls(directory, Tokenizer.load(directory), max_tokens)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.load(self.directory, self._tokenizer)

    def chunk(self, path: Path, first: int, lines: Sequence[str]) -> TokenChunk:
        """Encode lines; `first` is the number of the first one, for error messages."""
        examples: list[TokenPair] = []
        dropped = 0
        for number, line in enumerate(lines, first):
            encoded = self._encode_line(path, number, line) if line.strip() else []
            fitting = [pair for pair in encoded if sum(map(len, pair)) <= self.max_tokens]
            dropped += len(encoded) - len(fitting)
            examples += fitting
        return TokenChunk.of(examples, dropped)

    def _encode_line(self, path: Path, number: int, line: str) -> list[TokenPair]:
        try:
            return self.examples(json.loads(line))
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}, line {number}: no JSON at character {error.pos + 1} ({error.msg}); "
                "write one object a line"
            ) from None
        except UsageError as error:
            place = "entry" if path.suffix == ".json" else "line"
            raise UsageError(f"{path}, {place} {number}: {error}") from None

    def examples(self, record: object) -> list[TokenPair]:
        """Encode one record: one example, or several pieces of a long text."""
        read = read_record(record)
        return self.pieces(read) if isinstance(read, str) else [self.chat(read)]

    def pieces(self, text: str) -> list[TokenPair]:
        """Encode plain text; every piece begins with <bos>, only the last ends with <eos>."""
        ids = [*self._tokenizer.encode(text), self._eos]
        size = self.max_tokens - 1
        return [((), [self._bos, *ids[start : start + size]]) for start in range(0, len(ids), size)]

    def chat(self, chat: TrainingChat) -> TokenPair:
        prompt = self._template.prompt(chat.messages, chat.tools)
        if isinstance(chat.reply, Message):
            return prompt.ids, self._calls(chat, chat.reply, len(prompt.ids))
        return prompt.ids, [*self._tokenizer.encode(chat.reply), self._turn_end]

    def _calls(self, chat: TrainingChat, reply: Message, start: int) -> list[int]:
        """Encode a reply with tool calls, up to the token that starts the tool's answer."""
        answer = Message(role="tool", content="", tool_call_id=reply.tool_calls[-1].id)
        ids = self._template.prompt([*chat.messages, reply, answer], chat.tools).ids
        stop = _control_id(self._tokenizer, TOOL_RESPONSE)
        if stop not in ids[start:]:
            raise UsageError("the chat template writes no calls of tools; leave tool_calls out")
        return list(ids[start : ids.index(stop, start) + 1])


def eos_id_of(directory: Path) -> int:
    """Return the id of <eos>; the Gemma default if only tokens are available."""
    if not (directory / "tokenizer.json").exists():
        return EOS_ID
    return _control_id(Tokenizer.load(directory), EOS)


def _control_id(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.control_ids:
        raise CheckpointError(f"the tokenizer has no {name}; training needs one of the Gemma kind")
    return tokenizer.control_ids[name]
