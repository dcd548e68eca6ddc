"""Tiny checkpoints for the tests of weights, and the plainest possible file surgery."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from dgemma.config import FULL, SLIDING, ModelConfig, VisionConfig
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from tests.tiny import TINY, gemma4_twin, shake, twin

SHARED = Path(__file__).resolve().parents[3] / "shared" / "checkpoint"
# Sizes all differ, so that no shape is right by accident.
VISION = VisionConfig(
    hidden_size=12,
    intermediate_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    patch_size=2,
    position_embedding_size=6,
    standardize=True,
)
CONFIG = replace(TINY, layer_types=(SLIDING, SLIDING, FULL), vision=VISION)
SIBLING = replace(CONFIG, family="gemma4", final_logit_softcapping=None, canvas_length=256)


def reference(config: ModelConfig, seed: int = 0) -> nn.Module:
    """The transformers model of a config: weights random, layer scalars alike in both halves."""
    model = twin(config) if config.can_denoise else gemma4_twin(config)
    shake(model, seed)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + int(name.split(".")[-2]) / 8)
        elif ".std_" in name:
            buffer.copy_(torch.arange(len(buffer)) + seed)
    if not config.can_denoise:
        # As released; a fresh model would write down every default of its library.
        model.generation_config = GenerationConfig(do_sample=True, top_k=64, eos_token_id=[1, 50])
    return model


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its tensor bytes."""
    content = path.read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:data_start]), content[data_start:]


def write(path: Path, raw: Any, data: bytes, padding: int = 0) -> None:
    text = json.dumps(raw).encode() + b" " * padding
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor_bytes(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Dtype, shape and bytes of every tensor of a directory, wherever it lies."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        raw, data = header(path)
        raw.pop("__metadata__")
        for name, entry in raw.items():
            start, stop = entry["data_offsets"]
            tensors[name] = (entry["dtype"], entry["shape"], data[start:stop])
    return tensors


def our_logits(model: Gemma, ids_T: Tensor, canvas_L: Tensor | None) -> Tensor:
    """Logits of a canvas behind a prompt, or of the prompt itself where there is no canvas."""
    dtype = model.embed_tokens.weight.dtype
    cache = KVCache(model.config, Capacity(tokens=128), dtype, torch.device("cpu"))
    with torch.inference_mode():
        prompt = ForwardBatch([Segment(cache, len(ids_T), commit=True)])
        hidden_TD = model.encode(ids_T, prompt)
        prompt.close()
        if canvas_L is not None:
            canvas = ForwardBatch([Segment(cache, len(canvas_L), commit=False)])
            hidden_TD = model.denoise(canvas_L, None, canvas)
        return model.logits(hidden_TD)


def their_logits(model: Any, ids_T: Tensor, canvas_L: Tensor | None) -> Tensor:
    with torch.inference_mode():
        if canvas_L is None:
            return model(input_ids=ids_T[None]).logits[0]
        past = DynamicCache(config=model.config.get_text_config())
        model.model.encoder(input_ids=ids_T[None], past_key_values=past)
        return model(decoder_input_ids=canvas_L[None], past_key_values=past).logits[0]


def some_ids(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (count,), generator=generator)


def finish_gguf(writer: GGUFWriter, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Add the tensors and write the file."""
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
