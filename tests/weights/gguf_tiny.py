"""Tiny GGUF models in the released layout, written by gguf-py, and what their blocks stand for.

Widths are small relatives of the released ones: 256 inputs take K-quants, 96 and 160 (as 704 and
2112) are multiples of 32 only, so that fallback types occur. K-quants, which gguf-py cannot make,
are packed here with plain ranges.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from dgemma.config import SLIDING, ModelConfig
from dgemma.weights.gguf_write import gguf_shapes, tensor_types
from examples.tiny_model import tiny_config
from tests.text.small import TEMPLATE, make_backend

Array = NDArray[Any]
Keys = dict[str, tuple[str, Any]]  # gguf-py's method and its value
Tensors = dict[str, tuple[Array, str]]  # packed rows and their type

VISIBLE = '<|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>'


@cache
def backend_json() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(make_backend().to_str())
    return raw


TINY_GGUF = tiny_config(
    len(backend_json()["model"]["vocab"]),
    hidden_size=256,
    intermediate_size=160,
    moe_intermediate_size=96,
    head_dim=64,
    global_head_dim=128,
    sliding_window=12,
    max_position_embeddings=512,
    canvas_length=16,
)


def tiny_keys(config: ModelConfig = TINY_GGUF) -> Keys:
    """Return the keys of a file, as the reference converter writes them for this model."""
    arch = {"diffusion_gemma": "diffusion-gemma", "gemma4": "gemma4"}[config.family]
    sliding = [kind == SLIDING for kind in config.layer_types]
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "attention.key_length": config.global_head_dim,
        "attention.value_length": config.global_head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "rope.dimension_count": config.global_head_dim,
        "rope.dimension_count_swa": config.head_dim,
    }
    numbers = {
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "final_logit_softcapping": 30.0,
    }
    kv_heads = [
        config.num_key_value_heads if each else config.num_global_key_value_heads
        for each in sliding
    ]
    keys: Keys = {"general.architecture": ("string", arch), "general.type": ("string", "model")}
    keys |= {"general.name": ("string", "tiny"), "general.file_type": ("uint32", 15)}
    keys |= {f"{arch}.{key}": ("uint32", value) for key, value in sizes.items()}
    keys |= {f"{arch}.{key}": ("float32", value) for key, value in numbers.items()}
    keys[f"{arch}.attention.head_count_kv"] = ("array", kv_heads)
    keys[f"{arch}.attention.sliding_window_pattern"] = ("array", sliding)
    if config.can_denoise:
        keys[f"{arch}.attention.causal"] = ("bool", False)
        keys["diffusion.canvas_length"] = ("uint32", config.canvas_length)
    return keys | tokenizer_keys()


def tokenizer_keys() -> Keys:
    raw = backend_json()
    vocab, merges = raw["model"]["vocab"], raw["model"]["merges"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    control = {entry["content"] for entry in raw["added_tokens"]}
    types = [4 if piece in VISIBLE.split() else 3 if piece in control else 1 for piece in tokens]
    types = [
        6 if piece.startswith("<0x") else kind for piece, kind in zip(tokens, types, strict=True)
    ]
    ids = {"bos": 2, "eos": 1, "unknown": 3, "padding": 0, "mask": 4}
    return {
        "tokenizer.ggml.model": ("string", "gemma4"),
        "tokenizer.ggml.tokens": ("array", tokens),
        "tokenizer.ggml.scores": ("array", [-1000.0] * len(tokens)),
        "tokenizer.ggml.token_type": ("array", types),
        "tokenizer.ggml.merges": ("array", [" ".join(merge) for merge in merges]),
        **{f"tokenizer.ggml.{key}_token_id": ("uint32", value) for key, value in ids.items()},
        "tokenizer.chat_template": ("string", TEMPLATE),
        "tokenizer.ggml.add_bos_token": ("bool", True),
    }


def tiny_tensors(config: ModelConfig = TINY_GGUF, file_type: str = "Q4_K_M") -> Tensors:
    """Draw weights and pack them; scales near one, matrices of unit gain."""
    shapes, rng = gguf_shapes(config), np.random.default_rng(0)
    tensors: Tensors = {}
    for name, block in tensor_types(shapes, file_type).items():
        shape = shapes[name]
        if name == "rope_freqs.weight":
            rotating = shape[0] // 4
            values = np.array([1.0] * rotating + [1e30] * (shape[0] - rotating), np.float32)
        elif len(shape) == 1:
            values = 1 + 0.1 * rng.standard_normal(shape)
        else:
            values = rng.standard_normal(shape) * shape[-1] ** -0.5
        if name.endswith("layer_output_scale.weight"):
            values = np.full(shape, 0.5 + int(name.split(".")[1]) / 8)  # encoder and decoder alike
        tensors[name] = (pack(values.astype(np.float32), block.name), block.name)
    return tensors


def pack(values: Array, type_name: str) -> Array:
    if type_name == "Q4_K":
        return _pack_q4_k(values)
    if type_name == "Q6_K":
        return _pack_q6_k(values)
    return gguf.quantize(values, GGMLQuantizationType[type_name])


def unpack(packed: Array, type_name: str) -> Array:
    """Return the float32 values of packed rows, by gguf-py."""
    values = gguf.dequantize(packed, GGMLQuantizationType[type_name])
    return np.ascontiguousarray(values, np.float32)


def _half(values: Array) -> Array:
    return values.astype(np.float16).view(np.uint8)


def _pack_q4_k(values: Array) -> Array:
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    scale = np.maximum((groups.max(-1) - low) / 15, 1e-8)
    d, dmin = scale.max(-1, keepdims=True) / 63, np.maximum(-low.min(-1, keepdims=True), 1e-8) / 63
    sc, m = np.rint(scale / d).astype(np.uint8), np.rint(-low / dmin).astype(np.uint8)
    step, shift = (d * sc)[..., None], (dmin * m)[..., None]
    q = np.clip(np.rint((groups + shift) / np.maximum(step, 1e-12)), 0, 15).astype(np.uint8)
    packed = [sc[:, :4] | sc[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6]
    packed.append(sc[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    q = q.reshape(-1, 4, 2, 32)
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate([_half(d), _half(dmin), *packed, nibbles], -1)
    return blocks.reshape(*values.shape[:-1], -1)


def _pack_q6_k(values: Array) -> Array:
    groups = values.reshape(-1, 16, 16)
    scale = np.maximum(np.abs(groups).max(-1) / 31, 1e-8)
    d = scale.max(-1, keepdims=True) / 127
    sc = np.rint(scale / d).astype(np.int8)
    step = np.maximum((d * sc)[..., None], 1e-12)
    u = (np.clip(np.rint(groups / step), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = [u[:, :, 0] & 15 | (u[:, :, 2] & 15) << 4, u[:, :, 1] & 15 | (u[:, :, 3] & 15) << 4]
    high = u[:, :, 0] >> 4 | u[:, :, 1] >> 4 << 2 | u[:, :, 2] >> 4 << 4 | u[:, :, 3] >> 4 << 6
    parts = [np.stack(low, 2).reshape(-1, 128), high.reshape(-1, 64), sc.view(np.uint8), _half(d)]
    return np.concatenate(parts, -1).reshape(*values.shape[:-1], -1)


def write_tiny(path: Path, keys: Keys, tensors: Tensors) -> Path:
    """Write a file by gguf-py."""
    writer = GGUFWriter(path, keys["general.architecture"][1])
    for key, (kind, value) in keys.items():
        if key != "general.architecture":  # written by the writer itself
            getattr(writer, f"add_{kind}")(key, value)
    for name, (array, type_name) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
