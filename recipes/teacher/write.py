"""Let the teacher answer requests, as many at once as its cache has places for.

    python -m recipes.teacher.write TEACHER.gguf ASKS.jsonl.xz --out DIRECTORY --seconds 1400

Reads lines with `ask` and `begin` (`recipes.teacher.ask` makes them). Writes NNN.jsonl.xz into the
directory, each when it is full: the `number` of the request, its `begin`, the `text` behind that up
to the closing fence, and whether it `ended` there and not at the limit. What is still being written
when the time is over is left out.
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

from recipes.teacher.desk import Desk, Reply, Request
from recipes.teacher.gguf import Gguf
from recipes.teacher.qwen import Qwen, read_weights
from recipes.teacher.spell import prompt, read_tokenizer, stops

LONGEST_PROMPT = 320  # tokens; requests that are longer are left out
LONGEST = 448  # tokens of a reply
STEPS = 16  # between looks at which texts have ended
TOGETHER = 64  # prompts that are encoded at once
CHUNK = 1024  # requests that are made tokens of at once
PART = 30_000  # replies of a file
PRESET = 2  # of the compression: more takes longer than the writing


def requests(path: Path, tokenizer: Tokenizer, first: int) -> Iterator[Request]:
    """The requests of a file from a number on, as tokens."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        numbered = islice(enumerate(lines), first, None)
        while chunk := [(number, json.loads(line)) for number, line in islice(numbered, CHUNK)]:
            texts = [prompt(one["ask"], one["begin"]) for _, one in chunk]
            for (number, one), spelled in zip(chunk, tokenizer.encode_batch(texts), strict=True):
                if len(spelled.ids) <= LONGEST_PROMPT:
                    yield Request(number, one["begin"], tuple(spelled.ids))


class Parts:
    """Files of replies in a directory, written beside the work. Leave the context to end them."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SystemExit(f"{directory} is not empty; give another --out, or empty it")
        self.directory, self.tokenizer = directory, tokenizer
        self.waiting: list[Reply] = []
        self.parts: list[Future[None]] = []
        self.threads = ThreadPoolExecutor(2)

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_part()
        self.threads.shutdown()
        for part in self.parts:
            part.result()  # what kept one from being written is not passed over

    def add(self, replies: Sequence[Reply]) -> None:
        self.waiting += replies
        if len(self.waiting) >= PART:
            self._end_part()

    def _end_part(self) -> None:
        if self.waiting:
            path = self.directory / f"{len(self.parts):03}.jsonl.xz"
            self.parts.append(self.threads.submit(_write, path, self.waiting, self.tokenizer))
            self.waiting = []


def _write(path: Path, replies: Sequence[Reply], tokenizer: Tokenizer) -> None:
    texts = tokenizer.decode_batch([list(reply.ids) for reply in replies])
    hidden = path.with_suffix(".part")
    with lzma.open(hidden, "wt", encoding="utf-8", preset=PRESET) as file:
        for reply, text in zip(replies, texts, strict=True):
            line = {
                "number": reply.request.number,
                "begin": reply.request.begin,
                "text": text,
                "ended": reply.ended,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    hidden.rename(path)  # a file that is there is whole


def write(desk: Desk, asked: Iterator[Request], parts: Parts, seconds: float) -> None:
    """Answer requests until there are none left, or the time is over."""
    begun = said = time.monotonic()
    tokens = replies = 0
    while time.monotonic() - begun < seconds:
        free = len(desk.free)
        for at in range(0, free, TOGETHER):
            if some := list(islice(asked, min(TOGETHER, free - at))):
                desk.seat(some)
        if len(desk.free) == len(desk.requests):
            break
        for _ in range(STEPS):
            desk.advance()
        taken = desk.take()
        parts.add(taken)
        replies += len(taken)
        tokens += sum(len(reply.ids) for reply in taken)
        if (now := time.monotonic()) - said > 10:
            said, rate = now, tokens / (now - begun)
            print(f"{replies:,} replies, {tokens:,} tokens, {rate:,.0f} a second", flush=True)
    print(f"{replies:,} replies, {tokens:,} tokens in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", type=Path, help="a GGUF file of Qwen2")
    parser.add_argument("asks", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="the first request to answer")
    parser.add_argument("--places", type=int, default=1024, help="texts at once")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    file = Gguf(chosen.teacher)
    shape, weights = read_weights(file, device, dtype)
    tokenizer = read_tokenizer(file)
    torch.manual_seed(chosen.seed)
    model = Qwen(shape, weights, chosen.places, LONGEST_PROMPT + LONGEST)
    desk = Desk(model, stops(tokenizer), LONGEST)
    with Parts(chosen.out, tokenizer) as parts:
        write(desk, requests(chosen.asks, tokenizer, chosen.first), parts, chosen.seconds)


if __name__ == "__main__":
    main()
