"""Small checkpoints in the released quantized layouts, written without our code, and their values.

Numbers are decoded here from the formats' own definitions, in float64 and bit by bit.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dgemma.config import ModelConfig, config_to_json
from tests.weights.sample import CONFIG

# Widths all differ, and split into groups of sixteen.
SMALL = replace(CONFIG, hidden_size=48, moe_intermediate_size=32, dtype="bfloat16", vision=None)
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.45.0.dev127"},
    "ignore": ["lm_head", "*mlp*", "*router*", "*self_attn*", "*self_conditioning*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float"},
        }
    },
}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*router.*", "re:.*embed_tokens.*", "re:.*self_conditioning.*"],
    "version": "0.14.0",
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
                "group_size": None,
                "observer": "minmax",
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
            },
            "output_activations": None,
        }
    },
}


def e2m1(code: np.ndarray) -> np.ndarray:
    """Sign, two bits of exponent with bias 1, one bit of mantissa."""
    sign = np.where(code & 8, -1.0, 1.0)
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = (1 + mantissa / 2) * 2.0 ** (exponent.astype(float) - 1)
    return sign * np.where(exponent == 0, mantissa / 2, normal)


def e4m3(byte: np.ndarray) -> np.ndarray:
    """Sign, four bits of exponent with bias 7, three bits of mantissa."""
    sign = np.where(byte & 128, -1.0, 1.0)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(float) - 7)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


class Writer:
    """Draws one checkpoint: its tensors as stored, and in float64 what they stand for."""

    def __init__(self, layout: str, config: ModelConfig = SMALL, seed: int = 0) -> None:
        self.layout, self.config = layout, config
        self.random = np.random.default_rng(seed)
        self.stored: dict[str, Tensor] = {}
        self.values: dict[str, np.ndarray] = {}  # by the plain layout's names
        self._plain_tensors()
        for layer in range(config.num_hidden_layers):
            self._layer(layer)

    def save(self, directory: Path) -> Path:
        raw = config_to_json(self.config)
        raw["quantization_config"] = MODELOPT if self.layout == "nvfp4" else COMPRESSED
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(raw))
        save_file(self.stored, directory / "model.safetensors", {"format": "pt"})
        return directory

    def _plain(self, name: str, *shape: int) -> None:
        value = torch.from_numpy(self.random.normal(0, 0.2, shape)).bfloat16()
        self.stored[name], self.values[name] = value, value.double().numpy()

    def _dense(self, module: str, *shape: int) -> None:
        if self.layout == "fp8":
            self.values[module + ".weight"] = self._packed(module, *shape)
        else:
            self._plain(module + ".weight", *shape)

    def _packed(self, module: str, rows: int, columns: int) -> np.ndarray:
        if self.layout == "fp8":
            byte = self._e4m3((rows, columns), signed=True)
            scale = torch.from_numpy(self.random.uniform(1e-4, 1e-2, (rows, 1))).bfloat16()
            self.stored[module + ".weight"] = torch.from_numpy(byte).view(torch.float8_e4m3fn)
            self.stored[module + ".weight_scale"] = scale
            return e4m3(byte) * scale.double().numpy()
        code = self.random.integers(0, 16, (rows, columns), dtype=np.uint8)
        byte = self._e4m3((rows, columns // 16), signed=False)
        factor = torch.tensor(self.random.uniform(1e-5, 1e-3), dtype=torch.float32)
        self.stored[module + ".weight"] = torch.from_numpy(code[:, ::2] | (code[:, 1::2] << 4))
        self.stored[module + ".weight_scale"] = torch.from_numpy(byte).view(torch.float8_e4m3fn)
        self.stored[module + ".weight_scale_2"] = factor
        self.stored[module + ".input_scale"] = torch.tensor(0.01)
        return e2m1(code) * np.repeat(e4m3(byte), 16, axis=1) * factor.item()

    def _e4m3(self, shape: tuple[int, int], *, signed: bool) -> np.ndarray:
        byte = self.random.integers(0, 127, shape, dtype=np.uint8)  # 127 would be NaN
        return byte | (self.random.integers(0, 2, shape, dtype=np.uint8) << 7) if signed else byte

    def _plain_tensors(self) -> None:
        config, decoder = self.config, "model.decoder."
        width, inner = config.hidden_size, config.intermediate_size
        self._plain(decoder + "embed_tokens.weight", config.vocab_size, width)
        self._plain(decoder + "norm.weight", width)
        own = decoder + "self_conditioning."
        self._plain(own + "pre_norm.weight", width)
        self._plain(own + "gate_proj.weight", inner, width)
        self._plain(own + "up_proj.weight", inner, width)
        self._plain(own + "down_proj.weight", width, inner)

    def _layer(self, layer: int) -> None:
        config, at = self.config, f"model.decoder.layers.{layer}."
        width, inner, shape = config.hidden_size, config.intermediate_size, config.attention(layer)
        query = config.num_attention_heads * shape.head_dim
        key = shape.num_kv_heads * shape.head_dim
        for name in ("q", "k", "v", "o") if shape.has_value else ("q", "k", "o"):
            size = {"q": (query, width), "o": (width, query)}.get(name, (key, width))
            self._dense(f"{at}self_attn.{name}_proj", *size)
        for name in ("q_norm", "k_norm"):
            self._plain(f"{at}self_attn.{name}.weight", shape.head_dim)
        for name, size in {"gate": (inner, width), "up": (inner, width)}.items():
            self._dense(f"{at}mlp.{name}_proj", *size)
        self._dense(f"{at}mlp.down_proj", width, inner)
        self._plain(at + "router.proj.weight", config.num_experts, width)
        self._plain(at + "router.scale", width)
        self._plain(at + "router.per_expert_scale", config.num_experts)
        for name in "input post_attention pre_feedforward post_feedforward".split():
            self._plain(f"{at}{name}_layernorm.weight", width)
        for name in "post_feedforward_layernorm_1 post_feedforward_layernorm_2".split():
            self._plain(f"{at}{name}.weight", width)
        self._plain(at + "pre_feedforward_layernorm_2.weight", width)
        self._plain(at + "layer_scalar", 1)
        twin = f"model.encoder.language_model.layers.{layer}.layer_scalar"
        self.stored[twin] = self.stored[at + "layer_scalar"].clone()
        self._experts(at + "experts")

    def _experts(self, at: str) -> None:
        width, inner = self.config.hidden_size, self.config.moe_intermediate_size
        both, down = [], []
        for expert in range(self.config.num_experts):
            gate = self._packed(f"{at}.{expert}.gate_proj", inner, width)
            up = self._packed(f"{at}.{expert}.up_proj", inner, width)
            both.append(np.concatenate([gate, up]))
            down.append(self._packed(f"{at}.{expert}.down_proj", width, inner))
        self.values[at + ".gate_up_proj"] = np.stack(both)
        self.values[at + ".down_proj"] = np.stack(down)
