"""Formats of a layer's weights in memory, and the quantization of plain layers in place.

    fp8         experts, attention and dense MLP in e4m3, one scale per output
    nvfp4       experts in four bits; attention and dense MLP as in fp8
    nvfp4_bf16  experts in four bits, all else in 16: for GPUs without fp8 arithmetic
    stored      tensors that the file packs stay packed, the rest is plain; of a GGUF file on a CPU
                the experts stay blocks (`gguf_checkpoint`)
    gguf        experts in the blocks of a GGUF file, repacked for a GPU; all else in 16 bits
    gguf_fp8    likewise; attention and dense MLP as in fp8
    int8        all GEMMs in 8-bit integers, for CPUs

Router, norms, self-conditioning, embedding and LM head keep their dtype; int8 quantizes the last
three too, and `quant.head` adds an LM head and soft embeddings in 8 bits.
"""

from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import nn

from dgemma.backends.cpu import Int8Table, pack_layers_int8
from dgemma.backends.cuda.merge import is_mergeable, merge_layer
from dgemma.config import ModelConfig
from dgemma.errors import UsageError
from dgemma.model.gemma import Experts, Gemma, Layer
from dgemma.quant.fp8 import Fp8Experts, Fp8Linear
from dgemma.quant.gguf_tiles import TiledBlockExperts
from dgemma.quant.nvfp4 import TILE_DEPTH, Nvfp4Experts, can_tile
from dgemma.weights.quant_schemes import SchemeName

Quant = Literal["none", "stored", "int8", "fp8", "nvfp4", "nvfp4_bf16", "gguf", "gguf_fp8"]
WeightType = Literal["plain", "int8", "fp8", "nvfp4", "gguf"]
StoredScheme = SchemeName | Literal["gguf"]
QUANTS: tuple[Quant, ...] = get_args(Quant)
DENSE = {"self_attn": "q_proj k_proj v_proj o_proj", "mlp": "gate_proj up_proj down_proj"}


PACKED_EXPERTS: dict[
    WeightType, type[Fp8Experts] | type[Nvfp4Experts] | type[TiledBlockExperts]
] = {"fp8": Fp8Experts, "nvfp4": Nvfp4Experts, "gguf": TiledBlockExperts}


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """Weight types of a layer."""

    experts: WeightType = "plain"
    dense: WeightType = "plain"
    as_stored: bool = False  # weights not packed in the file stay plain


LAYER_FORMATS: dict[Quant, LayerFormat] = {
    "none": LayerFormat(),
    "int8": LayerFormat("int8", "int8"),
    "fp8": LayerFormat("fp8", "fp8"),
    "nvfp4": LayerFormat("nvfp4", "fp8"),
    "nvfp4_bf16": LayerFormat("nvfp4", "plain"),
    "gguf": LayerFormat("gguf", "plain"),
    "gguf_fp8": LayerFormat("gguf", "fp8"),
}
STORED_FORMATS: dict[StoredScheme, LayerFormat] = {
    "fp8": LayerFormat("fp8", "fp8", as_stored=True),
    "nvfp4": LayerFormat("nvfp4", "plain", as_stored=True),
    "gguf": LayerFormat("gguf", "gguf", as_stored=True),
}


def layer_format(quant: Quant, scheme: StoredScheme | None) -> LayerFormat:
    """Return the format for a checkpoint of this scheme; refuses to quantize twice.

    GGUF blocks may be quantized again, since some types have no GPU kernels.
    """
    if quant not in QUANTS:
        raise UsageError(f"quant {quant!r} is not known; use {', '.join(QUANTS)}")
    if quant == "stored":
        return LayerFormat() if scheme is None else STORED_FORMATS[scheme]
    packed_as = quant.removesuffix("_bf16")
    is_packed = scheme is not None and scheme != "gguf"
    if is_packed and packed_as in ("fp8", "nvfp4") and packed_as != scheme:
        raise UsageError(
            f"the checkpoint is stored as {scheme}, and rounding it again to {quant} would lose "
            f"more than either; use --quant auto or {scheme}, or load its original as {quant}"
        )
    return LAYER_FORMATS[quant]


def check_widths(fmt: LayerFormat, config: ModelConfig) -> None:
    """Refuse widths that a format cannot hold."""
    widths = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    odd = [f"{name} {size}" for name, size in widths.items() if not can_tile(size, size)]
    if fmt.experts == "nvfp4" and odd:
        raise UsageError(
            f"nvfp4 takes widths that are multiples of {TILE_DEPTH}, which are not "
            f"{' and '.join(odd)}; use fp8, or none"
        )


@torch.no_grad()
def quantize_layer(layer: Layer, fmt: LayerFormat) -> None:
    """Replace a layer's plain modules by quantized ones, in place."""
    if fmt.as_stored:
        return
    if fmt.experts == "int8" or fmt.dense == "int8":
        assert fmt.experts == fmt.dense, "int8 is for all GEMMs of a layer or none"
        pack_layers_int8(layer)
        return
    if isinstance(source := layer.experts, Experts) and fmt.experts != "plain":
        layer.experts = PACKED_EXPERTS[fmt.experts].quantized(source)  # type: ignore[assignment]
    if fmt.dense != "fp8":
        return
    for owner, names in DENSE.items():
        module = getattr(layer, owner)
        for name in names.split():
            if type(linear := getattr(module, name)) is nn.Linear:
                setattr(module, name, Fp8Linear.quantized(linear))
    if is_mergeable(layer):
        merge_layer(layer)


def quantize_model(model: Gemma, fmt: LayerFormat) -> Gemma:
    """Quantize a loaded model in place, for inference only."""
    model.requires_grad_(False)
    for layer in model.layers:
        quantize_layer(cast(Layer, layer), fmt)
    quantize_outside_layers(model, fmt)
    return model


def quantize_outside_layers(model: Gemma, fmt: LayerFormat) -> None:
    """Quantize token table and self-conditioning, in place."""
    if fmt.dense == "int8":
        model.embed_tokens = Int8Table(model.embed_tokens)
        if model.self_conditioning is not None:
            pack_layers_int8(model.self_conditioning)
