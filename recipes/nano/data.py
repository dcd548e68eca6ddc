"""Make nano's training data: JSONL sources, held-out files, tokenizer, token stores.

    python -m recipes.nano.data --data ../shared/data --out out/nano

Writes OUT/raw/NAME.jsonl (training sources), OUT/heldout/*.jsonl (never trained on),
OUT/tokenizer/ and OUT/tokens/NAME.npz. The same data and seed give the same files.
`--functions FILE` adds the source `packages`, functions of more packages by `recipes.nano.pypi`,
and `--written FILE` the source `written`, a teacher's functions by `recipes.nano.teacher.extract`.
The split is made without them, so that the held-out files do not change.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random

from dgemma.text.tokenizer import Tokenizer
from dgemma.train.tokens import tokenize_file
from recipes.nano import code_tasks, prose_tasks, raw
from recipes.nano.raw import Function
from recipes.nano.split import Benchmarks, HeldCode, Split, chunks, clean_functions, make_split
from recipes.nano.tokenizer import make_tokenizer

Record = dict[str, str]

MAX_TEXT_TOKENS = 640  # a longer text is cut
MAX_PAIR_TOKENS = 704  # a longer pair is dropped
NUM_PLAIN_SENTENCES = 480_000  # as plain text; the others go into tasks
MAX_PAIR_CODE = 700  # characters of a function that a pair shows twice
MAX_CODE = 1600  # characters of a function
MAX_PER_PACKAGE = 600  # methods; large packages repeat themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The split and the sentences that sources are made from."""

    data: Path
    seed: int
    split: Split
    plain: list[str]  # sentences for plain text
    tasks: list[str]  # sentences for tasks
    nouns: list[str]
    more_functions: dict[str, list[Function]]  # by source: from files outside the data directory

    def rng(self, name: str) -> Random:
        return Random(f"{self.seed}/{name}")


def gather(data: Path, seed: int, files: Mapping[str, Path]) -> Material:
    """Read and split the data directory, with more functions from a file per source."""
    sentences = raw.sentences(data)
    Random(f"{seed}/sentences").shuffle(sentences)
    split = make_split(data, seed)
    more_functions: dict[str, list[Function]] = {}
    benchmarks, held = Benchmarks(data), HeldCode(split.held_out.functions)
    for name, path in files.items():
        functions = raw.more_functions(path)
        more_functions[name], counts = clean_functions(functions, benchmarks, held)
        dropped = {f"{name} {rule}": count for rule, count in counts.items()}
        split = replace(split, dropped={**split.dropped, **dropped})
    return Material(
        data=data,
        seed=seed,
        split=split,
        plain=sentences[:NUM_PLAIN_SENTENCES],
        tasks=sentences[NUM_PLAIN_SENTENCES:],
        nouns=prose_tasks.find_nouns(sentences),
        more_functions=more_functions,
    )


def text_sources(material: Material) -> Iterator[tuple[str, Iterable[Record]]]:
    """Yield each source of plain text with its records."""
    train, rng = material.split.train, material.rng("sentences")
    groups = prose_tasks.sentence_texts(material.plain, rng, NUM_PLAIN_SENTENCES)
    yield "sentences", ({"text": text} for text in groups)
    yield "stories", ({"text": document.text} for document in train.stories)
    yield "books", ({"text": document.text} for document in train.books)
    yield "dialogues", ({"text": document.text} for document in train.dialogues)
    yield "code", ({"text": function.code} for function in choose_code(material))
    for name, functions in material.more_functions.items():
        order = material.rng(name).sample(functions, len(functions))
        yield name, ({"text": function.code} for function in order)


def choose_code(material: Material) -> list[Function]:
    """Choose short functions, and not too many methods of one package."""
    rng, counts = material.rng("code"), dict[str, int]()
    chosen = []
    for function in rng.sample(material.split.train.functions, len(material.split.train.functions)):
        count = counts[function.group] = counts.get(function.group, 0) + 1
        if len(function.code) <= MAX_CODE and (count <= MAX_PER_PACKAGE or function.top):
            chosen.append(function)
    return chosen


