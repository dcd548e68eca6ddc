"""Collect what a machine without the data directory needs for a training run, in one small folder.

    python -m recipes.nano.carry --data ../shared/data --made out/nano --out out/run14
    python -m recipes.nano.carry ... --out out/run15 --share 0.4 --tasks 16000

Needs MADE/raw and MADE/heldout by `recipes.nano.data`, `recipes.nano.made` and `recipes.nano.bank`,
and MADE/tokens by `recipes.nano.pictures.spelling`.
Writes token stores of a sample of each source, the texts that other tasks are made from there,
puzzles, held-out cases, and the weights of stories15M with four significant bits. With `--tasks`
there are also examples of what is made by program, which then need not be made there.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from dgemma.eval.stories import TOKENIZER, WEIGHTS
from dgemma.train.tokens import tokenize_file
from dgemma.weights.hub import NANO_DIRECTORY
from recipes.nano import sudoku
from recipes.nano.data import MAX_PAIR_TOKENS, MAX_TEXT_TOKENS
from recipes.nano.extraction import is_named
from recipes.nano.made import MADE_ELSEWHERE, read_texts
from recipes.nano.reading import is_told

# Examples of each source: as many as fit, in the order of what they are worth.
COUNTS = {
    "code": 60_000,
    "packages": 110_000,
    "code_tasks": 12_000,
    "bugs": 18_000,
    "books": 4_000,
    "sentences": 60_000,
    "stories": 600,
    "dialogues": 6_000,
    "json_calls": 30_000,
    "ni": 12_000,
    "qa": 4_000,
    "instruct": 49_000,
    "story_tasks": 5_000,
    "fix": 9_000,
    "edits": 14_000,
    "fill_doc": 9_000,
    "corrections": 60_000,
    "rewrites": 100_000,
    "colouring": 8_000,
}
PUZZLES = 36_000
NUM_SENTENCES, NUM_PARAGRAPHS = 3_000, 1_200
SPELLED = ("lines", "scenes")  # by `recipes.nano.pictures.spelling`
HELD_OUT = {
    **dict.fromkeys(("questions", "citations", "rewrites", "extraction", "tools", "talk"), 200),
    **{"json_calls": 300, "infill": 450, "problems": 300, "fix_stories": 150, "stories": 100},
    **dict.fromkeys(("sudoku_22-27", "sudoku_28-35", "sudoku_36-45"), 300),
}
SIGNIFICANT_BITS = 3  # of the weights of stories15M, beside the first


def write_tokens(source: Path, out: Path, count: int) -> int:
    """Tokenize a sample of a source's examples."""
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = Random(0).sample(lines, min(count, len(lines)))
    limit = MAX_TEXT_TOKENS if lines[0].startswith('{"text"') else MAX_PAIR_TOKENS
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / source.name
        path.write_text("".join(chosen), encoding="utf-8")
        made = tokenize_file(path, NANO_DIRECTORY, max_tokens=limit, workers=1)
    made.store.save(out / f"{source.stem}.npz")
    return len(made.store)


def write_story_model(data: Path, out: Path) -> None:
    """Write stories15M with rounded weights, which compress to less than half."""
    out.mkdir(parents=True, exist_ok=True)
    bits = np.frombuffer(lzma.decompress((data / WEIGHTS).read_bytes()), np.uint16)
    drop = 10 - SIGNIFICANT_BITS
    rounded = ((bits.astype(np.uint32) + (1 << (drop - 1))) >> drop << drop).astype(np.uint16)
    # The two bytes of a number are alike among themselves.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]
    (out / WEIGHTS).write_bytes(lzma.compress(rounded.tobytes(), filters=filters))
    shutil.copyfile(data / TOKENIZER, out / TOKENIZER)


def write_texts(data: Path, made: Path, out: Path) -> None:
    """Write sentences that tasks can be made from, and paragraphs."""
    train, _ = read_texts(data, made, 0)
    told = [text for text in train.sentences if is_told(text)]
    named = [text for text in train.sentences if is_named(text)]
    texts = {
        "sentences": [*told, *Random(0).sample(named, NUM_SENTENCES)],
        "paragraphs": Random(1).sample(train.paragraphs, NUM_PARAGRAPHS),
    }
    out.write_bytes(lzma.compress(json.dumps(texts).encode()))


def write_held_out(made: Path, out: Path) -> None:
    """Write some of the held-out cases, spread over each file."""
    for name, count in HELD_OUT.items():
        [path] = made.glob(f"{name}.*")
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        chosen = [lines[i * len(lines) // count] for i in range(min(count, len(lines)))]
        (out / path.name).write_text("".join(chosen), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--made", type=Path, default=Path("out/nano"))
    parser.add_argument("--out", type=Path, default=Path("out/run14"))
    parser.add_argument("--share", type=float, default=1.0, help="of the counts of sources")
    parser.add_argument("--tasks", type=int, help="examples of each task that is made by program")
    options = parser.parse_args(arguments)
    out: Path = options.out
    for folder in ("tokens", "puzzles", "heldout"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    counts = {name: round(options.share * count) for name, count in COUNTS.items()}
    if options.tasks is not None:
        counts |= dict.fromkeys(MADE_ELSEWHERE, options.tasks)
    for name, count in counts.items():
        if not (options.made / "raw" / f"{name}.jsonl").is_file():
            print(f"{name}: left out, it was not made", flush=True)
            continue
        written = write_tokens(options.made / "raw" / f"{name}.jsonl", out / "tokens", count)
        print(f"{name}: {written}", flush=True)
    for name in SPELLED:
        shutil.copyfile(options.made / "tokens" / f"{name}.npz", out / "tokens" / f"{name}.npz")
    if not (out / "puzzles" / "sudoku.npz").is_file():
        bank = sudoku.make_bank(np.random.default_rng(1), PUZZLES, held_out=False)
        bank.save(out / "puzzles" / "sudoku.npz")
    write_story_model(options.data / "train", out / "shared" / "train")
    write_texts(options.data, options.made, out / "texts.json.xz")
    write_held_out(options.made / "heldout", out / "heldout")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{size / (1 << 20):.1f} MiB in {out}")


if __name__ == "__main__":
    main()
