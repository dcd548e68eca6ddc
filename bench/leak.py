"""Check that memory stays flat over many requests, some cancelled at random points.

    python bench/leak.py MODEL_DIRECTORY [--requests 2000]

`python -m examples.tiny_model DIRECTORY` makes a model for it. Prints the resident memory every
tenth of the way; fails if the second half grows by more than 5 %. The last line is JSON.
"""

import argparse
import gc
import random
import sys

from common import finish, head, resident_mib

from dgemma import Engine, SamplingParams
from dgemma.engine import MODES

TOLERANCE = 0.05


def one_request(engine: Engine, rng: random.Random) -> bool:
    """Run a random request, perhaps only a part of it; returns True if it was cancelled."""
    words = " ".join(
        rng.choice(["noise", "canvas", "words", "settle"]) for _ in range(rng.randint(1, 30))
    )
    mode = rng.choice(MODES)
    params = SamplingParams(
        seed=rng.randrange(1 << 30),
        mode=mode,
        max_tokens=rng.randint(1, 100),
        drafts=mode != "ar" and rng.random() < 0.5,
    )
    events_left = rng.randint(0, 20) if rng.random() < 0.5 else -1
    stream = engine.stream(words, params)
    for _ in stream:
        if events_left == 0:
            stream.close()
            return True
        events_left -= 1
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    # Prefixes of finished requests are kept on purpose: a small bound is reached early.
    engine = Engine.load(arguments.model, device="cpu", dtype="float32", prefix_bytes=16 << 20)
    rng = random.Random(0)
    levels, cancelled = [], 0
    for number in range(1, arguments.requests + 1):
        cancelled += one_request(engine, rng)
        if number % (arguments.requests // 10) == 0:
            gc.collect()
            levels.append(resident_mib())
            print(
                f"{number:6} requests, {cancelled:5} cancelled, {levels[-1]:7.1f} MiB", flush=True
            )
    growth = max(levels[5:]) / max(levels[:5]) - 1
    print(
        f"second half against first: {growth:+.1%}; {len(engine.scheduler.requests)} requests left"
    )
    facts = {"requests": arguments.requests, "cancelled": cancelled, "mib": levels}
    finish({**head("leak"), **facts, "growth": growth})
    if growth > TOLERANCE or engine.scheduler.requests:
        sys.exit(1)


if __name__ == "__main__":
    main()
