"""Write a checkpoint as a GGUF file, with the keys and types of llama.cpp's converter.

Types and shapes are known in advance, so the header is written first, and a weight is in memory
only while it is quantized. The file has a temporary name until it is complete. Defaults of models
trained with this package that have no standard key are stored under `dgemma.`, unless a reader
would infer them; other programs ignore these keys.
"""

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from dgemma.config import SLIDING, GenerationConfig, ModelConfig, own_generation_to_json
from dgemma.errors import CheckpointError, UsageError
from dgemma.quant.gguf import FORMATS, BlockFormat
from dgemma.quant.gguf_encode import BY_NAME, encode
from dgemma.text.control_tokens import BOS, EOS
from dgemma.weights import gguf_config as keys
from dgemma.weights import gguf_tokenizer as words
from dgemma.weights.files import OnProgress, TensorShape
from dgemma.weights.gguf import DEFAULT_ALIGNMENT, MAGIC, VERSIONS
from dgemma.weights.gguf_tokenizer import TokenizerKeys
from dgemma.weights.load import load_model
from dgemma.weights.lora import merge
from dgemma.weights.lora_files import load_adapter
from dgemma.weights.names import (
    ARCHITECTURE_OF,
    BLOCK,
    ROPE_FREQS,
    TOKEN_EMBD,
    check_copies,
    check_names,
    gguf_name,
    skeleton,
    text_specs,
)
from dgemma.weights.quantized_tensors import open_checkpoint
from dgemma.weights.safetensors_io import sync
from dgemma.weights.save import released_tensors
from dgemma.weights.source import generation_config, load_tokenizer_keys, model_config

# llama.cpp's name of each mix; Q4_K alone is its "small" one without exceptions.
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q8_0": 7,
    "Q6_K": 18,
    "Q5_0": 8,
    "Q4_K_M": 15,
    "Q4_K": 14,
    "Q4_0": 2,
}
TYPE_IDS = {block.name: type_id for type_id, block in FORMATS.items()}
UNROTATED = 1e30  # divisor of an angle that does not rotate
# Rows must be a multiple of 256 for K-quants, and of 32 to be quantized at all.
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
LAST_FALLBACK = "F16"
FLOAT_TYPES = ("F32", "F16", "BF16")
ROUTER = "ffn_gate_inp.weight"
DOWN_ENDINGS = (".ffn_down.weight", ".ffn_down_exps.weight")
MAX_HALF = 65504.0
PADDING = b"\0" * DEFAULT_ALIGNMENT
STRING, ARRAY = 8, 9
CODES = {"u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?")}
QUANTIZATION_VERSION = 2
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


# --- metadata


class MetadataValue(NamedTuple):
    """A typed value; `[type]` is a list."""

    type: str
    value: Any

    def encode(self) -> bytes:
        if not self.type.startswith("["):
            return struct.pack("<I", _type_id(self.type)) + _encode(self.type, [self.value])
        inner = self.type[1:-1]
        start = struct.pack("<IIQ", ARRAY, _type_id(inner), len(self.value))
        return start + _encode(inner, self.value)


Metadata = dict[str, MetadataValue]


def encode_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _type_id(name: str) -> int:
    return STRING if name == "str" else CODES[name][0]


def _encode(name: str, values: Sequence[Any]) -> bytes:
    if name == "str":
        return b"".join(map(encode_string, values))
    return struct.pack(f"<{len(values)}{CODES[name][1]}", *values)


def gguf_metadata(
    config: ModelConfig,
    generation: GenerationConfig,
    tokenizer: words.TokenizerKeys,
    name: str,
    file_type: int,
) -> Metadata:
    """Return all keys of a file, in the converter's order."""
    architecture = ARCHITECTURE_OF[config.family]
    return {
        "general.architecture": MetadataValue("str", architecture),
        "general.type": MetadataValue("str", "model"),
        "general.name": MetadataValue("str", name),
        "general.size_label": MetadataValue("str", size_label(config)),
        **{f"{architecture}.{key}": value for key, value in _model_keys(config).items()},
        **(_sampler_keys(config, generation) if config.can_denoise else {}),
        **_tokenizer_keys(config, tokenizer),
        **_own_keys(config, generation, tokenizer),
        "general.quantization_version": MetadataValue("u32", QUANTIZATION_VERSION),
        "general.file_type": MetadataValue("u32", file_type),
    }


