"""A denoising step, a commit and an AR token through the backend, by form, context and batch.

    python bench/step.py [--quant none fp8 nvfp4] [--context 512 2048] [--batch 1 4 16]
                         [--shapes released|example|tiny] [--layers 30] [--device auto]
                         [--steps 24] [--prefill 8192] [--head 16] [--soft 16]
                         [--peer dynamic static] [--profile] [--out FILE]

Random weights, by default such that tokens spread evenly and every expert of every layer is read:
the worst case, valid for the time of a step and not for the number of steps. The caches hold random
keys. Times are medians of passes with the device drained after each. Random logits are flat, so
that each step takes the dense soft embedding; `confident` is the same at a temperature at which the
logits are as sharp as those of a canvas about to converge. Tokens per second follow from the times
for a stated number of steps per block. `floor_ms` is the roofline (`dgemma.roofline`) at the copy
bandwidth measured here, on GPUs it knows, for a batch of one.

On a CPU use `--shapes example`, a model of 40M parameters. `--peer` runs transformers in turn with
ours (`_step_peer.py`); both models have to fit. The last line is JSON.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from _step_peer import CACHES, WARM_S, compare
from common import (
    MAX_STEPS,
    SHAPES,
    Facts,
    Times,
    build,
    copy_bandwidth,
    filled_cache,
    finish,
    gpu_memory,
    head,
    name_of,
    new_state,
    pack_for_cpu,
    random_tokens,
    reset_memory,
    shape,
    show,
    top_kernels,
    wait,
    wall,
)

from dgemma.backends.base import Backend, ForwardInput, TokenDraw
from dgemma.backends.choose import choose_backend
from dgemma.device import choose_device, choose_dtype
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.roofline import (
    BF16,
    DEVICES,
    FOUR_BIT,
    FP8,
    STEPS_PER_BLOCK,
    Device,
    Pass,
    WeightFormat,
    cost,
    floor,
    ops,
    passes,
)

FORMATS: dict[str, WeightFormat] = {"none": BF16, "fp8": FP8, "nvfp4": FOUR_BIT}
PREFILL_CHUNK = 4096  # tokens of a prompt in one pass
QUANTS = ("none", "int8", "fp8", "nvfp4")
CONFIDENT = (0.1, 0.1)  # temperatures that make random logits sharp
COMMITS, ROW_STEPS = 8, 16


class Requests:
    """Sequences of one length that step, commit or decode together."""

    def __init__(self, backend: Backend, context: int, batch: int) -> None:
        self.backend, self.model = backend, backend.model
        self.device = self.model.embed_tokens.weight.device
        self.length, self.context = self.model.config.canvas_length, context
        self.block = tuple(range(3, 3 + self.length))
        # A commit with a canvas, and the next canvas of a decode.
        self.caches = [filled_cache(self.model, context, 3 * self.length) for _ in range(batch)]
        self.temperatures: tuple[float, float] | None = None
        self.new_states()

    def new_states(self) -> None:
        self.states = [
            new_state(self.model, seed=seed, temperatures=self.temperatures)
            for seed in range(len(self.caches))
        ]

    def step(self) -> None:
        if self.states[0].canvas.num_steps >= MAX_STEPS - 1:
            self.new_states()
        pairs = zip(self.caches, self.states, strict=True)
        outputs = self.backend.run(
            [ForwardInput(cache=cache, state=state) for cache, state in pairs]
        )
        self.states = [output.state for output in outputs if output.state is not None]

    def steps(self, count: int) -> Times:
        self.new_states()
        return wall(self.step, count, self.device, warm=4)

    def mean_step_ms(self) -> float:
        """Milliseconds a step of several in a row, as a peer's are timed."""
        self.new_states()
        for _ in range(4):
            self.step()
        wait(self.device)
        begin = time.perf_counter()
        for _ in range(ROW_STEPS):
            self.step()
        wait(self.device)
        return 1000 * (time.perf_counter() - begin) / ROW_STEPS

    def commits(self, *, with_step: bool = False) -> Times:
        """Commits of a block each, alone or in one pass with the next canvas's first step."""
        self.new_states()

        def work() -> None:
            states = self.states if with_step else [None] * len(self.caches)
            pairs = zip(self.caches, states, strict=True)
            self.backend.run(
                [
                    ForwardInput(cache=cache, tokens=self.block, state=state)
                    for cache, state in pairs
                ]
            )
            self.truncate()

        return wall(work, COMMITS, self.device)

    def token(self) -> None:
        draw = TokenDraw()
        self.backend.run([ForwardInput(cache=c, tokens=(7,), draw=draw) for c in self.caches])

    def tokens(self, count: int) -> Times:
        count = min(count, self.length)
        times = wall(self.token, count, self.device, warm=4)
        self.truncate()
        return times

    def truncate(self) -> None:
        for cache in self.caches:
            cache.truncate(self.context)


