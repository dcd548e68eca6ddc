"""Everything `nano` learns from: raw files to JSONL, held-out files, tokenizer, token stores.

    python -m recipes.nano_data --data ../shared/data --out out/nano

Writes OUT/raw/NAME.jsonl (training sources), OUT/heldout/*.jsonl (never trained on),
OUT/tokenizer/ and OUT/tokens/NAME.npz. The same data and seed give the same files.
`--functions FILE` adds the source `code2`, functions of further packages that `recipes.nano_pypi`
wrote, and `--written FILE` the source `written`, a teacher's functions that `recipes.teacher.take`
wrote; the split is chosen without them, so that what is held out stays what it was.
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
from dgemma.train.sources import tokenize_file
from recipes import nano_code, nano_given, nano_prose, nano_raw
from recipes.nano_raw import Function
from recipes.nano_split import (
    Benchmarks,
    HeldCode,
    Split,
    chunks,
    clean_functions,
    make_split,
)
from recipes.nano_tokenizer import make_tokenizer

Record = dict[str, str]

TEXT_TOKENS = 640  # a text is cut into pieces of this many
PAIR_TOKENS = 704  # a longer pair is left out
SENTENCES = 480_000  # as plain text; other sentences go into tasks
SHORT_CODE = 700  # characters of a function that a pair shows twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What the sources are made from."""

    data: Path
    seed: int
    split: Split
    plain: list[str]  # sentences for plain text
    tasks: list[str]  # sentences for tasks
    nouns: list[str]
    further: dict[str, list[Function]]  # by source: what the data directory does not hold

    def rng(self, name: str) -> Random:
        return Random(f"{self.seed}/{name}")


def gather(data: Path, seed: int, files: Mapping[str, Path]) -> Material:
    """All there is, with further functions out of a file per source."""
    sentences = nano_raw.sentences(data)
    Random(f"{seed}/sentences").shuffle(sentences)
    split = make_split(data, seed)
    further: dict[str, list[Function]] = {}
    benchmarks, held = Benchmarks(data), HeldCode(split.held_out.functions)
    for name, path in files.items():
        found = nano_raw.further_functions(path)
        further[name], lost = clean_functions(found, benchmarks, held)
        dropped = {f"{name} {rule}": count for rule, count in lost.items()}
        split = replace(split, dropped={**split.dropped, **dropped})
    return Material(
        data=data,
        seed=seed,
        split=split,
        plain=sentences[:SENTENCES],
        tasks=sentences[SENTENCES:],
        nouns=nano_prose.find_nouns(sentences),
        further=further,
    )


def text_sources(material: Material) -> Iterator[tuple[str, Iterable[Record]]]:
    train, rng = material.split.train, material.rng("sentences")
    groups = nano_prose.sentence_texts(material.plain, rng, SENTENCES)
    yield "sentences", ({"text": text} for text in groups)
    yield "stories", ({"text": document.text} for document in train.stories)
    yield "books", ({"text": document.text} for document in train.books)
    yield "dialogues", ({"text": document.text} for document in train.dialogues)
    yield "code", ({"text": function.code} for function in chosen_code(material))
    for name, functions in material.further.items():
        order = material.rng(name).sample(functions, len(functions))
        yield name, ({"text": function.code} for function in order)


def chosen_code(material: Material) -> list[Function]:
    """Short functions; of large packages only so many, since they repeat themselves."""
    rng, counts = material.rng("code"), dict[str, int]()
    chosen = []
    for function in rng.sample(material.split.train.functions, len(material.split.train.functions)):
        count = counts[function.group] = counts.get(function.group, 0) + 1
        if len(function.code) <= 1600 and (count <= 600 or function.top):
            chosen.append(function)
    return chosen


def pair_sources(material: Material) -> Iterator[tuple[str, Iterable[Record]]]:
    data, nouns = material.data, set(material.nouns)
    held = HeldCode(material.split.held_out.functions)
    yield "instruct", nano_given.instruct(data, Benchmarks(data), held)
    texts = [document.text for document in material.split.train.stories]
    yield "qa", nano_given.questions(data, texts, material.rng("qa"))
    yield "ni", nano_given.tasks(data, material.rng("ni"))
    calls = material.split.train.calls
    yield "json_calls", nano_given.json_calls(calls, material.rng("json_calls"))
    yield "story_tasks", story_tasks(material, nouns)
    yield "fix", fix(material)
    yield "edits", edits(material)
    yield "fill_doc", fill_doc(material)
    yield "code_tasks", code_tasks(material)


def story_tasks(material: Material, nouns: set[str]) -> Iterator[Record]:
    rng, train = material.rng("story_tasks"), material.split.train
    texts = nano_prose.short_texts([*train.stories, *train.books[::4]], rng, 1000)
    yield from nano_prose.story_tasks(texts, nouns, rng)
    opening = [document for document in train.stories if document.group.startswith("asp/")]
    yield from nano_prose.story_requests(opening, nouns, rng)
    yield from nano_prose.sentence_tasks(material.tasks[:30_000], nouns, rng)


