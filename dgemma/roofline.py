"""Roofline estimate of a pass: its ops from a config alone, then times and memory on a device.

    step    a canvas is denoised: all its rows at once, LM head, statistics, soft embedding
    commit  a finished canvas enters the KV cache: the stack alone, causal
    token   one token of autoregressive decoding: the stack for one row, and the LM head

    floor = sum over ops of max(bytes / bandwidth, operations / rate)
    time  = floor / efficiency + layers * launch gaps of a layer

Counts the traffic of a fused implementation: head norms, RoPE and gating are fused and cost
nothing; an expert is read if any row is routed to it, all being equally likely. A block of n steps
costs n steps and a commit; break-even is the n at which that takes as long as autoregressive
decoding of the same number of tokens.

A measured rate is used as it is; a datasheet's is scaled by the fraction that measured devices
reached: 0.9 of bandwidth (an H200 copies at 4.3 of 4.8 TB/s) and 0.8 of arithmetic (790 of 989
TFLOP/s). Datasheet rates are dense, with float32 accumulation.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dgemma.config import FULL, SLIDING, AttentionShape, ModelConfig
from dgemma.errors import UsageError

WeightGroup = Literal["experts", "dense", "head", "exact", "attention"]
PassName = Literal["step", "commit", "token"]
Rates = Mapping[int, float]  # 10^12 operations a second by bits

NORM_TRAFFIC = 16  # reads and writes of the residual by a layer's norms and sums
NORMS = 7  # norms per layer, all of the residual's width
STEPS_PER_BLOCK = (8, 16, 32, 48)
BANDWIDTH_FRACTION, FLOP_FRACTION = 0.9, 0.8
PCIE_4, PCIE_5 = 24.0, 50.0  # GB/s from pinned memory by 16 lanes, as measured by others


# --- devices and formats


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Bits per weight of each group, and the fraction of the roofline that kernels reach."""

    name: str
    experts: float
    dense: float  # attention, dense MLP, self-conditioning
    head: float = 16.0  # LM head and embedding, the same table
    exact: float = 16.0  # router, norms, activations, keys and values
    efficiency: float  # of the roofline floor; its origin is in docs/fit.md

    def bits(self, group: str) -> float:
        return float(getattr(self, group, self.exact))