class Roofline:
    """Compares a pass's time with the bytes and FLOPs it needs on this device."""

    def __init__(self, quant: str, model: Gemma, device: Device | None) -> None:
        kind = FORMATS.get(quant)
        if kind is not None and quant != "none":
            kind = replace(
                kind, head=16 if type(model.embed_tokens).__name__ == "TokenTable" else 8
            )
        self.config, self.kind, self.device = model.config, kind, device

    def facts(self, run: Pass, times: Times) -> Facts:
        if self.kind is None or self.device is None:
            return times.facts()
        spent = cost(self.config, run, self.kind)
        least = 1000 * floor(ops(self.config, run), self.kind, self.device)
        moved = spent.weight_bytes + spent.activation_bytes
        return {
            **times.facts(),
            "gb": round(moved / 1e9, 2),
            "gb_s": round(moved / times.ms / 1e6),
            "tflop_s": round(spent.flop / times.ms / 1e9, 1),
            "floor_ms": round(least, 2),
            "of_floor": round(least / times.ms, 3),
        }


def this_device(device: torch.device) -> tuple[Device | None, float]:
    """Return the roofline's entry for this GPU, and its measured copy bandwidth in GB/s."""
    bandwidth = copy_bandwidth(device)
    if device.type != "cuda":
        return None, bandwidth
    name = torch.cuda.get_device_name(device)
    known = [one for key, one in DEVICES.items() if key in name.lower().replace(" ", "")]
    return (replace(known[0], bandwidth=bandwidth) if known else None), bandwidth


def rates(step: Times, commit: Times, token: Times, requests: Requests) -> Facts:
    """Committed tokens per second, by steps per block, and in multiples of AR's."""
    batch = len(requests.caches)
    ar = 1000 * batch / token.ms
    found: Facts = {"ar_tok_s": round(ar, 1)}
    for steps in STEPS_PER_BLOCK:
        rate = 1000 * batch * requests.length / (steps * step.ms + commit.ms)
        found[f"{steps}_steps_tok_s"] = round(rate, 1)
        found[f"{steps}_steps_over_ar"] = round(rate / ar, 2)
    return found


def measure(requests: Requests, roofline: Roofline, steps: int) -> Facts:
    """Measure every pass of one batch."""
    times = requests.steps(steps), requests.commits(), requests.tokens(steps)
    alone = len(requests.caches) == 1
    runs = passes(requests.model.config, requests.context)
    facts: Facts = {
        run.name: roofline.facts(run, found) if alone else found.facts()
        for run, found in zip(runs, times, strict=True)
    }
    facts["commit_and_step"] = requests.commits(with_step=True).facts()
    facts["rates"] = rates(*times, requests)
    facts["cache_mib"] = round(requests.caches[0].num_bytes / 2**20, 1)
    return facts


def experts_hit(model: Gemma, context: int) -> Facts:
    """Over all layers, by definition: fraction of experts read, and the most tokens of one."""
    found: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith(".router")]
    hooks = [r.register_forward_hook(lambda _, __, out: found.append(out[0])) for r in routers]
    cache = filled_cache(model, context, model.config.canvas_length)
    batch = ForwardBatch([Segment(cache, model.config.canvas_length, commit=False)])
    model.denoise(new_state(model).canvas.tokens_L, None, batch)
    for hook in hooks:
        hook.remove()
    count = model.config.num_experts
    tokens = torch.stack([torch.bincount(ids.flatten(), minlength=count) for ids in found])
    return {"experts_hit": (tokens > 0).float().mean().item(), "most_rows": float(tokens.max())}


def prefill_times(backend: Backend, count: int) -> Times:
    """Times of a prompt committed to an empty cache."""
    model = backend.model
    weight, chunk = model.embed_tokens.weight, min(count, PREFILL_CHUNK)
    tokens = tuple(random_tokens(model.config.vocab_size, count, weight.device).tolist())
    capacity = Capacity(tokens=count, segment=chunk)

    def work() -> None:
        cache = KVCache(model.config, capacity, weight.dtype, weight.device)
        for begin in range(0, count, chunk):
            backend.run([ForwardInput(cache=cache, tokens=tokens[begin : begin + chunk])])

    return wall(work, 3, weight.device, warm=2)