def fix(material: Material) -> Iterator[Record]:
    rng, train = material.rng("fix"), material.split.train
    yield from nano_prose.fix(material.tasks[30_000:90_000], rng, 5)
    stories = nano_prose.short_texts(train.stories, rng, 1100)
    books = nano_prose.short_texts(train.books[1::4], rng, 1100)
    yield from nano_prose.fix([*stories, *books], rng, 12)


def edits(material: Material) -> Iterator[Record]:
    rng, train = material.rng("edits"), material.split.train
    yield from nano_prose.edits(material.tasks[90_000:125_000], material.nouns, rng)
    texts = nano_prose.short_texts([*train.stories, *train.books[2::4]], rng, 700)
    yield from nano_prose.edits(texts, material.nouns, rng)
    yield from nano_code.code_edits(short_code(material, rng)[:14_000], rng)


def fill_doc(material: Material) -> Iterator[Record]:
    rng, train = material.rng("fill_doc"), material.split.train
    texts = nano_prose.short_texts([*train.stories, *train.books[3::4]], rng, 900)
    yield from nano_prose.fill_texts(texts, rng)
    yield from nano_code.fill_code(short_code(material, rng)[:24_000], rng)


def code_tasks(material: Material) -> Iterator[Record]:
    rng = material.rng("code_tasks")
    plain = [function for function in short_code(material, rng) if function.top]
    yield from nano_code.code_tasks(plain[:24_000], rng)


def short_code(material: Material, rng: Random) -> list[Function]:
    """Plain functions first: a method's meaning lies outside it."""
    found = [f for f in material.split.train.functions if len(f.code) <= SHORT_CODE]
    order = rng.sample(found, len(found))
    return sorted(order, key=lambda function: not function.top)


def held_out(material: Material, tokenizer: Tokenizer) -> Iterator[tuple[str, list[Record]]]:
    held, rng = material.split.held_out, material.rng("heldout")

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    functions = rng.sample(held.functions, len(held.functions))
    yield "stories", [{"text": d.text, "group": d.group} for d in held.stories]
    short = [f for f in functions if len(f.code) <= 1600]
    yield "code", [{"text": f.code, "group": f.group} for f in short[:600]]
    yield "dialogue", [{"text": d.text, "group": d.group} for d in held.dialogues[:400]]
    yield "infill", list(nano_code.held_out_lines(short, count_tokens, rng))
    yield "problems", list(nano_code.problem_lines(short, count_tokens, material.rng("problems")))
    calls = rng.sample(held.calls, min(800, len(held.calls)))
    yield "json_calls", [{**nano_given.call_pair(call), "group": call.group} for call in calls]
    texts = [piece for d in held.stories for piece in chunks(d.text, 1000) if len(piece) >= 500]
    pairs = nano_prose.fix(rng.sample(texts, len(texts)), rng, 12)
    yield (
        "fix_stories",
        [made for made in pairs if not made["prompt"].endswith(made["reply"])][:500],
    )


def write_lines(path: Path, records: Iterable[Record]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)
    return len(lines)


def write_all(
    data: Path, out: Path, seed: int, *, files: Mapping[str, Path], train: bool = True
) -> None:
    """Raw files, if wanted, and held-out files; the tokenizer only where there is none."""
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
    """Token stores of every raw source, and a table of them."""
    print(f"{'source':12} {'examples':>9} {'tokens':>11} {'mean':>5} {'dropped':>7} {'bytes':>11}")
    total = 0
    for path in sorted((out / "raw").glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            limit = TEXT_TOKENS if file.readline().startswith('{"text"') else PAIR_TOKENS
        made = tokenize_file(path, out / "tokenizer", max_tokens=limit, workers=workers)
        target = out / "tokens" / f"{path.stem}.npz"
        made.store.save(target)
        size, count = target.stat().st_size, len(made.store)
        tokens = len(made.store.tokens_N)
        total += size
        print(
            f"{path.stem:12} {count:9,} {tokens:11,} {tokens // max(1, count):5} "
            f"{made.dropped:7,} {size:11,}",
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
    parser.add_argument("--functions", type=Path, help="further functions, as JSONL")
    parser.add_argument("--written", type=Path, help="a teacher's functions, as JSONL")
    parser.add_argument("--only", choices=["raw", "heldout", "tokens"], help="one step")
    choices = parser.parse_args()
    given = {"code2": choices.functions, "written": choices.written}
    files = {name: path for name, path in given.items() if path is not None}
    if files and choices.only in ("heldout", "tokens"):
        options = "--functions and --written are"
        parser.error(f"{options} for raw files, which --only {choices.only} does not write")
    if choices.only != "tokens":
        train = choices.only != "heldout"
        write_all(choices.data, choices.out, choices.seed, files=files, train=train)
    if choices.only in (None, "tokens"):
        tokenize_all(choices.out, choices.workers)


if __name__ == "__main__":
    main()
