"""Denoising steps, commits and single tokens of the released shapes on a GPU, beside their floors.

    python bench/gpu_step.py [--quant none fp8 nvfp4] [--context 512 2048] [--long 32768]
                             [--peer dynamic static] [--layers 30] [--steps 24] [--head 16]
                             [--soft 16] [--out FILE]

Random weights, by default such that tokens spread evenly and every expert of every layer is read:
the worst case, valid for the time of a step and not for the number of steps. Their logits are flat,
so that each step also takes the dense soft embedding; `sure` is the same with logits as sure as
those of a canvas that is about to settle.
Bytes and arithmetic are from `dgemma.roofline`; the floor is what no implementation can beat
at the copy bandwidth measured here and the device's arithmetic. With `--peer`, transformers runs
in turn with ours, on weights drawn alike, in a process of its own (`bench/gpu_beside.py`): both
models have to fit. The last line is JSON.
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_agreement import accepted, agreement
from gpu_beside import WAIT_S, beside
from gpu_measure import copy_bandwidth
from gpu_ours import DEVICE, HEAT, SURE, Bench, Times, built, prefill, routing
from gpu_profile import profile
from shapes import shallow

from dgemma.config import ModelConfig
from dgemma.device import describe_device
from dgemma.graph.steppers import Fast
from dgemma.roofline.devices import BF16, DEVICES, FOUR_BIT, FP8, Device, Format
from dgemma.roofline.predict import STEPS_PER_BLOCK, cost, floor
from dgemma.roofline.table import Pass, ops, passes

FORMATS: dict[str, Format] = {"none": BF16, "fp8": FP8, "nvfp4": FOUR_BIT}
PROMPT = 8192
Facts = dict[str, Any]


class Beside:
    """A precision's passes next to what they have to move and to compute on this device."""

    def __init__(self, config: ModelConfig, kind: Format, here: Device) -> None:
        self.config, self.kind, self.here = config, kind, here

    def __call__(self, run: Pass, times: Times) -> Facts:
        spent = cost(self.config, run, self.kind)
        least = 1000 * floor(ops(self.config, run), self.kind, self.here)
        moved = spent.weight_bytes + spent.moved_bytes
        return {
            **times.facts(),
            "gb": round(moved / 1e9, 2),
            "gb_s": round(moved / times.ms / 1e6),
            "tflop_s": round(spent.flop / times.ms / 1e9, 1),
            "flop_per_byte": round(spent.flop / moved, 1),
            "floor_ms": round(least, 2),
            "of_floor": round(least / times.ms, 3),
        }


def claim(step: Times, commit: Times, token: Times, length: int) -> Facts:
    """Committed tokens a second by steps per block, and how many times those of one by one."""
    alone = 1000 / token.ms
    found: Facts = {"ar_tok_s": round(alone)}
    for steps in STEPS_PER_BLOCK:
        rate = 1000 * length / (steps * step.ms + commit.ms)
        found[f"{steps}_steps_tok_s"], found[f"{steps}_over_ar"] = round(rate), rate / alone
    return found


def show(name: str, facts: Any) -> Any:
    print(f"{name:28} {json.dumps(facts)}", flush=True)
    return facts


def at_context(bench: Bench, context: int, beside: Beside, steps: int) -> Facts:
    """All passes behind a prompt of this length."""
    step, commit, token = passes(beside.config, context)
    found, told, done = bench.steps(steps), bench.tokens(steps), bench.commits(8)
    return {
        "step": beside(step, found),
        "token": beside(token, told),
        "commit": beside(commit, done),
        "commit_and_first": bench.firsts(8).facts(),
        "claim": claim(found, done, told, bench.length),
    }


