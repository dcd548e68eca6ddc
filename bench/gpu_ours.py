"""Our side of the GPU benchmarks: a model behind a prompt, timed pass by pass.

A step is timed from its launch to the host's knowing its flags, a token to its number.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise
from dgemma.config import ModelConfig
from dgemma.denoise import Row, commit, start
from dgemma.graph.steppers import Fast
from dgemma.model import Gemma, Layer
from dgemma.ops.fast import switched
from dgemma.sampler import EntropyBound, Sampler
from dgemma.weights.head import shrink_head
from dgemma.weights.packed import FORMS, Quant, shrink
from dgemma.weights.random import random_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16
MAX_STEPS = 48
NEVER = EntropyBound(settle_steps=1 << 20)  # no canvas settles
HEAT = (0.8, 0.4)  # of the first and the last step, as released
SURE = 0.1  # heat at which random logits are as sure as those of a canvas about to settle
COMMON = 0.1  # share of attention's part that random weights keep for even routing
FEWEST = 4  # steps or tokens before the clock


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds."""

    ms: float
    least: float
    most: float

    @classmethod
    def of(cls, times: list[float]) -> "Times":
        return cls(statistics.median(times), min(times), max(times))

    def __str__(self) -> str:
        return f"{self.ms:.2f} [{self.least:.2f}-{self.most:.2f}]"

    def facts(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def wall(work: Callable[[], object], repeats: int, warm: int = 2) -> Times:
    """Each call alone, from the host's sight."""
    times = []
    for _ in range(repeats + warm):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(1000 * (time.perf_counter() - begin))
    return Times.of(times[warm:])


def prompt_of(vocab: int, count: int, device: torch.device) -> Tensor:
    """The same random tokens for whoever is measured."""
    generator = torch.Generator(device).manual_seed(5)
    return torch.randint(vocab, (count,), device=device, generator=generator)


class Bench:
    """A model, a committed prompt, and canvases on it. `row` and the cache change."""

    def __init__(self, model: Gemma, fast: Fast, prompt: int) -> None:
        self.model, self.fast, config = model, fast, model.config
        self.length, self.vocab = config.canvas_length, config.vocab_size
        room = Room(tokens=prompt + 3 * self.length, span=2048 + self.length)
        dtype = model.embed_tokens.weight.dtype
        self.cache, self.heat = KVCache(config, room, dtype, DEVICE), HEAT
        commit(model, self.cache, prompt_of(self.vocab, prompt, DEVICE), chunk=2048)
        self.row = self.fresh()

    def fresh(self) -> Row:
        noise = Noise(seed=1).block(0, MAX_STEPS, self.length, self.vocab, DEVICE)
        first, last = self.heat
        sampler = Sampler(rule=NEVER, max_steps=MAX_STEPS, first_heat=first, last_heat=last)
        return start(sampler, noise, NO_PINS)

    def step(self) -> None:
        if self.row.canvas.num_steps >= MAX_STEPS - 1:
            self.row = self.fresh()
        after = self.fast.step(self.row, self.cache)
        assert after is not None, "the step was refused"
        self.row = after

    def steps(self, count: int) -> Times:
        self.row = self.fresh()
        for _ in range(FEWEST):
            self.step()
        return wall(self.step, count, warm=0)

    def mean_ms(self, count: int = 16) -> float:
        """Of steps in a row, as a peer's are timed: by the clock before and behind them all."""
        self.row = self.fresh()
        for _ in range(FEWEST):
            self.step()
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            self.step()
        wait()
        return 1000 * (time.perf_counter() - begin) / count

    def tokens(self, count: int) -> Times:
        """Of the autoregressive mode, with the choice of the next on the device."""
        state, length = {"token": 7}, self.cache.length

        def tell() -> None:
            logits_V = self.fast.tell(state["token"], self.cache)
            assert logits_V is not None, "the token was refused"
            state["token"] = int(logits_V.argmax())

        found = wall(tell, count, warm=FEWEST)
        self.cache.truncate(length)
        return found

    def commits(self, count: int) -> Times:
        """Of a whole block, and the cache cut back each time."""
        tokens, length = list(range(self.length)), self.cache.length

        def work() -> None:
            assert self.fast.commit(tokens, self.cache), "the commit was refused"
            self.cache.truncate(length)

        return wall(work, count)

    def firsts(self, count: int) -> Times:
        """A commit and the next canvas's first step in one pass."""
        tokens, length, row = list(range(self.length)), self.cache.length, self.fresh()

        def work() -> None:
            after = self.fast.first(tokens, row, self.cache)
            assert after is not None, "the pass was refused"
            self.cache.truncate(length)

        return wall(work, count)


def prefill(model: Gemma, count: int, chunk: int, repeats: int = 3) -> Times:
    """A prompt of so many tokens, committed to an empty cache."""
    tokens_T = torch.randint(model.config.vocab_size, (count,), device=DEVICE)
    room = Room(tokens=count, span=chunk)
    cache = KVCache(model.config, room, model.embed_tokens.weight.dtype, DEVICE)

    def work() -> None:
        cache.truncate(0)
        commit(model, cache, tokens_T, chunk=chunk)

    return wall(work, repeats, warm=1)


def built(
    config: ModelConfig,
    quant: Quant,
    *,
    even: bool = True,
    device: torch.device = DEVICE,
    tables: tuple[int, int] = (8, 8),
) -> Gemma:
    """Random weights, each layer in fewer bits as soon as it stands, and then head and means.

    Attention over random weights gives all tokens nearly the same, and its norm makes that large:
    deep routers then send most tokens to few experts. `even` keeps it small, and every expert of
    every layer is used.
    """

    def change(layer: Layer) -> None:
        if even:
            layer.post_attention_layernorm.weight.mul_(COMMON)
        shrink(layer, FORMS[quant])

    model = random_model(config, 0, device=device, dtype=HALF, on_layer=change)
    head, soft = tables  # their bits, where layers have fewer
    if head == 16 or quant not in ("fp8", "nvfp4"):
        return model
    return shrink_head(model, soft=soft == 8)


def routing(bench: Bench) -> dict[str, float]:
    """Over all layers, by the plain path: share of experts hit, and the most rows of one."""
    found: list[Tensor] = []
    hooks = [
        layer.router.register_forward_hook(lambda _, __, out: found.append(out[0]))  # type: ignore[operator]
        for layer in bench.model.layers
    ]
    runner, bench.model.runner = bench.model.runner, None
    context = Pass([Span(bench.cache, bench.length, commit=False)])
    with switched(False):
        bench.model.denoise(bench.fresh().canvas.tokens_L, None, context)
    bench.model.runner = runner
    for hook in hooks:
        hook.remove()
    count = bench.model.config.num_experts
    rows = torch.stack([torch.bincount(ids.flatten(), minlength=count) for ids in found])
    return {"experts_hit": (rows > 0).float().mean().item(), "most_rows": float(rows.max())}
