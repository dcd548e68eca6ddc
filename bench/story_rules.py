"""How stories of the built-in model read, and how many steps they take, by one rule or another.

    python bench/story_rules.py [SETTING ...] [--stories 24] [--data ../shared/data] [--threads 1]
                                [--dtype auto] [--model nano]

A setting is what is changed in the model's `long_reply`, such as `entropy_bound=4,reach=0`, and is
then for whole canvases too; `as-is` changes nothing; `ar` is one token at a time at heat 0.8. The
usual ones are `as-is`, a bound of 4 without reach, and `ar`. Measured as by `dgemma eval --tasks
stories`; twelve stories move by a fifth from one set to the next. The last line is JSON.
"""

import argparse
import json
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from nano import hardware

from dgemma.config import LongReply
from dgemma.engine import Done, Engine, Options
from dgemma.errors import UsageError
from dgemma.eval.answers import Question, ask, tune
from dgemma.eval.data import Data
from dgemma.eval.measure import Case
from dgemma.eval.tasks.stories import (
    AR_HEAT,
    MAX_TOKENS,
    Judge,
    distinct,
    doubled,
    perplexity,
    prompt,
)
from dgemma.sampler import released_sampler

ROWS = 8
NAMES = ("entropy_bound", "t_max", "t_min", "max_denoising_steps", "reach")
USUAL = ("as-is", "entropy_bound=4,reach=0", "ar")


def changed(long: LongReply, setting: str) -> LongReply:
    changes = {}
    for change in setting.split(","):
        name, _, value = change.partition("=")
        if name not in NAMES:
            raise UsageError(f"{change!r} changes nothing; use {', '.join(NAMES)}, each with =")
        kind = type(asdict(long)[name])
        changes[name] = kind(value)
    return replace(long, **changes)


def options(engine: Engine, setting: str, seed: int) -> Options:
    given = Options(seed=seed, max_tokens=MAX_TOKENS)
    if setting == "ar":
        return replace(given, mode="ar", heat=AR_HEAT)
    long = engine.model.config.long_reply
    assert long is not None, "the model writes long replies as any other"
    if setting == "as-is":
        return given
    long = changed(long, setting)
    return replace(
        given, sampler=released_sampler(long.applied(engine.generation), reach=long.reach)
    )


def measure(engine: Engine, judge: Judge, setting: str, stories: int) -> dict[str, Any]:
    asked = [Question(prompt(i), options(engine, setting, i)) for i in range(stories)]
    done = [one for one in ask(engine, asked, setting) if isinstance(one, Done)]
    texts, case = [one.text for one in done], Case("stories", "diffusion")
    return {
        "perplexity": perplexity(case, judge.losses(texts), "").value,
        "distinct-2": distinct(case, texts).value,
        "doubled words": doubled(case, texts).value,
        "steps": sum(one.steps for one in done) / len(done),
        "tokens": sum(one.tokens for one in done) / len(done),
        "unsettled canvases": sum(one.unsettled_blocks for one in done),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", default=USUAL)
    parser.add_argument("--stories", type=int, default=24)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--model", default="nano")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    engine = Engine.load(given.model, device="cpu", dtype=given.dtype)
    tune(engine, ROWS)
    judge = Judge(Data(given.data, given.data), engine.device)
    print(f"{hardware()}; {given.stories} stories, {str(engine.dtype).removeprefix('torch.')}")
    found = {}
    for setting in given.settings:
        found[setting] = measure(engine, judge, setting, given.stories)
        facts = ", ".join(f"{name} {value:.3g}" for name, value in found[setting].items())
        print(f"  {setting:28} {facts}", flush=True)
    print(json.dumps({"bench": "story_rules", "date": str(date.today()), "results": found}))


if __name__ == "__main__":
    main()
