"""The image tower: patches of a picture to soft tokens, which replace rows of token embeddings.

Gemma 4's tower. Every patch of a picture sees every other; square blocks of patches are averaged
into soft tokens and projected to the width of the language model. Pictures of one size share a
pass, without padding. Attribute names are those of the released files. Nothing here knows files,
devices or requests.

B pictures, P patches of one, T = B * P, C numbers of a patch, D width of the tower, N/M query/key
heads, H head width, S soft tokens of one picture, E width of the language model.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.config import VisionConfig
from dgemma.errors import UsageError
from dgemma.model.gemma import Norm
from dgemma.model.norm_rope import apply_rope, cos_sin, rms_norm

Axis = tuple[Tensor, Tensor]  # cos_TP and sin_TP of the patches' columns, or of their rows


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of a picture; both numbers are multiples of the pooling kernel."""

    rows: int
    columns: int

    def positions(self, device: torch.device) -> Tensor:
        """Column and row of each patch, [2, P], row by row."""
        row_P = torch.arange(self.rows, device=device).repeat_interleave(self.columns)
        column_P = torch.arange(self.columns, device=device).repeat(self.rows)
        return torch.stack([column_P, row_P])


@cache
@torch.inference_mode(False)
def axial_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Inverse frequencies of the pairs that rotate by one of the two directions."""
    width = head_dim // 2
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    return (1.0 / theta**exponents).to(device)


class VisionLinear(nn.Module):
    """A linear under the released name; other releases clip its input and output."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class VisionAttention(nn.Module):
    """Attention among all patches of a picture, with normed q, k and v and axial RoPE."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        query = config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        self.has_groups = query != key
        self.q_proj = VisionLinear(config.hidden_size, query)
        self.k_proj = VisionLinear(config.hidden_size, key)
        self.v_proj = VisionLinear(config.hidden_size, key)
        self.o_proj = VisionLinear(query, config.hidden_size)
        self.q_norm, self.k_norm = Norm(self.head_dim, self.eps), Norm(self.head_dim, self.eps)

    def forward(self, x_TD: Tensor, axes: tuple[Axis, Axis], num_pictures: int) -> Tensor:
        heads = (len(x_TD), -1, self.head_dim)
        q_TNH = rotate(self.q_norm(self.q_proj(x_TD).view(heads)), axes)
        k_TMH = rotate(self.k_norm(self.k_proj(x_TD).view(heads)), axes)
        v_TMH = rms_norm(self.v_proj(x_TD).view(heads), None, self.eps)
        q_BNPH, k_BMPH, v_BMPH = (
            x.view(num_pictures, len(x_TD) // num_pictures, -1, self.head_dim).transpose(1, 2)
            for x in (q_TNH, k_TMH, v_TMH)
        )
        out_BNPH = F.scaled_dot_product_attention(
            q_BNPH, k_BMPH, v_BMPH, scale=1.0, enable_gqa=self.has_groups
        )
        return self.o_proj(out_BNPH.transpose(1, 2).reshape(len(x_TD), -1))  # type: ignore[no-any-return]


def rotate(x_TNH: Tensor, axes: tuple[Axis, Axis]) -> Tensor:
    """Rotate the first half of each head by the patch's column, the second by its row."""
    halves = zip(x_TNH.chunk(2, dim=-1), axes, strict=True)
    return torch.cat([apply_rope(half, *axis) for half, axis in halves], dim=-1)


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.gate_proj = VisionLinear(config.hidden_size, config.intermediate_size)
        self.up_proj = VisionLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = VisionLinear(config.intermediate_size, config.hidden_size)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TI = F.gelu(self.gate_proj(x_TD), approximate="tanh")
        return self.down_proj(gate_TI * self.up_proj(x_TD))  # type: ignore[no-any-return]


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = VisionAttention(config), VisionMLP(config)
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.pre_feedforward_layernorm = Norm(width, eps)
        self.post_feedforward_layernorm = Norm(width, eps)

    def forward(self, x_TD: Tensor, axes: tuple[Axis, Axis], num_pictures: int) -> Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), axes, num_pictures)
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        inner_TD = self.mlp(self.pre_feedforward_layernorm(x_TD))
        return x_TD + self.post_feedforward_layernorm(inner_TD)  # type: ignore[no-any-return]


