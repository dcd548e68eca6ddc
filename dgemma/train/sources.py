"""Files of text, pairs or chats to token stores, in parallel and always in file order.

A source is a JSONL file; each line is one of
- `{"text": ...}`: plain text, cut into pieces of at most `max_tokens`;
- `{"prompt": ..., "reply": ...}`: a user turn and the model's turn;
- `{"messages": [...]}`: a conversation whose last message, the assistant's, is the reply; `tools`
  beside it are told in its prompt.
Pairs and chats over `max_tokens` are left out and counted: half a reply teaches a wrong end.

Owns the way from a line to ids. Knows nothing of mixing or of what the lines say.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dgemma.errors import CheckpointError, UsageError
from dgemma.text.chat import ChatTemplate, Message, Tool
from dgemma.text.messages import check_conversation, read_tools
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.store import Store

Example = tuple[Sequence[int], Sequence[int]]
Progress = Callable[[int, int], None]  # lines done, lines in all

LINES_PER_TASK = 512
FORMS = '"text", "prompt" and "reply", or "messages"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """A store and what was left out of it because it was too long."""

    store: Store
    dropped: int


def tokenize_file(
    path: Path,
    tokenizer_dir: Path,
    *,
    max_tokens: int = 1024,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Tokenized:
    """Tokenize a source; the result does not depend on the number of workers."""
    if max_tokens < 8:
        raise UsageError(f"max_tokens is {max_tokens}; it must be at least 8")
    if not path.is_file():
        raise UsageError(f"no file {path}; give a .jsonl file with {FORMS} in each line")
    encoder = Encoder.load(tokenizer_dir, max_tokens)
    with path.open("rb") as file:
        total = sum(1 for _ in file)
    workers = workers or min(os.cpu_count() or 1, 16)
    parts: list[Part] = []
    done = 0
    for count, part in encode_parts(path, encoder, min(workers, -(-total // LINES_PER_TASK))):
        parts.append(part)
        done += count
        if progress is not None:
            progress(done, total)
    return join(parts, encoder.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of lines, tokenized: arrays travel between processes far faster than lists."""

    tokens_N: np.ndarray
    lengths_E: np.ndarray
    prompts_E: np.ndarray
    dropped: int


def join(parts: Sequence[Part], vocab_size: int) -> Tokenized:
    empty = np.zeros(0, dtype=np.int64)
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    lengths = np.concatenate([np.zeros(1, dtype=np.int64), *(part.lengths_E for part in parts)])
    store = Store(
        tokens_N=np.concatenate([empty, *(part.tokens_N for part in parts)]).astype(dtype),
        starts_E=np.cumsum(lengths, dtype=np.int64),
        prompts_E=np.concatenate([empty, *(part.prompts_E for part in parts)]).astype(np.int32),
    )
    return Tokenized(store=store, dropped=sum(part.dropped for part in parts))


def encode_parts(path: Path, encoder: Encoder, workers: int) -> Iterator[tuple[int, Part]]:
    """How many lines, and their tokens; in file order."""
    if workers <= 1:
        yield from ((len(lines), encoder.part(path, first, lines)) for first, lines in runs(path))
        return
    # A forked child may inherit a lock of torch or of the tokenizer's own threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, context, initializer=start_worker, initargs=(encoder.directory, encoder.max_tokens)
    ) as pool:
        tasks = runs(path)
        waiting = [submit(pool, path, task) for task in islice(tasks, 4 * workers)]
        while waiting:
            count, future = waiting.pop(0)
            yield count, future.result()
            waiting += [submit(pool, path, task) for task in islice(tasks, 1)]


def submit(pool: ProcessPoolExecutor, path: Path, task: tuple[int, list[str]]) -> Any:
    first, lines = task
    return len(lines), pool.submit(work, path, first, lines)


