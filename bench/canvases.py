"""What short canvases, and means without products, are worth to the built-in model's stories.

    python bench/canvases.py [--stories 8] [--threads N] [--dtype auto] [--tokens 200]

Every story is written in each way, one after the other, so that a busy machine disturbs all alike:

    whole   all canvases are whole, as any other reply's, and every soft embedding is a product
    short   canvases are short, and move as the model says, once a first step has seen no end
    sure    the same, and positions that are sure need no product: as it is shipped

Seconds are the processor's, of all threads; ratios are beside `whole`. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from datetime import date

import torch
from nano import hardware
from torch import Tensor

from dgemma.engine import Engine, Options
from dgemma.eval.tasks.stories import prompt
from dgemma.weights.pack import PackedTable

WAYS = ("whole", "short", "sure")


class Multiplied(PackedTable):
    """The token table whose means are all products."""

    def mean(self, p_TV: Tensor) -> Tensor:
        return self.transposed(p_TV.to(self.weight.dtype)) * self.scale


@dataclass(frozen=True)
class Told:
    """One story, told in one way."""

    seconds: float
    steps: int
    tokens: int
    text: str


def tell(engine: Engine, number: int, way: str, tokens: int) -> Told:
    engine.prefixes.clear()
    length = engine.model.config.canvas_length if way == "whole" else None
    options = Options(max_tokens=tokens, seed=number, canvas_length=length)
    begin = time.process_time()
    done = engine.generate(prompt(number), options)
    return Told(time.process_time() - begin, done.steps, done.tokens, done.text)


def compare(engine: Engine, stories: int, tokens: int) -> dict[str, list[Told]]:
    """The same stories in every way; one before them warms up."""
    shipped = engine.model.embed_tokens
    assert isinstance(shipped, PackedTable), "there are no packed products here"
    tables = {"whole": Multiplied(shipped), "short": Multiplied(shipped), "sure": shipped}
    told: dict[str, list[Told]] = {way: [] for way in WAYS}
    for number in range(-1, stories):
        for way in WAYS:
            engine.model.embed_tokens = tables[way]
            one = tell(engine, max(0, number), way, tokens)
            if number >= 0:
                told[way].append(one)
    return told


def describe(way: str, told: list[Told], whole: list[Told]) -> dict[str, float]:
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(told, whole, strict=True))
    mean = {
        name: statistics.mean(getattr(one, name) for one in told)
        for name in ("seconds", "steps", "tokens")
    }
    facts = ", ".join(f"{value:.1f} {name}" for name, value in mean.items())
    print(f"  {way:6} {facts} a story; {ratio:.3f} of the seconds of `whole` (median)")
    return {**mean, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stories", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engine = Engine.load("nano", device="cpu", dtype=arguments.dtype)
    dtype = str(engine.dtype).removeprefix("torch.")
    print(f"{hardware()}; {arguments.threads} threads, {dtype}, load {os.getloadavg()[0]:.1f}")
    told = compare(engine, arguments.stories, arguments.tokens)
    ways = {way: describe(way, told[way], told["whole"]) for way in WAYS}
    same = sum(a.text == b.text for a, b in zip(told["short"], told["sure"], strict=True))
    print(f"  the same text with and without products of sure ones: {same} of {len(told['sure'])}")
    print(
        json.dumps({"bench": "canvases", "date": str(date.today()), "dtype": dtype, "ways": ways})
    )


if __name__ == "__main__":
    main()