def pair_sources(material: Material) -> Iterator[tuple[str, Iterable[Record]]]:
    """Yield each source of prompts and replies with its records."""
    data, nouns = material.data, set(material.nouns)
    benchmarks, held = Benchmarks(data), HeldCode(material.split.held_out.functions)

    def is_excluded(code: str) -> bool:
        return benchmarks.contain(code) or held.name_in(code)

    yield "instruct", raw.instructions(data, is_excluded)
    texts = [document.text for document in material.split.train.stories]
    yield "qa", raw.questions(data, texts, material.rng("qa"))
    yield "ni", raw.tasks(data, material.rng("ni"))
    calls = material.split.train.calls
    yield "json_calls", raw.json_calls(calls, material.rng("json_calls"))
    yield "story_tasks", story_tasks(material, nouns)
    yield "fix", corrections(material)
    yield "edits", edits(material)
    yield "fill_doc", fill_doc(material)
    yield "code_tasks", code_requests(material)


def story_tasks(material: Material, nouns: set[str]) -> Iterator[Record]:
    rng, train = material.rng("story_tasks"), material.split.train
    texts = prose_tasks.short_texts([*train.stories, *train.books[::4]], rng, 1000)
    yield from prose_tasks.story_tasks(texts, nouns, rng)
    opening = [document for document in train.stories if document.group.startswith("asp/")]
    yield from prose_tasks.story_requests(opening, nouns, rng)
    yield from prose_tasks.sentence_tasks(material.tasks[:30_000], nouns, rng)


def corrections(material: Material) -> Iterator[Record]:
    rng, train = material.rng("fix"), material.split.train
    yield from prose_tasks.corrections(material.tasks[30_000:90_000], rng, 5)
    stories = prose_tasks.short_texts(train.stories, rng, 1100)
    books = prose_tasks.short_texts(train.books[1::4], rng, 1100)
    yield from prose_tasks.corrections([*stories, *books], rng, 12)


def edits(material: Material) -> Iterator[Record]:
    rng, train = material.rng("edits"), material.split.train
    yield from prose_tasks.edits(material.tasks[90_000:125_000], material.nouns, rng)
    texts = prose_tasks.short_texts([*train.stories, *train.books[2::4]], rng, 700)
    yield from prose_tasks.edits(texts, material.nouns, rng)
    yield from code_tasks.edits(short_code(material, rng)[:14_000], rng)


def fill_doc(material: Material) -> Iterator[Record]:
    rng, train = material.rng("fill_doc"), material.split.train
    texts = prose_tasks.short_texts([*train.stories, *train.books[3::4]], rng, 900)
    yield from prose_tasks.fills(texts, rng)
    yield from code_tasks.fills(short_code(material, rng)[:24_000], rng)


def code_requests(material: Material) -> Iterator[Record]:
    rng = material.rng("code_tasks")
    plain = [function for function in short_code(material, rng) if function.top]
    yield from code_tasks.requests(plain[:24_000], rng)


def short_code(material: Material, rng: Random) -> list[Function]:
    """Shuffle the functions short enough for a pair, plain functions before methods."""
    short = [f for f in material.split.train.functions if len(f.code) <= MAX_PAIR_CODE]
    order = rng.sample(short, len(short))
    return sorted(order, key=lambda function: not function.top)