def size_label(config: ModelConfig) -> str:
    """Return experts x (shared weights + one expert's), as in model cards of this format."""
    sizes = {name: weight.numel() for name, weight in skeleton(config).state_dict().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    count = sum(sizes.values()) - experts + experts // config.num_experts
    scale, unit = next((pair for pair in UNITS if count > pair[0]), UNITS[-1])
    digits = 1 if round(count / scale) < 10 else 0
    return f"{config.num_experts}x{count / scale:.{digits}f}{unit}"


def _model_keys(config: ModelConfig) -> Metadata:
    is_sliding = [kind == SLIDING for kind in config.layer_types]
    kv_heads = [
        config.num_key_value_heads if sliding else config.num_global_key_value_heads
        for sliding in is_sliding
    ]

    def u32(value: int) -> MetadataValue:
        return MetadataValue("u32", value)

    def f32(value: float) -> MetadataValue:
        return MetadataValue("f32", value)

    cap = config.final_logit_softcapping
    return {
        keys.BLOCK_COUNT: u32(config.num_hidden_layers),
        "context_length": u32(config.max_position_embeddings),
        "embedding_length": u32(config.hidden_size),
        "feed_forward_length": u32(config.intermediate_size),
        "attention.head_count": u32(config.num_attention_heads),
        keys.KV_HEADS: MetadataValue("[i32]", kv_heads),
        "rope.freq_base": f32(config.full_rope_theta),
        "rope.freq_base_swa": f32(config.sliding_rope_theta),
        "attention.layer_norm_rms_epsilon": f32(config.rms_norm_eps),
        "expert_count": u32(config.num_experts),
        "expert_used_count": u32(config.top_k_experts),
        "attention.key_length": u32(config.global_head_dim),
        "attention.value_length": u32(config.global_head_dim),
        **({keys.SOFTCAP: f32(cap)} if cap is not None else {}),
        "attention.sliding_window": u32(config.sliding_window),
        "attention.shared_kv_layers": u32(0),
        "embedding_length_per_layer_input": u32(0),
        keys.PATTERN: MetadataValue("[bool]", is_sliding),
        "attention.key_length_swa": u32(config.head_dim),
        "attention.value_length_swa": u32(config.head_dim),
        "expert_feed_forward_length": u32(config.moe_intermediate_size),
        "rope.dimension_count": u32(config.global_head_dim),
        "rope.dimension_count_swa": u32(config.head_dim),
        **({keys.CAUSAL: MetadataValue("bool", False)} if config.can_denoise else {}),
    }


def _sampler_keys(config: ModelConfig, generation: GenerationConfig) -> Metadata:
    sampler = {
        key: MetadataValue("u32" if kind is int else "f32", getattr(generation, field))
        for key, (field, kind) in keys.SAMPLER.items()
    }
    return {keys.CANVAS: MetadataValue("u32", config.canvas_length), **sampler}


def _tokenizer_keys(config: ModelConfig, tokenizer: words.TokenizerKeys) -> Metadata:
    ids = {
        "bos": config.bos_token_id if tokenizer.id_of(BOS) is None else tokenizer.id_of(BOS),
        "eos": tokenizer.id_of(EOS),
        "unknown": tokenizer.id_of("<unk>"),
        "padding": config.pad_token_id,
        "mask": tokenizer.id_of("<mask>"),
    }
    template = tokenizer.template
    return {
        words.MODEL: MetadataValue("str", words.KIND),
        words.TOKENS: MetadataValue("[str]", tokenizer.tokens),
        words.SCORES: MetadataValue("[f32]", [words.SCORE] * len(tokenizer.tokens)),
        words.TYPES: MetadataValue("[i32]", tokenizer.types),
        words.MERGES: MetadataValue("[str]", tokenizer.merges),
        **{
            f"tokenizer.ggml.{name}_token_id": MetadataValue("u32", index)
            for name, index in ids.items()
            if index is not None
        },
        **({words.CHAT_TEMPLATE: MetadataValue("str", template)} if template is not None else {}),
        "tokenizer.ggml.add_space_prefix": MetadataValue("bool", False),
        "tokenizer.ggml.add_bos_token": MetadataValue("bool", True),
    }


def _own_keys(
    config: ModelConfig, generation: GenerationConfig, tokenizer: words.TokenizerKeys
) -> Metadata:
    """Return keys that only this package reads, where a reader would not infer them."""
    found: Metadata = {}
    if config.long_reply is not None:
        for field in fields(config.long_reply):
            kind = "u32" if field.type is int else "f32"
            value = getattr(config.long_reply, field.name)
            found[keys.LONG_REPLY + field.name] = MetadataValue(kind, value)
    if own := own_generation_to_json(generation):
        found[keys.OWN_GENERATION] = MetadataValue("str", json.dumps(own))
    inferred = {
        words.TOKENS: tokenizer.tokens,
        "tokenizer.ggml.eos_token_id": tokenizer.id_of(EOS),
    }
    if keys.stop_ids_of(inferred) != generation.stop_ids:
        found[keys.STOP_IDS] = MetadataValue("[i32]", generation.stop_ids)
    if generation.max_new_tokens != GenerationConfig().max_new_tokens:
        found[keys.MAX_NEW_TOKENS] = MetadataValue("u32", generation.max_new_tokens)
    return found


# --- tensors


def tensor_types(shapes: Mapping[str, TensorShape], file_type: str) -> dict[str, BlockFormat]:
    """Return the type of each tensor for a file type, by llama.cpp's rules."""
    if file_type not in FILE_TYPES:
        raise UsageError(f"GGUF type {file_type!r} is not known; use {', '.join(FILE_TYPES)}")
    wider = _wider(list(shapes)) if file_type == "Q4_K_M" else set()
    types = {}
    for name, shape in shapes.items():
        kind = "Q6_K" if name in wider else _base_type(name, shape, file_type)
        types[name] = BY_NAME[_fallback(kind, shape[-1])]
    return types


def _wider(names: list[str]) -> set[str]:
    """Return the tensors with more bits in Q4_K_M: some value and down projections.

    Value projections are counted separately, since full layers have none.
    """
    layers = sorted({_layer(name) for name in names if name.startswith(BLOCK)})
    values = [f"{BLOCK}{layer}.attn_v.weight" for layer in layers]
    values = [name for name in values if name in names]
    wider = {name for i, name in enumerate(values) if gets_more_bits(i, len(values))}
    downs = (name for name in names if name.endswith(DOWN_ENDINGS))
    return wider | {name for name in downs if gets_more_bits(_layer(name), len(layers))}


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def gets_more_bits(index: int, count: int) -> bool:
    """True for the first and last eighth of the layers, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _base_type(name: str, shape: TensorShape, file_type: str) -> str:
    is_weight = name.endswith(".weight") and not name.endswith("_norm.weight")
    if not is_weight or len(shape) == 1 or name.endswith(ROUTER):
        return "F32"
    if file_type in (*FLOAT_TYPES, "Q8_0"):
        return file_type
    return "Q6_K" if name == TOKEN_EMBD else file_type.removesuffix("_M")


def _fallback(kind: str, inputs: int) -> str:
    if inputs % BY_NAME[kind].num_weights == 0:
        return kind
    kind = FALLBACKS.get(kind, LAST_FALLBACK)
    return kind if inputs % BY_NAME[kind].num_weights == 0 else LAST_FALLBACK


def gguf_shapes(config: ModelConfig) -> dict[str, TensorShape]:
    """Return all tensors of a model file in order: outside the layers, then by layer and name."""
    shapes: dict[str, TensorShape] = {
        gguf_name(name, config): spec.shape for name, spec in text_specs(config).items()
    }
    shapes[ROPE_FREQS] = (config.global_head_dim // 2,)

    def order(name: str) -> tuple[int, str]:
        return (_layer(name) if name.startswith(BLOCK) else -1, name)

    return {name: shapes[name] for name in sorted(shapes, key=order)}


def rope_freqs(config: ModelConfig) -> Tensor:
    """Return the angle divisors of full layers: 1 if rotated, else 1e30."""
    count = config.global_head_dim // 2
    rotating = int(config.global_head_dim * config.full_rotary_fraction / 2)
    return torch.tensor([1.0] * rotating + [UNROTATED] * (count - rotating))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A model to write: configs, a name, and a reader of weights by released name."""

    config: ModelConfig
    generation: GenerationConfig
    name: str
    read: Callable[[str], Tensor]


def write_gguf(
    path: Path,
    weights: ModelWeights,
    tokenizer: TokenizerKeys,
    file_type: str,
    on_tensor: OnProgress | None = None,
) -> None:
    """Write a whole model; `path` appears when the file is complete."""
    # Before any file is created: both may refuse.
    types = tensor_types(gguf_shapes(weights.config), file_type)
    metadata = gguf_metadata(
        weights.config, weights.generation, tokenizer, weights.name, FILE_TYPES[file_type]
    )
    hidden = path.with_name(f".saving-{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with hidden.open("wb") as file:
                _write_all(file, weights, metadata, types, on_tensor)
                sync(file)
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}; check its free space and permissions"
        ) from None


