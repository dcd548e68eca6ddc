"""Qwen2 for generation in large batches: weights of a GGUF file, a static KV cache with slots.

T rows of a pass, D width, N query heads, M key heads, G = N / M, H head width, F = H / 2, B slots,
S tokens of a slot, P tokens of a prompt, L layers, X heads of queries, keys and values together, I
MLP width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.errors import CheckpointError
from dgemma.model.norm_rope import apply_rope
from dgemma.weights.gguf import GGUFFile

ARCHITECTURE = "qwen2"

# From a layer and its queries, keys and values [T, heads, H] to attention's output [T, N * H].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenConfig:
    """Sizes of the model, by the metadata of its file."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def read(cls, file: GGUFFile) -> "QwenConfig":
        architecture = file.value("general.architecture", str)
        if architecture != ARCHITECTURE:
            raise CheckpointError(
                f"{file.path} holds a model of architecture {architecture}; the teacher is "
                f"{ARCHITECTURE}"
            )
        prefix = f"{ARCHITECTURE}."
        return cls(
            num_layers=file.value(prefix + "block_count", int),
            num_heads=file.value(prefix + "attention.head_count", int),
            num_kv_heads=file.value(prefix + "attention.head_count_kv", int),
            hidden_size=file.value(prefix + "embedding_length", int),
            rms_norm_eps=file.value(prefix + "attention.layer_norm_rms_epsilon", float),
            rope_theta=file.value(prefix + "rope.freq_base", float),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenLayer:
    """Weights of one layer; projections of the same input are merged."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class QwenWeights(NamedTuple):
    """Weights of the model."""

    embedding_VD: Tensor
    layers: tuple[QwenLayer, ...]
    norm: Tensor
    lm_head_VD: Tensor


def read_weights(
    file: GGUFFile, device: torch.device, dtype: torch.dtype
) -> tuple[QwenConfig, QwenWeights]:
    """Dequantize the weights of a GGUF file."""
    config = QwenConfig.read(file)

    def merged(*names: str) -> Tensor:
        return torch.cat([file.dequantize(name, device).to(dtype) for name in names])

    def read_layer(layer: int) -> QwenLayer:
        prefix = f"blk.{layer}."
        return QwenLayer(
            attn_norm=merged(f"{prefix}attn_norm.weight"),
            qkv=merged(*(f"{prefix}attn_{letter}.weight" for letter in "qkv")),
            qkv_bias=merged(*(f"{prefix}attn_{letter}.bias" for letter in "qkv")),
            out=merged(f"{prefix}attn_output.weight"),
            mlp_norm=merged(f"{prefix}ffn_norm.weight"),
            gate_up=merged(f"{prefix}ffn_gate.weight", f"{prefix}ffn_up.weight"),
            down=merged(f"{prefix}ffn_down.weight"),
        )

    embedding_VD = merged("token_embd.weight")
    is_tied = "output.weight" not in file.tensors
    return config, QwenWeights(
        embedding_VD=embedding_VD,
        layers=tuple(read_layer(layer) for layer in range(config.num_layers)),
        norm=merged("output_norm.weight"),
        lm_head_VD=embedding_VD if is_tied else merged("output.weight"),
    )


class Qwen:
    """The model with its KV cache, which `prefill` and `decode` write to."""

    def __init__(
        self, config: QwenConfig, weights: QwenWeights, num_slots: int, max_len: int
    ) -> None:
        self.config, self.weights = config, weights
        like = weights.embedding_VD
        size = (config.num_layers, 2, num_slots, config.num_kv_heads, max_len, config.head_dim)
        self.cache_L2BMSH = like.new_zeros(size)
        self.slots_B = torch.arange(num_slots, device=like.device)
        self.positions_S = torch.arange(max_len, device=like.device)
        half = config.head_dim // 2
        frequency_F = config.rope_theta ** -(torch.arange(half, device=like.device) / half)
        angle_SF = self.positions_S[:, None] * frequency_F
        self.cos_SF, self.sin_SF = angle_SF.cos().to(like.dtype), angle_SF.sin().to(like.dtype)

    @torch.inference_mode()
    def prefill(self, prompts_BP: Tensor, slots_B: Tensor) -> None:
        """Write the keys and values of right-padded prompts into slots."""
        count, length = prompts_BP.shape

        def attend(layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
            q, k, v = (
                x.view(count, length, -1, self.config.head_dim).transpose(1, 2)
                for x in (q_TNH, k_TMH, v_TMH)
            )
            self.cache_L2BMSH[layer, 0, slots_B, :, :length] = k
            self.cache_L2BMSH[layer, 1, slots_B, :, :length] = v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(count * length, -1)

        position_T = self.positions_S[:length].repeat(count)
        self._forward(prompts_BP.flatten(), position_T, attend)

    @torch.inference_mode()
    def decode(self, tokens_B: Tensor, position_B: Tensor) -> Tensor:
        """Return the logits after the token of every slot, which is at a position of its text."""
        num_kv_heads = self.config.num_kv_heads
        mask_BS = self.positions_S <= position_B[:, None]
        groups = self.config.num_heads // num_kv_heads

        def attend(layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
            keys_BMSH, values_BMSH = self.cache_L2BMSH[layer]
            keys_BMSH[self.slots_B, :, position_B] = k_TMH
            values_BMSH[self.slots_B, :, position_B] = v_TMH
            # Queries of one key head are its query rows, so that keys are read once.
            q_BMGH = q_TNH.view(len(q_TNH), num_kv_heads, groups, -1)
            mask = mask_BS[:, None, None].expand(-1, num_kv_heads, groups, -1)
            out = F.scaled_dot_product_attention(q_BMGH, keys_BMSH, values_BMSH, attn_mask=mask)
            return out.reshape(len(q_TNH), -1)

        x_TD = self._forward(tokens_B, position_B, attend)
        return F.linear(self._norm(x_TD, self.weights.norm), self.weights.lm_head_VD)

    def _forward(self, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        config = self.config
        x_TD = F.embedding(tokens_T, self.weights.embedding_VD)
        cos_sin = self.cos_SF[position_T], self.sin_SF[position_T]
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        for number, layer in enumerate(self.weights.layers):
            qkv_TX = F.linear(self._norm(x_TD, layer.attn_norm), layer.qkv, layer.qkv_bias)
            heads_TXH = qkv_TX.view(len(x_TD), -1, config.head_dim)
            q_TNH, k_TMH, v_TMH = torch.split(heads_TXH, sizes, 1)
            out_TD = attend(number, apply_rope(q_TNH, *cos_sin), apply_rope(k_TMH, *cos_sin), v_TMH)
            x_TD = x_TD + F.linear(out_TD, layer.out)
            gate_up = F.linear(self._norm(x_TD, layer.mlp_norm), layer.gate_up)
            gate_TI, up_TI = gate_up.chunk(2, -1)
            x_TD = x_TD + F.linear(F.silu(gate_TI) * up_TI, layer.down)
        return x_TD

    def _norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return F.rms_norm(x_TD, x_TD.shape[-1:], weight_D, self.config.rms_norm_eps)