def measured(quant: Any, arguments: argparse.Namespace, here: Device) -> Facts:
    """All there is to know of one precision."""
    config = shallow(arguments.layers)
    kind = FORMATS[quant]
    if quant != "none":
        kind = replace(kind, head=arguments.head)
    beside_floor = Beside(config, kind, here)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tables = (arguments.head, arguments.soft)
    model = built(config, quant, even=not arguments.uneven, tables=tables)
    begin = time.perf_counter()
    fast, facts = Fast.of(model), {}
    if fast is None:
        return show(f"{quant}", {"failed": "not all kernels passed their check here"})
    for context in arguments.context:
        bench = Bench(model, fast, context)
        if not facts:
            bench.step()
            facts["ready_s"] = round(time.perf_counter() - begin, 2)
        found = at_context(bench, context, beside_floor, arguments.steps)
        facts[str(context)] = found
        for name, value in found.items():
            show(f"{quant} {context} {name}", value)
    facts["head_bits"] = 8 if model.embed_tokens.head.is_8 else 16
    facts["soft_bits"] = 16 if model.embed_tokens.soft is None else 8
    facts |= show(f"{quant} routing", routing(bench))
    bench.heat = (SURE, SURE)
    facts["sure"] = show(f"{quant} sure", bench.steps(arguments.steps).facts())
    memory(facts)
    facts["prefill"] = show(f"{quant} prefill {PROMPT}", prefill(model, PROMPT, PROMPT).facts())
    if arguments.long and quant != "none":
        long = Bench(model, fast, arguments.long)
        facts["long"] = show(f"{quant} {arguments.long} step", long.steps(8).facts())
    if quant == "none" and arguments.peer:
        facts["peer"] = show("transformers", with_peer(bench, arguments))
    if (
        arguments.profile
    ):  # last, and of no use beside times: what is watched is slower from then on
        facts["launches"], table = profile(bench.step)
        print(table, profile(lambda: fast.tell(7, bench.cache))[1], sep="\n\n", flush=True)
    return facts


def with_peer(bench: Bench, arguments: argparse.Namespace) -> Facts:
    """Both behind the same prompt, at the released heat."""
    bench.heat = HEAT
    torch.cuda.empty_cache()  # what is only kept is theirs to use
    where = ["--prompt", str(bench.cache.length), "--layers", str(arguments.layers)]
    where += ["--uneven"] if arguments.uneven else []
    return beside(bench.mean_ms, arguments.peer, where, wait_s=arguments.peer_wait)


def memory(facts: Facts) -> None:
    """The most that was reserved, and what the device holds beside it: context and libraries."""
    free, total = torch.cuda.mem_get_info()
    facts["peak_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    facts["beside_gb"] = round((total - free - torch.cuda.memory_reserved()) / 1e9, 2)
    show("memory", {name: facts[name] for name in ("peak_gb", "beside_gb")})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quant", nargs="+", choices=list(FORMATS), default=["none"])
    parser.add_argument("--context", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--long", type=int, default=0, help="a context for fewer bits alone")
    parser.add_argument("--peer", nargs="+", choices=["dynamic", "static"], default=[])
    parser.add_argument("--peer-wait", type=float, default=WAIT_S, help="seconds to compile")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--head", type=int, choices=[8, 16], default=8, help="for fewer bits alone")
    parser.add_argument("--soft", type=int, choices=[8, 16], default=8, help="with 8-bit heads")
    parser.add_argument("--uneven", action="store_true", help="routing as weights are drawn")
    parser.add_argument("--agreement", action="store_true")
    parser.add_argument("--profile", action="store_true", help="one precision; times are off then")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    arguments = parse()
    copy = copy_bandwidth()
    here = replace(DEVICES["h200"], bandwidth=copy)
    facts: Facts = {
        "bench": "gpu_step",
        "date": str(date.today()),
        "device": describe_device(DEVICE),
        "torch": torch.__version__,
        "layers": arguments.layers,
        "copy_gb_s": round(copy),
    }
    if arguments.agreement:
        facts["agreement"] = show("agreement", agreement(3, 512))
        facts["accepted"] = show("accepted", accepted())
    for quant in arguments.quant:
        facts[quant] = measured(quant, arguments, here)
        gc.collect()
    line = json.dumps(facts)
    if arguments.out is not None:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