class PatchEmbedder(nn.Module):
    """Projected pixels plus one learned embedding for the column and one for the row."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(config.patch_width, config.hidden_size, bias=False)
        shape = (2, config.position_embedding_size, config.hidden_size)
        self.position_embedding_table = nn.Parameter(torch.empty(shape))

    def forward(self, pixels_BPC: Tensor, positions_2P: Tensor) -> Tensor:
        centered_BPC = (2 * (pixels_BPC - 0.5)).to(self.input_proj.weight.dtype)
        column_PD, row_PD = (
            F.embedding(positions_P, table_XD)
            for positions_P, table_XD in zip(
                positions_2P, self.position_embedding_table, strict=True
            )
        )
        return self.input_proj(centered_BPC) + (column_PD + row_PD)  # type: ignore[no-any-return]


class VisionEncoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))


class VisionTower(nn.Module):
    """Patches to pooled features, in the tower's own width."""

    std_bias: Tensor
    std_scale: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = VisionEncoder(config)
        if config.standardize:
            self.register_buffer("std_bias", torch.empty(config.hidden_size))
            self.register_buffer("std_scale", torch.empty(config.hidden_size))

    def forward(self, pixels_BPC: Tensor, grid: Grid) -> Tensor:
        positions_2P = grid.positions(pixels_BPC.device)
        hidden_BPD = self.patch_embedder(pixels_BPC, positions_2P)
        count, x_TD = len(hidden_BPD), hidden_BPD.flatten(0, 1)
        axes = self._axes(positions_2P, count)
        for layer in self.encoder.layers:
            x_TD = layer(x_TD, axes, count)
        return self._pool(x_TD.view_as(hidden_BPD), grid)

    def _axes(self, positions_2P: Tensor, num_pictures: int) -> tuple[Axis, Axis]:
        config = self.config
        freq = axial_frequencies(config.head_dim, config.rope_theta, positions_2P.device)
        columns_T, rows_T = positions_2P.repeat(1, num_pictures)
        return cos_sin(columns_T, freq), cos_sin(rows_T, freq)

    def _pool(self, hidden_BPD: Tensor, grid: Grid) -> Tensor:
        """Average blocks of patches and standardize.

        The mean is rounded to the working dtype before it is scaled, as in the reference; from then
        on it is float32, since values exceed the range of float16.
        """
        size, width = self.config.pooling_kernel_size, hidden_BPD.shape[-1]
        blocks = (-1, grid.rows // size, size, grid.columns // size, size, width)
        pooled_BSD = hidden_BPD.view(blocks).float().mean((2, 4)).flatten(1, 2)
        pooled_BSD = pooled_BSD.to(hidden_BPD.dtype).float() * math.sqrt(width)
        if self.config.standardize:
            pooled_BSD = (pooled_BSD - self.std_bias.float()) * self.std_scale.float()
        return pooled_BSD.to(hidden_BPD.dtype)


class VisionProjection(nn.Module):
    def __init__(self, config: VisionConfig, out: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.embedding_projection = nn.Linear(config.hidden_size, out, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.embedding_projection(rms_norm(x_BSD, None, self.eps))  # type: ignore[no-any-return]


class ImageEncoder(nn.Module):
    """The tower and its projection: patches to rows that replace token embeddings.

    Run it in bfloat16 or float32; its features exceed the range of float16.
    """

    def __init__(self, config: VisionConfig, out: int) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.embed_vision = VisionProjection(config, out)

    def forward(self, pixels_BPC: Tensor, grid: Grid) -> Tensor:
        """Return features [B, S, E] of pictures of one size, whose values are within [0, 1]."""
        longest = max(grid.rows, grid.columns)
        if longest > self.config.position_embedding_size:
            raise UsageError(
                f"a picture of {grid.rows} by {grid.columns} patches is too long for this tower, "
                f"which has {self.config.position_embedding_size} positions; crop it"
            )
        return self.embed_vision(self.vision_tower(pixels_BPC, grid))  # type: ignore[no-any-return]
