"""Time the built-in model on this CPU: a 200-token story and one Sudoku, by diffusion and AR.

    python bench/nano.py [--rounds 3] [--threads N] [--dtype auto] [--quant auto] [--model nano]
                         [--seed 0]

Seconds are of wall time, the prompt included, loading not; tokens are those committed. Seeds are
fixed, so every round does the same work: the median counts; the fastest is given too. A busy
machine shows in the spread. The last line is JSON.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import cpu_name, finish, head, name_of

from dgemma.backends.cpu import Int8Table
from dgemma.config import WHOLE_MODES, Mode
from dgemma.engine import Engine, SamplingParams
from dgemma.programs.sudoku.solve import SudokuParams, solve

STORY = "Write a long story about a girl, her dog and a lost ball."
TOKENS = 200
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
TIMES = ("seconds", "fastest")


def story(engine: Engine, mode: Mode, seed: int) -> dict[str, Any]:
    done = engine.generate(STORY, SamplingParams(mode=mode, max_tokens=TOKENS, seed=seed))
    return {
        "tokens": done.tokens,
        "steps": done.steps,
        "blocks": done.blocks,
        "unconverged_blocks": done.unconverged_blocks,
        "finish": done.finish,
    }


def sudoku(engine: Engine, mode: Mode, seed: int) -> dict[str, Any]:
    params = SudokuParams(mode=mode, pinned=mode != "ar", seed=seed)
    (result,) = solve(engine, [PUZZLE], params)
    return {"solved": result.is_right, "converged": result.converged, "steps": result.steps}


def measure(work: Callable[[], dict[str, Any]], engine: Engine, rounds: int) -> dict[str, Any]:
    """Run `work` several times after a warm-up; return its facts with the seconds."""
    times = []
    for _ in range(rounds + 1):
        engine.prefixes.clear()  # each round reads its prompt again
        begin = time.perf_counter()
        facts = work()
        times.append(time.perf_counter() - begin)
    return {"seconds": statistics.median(times[1:]), "fastest": min(times[1:]), **facts}


def describe(result: dict[str, Any]) -> str:
    facts = [f"{k.replace('_', ' ')} {v}" for k, v in result.items() if k not in TIMES]
    return f"{result['seconds']:6.2f} s (fastest {result['fastest']:.2f}): {', '.join(facts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quant", default="auto", help="form of the weights: auto, none or int8")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    begin = time.perf_counter()
    form = {"dtype": arguments.dtype, "quant": arguments.quant}
    engine = Engine.load(arguments.model, device="cpu", **form)
    loading = time.perf_counter() - begin
    dtype = name_of(engine.dtype)
    if isinstance(engine.model.embed_tokens, Int8Table):
        dtype = f"int8 beside {dtype}"
    print(f"{cpu_name()}; {arguments.threads} threads, {dtype}, load {os.getloadavg()[0]:.1f}")
    print(f"  load    {loading:6.2f} s")
    results: dict[str, Any] = {}
    for name, task in (("story", story), ("sudoku", sudoku)):
        for mode in WHOLE_MODES:
            result = measure(partial(task, engine, mode, arguments.seed), engine, arguments.rounds)
            results[f"{name} {mode}"] = result
            print(f"  {name:6} {mode:9} {describe(result)}")
    finish(
        {
            **head("nano"),
            "dtype": dtype,
            "model": arguments.model,
            "seed": arguments.seed,
            "load_seconds": loading,
            "results": results,
        }
    )


if __name__ == "__main__":
    main()
