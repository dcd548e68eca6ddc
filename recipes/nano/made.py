"""Write the tasks that are made by program: what a person asks a small model for.

    python -m recipes.nano.made --data ../shared/data --out out/nano

Needs OUT/raw and OUT/heldout of `recipes.nano.data`. Writes OUT/raw/NAME.jsonl for training and
OUT/heldout/NAME.jsonl for `dgemma eval`, from other names, words, phrasings and texts. The same
data and seed give the same files. With `--texts`, a file by `recipes.nano.carry`, neither data nor
OUT/raw are needed, and the examples are tokenized at once.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dgemma.train.tokens import tokenize_file
from dgemma.weights.hub import NANO_DIRECTORY
from recipes.nano import raw
from recipes.nano.code_drills import bug_pairs, drill_pairs
from recipes.nano.data import MAX_PAIR_TOKENS, write_lines
from recipes.nano.extraction import extraction_pairs, markdown_pairs, tool_chats
from recipes.nano.letters import letter_pairs
from recipes.nano.raw import Function, read_lines
from recipes.nano.reading import cited_pairs, question_pairs, summary_pairs
from recipes.nano.rewriting import correction_pairs, rewrite_pairs
from recipes.nano.slots import Draw
from recipes.nano.split import chunks
from recipes.nano.talk import chats

FIRST_SENTENCE = 605_000  # in the shuffled order; `recipes.nano.data` uses those before
NUM_HELD_OUT_SENTENCES = 20_000  # the last ones
NUM_HELD_OUT = 400  # examples of each task
MAX_BUG_CODE = 500  # characters
COUNTS = {
    "talk": 120_000,
    "questions": 90_000,
    "citations": 50_000,
    "summaries": 12_000,
    "rewrites": 120_000,
    "corrections": 70_000,
    "extraction": 80_000,
    "markdown": 15_000,
    "tools": 20_000,
    "drills": 12_000,
    "bugs": 25_000,
    "letters": 20_000,
}

# Those that a machine without the data directory can make from a few texts.
MADE_ELSEWHERE = (
    "talk",
    "questions",
    "citations",
    "summaries",
    "extraction",
    "markdown",
    "tools",
    "drills",
    "letters",
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of one side of the split."""

    sentences: list[str]
    paragraphs: list[str]
    functions: list[Function]


Records = Iterable[Mapping[str, object]]
Maker = Callable[[Draw, Texts, int], Records]
MAKERS: Mapping[str, Maker] = {
    "talk": lambda draw, _, count: chats(draw, count),
    "questions": lambda draw, texts, count: question_pairs(draw, texts.sentences, count),
    "citations": lambda draw, _, count: cited_pairs(draw, count),
    "summaries": lambda draw, texts, count: summary_pairs(draw, texts.paragraphs, count),
    "rewrites": lambda draw, texts, count: rewrite_pairs(draw, texts.sentences, count),
    "corrections": lambda draw, texts, count: correction_pairs(draw, texts.sentences, count),
    "extraction": lambda draw, texts, count: extraction_pairs(draw, texts.sentences, count),
    "markdown": lambda draw, _, count: markdown_pairs(draw, count),
    "tools": lambda draw, _, count: tool_chats(draw, count),
    "drills": lambda draw, _, count: drill_pairs(draw, count),
    "letters": lambda draw, _, count: letter_pairs(draw, count),
    "bugs": lambda draw, texts, count: bug_pairs(draw, texts.functions, count),
}
# Held-out files: those that `dgemma eval` has a task for.
HELD_OUT = ("talk", "questions", "citations", "rewrites", "extraction", "tools")


def read_texts(data: Path, out: Path, seed: int) -> tuple[Texts, Texts]:
    """Read the texts for training, and those held out."""
    sentences = raw.sentences(data)
    Random(f"{seed}/sentences").shuffle(sentences)  # as `recipes.nano.data` does
    free, held = (
        sentences[FIRST_SENTENCE:-NUM_HELD_OUT_SENTENCES],
        sentences[-NUM_HELD_OUT_SENTENCES:],
    )
    stories = [record["text"] for record in read_lines(out / "raw" / "stories.jsonl")]
    code = [record["text"] for record in read_lines(out / "raw" / "code.jsonl")]
    functions = [Function(text, "", "", True) for text in code if len(text) <= MAX_BUG_CODE]
    held_stories = [record["text"] for record in read_lines(out / "heldout" / "stories.jsonl")]
    return Texts(free, paragraphs(stories), functions), Texts(held, paragraphs(held_stories), [])


def carried_texts(path: Path) -> Texts:
    """Read the texts that `recipes.nano.carry` wrote."""
    texts = json.loads(lzma.decompress(path.read_bytes()))
    return Texts(texts["sentences"], texts["paragraphs"], [])


def paragraphs(texts: Iterable[str]) -> list[str]:
    return [piece for text in texts for piece in chunks(text, 500) if len(piece) > 150]


def unique(records: Records) -> Iterator[Mapping[str, object]]:
    """Drop repeated examples."""
    seen = set[str]()
    for record in records:
        key = json.dumps(record, sort_keys=True)
        if key not in seen:
            seen.add(key)
            yield record


def make_training(name: str, texts: Texts, options: argparse.Namespace) -> Path:
    """Write the training examples of one task."""
    draw = Draw(Random(f"{options.seed}/{name}"))
    path: Path = options.out / "raw" / f"{name}.jsonl"
    print(name, write_lines(path, unique(MAKERS[name](draw, texts, COUNTS[name]))), flush=True)
    return path


def make_held_out(name: str, texts: Texts, options: argparse.Namespace) -> None:
    draw = Draw(Random(f"{options.seed}/{name}/heldout"), held_out=True)
    records = unique(MAKERS[name](draw, texts, NUM_HELD_OUT))
    write_lines(options.out / "heldout" / f"{name}.jsonl", records)


def tokenize(path: Path, out: Path, tokenizer: Path, workers: int) -> None:
    made = tokenize_file(path, tokenizer, max_tokens=MAX_PAIR_TOKENS, workers=workers)
    made.store.save(out / "tokens" / f"{path.stem}.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("out/nano"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--texts", type=Path, help="instead of --data; tokenizes too")
    parser.add_argument("--workers", type=int, default=2, help="of the tokenizer")
    options = parser.parse_args()
    if options.texts is not None:
        carried = carried_texts(options.texts)
        for name in options.only:
            path = make_training(name, carried, options)
            tokenize(path, options.out, NANO_DIRECTORY, options.workers)
        return
    train, held = read_texts(options.data, options.out, options.seed)
    for name in options.only:
        make_training(name, train, options)
        if name in HELD_OUT:
            make_held_out(name, held, options)


if __name__ == "__main__":
    main()