def _write_all(
    file: BinaryIO,
    weights: ModelWeights,
    metadata: Metadata,
    types: Mapping[str, BlockFormat],
    on_tensor: OnProgress | None,
) -> None:
    config = weights.config
    released = {gguf_name(name, config): name for name in text_specs(config)}
    file.write(header_bytes(metadata, gguf_shapes(config), types))
    for done, (name, block) in enumerate(types.items(), start=1):
        is_rope = name == ROPE_FREQS
        tensor = rope_freqs(config) if is_rope else weights.read(released[name])
        _write_tensor(file, name, tensor, block)
        if on_tensor is not None:
            on_tensor(done, len(types))


def export_gguf(
    source: Path,
    path: Path,
    file_type: str,
    *,
    adapter: Path | None = None,
    on_tensor: OnProgress | None = None,
) -> None:
    """Write a checkpoint as a GGUF file; an adapter is merged.

    Without an adapter, weights are read from the source one at a time.
    """
    config, generation = model_config(source), generation_config(source)
    tokenizer = load_tokenizer_keys(source)
    if adapter is not None:
        checkpoint = load_model(source)
        merge(checkpoint.model, load_adapter(adapter))
        read = released_tensors(checkpoint).__getitem__
    else:
        tensors = open_checkpoint(source, config)
        specs = check_names(config, tensors.stored, source)
        check_copies(specs, tensors, source)
        read = tensors.__getitem__
    weights = ModelWeights(config=config, generation=generation, name=source.stem, read=read)
    write_gguf(path, weights, tokenizer, file_type, on_tensor)


