"""A dataset through several engines: `python -m examples.ray_data IN.jsonl OUT 2`.

Each row has a `prompt`; an actor per engine answers blocks of rows. Needs `pip install ray[data]`.
With `num_gpus=1` every engine has a card of its own. On a cluster leave out `num_cpus`, which lets
more actors and readers share this machine's cores than Ray would. Not run by the tests.
"""

import hashlib
import os
import sys
from typing import Any


class Answer:
    """One engine, in an actor of its own."""

    def __init__(self, model: str = "nano") -> None:
        from dgemma import Engine

        self.engine = Engine.load(model)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        from dgemma import SamplingParams

        prompts = [str(prompt) for prompt in rows["prompt"]]
        params = [SamplingParams(seed=seed_of(prompt), max_tokens=64) for prompt in prompts]
        done = self.engine.generate_all(prompts, params)
        return {**rows, "text": [answer.text for answer in done]}


def seed_of(prompt: str) -> int:
    """Seed of a row: the same wherever and in whatever order it is answered."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest())


def main() -> None:
    import ray

    source, target, engines = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=engines + 2, include_dashboard=False)
    dataset = ray.data.read_json(source, lines=True)
    answered = dataset.map_batches(Answer, concurrency=engines, batch_size=16, num_gpus=0)
    answered.write_json(target)


if __name__ == "__main__":
    main()
