"""Memory of GGUF files: the layout on a GPU, which layers are streamed, and predicted times.

All of it follows from tensor types, so it can also be computed for a file that does not exist. On a
GPU with kernels for the experts' types, `plan_gguf` keeps experts packed, the rest in 16 or 8 bits,
and streams as few layers as memory allows.

step, commit: max(pass, copied bytes / link) + time outside the layers

token: pass + bytes of the experts in use, read from host memory / link

CPU: pass + decoding of the experts in use, for files that stay mapped
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from dgemma.backends.cuda.streaming import streamed_layers
from dgemma.config import ModelConfig
from dgemma.quant.gguf import BlockTensor, BlockWeight
from dgemma.quant.gguf_tiles import TILE_FORMATS, can_tile_blocks
from dgemma.roofline import (
    BF16,
    DEVICES,
    FLOAT32,
    FP8,
    Device,
    Memory,
    Prediction,
    WeightFormat,
    max_context,
    memory,
    predict,
    stored_parameters,
)
from dgemma.weights.gguf_checkpoint import EXPERTS, EXTRA_BYTES
from dgemma.weights.layer_formats import Quant
from dgemma.weights.names import gguf_name, layer_of, text_specs

# Of captured passes, logits and KV caches beyond the least ones, and libraries, where all of a GPU
# is to be used.
WORKSPACE_BYTES = 1.2e9
MAX_DEQUANTIZED_BYTES = 3e9  # larger GGUF models stay blocks on a CPU
# Free memory is measured with the driver already loaded.
WITHOUT_DRIVER = replace(DEVICES["h200"], runtime=0.0)
EFFICIENCY = 0.57  # fraction of the roofline, on an H200: docs/fit.md
IN_PLACE = 0.82  # fraction of the link's rate when kernels read host memory
# Q4_K_M weights per second decoded by the measured CPU; others in proportion to their GEMMs.
DECODED_PER_SECOND = 1.5e9

WeightBlocks = Callable[[str], BlockWeight]  # weight by released name


class GGUFPlan(NamedTuple):
    """GPU memory in bytes: of all weights, and with streamed experts in host memory."""

    quant: Quant
    whole: float
    total: float
    streamed: frozenset[int]


def blocks_of_type(config: ModelConfig, file_type: str) -> WeightBlocks:
    """Return the formats and shapes of a hypothetical file of a type, without data."""
    from dgemma.weights.gguf_write import gguf_shapes, tensor_types

    shapes, data = gguf_shapes(config), torch.empty(0, dtype=torch.uint8)
    types = tensor_types(shapes, file_type)

    def blocks(name: str) -> BlockWeight:
        stored = gguf_name(name, config)
        return BlockWeight((BlockTensor(data, types[stored], shapes[stored]),))

    return blocks


def tiled_bytes(config: ModelConfig, blocks: WeightBlocks) -> list[int] | None:
    """Return the tiled size of each layer's experts; None if a layer has no kernels."""
    sizes = [0] * config.num_hidden_layers
    for name, spec in text_specs(config).items():
        if spec.group == "text" and spec.target.endswith(EXPERTS):
            weight = blocks(name)
            if not can_tile_blocks(weight):
                return None
            layer = layer_of(spec.target)
            assert layer is not None
            sizes[layer] += TILE_FORMATS[weight.tensors[0].format.name].num_bytes(weight.shape)
    return sizes


def plan_gguf(
    config: ModelConfig, sizes: Sequence[int], free: float, *, has_fp8: bool, context: int
) -> GGUFPlan:
    """Choose the layout of a file on a GPU: dense weights in 16 or 8 bits, then streamed experts.

    `sizes`: bytes of each layer's experts. As few layers are streamed as the memory allows; a plan
    that streams all of them may still not fit.
    """
    quants: tuple[Quant, ...] = ("gguf", "gguf_fp8") if has_fp8 else ("gguf",)
    for quant in quants:
        whole = gguf_bytes(config, sizes, quant, context)
        if whole <= free:
            return GGUFPlan(quant, whole, whole, frozenset())
    for count in range(1, len(sizes) + 1):
        layers = streamed_layers(len(sizes), count)
        largest = max(sizes[layer] for layer in layers)
        total = whole - sum(sizes[layer] for layer in layers) + min(2, count) * largest
        if total <= free:
            break
    return GGUFPlan(quants[-1], whole, total, layers)


