"""Make texts and tasks from tales sampled by `recipes.nano.stories15m`.

    python -m recipes.nano.tales TALES.jsonl.xz... --out out/nano

writes raw/tales.jsonl and raw/tale_tasks.jsonl, which `recipes.nano.data --only tokens` tokenizes
with the rest. Only whole tales are texts or answers to a request for one; tales that were cut are
used where an end does not matter.
"""

import argparse
import json
import lzma
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from recipes.nano import prose_tasks
from recipes.nano.data import write_lines
from recipes.nano.raw import Pair
from recipes.nano.slots import BOYS, GIRLS

HEROINES = "Lily Lucy Mia Sara Anna Sue Amy Jane Daisy Molly Emma Mary Lila Lisa Ella Jenny".split()
HEROES = "Tim Timmy Tom Max Ben Jack Sam Bob Billy Tommy John Joe Jimmy Bobby Fred Mark Leo".split()
KINDS = {**dict.fromkeys(HEROINES, GIRLS), **dict.fromkeys(HEROES, BOYS)}
VAGUE = set("time day thing things way name fun lot one bit moment part".split())


def read(paths: list[Path]) -> Iterator[tuple[str, bool]]:
    """Read tales of more than 200 characters, and whether each is whole."""
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                tale = json.loads(line)
                if len(tale["text"]) > 200:
                    yield tale["text"], tale["whole"]


def rename(text: str, rng: Random) -> str:
    """Give the people of a tale other names: the same few occur in most of them."""
    found = [name for name in dict.fromkeys(re.findall(r"\b[A-Z][a-z]+\b", text)) if name in KINDS]
    chosen = {name: rng.choice([new for new in KINDS[name] if new not in text]) for name in found}
    return re.sub(r"\b[A-Z][a-z]+\b", lambda match: chosen.get(match[0], match[0]), text)


def tasks(whole: list[str], cut: list[str], nouns: set[str], rng: Random) -> Iterator[Pair]:
    """Ask for whole tales; make other tasks of those that were cut."""
    for text in whole:
        pair = prose_tasks.write_about(text, nouns, rng)
        if pair is not None:
            yield pair
    yield from prose_tasks.story_tasks(cut, nouns, rng)
    yield from islice(prose_tasks.corrections(rng.sample(cut, len(cut)), rng, 12), len(cut) // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tales", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("out/nano"))
    parser.add_argument("--rename", action="store_true", help="give people other names")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = Random(options.seed)
    tales = [
        (rename(text, rng) if options.rename else text, whole)
        for text, whole in read(options.tales)
    ]
    whole = [text for text, is_whole in tales if is_whole]
    cut = [text for text, is_whole in tales if not is_whole]
    nouns = set(prose_tasks.find_nouns([s for t in whole[:20_000] for s in t.split(". ")]))
    nouns -= VAGUE
    raw, half = options.out / "raw", len(whole) // 2
    print("tales", write_lines(raw / "tales.jsonl", ({"text": text} for text in whole[:half])))
    pairs = tasks(whole[half:], cut[: len(cut) // 2], nouns, rng)
    print("tale_tasks", write_lines(raw / "tale_tasks.jsonl", pairs))


if __name__ == "__main__":
    main()