def header_bytes(
    metadata: Metadata, shapes: Mapping[str, TensorShape], types: Mapping[str, BlockFormat]
) -> bytes:
    """Return everything before the tensor data: counts, metadata, tensor table, padding."""
    chunks = [MAGIC, struct.pack("<IQQ", VERSIONS[-1], len(shapes), len(metadata))]
    for key, value in metadata.items():
        chunks += [encode_string(key), value.encode()]
    offset = 0
    for name, shape in shapes.items():
        dims = shape[::-1]
        chunks.append(encode_string(name))
        chunks.append(struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        chunks.append(struct.pack("<IQ", TYPE_IDS[types[name].name], offset))
        size = types[name].row_bytes(torch.Size(shape).numel())
        offset += size + -size % DEFAULT_ALIGNMENT
    header = b"".join(chunks)
    return header + PADDING[: -len(header) % DEFAULT_ALIGNMENT]


def _write_tensor(file: BinaryIO, name: str, tensor: Tensor, block: BlockFormat) -> None:
    """Quantize and write a tensor, an expert at a time."""
    written = 0
    for matrix in tensor if tensor.dim() == 3 else [tensor]:
        weight = matrix.detach().cpu()
        largest = weight.abs().max().item()
        if not largest < torch.inf:
            raise CheckpointError(f"{name} holds NaN or infinity; the checkpoint is damaged")
        if block.name not in ("F32", "BF16") and largest > MAX_HALF:
            raise CheckpointError(
                f"{name} holds {largest:g}, and {block.name} reaches to {MAX_HALF:g}; write BF16"
            )
        written += file.write(encode(weight, block).numpy().tobytes())
    file.write(PADDING[: -written % DEFAULT_ALIGNMENT])
