"""Let the teacher answer requests, as many at once as its KV cache has slots.

    python -m recipes.nano.teacher.generate TEACHER.gguf REQUESTS.jsonl.xz --out DIRECTORY \
        --seconds 1400

Reads lines with `prompt` and `prefix` (`recipes.nano.teacher.requests` writes them). Writes files
NNN.jsonl.xz: the `number` of the request, its `prefix`, the `text` after it up to the closing
fence, and whether it `ended` there and not at the limit. Texts unfinished when the time is over are
dropped.
"""

import argparse
import json
import lzma
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dgemma.weights.gguf import GGUFFile
from recipes.nano.teacher.batch import TeacherBatch, TeacherReply, TeacherRequest
from recipes.nano.teacher.chat import read_tokenizer, render, stop_ids
from recipes.nano.teacher.qwen import Qwen, read_weights

MAX_PROMPT = 320  # tokens; requests that are longer are dropped
MAX_REPLY = 448  # tokens
STEPS = 16  # between looks at finished texts
PREFILL_BATCH = 64
TOKENIZE_BATCH = 1024
REPLIES_PER_FILE = 30_000
PRESET = 2  # of xz: a higher one takes longer than the generation


def read_requests(path: Path, tokenizer: Tokenizer, first: int) -> Iterator[TeacherRequest]:
    """Tokenize the requests of a file from a number on."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        numbered = islice(enumerate(lines), first, None)
        while batch := [(n, json.loads(line)) for n, line in islice(numbered, TOKENIZE_BATCH)]:
            texts = [render(record["prompt"], record["prefix"]) for _, record in batch]
            encoded = tokenizer.encode_batch(texts)
            for (number, record), encoding in zip(batch, encoded, strict=True):
                if len(encoding.ids) <= MAX_PROMPT:
                    yield TeacherRequest(number, record["prefix"], tuple(encoding.ids))


class ReplyFiles:
    """Writes replies to a directory in background threads. Leave the context to finish."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SystemExit(f"{directory} is not empty; give another --out, or empty it")
        self.directory, self.tokenizer = directory, tokenizer
        self.pending: list[TeacherReply] = []
        self.writes: list[Future[None]] = []
        self.threads = ThreadPoolExecutor(2)

    def __enter__(self) -> "ReplyFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._write_pending()
        self.threads.shutdown()
        for write in self.writes:
            write.result()  # raises if a file could not be written

    def add(self, replies: Sequence[TeacherReply]) -> None:
        self.pending += replies
        if len(self.pending) >= REPLIES_PER_FILE:
            self._write_pending()

    def _write_pending(self) -> None:
        if self.pending:
            path = self.directory / f"{len(self.writes):03}.jsonl.xz"
            self.writes.append(self.threads.submit(_write_file, path, self.pending, self.tokenizer))
            self.pending = []


def _write_file(path: Path, replies: Sequence[TeacherReply], tokenizer: Tokenizer) -> None:
    texts = tokenizer.decode_batch([list(reply.ids) for reply in replies])
    temporary = path.with_suffix(".part")
    with lzma.open(temporary, "wt", encoding="utf-8", preset=PRESET) as file:
        for reply, text in zip(replies, texts, strict=True):
            record = {
                "number": reply.request.number,
                "prefix": reply.request.prefix,
                "text": text,
                "ended": reply.ended,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    temporary.rename(path)  # a file of this name is whole


def generate(
    batch: TeacherBatch, requests: Iterator[TeacherRequest], files: ReplyFiles, seconds: float
) -> None:
    """Answer requests until there are none left, or the time is over."""
    begun = reported = time.monotonic()
    tokens = replies = 0
    while time.monotonic() - begun < seconds:
        free = len(batch.free_slots)
        for start in range(0, free, PREFILL_BATCH):
            if added := list(islice(requests, min(PREFILL_BATCH, free - start))):
                batch.add(added)
        if len(batch.free_slots) == len(batch.requests):
            break
        for _ in range(STEPS):
            batch.step()
        finished = batch.take_finished()
        files.add(finished)
        replies += len(finished)
        tokens += sum(len(reply.ids) for reply in finished)
        if (now := time.monotonic()) - reported > 10:
            reported, rate = now, tokens / (now - begun)
            print(f"{replies:,} replies, {tokens:,} tokens, {rate:,.0f} a second", flush=True)
    print(f"{replies:,} replies, {tokens:,} tokens in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher", type=Path, help="a GGUF file of Qwen2")
    parser.add_argument("requests", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="the first request to answer")
    parser.add_argument("--slots", type=int, default=1024, help="texts at once")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    file = GGUFFile(options.teacher)
    config, weights = read_weights(file, device, dtype)
    tokenizer = read_tokenizer(file)
    torch.manual_seed(options.seed)
    model = Qwen(config, weights, options.slots, MAX_PROMPT + MAX_REPLY)
    batch = TeacherBatch(model, stop_ids(tokenizer), MAX_REPLY)
    with ReplyFiles(options.out, tokenizer) as files:
        requests = read_requests(options.requests, tokenizer, options.first)
        generate(batch, requests, files, options.seconds)


if __name__ == "__main__":
    main()