def runs(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number of the first line and the lines, a task at a time."""
    first = 1
    with path.open("rb") as file:
        while lines := list(islice(file, LINES_PER_TASK)):
            yield first, [decoded(path, number, line) for number, line in enumerate(lines, first)]
            first += len(lines)


def decoded(path: Path, number: int, line: bytes) -> str:
    try:
        # Some editors begin a file with a mark that belongs to no line.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}, line {number}: no UTF-8 at byte {error.start}; write the file in UTF-8"
        ) from None


_worker: Encoder | None = None  # one per worker process: loading it costs more than a task


def start_worker(directory: Path, max_tokens: int) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Encoder.load(directory, max_tokens)


def work(path: Path, first: int, lines: list[str]) -> Part:
    assert _worker is not None
    return _worker.part(path, first, lines)


class Encoder:
    """Lines to examples, with one checkpoint's tokenizer and template."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, max_tokens: int) -> None:
        self.directory = directory
        self.max_tokens = max_tokens
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._bos, self._eos, self._end = (
            control_id(tokenizer, name) for name in ("<bos>", "<eos>", "<turn|>")
        )
        self._template: ChatTemplate | None = None

    @classmethod
    def load(cls, directory: Path, max_tokens: int = 1024) -> Encoder:
        return cls(directory, Tokenizer.load(directory), max_tokens)

    def part(self, path: Path, first: int, lines: Sequence[str]) -> Part:
        examples: list[Example] = []
        dropped = 0
        for number, line in enumerate(lines, first):
            found = self._read(path, number, line) if line.strip() else []
            kept = [pair for pair in found if sum(map(len, pair)) <= self.max_tokens]
            dropped += len(found) - len(kept)
            examples += kept
        return Part(
            tokens_N=np.asarray([token for pair in examples for ids in pair for token in ids], int),
            lengths_E=np.asarray([sum(map(len, pair)) for pair in examples], dtype=np.int64),
            prompts_E=np.asarray([len(prompt) for prompt, _ in examples], dtype=np.int64),
            dropped=dropped,
        )

    def _read(self, path: Path, number: int, line: str) -> list[Example]:
        try:
            return self.examples(json.loads(line))
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}, line {number}: no JSON at character {error.pos + 1} ({error.msg}); "
                "write one object a line"
            ) from None
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None

    def examples(self, record: object) -> list[Example]:
        """What one line gives: one example, or several pieces of a long text."""
        if not isinstance(record, Mapping):
            raise UsageError(f"a {type(record).__name__} and not an object with {FORMS}")
        if len(record.keys() & {"text", "messages", "prompt"}) > 1:
            raise UsageError(f"the keys are {_named(record)}, of several forms; give only {FORMS}")
        if "text" in record:
            return self.pieces(string(record, "text"))
        if "messages" in record:
            return [self.chat(record["messages"], record.get("tools"))]
        if "prompt" in record and "reply" in record:
            return [self.pair(string(record, "prompt"), string(record, "reply"))]
        raise UsageError(f"the keys are {_named(record) or 'none'}; give {FORMS}")

    def pieces(self, text: str) -> list[Example]:
        """Every piece begins with <bos>; only the last ends with <eos>, as only it ends."""
        ids = [*self._tokenizer.encode(text), self._eos]
        size = self.max_tokens - 1
        return [((), [self._bos, *ids[start : start + size]]) for start in range(0, len(ids), size)]

    def pair(self, prompt: str, reply: str) -> Example:
        return self._reply([Message(role="user", content=prompt)], reply)

    def chat(self, messages: object, tools: object = None) -> Example:
        """The last message is the reply; it must be the assistant's, in words."""
        if not isinstance(messages, list) or len(messages) < 2:
            raise UsageError('"messages" must be a list of at least a question and an answer')
        *before, last = [Message.from_dict(message) for message in messages]
        if last.role != "assistant" or not isinstance(last.content, str) or last.tool_calls:
            raise UsageError("the last message must be the assistant's, with text as its content")
        check_conversation(before)
        return self._reply(before, last.content, read_tools(tools))

    def _reply(
        self, messages: Sequence[Message], reply: str, tools: Sequence[Tool] = ()
    ) -> Example:
        if self._template is None:
            self._template = ChatTemplate.load(self.directory, self._tokenizer)
        prompt = self._template.prompt(messages, tools)
        return prompt.ids, [*self._tokenizer.encode(reply), self._end]


def control_id(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.control_ids:
        raise CheckpointError(f"the tokenizer has no {name}; training needs one of the Gemma kind")
    return tokenizer.control_ids[name]


def _named(record: Mapping[str, object]) -> str:
    return ", ".join(map(repr, record))


def string(record: Mapping[str, object], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise UsageError(f'"{key}" is {value!r}; it must be a string')
    return value
