"""Qwen2 for writing in large batches: weights of a GGUF file, a place for each text in one cache.

T rows of a pass, D width, N query heads, M key heads, G = N / M, H head width, B places, S tokens
that a place holds, P tokens of a prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.model.rope import apply_rope
from recipes.teacher.gguf import Gguf

ARCHITECTURE = "qwen2"

# A layer, and its queries, keys and values [T, heads, H], to what attention gives, [T, N * H].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    layers: int
    heads: int
    key_heads: int
    width: int
    eps: float
    theta: float  # of the rotations

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @classmethod
    def of(cls, file: Gguf) -> "Shape":
        def fact(name: str) -> float:
            return float(file.facts[f"{ARCHITECTURE}.{name}"])

        return cls(
            layers=int(fact("block_count")),
            heads=int(fact("attention.head_count")),
            key_heads=int(fact("attention.head_count_kv")),
            width=int(fact("embedding_length")),
            eps=fact("attention.layer_norm_rms_epsilon"),
            theta=fact("rope.freq_base"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer; those that read the same rows are joined."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    ff_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    table_VD: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head_VD: Tensor


def read_weights(file: Gguf, device: torch.device, dtype: torch.dtype) -> tuple[Shape, Weights]:
    shape = Shape.of(file)

    def joined(*names: str) -> Tensor:
        return torch.cat([file.weight(name, device).to(dtype) for name in names])

    def layer(number: int) -> Layer:
        at = f"blk.{number}."
        return Layer(
            norm=joined(f"{at}attn_norm.weight"),
            qkv=joined(*(f"{at}attn_{part}.weight" for part in "qkv")),
            qkv_bias=joined(*(f"{at}attn_{part}.bias" for part in "qkv")),
            out=joined(f"{at}attn_output.weight"),
            ff_norm=joined(f"{at}ffn_norm.weight"),
            gate_up=joined(f"{at}ffn_gate.weight", f"{at}ffn_up.weight"),
            down=joined(f"{at}ffn_down.weight"),
        )

    table_VD = joined("token_embd.weight")
    head_VD = joined("output.weight") if "output.weight" in file.weights else table_VD
    layers = tuple(layer(number) for number in range(shape.layers))
    norm = joined("output_norm.weight")
    return shape, Weights(table_VD=table_VD, layers=layers, norm=norm, head_VD=head_VD)


class Qwen:
    """The model with its cache, which `encode` and `step` write to."""

    def __init__(self, shape: Shape, weights: Weights, places: int, room: int) -> None:
        self.shape, self.weights = shape, weights
        like = weights.table_VD
        size = (shape.layers, 2, places, shape.key_heads, room, shape.head_width)
        self.cache_X2BMSH = like.new_zeros(size)
        self.at_B = torch.arange(places, device=like.device)
        self.room_S = torch.arange(room, device=like.device)
        half = shape.head_width // 2
        turn_F = shape.theta ** -(torch.arange(half, device=like.device) / half)
        angle_SF = self.room_S[:, None] * turn_F
        self.cos_SF, self.sin_SF = angle_SF.cos().to(like.dtype), angle_SF.sin().to(like.dtype)

    @torch.inference_mode()
    def encode(self, prompts_BP: Tensor, places_B: Tensor) -> None:
        """Put the keys and values of prompts into places; what fills a prompt up does no harm."""
        count, length = prompts_BP.shape
        shape = self.shape

        def attend(layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
            q, k, v = (
                x.view(count, length, -1, shape.head_width).transpose(1, 2)
                for x in (q_TNH, k_TMH, v_TMH)
            )
            self.cache_X2BMSH[layer, 0, places_B, :, :length] = k
            self.cache_X2BMSH[layer, 1, places_B, :, :length] = v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(count * length, -1)

        at_T = self.room_S[:length].repeat(count)
        self._layers(prompts_BP.flatten(), at_T, attend)

    @torch.inference_mode()
    def step(self, tokens_B: Tensor, at_B: Tensor) -> Tensor:
        """Logits behind the token of every place, the `at`th of its text."""
        shape = self.shape
        sees_BS = self.room_S <= at_B[:, None]
        groups = shape.heads // shape.key_heads

        def attend(layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
            keys_BMSH, values_BMSH = self.cache_X2BMSH[layer]
            keys_BMSH[self.at_B, :, at_B] = k_TMH
            values_BMSH[self.at_B, :, at_B] = v_TMH
            # Queries that share a key head stand in its rows, so that keys are read once.
            q_BMGH = q_TNH.view(len(q_TNH), shape.key_heads, groups, -1)
            sees = sees_BS[:, None, None].expand(-1, shape.key_heads, groups, -1)
            out = F.scaled_dot_product_attention(q_BMGH, keys_BMSH, values_BMSH, attn_mask=sees)
            return out.reshape(len(q_TNH), -1)

        x_TD = self._layers(tokens_B, at_B, attend)
        return F.linear(self._normed(x_TD, self.weights.norm), self.weights.head_VD)

    def _layers(self, tokens_T: Tensor, at_T: Tensor, attend: Attend) -> Tensor:
        x_TD = F.embedding(tokens_T, self.weights.table_VD)
        turns = self.cos_SF[at_T], self.sin_SF[at_T]
        keys = self.shape.key_heads
        for number, layer in enumerate(self.weights.layers):
            qkv_TX = F.linear(self._normed(x_TD, layer.norm), layer.qkv, layer.qkv_bias)
            heads_TXH = qkv_TX.view(len(x_TD), -1, self.shape.head_width)
            q_TNH, k_TMH, v_TMH = torch.split(heads_TXH, [self.shape.heads, keys, keys], 1)
            out_TD = attend(number, apply_rope(q_TNH, *turns), apply_rope(k_TMH, *turns), v_TMH)
            x_TD = x_TD + F.linear(out_TD, layer.out)
            gate_up = F.linear(self._normed(x_TD, layer.ff_norm), layer.gate_up)
            gate_TI, up_TI = gate_up.chunk(2, -1)
            x_TD = x_TD + F.linear(F.silu(gate_TI) * up_TI, layer.down)
        return x_TD

    def _normed(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return F.rms_norm(x_TD, x_TD.shape[-1:], weight_D, self.shape.eps)