def gguf_bytes(config: ModelConfig, sizes: Sequence[int], quant: Quant, context: int) -> float:
    """Return the bytes of a repacked file, a KV cache, logits and buffers."""
    fmt = packed_format("", config, sizes, quant)
    return memory(config, context, fmt, WITHOUT_DRIVER).total + WORKSPACE_BYTES


def packed_format(
    name: str, config: ModelConfig, sizes: Sequence[int], quant: Quant
) -> WeightFormat:
    bits = 8 * sum(sizes) / stored_parameters(config)["experts"]
    dense = FP8.dense if quant == "gguf_fp8" else BF16.dense
    return WeightFormat(name=name, experts=bits, dense=dense, efficiency=EFFICIENCY)


# --- predictions


class GGUFWeights(NamedTuple):
    """Sizes of a file, as predictions need them."""

    name: str
    num_bytes: float  # of all tensors
    tiled: tuple[int, ...] | None  # per layer's experts; None: no kernels


def gguf_weights(name: str, config: ModelConfig, blocks: WeightBlocks) -> GGUFWeights:
    """Describe a file by the types of its tensors."""
    num_bytes = 0
    for released in text_specs(config):
        tensors = blocks(released).tensors
        num_bytes += sum(tensor.format.row_bytes(prod(tensor.shape)) for tensor in tensors)
    tiled = tiled_bytes(config, blocks)
    return GGUFWeights(name, num_bytes, None if tiled is None else tuple(tiled))


def predict_gguf(
    config: ModelConfig, context: int, file: GGUFWeights, device: Device
) -> Prediction:
    """Predict times and memory of a GGUF file on a device."""
    if device.backend == "cpu":
        return _on_cpu(config, context, file, device)
    if file.tiled is None or device.backend != "cuda":
        return predict(config, context, replace(BF16, name=file.name), device)
    free = 1e9 * (device.memory - device.runtime)
    plan = plan_gguf(config, file.tiled, free, has_fp8=8 in device.rates, context=context)
    fmt = packed_format(file.name, config, file.tiled, plan.quant)
    whole = predict(config, context, fmt, device)
    work = whole.memory.work + WORKSPACE_BYTES
    weights = plan.total - whole.memory.cache - work + 1e9 * device.runtime
    held = Memory(weights=weights, cache=whole.memory.cache, work=work)
    longest = max_context(config, fmt, held, device)
    whole = replace(whole, memory=held, max_context=longest)
    if not plan.streamed:
        return whole
    if not device.link:
        return replace(whole, obstacle="does not fit, and memory is shared with the host")
    return _streamed(config, whole, sum(file.tiled[layer] for layer in plan.streamed), plan)


def _streamed(config: ModelConfig, whole: Prediction, copied: float, plan: GGUFPlan) -> Prediction:
    """Add the copies of streamed layers to the predicted times."""
    link = 1e9 * whole.device.link
    used = config.top_k_experts / config.num_experts
    commit = max(whole.commit, copied / link)
    step = max(whole.step, commit + whole.step - whole.commit)
    token = whole.token + used * copied / link / IN_PLACE
    return replace(
        whole,
        step=step,
        commit=commit,
        token=token,
        step_floor=max(whole.step_floor, copied / link),
        streamed_layers=len(plan.streamed),
        streamed_bytes=copied,
    )


def _on_cpu(config: ModelConfig, context: int, file: GGUFWeights, device: Device) -> Prediction:
    """Predict a file on a CPU: small ones are dequantized at load, others in use."""
    fmt = replace(FLOAT32, name=file.name)
    plain = predict(config, context, fmt, device)
    if plain.memory.weights <= MAX_DEQUANTIZED_BYTES:
        return plain
    held = replace(plain.memory, weights=file.num_bytes + EXTRA_BYTES)
    rate = DECODED_PER_SECOND * device.rate(32) / DEVICES["cpu"].rate(32)
    # A canvas uses all experts, a token its top-k.
    whole = stored_parameters(config)["experts"] / rate
    few = whole * config.top_k_experts / config.num_experts
    return replace(
        plain,
        step=plain.step + whole,
        commit=plain.commit + whole,
        token=plain.token + few,
        memory=held,
        max_context=max_context(config, fmt, held, device),
    )
