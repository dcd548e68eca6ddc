"""From ops, a format and a device to times and memory. Everything here is predicted.

    floor = sum over ops of max(bytes / bandwidth, operations / rate)
    time  = floor / efficiency + layers * time between a layer's kernels

A block of n steps costs n steps and a commit; break-even is the n at which that is as long as
autoregressive decoding of the same number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dgemma.config import ModelConfig
from dgemma.errors import UsageError
from dgemma.roofline.devices import Device, Format, format_on, obstacle
from dgemma.roofline.table import Op, Pass, cache_numbers, ops, passes, stored_parameters

STEPS_PER_BLOCK = (8, 16, 32, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One pass in one format, wherever it runs."""

    flop: float
    weight_bytes: float
    moved_bytes: float  # activations, keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes."""

    weights: float
    cache: float
    work: float  # logits, and what is gone before the first weight

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.work


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Times in seconds. All of it predicted, none measured."""

    device: Device
    format: Format
    context: int
    step_floor: float
    step: float
    commit: float
    token: float
    break_even: float  # steps per block at which diffusion is as fast as AR
    per_second: tuple[float, ...]  # committed tokens, at `STEPS_PER_BLOCK`
    memory: Memory
    longest: int  # context that still fits; 0: not even the weights do

    obstacle: str  # why it does not run here at any predicted speed; else empty

    @property
    def fits(self) -> bool:
        return self.memory.total <= 1e9 * self.device.memory

    @property
    def runs(self) -> bool:
        return self.fits and not self.obstacle


def cost(config: ModelConfig, run: Pass, kind: Format) -> Cost:
    """What a pass computes and moves."""
    table = ops(config, run)
    return Cost(
        flop=sum(op.flop for op in table),
        weight_bytes=sum(_weight_bytes(op, kind) for op in table),
        moved_bytes=sum(_moved_bytes(op, kind) for op in table),
    )


def floor(table: Sequence[Op], kind: Format, device: Device) -> float:
    """Seconds that no implementation of these ops can undercut on the device."""
    return sum(_floor(op, kind, device) for op in table)


def pass_time(config: ModelConfig, run: Pass, kind: Format, device: Device) -> float:
    efficiency = kind.efficiency * device.efficiency
    gaps = config.num_hidden_layers * device.layer_micros / 1e6
    return floor(ops(config, run), kind, device) / efficiency + gaps


def memory(config: ModelConfig, context: int, kind: Format, device: Device) -> Memory:
    found = stored_parameters(config)
    logits = config.canvas_length * config.vocab_size * kind.exact / 8
    return Memory(
        weights=sum(count * kind.bits(name) / 8 for name, count in found.items()),
        cache=cache_numbers(config, context) * kind.exact / 8,
        work=2 * logits + 1e9 * device.runtime,
    )


def predict(config: ModelConfig, context: int, kind: Format, device: Device) -> Prediction:
    """Times and memory of one format on one device."""
    if not config.can_denoise:
        raise UsageError("this model decodes one token at a time; there are no steps to predict")
    if not 0 <= context <= config.max_position_embeddings:
        raise UsageError(
            f"a context of {context} tokens is outside this model's 0 to "
            f"{config.max_position_embeddings}"
        )
    reason, kind = obstacle(kind, device), format_on(kind, device)
    step, commit, token = passes(config, context)
    times = [pass_time(config, run, kind, device) for run in (step, commit, token)]
    block = config.canvas_length
    return Prediction(
        device=device,
        format=kind,
        context=context,
        step_floor=floor(ops(config, step), kind, device),
        step=times[0],
        commit=times[1],
        token=times[2],
        break_even=max(0.0, (block * times[2] - times[1]) / times[0]),
        per_second=tuple(block / (n * times[0] + times[1]) for n in STEPS_PER_BLOCK),
        memory=memory(config, context, kind, device),
        longest=_longest(config, kind, device),
        obstacle=reason,
    )


def _longest(config: ModelConfig, kind: Format, device: Device) -> int:
    """The longest context whose cache fits, by halving."""
    low, high = -1, config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        if memory(config, middle, kind, device).total <= 1e9 * device.memory:
            low = middle
        else:
            high = middle - 1
    return max(low, 0)


def _weight_bytes(op: Op, kind: Format) -> float:
    return op.weights * op.read * kind.bits(op.kind) / 8


def _moved_bytes(op: Op, kind: Format) -> float:
    return op.moved * kind.exact / 8


def _floor(op: Op, kind: Format, device: Device) -> float:
    traffic = (_weight_bytes(op, kind) + _moved_bytes(op, kind)) / (1e9 * device.bandwidth)
    return max(traffic, op.flop / device.rate(kind.bits(op.kind)))