def of_form(
    quant: str, arguments: argparse.Namespace, device: torch.device, known: Device | None
) -> Facts:
    """Measure one form of weights."""
    reset_memory(device)
    config = shape(arguments.shapes, arguments.layers)
    dtype = choose_dtype(arguments.dtype, device)
    if quant == "int8" and arguments.dtype == "auto":
        dtype = torch.float32  # as the engine loads it
    tables, even = (arguments.head, arguments.soft), not arguments.uneven
    model = build(config, quant, device=device, dtype=dtype, tables=tables, even=even)  # type: ignore[arg-type]
    if quant == "none":
        pack_for_cpu(model)
    begin = time.perf_counter()
    backend = choose_backend(model)
    wait(device)
    facts: Facts = {
        "backend": backend.name,
        "dtype": name_of(dtype),
        "start_s": round(time.perf_counter() - begin, 2),
    }
    show(quant, facts)
    roofline = Roofline(quant, model, known)
    for context in arguments.context:
        for batch in arguments.batch:
            requests = Requests(backend, context, batch)
            found = measure(requests, roofline, arguments.steps)
            facts[f"context {context} batch {batch}"] = found
            for name, value in found.items():
                show(f"{quant} {context} x{batch} {name}", value)
    facts["routing"] = show(f"{quant} routing", experts_hit(model, arguments.context[-1]))
    requests = Requests(backend, arguments.context[-1], 1)
    requests.temperatures = CONFIDENT
    facts["confident"] = show(f"{quant} confident", requests.steps(arguments.steps).facts())
    facts["memory"] = show(f"{quant} memory", gpu_memory(device))
    if arguments.prefill:
        found = prefill_times(backend, arguments.prefill).facts()
        facts["prefill"] = show(f"{quant} prefill {arguments.prefill}", found)
    requests.temperatures = None
    if quant == "none" and arguments.peer:
        reset_memory(device)  # cached memory is theirs to use
        facts["peer"] = show("transformers", with_peer(requests, arguments))
    if arguments.profile:  # last: profiling slows the process down
        works: Sequence[Callable[[], None]] = (requests.step, requests.token)
        for work in works:
            launches, table = top_kernels(work)
            print(f"{launches} launches\n{table}\n", flush=True)
    return facts


def with_peer(requests: Requests, arguments: argparse.Namespace) -> Facts:
    """Measure transformers after a prompt of the same length, in turn with ours."""
    given = ["--prompt", str(requests.context), "--shapes", arguments.shapes]
    given += ["--device", arguments.device, *(["--uneven"] if arguments.uneven else [])]
    given += ["--layers", str(requests.model.config.num_hidden_layers)]
    wait_s = arguments.peer_wait
    return compare(partial(requests.mean_step_ms), arguments.peer, given, warm_s=wait_s)


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quant", nargs="+", choices=QUANTS, default=["none"])
    parser.add_argument("--context", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--shapes", choices=list(SHAPES), default="released")
    parser.add_argument("--layers", type=int, help="fewer of them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--steps", type=int, default=24, help="of each median")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt to commit")
    parser.add_argument("--head", type=int, choices=[8, 16], default=8, help="of fp8 and nvfp4")
    parser.add_argument("--soft", type=int, choices=[8, 16], default=8, help="with 8-bit heads")
    parser.add_argument("--uneven", action="store_true", help="routing as weights are drawn")
    parser.add_argument("--peer", nargs="+", choices=CACHES, default=[])
    parser.add_argument("--peer-wait", type=float, default=WARM_S, help="seconds to compile")
    parser.add_argument("--profile", action="store_true", help="kernels of a step and of a token")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(given)


@torch.inference_mode()
def main(given: Sequence[str] | None = None) -> Facts:
    arguments = parse(given)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    known, bandwidth = this_device(device)
    facts = {
        **head("step", device),
        "shapes": arguments.shapes,
        "layers": arguments.layers,
        "copy_gb_s": round(bandwidth),
    }
    show("head", facts)
    for quant in arguments.quant:
        facts[quant] = of_form(quant, arguments, device, known)
    finish(facts, arguments.out)
    return facts


if __name__ == "__main__":
    main()