BF16 = WeightFormat(name="bf16", experts=16, dense=16, efficiency=0.88)
FP8 = WeightFormat(name="fp8", experts=8, dense=8, efficiency=0.79)
# 4 bits, and an 8-bit scale for each group of 16.
FOUR_BIT = WeightFormat(name="4-bit", experts=4.5, dense=8, efficiency=0.59)
FLOAT32 = WeightFormat(name="float32", experts=32, dense=32, head=32, exact=32, efficiency=0.88)
FORMATS = (BF16, FP8, FOUR_BIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Rates in 10^9 bytes and 10^12 operations a second, memory in 10^9 bytes."""

    name: str
    bandwidth: float
    rates: Rates = field(hash=False)  # by bits; missing widths use the next wider
    memory: float
    runtime: float = 0.8  # memory of driver, libraries and kernels
    layer_micros: float = 15.0  # launch overhead of a layer
    efficiency: float = 1.0  # relative to the format's own efficiency
    backend: str = "cuda"  # only fused backends have predicted times
    link: float = 0.0  # 10^9 bytes a second from host memory; 0: there is no other memory
    source: str

    def rate(self, bits: float) -> float:
        """Return operations per second on values of this width."""
        # 4-bit weights are dequantized to 16 bits: their scale changes every 16 values.
        needed = 16 if bits < 8 else bits
        return 1e12 * self.rates[min(width for width in self.rates if width >= needed)]


def format_on(fmt: WeightFormat, device: Device) -> WeightFormat:
    """Return the format as loaded on a device: without fp8, 4-bit models keep dense in 16."""
    has_fp8 = device.backend != "cuda" or 8 in device.rates
    return fmt if fmt is not FOUR_BIT or has_fp8 else replace(FOUR_BIT, dense=16)


def obstacle(fmt: WeightFormat, device: Device) -> str:
    """Return why a format has no predicted speed on a device; empty if it has one."""
    if device.backend == "reference":
        return "no fused kernels here: it runs on the reference backend, at no predicted speed"
    if device.backend == "cpu" and fmt in (FP8, FOUR_BIT):
        return "a CPU has no kernels for this format"
    if fmt is FP8 and 8 not in device.rates:
        return "the GPU has no fp8 arithmetic"
    return ""


def _sheet(name: str, peak: float, rates: Rates, memory: float, link: float = 0.0) -> Device:
    return Device(
        name=name,
        bandwidth=BANDWIDTH_FRACTION * peak,
        rates={bits: FLOP_FRACTION * rate for bits, rate in rates.items()},
        memory=memory,
        link=link,
        source="datasheet",
    )


def _apple(name: str, bandwidth: float, rate: float, memory: float) -> Device:
    """The system keeps a quarter of the shared memory from the GPU."""
    device = _sheet(name, bandwidth, {16: rate, 32: rate}, 0.75 * memory)
    return replace(device, layer_micros=40.0, backend="reference")


H200 = Device(
    name="NVIDIA H200",
    bandwidth=4300,
    rates={8: 1450, 16: 790, 32: 50},
    memory=141,
    link=55,
    source="measured, but for 8-bit arithmetic",
)
DEVICES: dict[str, Device] = {
    "h200": H200,
    "h100": replace(
        H200,
        name="NVIDIA H100 SXM",
        bandwidth=3000,
        rates={8: 1400, 16: 760, 32: 50},
        memory=80,
        source="datasheet, scaled as the H200 was",
    ),
    "rtx5090": _sheet("RTX 5090", 1792, {8: 419, 16: 209.5, 32: 104.8}, 32, PCIE_5),
    "rtx4090": _sheet("RTX 4090 (24 GB)", 1008, {8: 330.3, 16: 165.2, 32: 82.6}, 24, PCIE_4),
    "rtx3090": _sheet("RTX 3090 (24 GB)", 936, {16: 71, 32: 35.6}, 24, PCIE_4),
    "rtx5080": _sheet("RTX 5080 (16 GB)", 960, {8: 225, 16: 112.6, 32: 56.3}, 16, PCIE_5),
    # Eight lanes, half of the others'.
    "rtx4060ti": _sheet("RTX 4060 Ti (16 GB)", 288, {8: 88, 16: 44, 32: 22}, 16, PCIE_4 / 2),
    "rtx5070": _sheet("RTX 5070 (12 GB)", 672, {8: 123.5, 16: 61.7, 32: 30.9}, 12, PCIE_5),
    "rtx3060": _sheet("RTX 3060 (12 GB)", 360, {16: 25.5, 32: 12.7}, 12, PCIE_4),
    # From 1 PFLOP/s in 4 bits with sparsity: half of it dense, half again per doubled width.
    "spark": _sheet("DGX Spark", 273, {8: 250, 16: 125, 32: 31}, 128),
    "m4max": _apple("Apple M4 Max (128 GB)", 546, 18.4, 128),
    "m3ultra": _apple("Apple M3 Ultra (96 GB)", 819, 28.4, 96),
    "cpu": Device(
        name="2 CPU cores, AVX-512",
        bandwidth=25,
        rates={8: 0.9, 16: 0.25, 32: 0.25},
        memory=23,
        runtime=0.5,
        layer_micros=700.0,
        efficiency=0.7,
        backend="cpu",
        source="measured on two Intel cores",
    ),
}


# --- predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op, summed over all layers that have it."""

    name: str
    group: WeightGroup
    flop: float = 0.0
    weights: float = 0.0  # parameters
    read: float = 1.0  # fraction of the weights that is read
    activations: float = 0.0  # elements moved, keys and values included
    has_shared_weights: bool = False  # counted by another op

    def weight_bytes(self, fmt: WeightFormat) -> float:
        return self.weights * self.read * fmt.bits(self.group) / 8

    def activation_bytes(self, fmt: WeightFormat) -> float:
        return self.activations * fmt.exact / 8

    def floor(self, fmt: WeightFormat, device: Device) -> float:
        """Return the lower bound on this op's seconds on the device."""
        traffic = (self.weight_bytes(fmt) + self.activation_bytes(fmt)) / (1e9 * device.bandwidth)
        return max(traffic, self.flop / device.rate(fmt.bits(self.group)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward pass of `rows` tokens after `context` cached ones."""

    name: PassName
    rows: int
    context: int

    def keys(self, window: int | None) -> float:
        """Return the mean number of keys a row attends to."""
        before = self.context if window is None else min(self.context, window - 1)
        # A commit is causal within its canvas.
        return before + (self.rows if self.name != "commit" else (self.rows + 1) / 2)


class PassCost(NamedTuple):
    """Operations and bytes of one pass in one format, on any device."""

    flop: float
    weight_bytes: float
    activation_bytes: float  # with keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes."""

    weights: float
    cache: float
    work: float  # logits, and the runtime's memory before any weight

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.work


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Times in seconds. All of it predicted, none measured."""

    device: Device
    format: WeightFormat
    context: int
    step_floor: float
    step: float
    commit: float
    token: float
    block: int  # tokens
    memory: Memory
    max_context: int  # longest context that fits; 0: not even the weights fit
    obstacle: str  # the reason why there is no predicted speed; else empty
    streamed_layers: int = 0  # layers with experts in host memory
    streamed_bytes: float = 0.0  # copied in each step

    @property
    def fits(self) -> bool:
        return self.memory.total <= 1e9 * self.device.memory

    @property
    def break_even(self) -> float:
        """Steps per block at which diffusion is as fast as AR."""
        return max(0.0, (self.block * self.token - self.commit) / self.step)

    @property
    def per_second(self) -> tuple[float, ...]:
        """Committed tokens, at `STEPS_PER_BLOCK`."""
        return tuple(self.block / (n * self.step + self.commit) for n in STEPS_PER_BLOCK)

    @property
    def runs(self) -> bool:
        return self.fits and not self.obstacle


def predict(config: ModelConfig, context: int, fmt: WeightFormat, device: Device) -> Prediction:
    """Predict times and memory of one format on one device."""
    if not config.can_denoise:
        raise UsageError("this model decodes one token at a time; there are no steps to predict")
    if not 0 <= context <= config.max_position_embeddings:
        raise UsageError(
            f"a context of {context} tokens is outside this model's 0 to "
            f"{config.max_position_embeddings}"
        )
    reason, fmt = obstacle(fmt, device), format_on(fmt, device)
    runs = passes(config, context)
    step, commit, token = (pass_time(config, run, fmt, device) for run in runs)
    held = memory(config, context, fmt, device)
    return Prediction(
        device=device,
        format=fmt,
        context=context,
        step_floor=floor(ops(config, runs[0]), fmt, device),
        step=step,
        commit=commit,
        token=token,
        block=config.canvas_length,
        memory=held,
        max_context=max_context(config, fmt, held, device),
        obstacle=reason,
    )


def cost(config: ModelConfig, run: Pass, fmt: WeightFormat) -> PassCost:
    """Return operations and bytes of a pass."""
    table = ops(config, run)
    return PassCost(
        flop=sum(op.flop for op in table),
        weight_bytes=sum(op.weight_bytes(fmt) for op in table),
        activation_bytes=sum(op.activation_bytes(fmt) for op in table),
    )


def floor(table: Sequence[Op], fmt: WeightFormat, device: Device) -> float:
    """Return the seconds that no implementation of these ops can undercut on the device."""
    return sum(op.floor(fmt, device) for op in table)


def pass_time(config: ModelConfig, run: Pass, fmt: WeightFormat, device: Device) -> float:
    efficiency = fmt.efficiency * device.efficiency
    gaps = config.num_hidden_layers * device.layer_micros / 1e6
    return floor(ops(config, run), fmt, device) / efficiency + gaps


def memory(config: ModelConfig, context: int, fmt: WeightFormat, device: Device) -> Memory:
    parameters = stored_parameters(config)
    logits = config.canvas_length * config.vocab_size * fmt.exact / 8
    return Memory(
        weights=sum(count * fmt.bits(group) / 8 for group, count in parameters.items()),
        cache=cache_elements(config, context) * fmt.exact / 8,
        work=2 * logits + 1e9 * device.runtime,
    )


def passes(config: ModelConfig, context: int) -> tuple[Pass, Pass, Pass]:
    """Return the three passes of a model after `context` tokens: step, commit, token."""
    rows = config.canvas_length
    return (
        Pass(name="step", rows=rows, context=context),
        Pass(name="commit", rows=rows, context=context),
        Pass(name="token", rows=1, context=context),
    )


def ops(config: ModelConfig, run: Pass) -> list[Op]:
    """List the ops of a pass."""
    table = [*_embed(config, run)]
    for layer_type, name in ((SLIDING, "sliding"), (FULL, "full")):
        count = config.layer_types.count(layer_type)
        if count:
            shape = config.attention(config.layer_types.index(layer_type))
            table += _attention(config, shape, run, (name, count))
    table += [*_feed_forward(config, run), *_norms(config, run)]
    return table + ([] if run.name == "commit" else [*_vocabulary(config, run)])


def stored_parameters(config: ModelConfig) -> dict[WeightGroup, float]:
    """Count the weights of the text model by group, each once."""
    counts: dict[WeightGroup, float] = {}
    for op in ops(config, passes(config, 0)[0]):
        if not op.has_shared_weights:
            counts[op.group] = counts.get(op.group, 0) + op.weights
    return counts


def cache_elements(config: ModelConfig, context: int) -> float:
    """Count keys and values cached for a context and one canvas."""
    total = 0.0
    for layer in range(config.num_hidden_layers):
        shape = config.attention(layer)
        before = context if shape.window is None else min(context, shape.window - 1)
        total += 2 * shape.num_kv_heads * shape.head_dim * (before + config.canvas_length)
    return total


def max_context(config: ModelConfig, fmt: WeightFormat, held: Memory, device: Device) -> int:
    """Bisect for the longest context whose KV cache fits beside the rest."""
    room = 1e9 * device.memory - held.weights - held.work
    lengths = range(1, config.max_position_embeddings + 1)
    return bisect_right(lengths, room, key=lambda n: cache_elements(config, n) * fmt.exact / 8)


def _gemm(name: str, group: WeightGroup, rows: int, weights: int, activations: int) -> Op:
    """Return a GEMM of some rows with weights of which each is used once a row."""
    flop = 2 * rows * weights
    return Op(name=name, group=group, flop=flop, weights=weights, activations=activations)


def _embed(config: ModelConfig, run: Pass) -> Iterator[Op]:
    width, inner = config.hidden_size, config.intermediate_size
    yield Op(name="embed", group="exact", activations=2 * run.rows * width)
    if run.name == "step" and config.can_denoise:
        moved = run.rows * (4 * width + 4 * inner)
        yield _gemm("self-conditioning", "dense", run.rows, 3 * width * inner, moved)


def _attention(
    config: ModelConfig, shape: AttentionShape, run: Pass, layers: tuple[str, int]
) -> Iterator[Op]:
    (name, count), width = layers, config.hidden_size
    query = config.num_attention_heads * shape.head_dim
    key = shape.num_kv_heads * shape.head_dim
    qkv = query + key * (2 if shape.has_value else 1)
    keys = run.keys(shape.window)
    for gemm, outputs in ((f"qkv {name}", qkv), (f"output {name}", query)):
        moved = count * run.rows * (width + outputs)
        yield _gemm(gemm, "dense", run.rows, count * width * outputs, moved)
    yield Op(
        name=f"attention {name}",
        group="attention",
        flop=4 * count * run.rows * query * keys,
        activations=count * (2 * run.rows * query + 2 * key * keys),
    )


def _feed_forward(config: ModelConfig, run: Pass) -> Iterator[Op]:
    layers, width, rows = config.num_hidden_layers, config.hidden_size, run.rows
    inner, routed_rows = config.moe_intermediate_size, run.rows * config.top_k_experts
    dense, moved = 3 * width * config.intermediate_size, 2 * width + 4 * config.intermediate_size
    yield _gemm("dense MLP", "dense", rows, layers * dense, layers * rows * moved)
    router, moved = width * config.num_experts, width + 2 * config.num_experts
    yield _gemm("router", "exact", rows, layers * router, layers * rows * moved)
    read = 1 - (1 - config.top_k_experts / config.num_experts) ** rows
    for name, outputs, per_row in (
        ("experts gate and up", 2 * inner, width + 2 * inner),
        ("experts down", inner, width + inner),
    ):
        yield Op(
            name=name,
            group="experts",
            flop=2 * layers * routed_rows * width * outputs,
            weights=layers * config.num_experts * width * outputs,
            read=read,
            activations=layers * routed_rows * per_row,
        )


def _norms(config: ModelConfig, run: Pass) -> Iterator[Op]:
    layers, width = config.num_hidden_layers, config.hidden_size
    # With the norms: the router's two scales, and the layer scalar.
    weights = layers * ((NORMS + 1) * width + config.num_experts + 1) + width
    weights += sum(2 * config.attention(layer).head_dim for layer in range(layers))
    if config.can_denoise:
        weights += width
    activations = layers * NORM_TRAFFIC * run.rows * width
    yield Op(name="norms and sums", group="exact", weights=weights, activations=activations)


def _vocabulary(config: ModelConfig, run: Pass) -> Iterator[Op]:
    width, rows = config.hidden_size, run.rows
    weights, logits = width * config.vocab_size, rows * config.vocab_size
    moved = rows * width + logits
    yield _gemm("head", "head", rows, weights, moved)
    yield Op(name="statistics and draw", group="exact", activations=logits)
    if run.name != "token":
        soft = _gemm("soft embedding", "head", rows, weights, moved + logits)
        yield replace(soft, has_shared_weights=True)