def held_out(material: Material, tokenizer: Tokenizer) -> Iterator[tuple[str, list[Record]]]:
    """Yield each held-out file's name and records."""
    held, rng = material.split.held_out, material.rng("heldout")

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    functions = rng.sample(held.functions, len(held.functions))
    yield "stories", [{"text": d.text, "group": d.group} for d in held.stories]
    short = [f for f in functions if len(f.code) <= MAX_CODE]
    yield "code", [{"text": f.code, "group": f.group} for f in short[:600]]
    yield "dialogue", [{"text": d.text, "group": d.group} for d in held.dialogues[:400]]
    yield "infill", list(code_tasks.held_out_lines(short, count_tokens, rng))
    yield "problems", list(code_tasks.problem_lines(short, count_tokens, material.rng("problems")))
    calls = rng.sample(held.calls, min(800, len(held.calls)))
    yield "json_calls", [{**raw.call_pair(call), "group": call.group} for call in calls]
    texts = [piece for d in held.stories for piece in chunks(d.text, 1000) if len(piece) >= 500]
    pairs = prose_tasks.corrections(rng.sample(texts, len(texts)), rng, 12)
    yield (
        "fix_stories",
        [pair for pair in pairs if not pair["prompt"].endswith(pair["reply"])][:500],
    )


def write_lines(path: Path, records: Iterable[Mapping[str, object]]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
    return len(lines)


def write_all(
    data: Path, out: Path, seed: int, *, files: Mapping[str, Path], train: bool = True
) -> None:
    """Write raw files, if `train`, and held-out files; the tokenizer only where there is none."""
    warnings.simplefilter("ignore", SyntaxWarning)  # escapes in other people's strings
    if not (out / "tokenizer" / "tokenizer.json").is_file():
        say("learning the tokenizer")
        make_tokenizer(data, out / "tokenizer", seed)
    say("reading and splitting")
    material = gather(data, seed, files)
    for rule, count in material.split.dropped.items():
        say(f"left out of training: {count} {rule}")
    sources = chain(text_sources(material), pair_sources(material)) if train else ()
    for name, records in sources:
        say(f"raw {name}: {write_lines(out / 'raw' / f'{name}.jsonl', records)}")
    tokenizer = Tokenizer.load(out / "tokenizer")
    for name, held in held_out(material, tokenizer):
        say(f"held out {name}: {write_lines(out / 'heldout' / f'{name}.jsonl', held)}")


def tokenize_all(out: Path, workers: int) -> None:
    """Tokenize every raw source, and print a table."""
    print(f"{'source':12} {'examples':>9} {'tokens':>11} {'mean':>5} {'dropped':>7} {'bytes':>11}")
    total = 0
    for path in sorted((out / "raw").glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            limit = MAX_TEXT_TOKENS if file.readline().startswith('{"text"') else MAX_PAIR_TOKENS
        tokenized = tokenize_file(path, out / "tokenizer", max_tokens=limit, workers=workers)
        target = out / "tokens" / f"{path.stem}.npz"
        tokenized.store.save(target)
        size, count = target.stat().st_size, len(tokenized.store)
        tokens = len(tokenized.store.tokens_N)
        total += size
        print(
            f"{path.stem:12} {count:9,} {tokens:11,} {tokens // max(1, count):5} "
            f"{tokenized.dropped:7,} {size:11,}",
            flush=True,
        )
    print(f"{'total':12} {total:56,}")


START = time.monotonic()


def say(line: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {line}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("out/nano"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--functions", type=Path, help="functions of more packages, as JSONL")
    parser.add_argument("--written", type=Path, help="a teacher's functions, as JSONL")
    parser.add_argument("--only", choices=["raw", "heldout", "tokens"], help="one step")
    options = parser.parse_args()
    sources = {"packages": options.functions, "written": options.written}
    files = {name: path for name, path in sources.items() if path is not None}
    if files and options.only in ("heldout", "tokens"):
        parser.error(
            "--functions and --written are for raw files, which "
            f"--only {options.only} does not write"
        )
    if options.only != "tokens":
        train = options.only != "heldout"
        write_all(options.data, options.out, options.seed, files=files, train=train)
    if options.only in (None, "tokens"):
        tokenize_all(options.out, options.workers)


if __name__ == "__main__":
    main()
