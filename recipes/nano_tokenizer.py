"""The tokenizer of `nano`: what it is learned from, in what proportion."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from dgemma.train import tokenizer
from recipes import nano_raw

TEMPLATE = Path(__file__).with_name("nano_template.jinja")
# Characters of each kind of text; prose, code and conversations weigh about the same.
SHARES = {
    "sentences": 6_000_000,
    "stories": 4_500_000,
    "books": 2_500_000,
    "code": 12_000_000,
    "dialogues": 2_000_000,
    "calls": 1_500_000,
    "instruct": 4_000_000,
}


def make_tokenizer(data: Path, out: Path, seed: int = 0) -> None:
    """Learn it from a sample of the data directory and write it with its template."""
    backend = tokenizer.learn(sample(data, seed))
    tokenizer.write(backend, TEMPLATE.read_text(encoding="utf-8"), out)


def sample(data: Path, seed: int) -> list[str]:
    rng = random.Random(seed)
    kinds = texts(data)
    return [text for name, size in SHARES.items() for text in take(kinds[name], size, rng)]


def texts(data: Path) -> dict[str, list[str]]:
    stories = [*nano_raw.storybook(data), *nano_raw.tales(data)]
    calls = nano_raw.read_lines(data / "train" / "sgd_calls.jsonl.xz")
    instructions = nano_raw.read_lines(data / "train" / "instruct.jsonl.xz")
    return {
        "sentences": nano_raw.sentences(data),
        "stories": [document.text for document in stories],
        "books": [part for book in nano_raw.books(data) for part in book.text.split("\n\n")],
        "code": [function.code for function in nano_raw.functions(data)],
        "dialogues": [document.text for document in nano_raw.dialogues(data)],
        "calls": [json.dumps(call["call"], separators=(",", ":")) for call in calls],
        "instruct": [f"{record['prompt']}\n\n{record['reply']}" for record in instructions],
    }


def take(found: Sequence[str], size: int, rng: random.Random) -> list[str]:
    """Random ones until `size` characters are reached."""
    taken, total = [], 0
    for text in rng.sample(found, len(found)):
        if total >= size:
            break
        taken.append(text)
        total += len(text)
    return taken
