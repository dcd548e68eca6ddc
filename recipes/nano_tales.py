"""Tales drawn from stories15M (see dgemma.eval.stories15m) as texts and as tasks.

    python -m recipes.nano_tales TALES.jsonl.xz... --out out/nano

writes raw/tales.jsonl and raw/tale_tasks.jsonl, which `recipes.nano_data --only tokens` tokenizes
with the rest. Only whole tales are texts or answers to a wish for one; tales that were cut serve
where an end does not matter.
"""

import argparse
import json
import lzma
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from recipes import nano_prose
from recipes.nano_data import write_lines

Pair = dict[str, str]
VAGUE = set("time day thing things way name fun lot one bit moment part".split())


def read(paths: list[Path]) -> Iterator[tuple[str, bool]]:
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                tale = json.loads(line)
                if len(tale["text"]) > 200:
                    yield tale["text"], tale["whole"]


def tasks(whole: list[str], cut: list[str], nouns: set[str], rng: Random) -> Iterator[Pair]:
    for text in whole:
        made = nano_prose.write_about(text, nouns, rng)
        if made is not None:
            yield made
    yield from nano_prose.story_tasks(cut, nouns, rng)
    yield from islice(nano_prose.fix(rng.sample(cut, len(cut)), rng, 12), len(cut) // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tales", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("out/nano"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = Random(given.seed)
    found = list(read(given.tales))
    whole = [text for text, is_whole in found if is_whole]
    cut = [text for text, is_whole in found if not is_whole]
    nouns = set(nano_prose.find_nouns([s for t in whole[:20_000] for s in t.split(". ")]))
    nouns -= VAGUE
    raw, half = given.out / "raw", len(whole) // 2
    print("tales", write_lines(raw / "tales.jsonl", ({"text": text} for text in whole[:half])))
    made = tasks(whole[half:], cut[: len(cut) // 2], nouns, rng)
    print("tale_tasks", write_lines(raw / "tale_tasks.jsonl", made))


if __name__ == "__main__":
    main()
