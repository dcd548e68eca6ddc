"""Nano's image tower in training: the package's own, with two linears that are dropped afterwards.

B pictures, S soft tokens, K classes of them, P patches, T = B * P, C numbers of a patch, D width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.config import VisionConfig
from dgemma.model.norm_rope import rms_norm
from dgemma.model.vision import Axis, Grid, ImageEncoder, VisionLayer, rotate
from recipes.nano.pictures.compose import NUM_KINDS

CONFIG = VisionConfig(
    hidden_size=160,
    intermediate_size=448,
    num_hidden_layers=6,
    num_attention_heads=5,
    num_key_value_heads=5,
    head_dim=32,
    pooling_kernel_size=2,
    position_embedding_size=560,
    default_output_length=280,
)
LOCAL_TAP, COLUMN_TAP = 3, 5  # layers before the two linears of training
# Names in a training's state: of the tower, and of the tokens it spells and their embeddings.
ENCODER, IDS, ROWS = "encoder.", "spelled.ids", "spelled.rows"


class Seen(NamedTuple):
    """Features of pictures, and what the two linears of training say about each patch."""

    features: Tensor  # [B, S, D]
    local: Tensor  # [B, P, kinds]
    column: Tensor  # [B, P, K]


class SeeingTower(nn.Module):
    """The tower, and two linears on its patches, which are dropped after training."""

    def __init__(self, width: int, config: VisionConfig = CONFIG, num_classes: int = 1) -> None:
        super().__init__()
        self.encoder = ImageEncoder(config, width)
        self.local = nn.Linear(config.hidden_size, NUM_KINDS)
        self.column = nn.Linear(config.hidden_size, num_classes)
        self.interpret_layers()
        reset_tower(self.encoder)

    def forward(self, pixels_BHWC: Tensor, grid: Grid) -> Seen:
        tower = self.encoder.vision_tower
        patches_BPC = to_patches(pixels_BHWC)
        positions_2P = grid.positions(patches_BPC.device)
        hidden_BPD = tower.patch_embedder(patches_BPC, positions_2P)
        axes = tower._axes(positions_2P, len(hidden_BPD))
        x_TD = hidden_BPD.flatten(0, 1).clone()  # no view, or layers would be compiled twice
        states = [x_TD]
        for layer in tower.encoder.layers:
            heads = self.attention_inputs(layer, x_TD, axes)
            q, k, v = (x.unflatten(0, hidden_BPD.shape[:2]).transpose(1, 2) for x in heads)
            out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
            x_TD = self.after_attention(layer, x_TD, out.transpose(1, 2).flatten(2).flatten(0, 1))
            states.append(x_TD)
        pooled = tower._pool(x_TD.float().view(hidden_BPD.shape), grid)
        local, column = (
            head(rms_norm(states[min(tap, len(states) - 1)], None, 1e-6))
            for head, tap in ((self.local, LOCAL_TAP), (self.column, COLUMN_TAP))
        )
        shape = (*patches_BPC.shape[:2], -1)
        return Seen(self.encoder.embed_vision(pooled), local.view(shape), column.view(shape))

    def interpret_layers(self) -> None:
        self.attention_inputs, self.after_attention = attention_inputs, after_attention

    def compile_layers(self) -> None:
        """Compile what is beside attention, once for all sizes of pictures."""
        torch._dynamo.config.suppress_errors = True
        self.attention_inputs = torch.compile(attention_inputs, dynamic=True)
        self.after_attention = torch.compile(after_attention, dynamic=True)


def attention_inputs(
    layer: VisionLayer, x_TD: Tensor, axes: tuple[Axis, Axis]
) -> tuple[Tensor, ...]:
    """Return queries, keys and values, [T, N, H], as `VisionAttention` does."""
    attention = layer.self_attn
    normed_TD = layer.input_layernorm(x_TD)
    q, k, v = (
        project(normed_TD).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = rotate(attention.q_norm(q), axes), rotate(attention.k_norm(k), axes)
    return q, k, rms_norm(v, None, attention.eps).to(q.dtype)


def after_attention(layer: VisionLayer, x_TD: Tensor, attended_TD: Tensor) -> Tensor:
    x_TD = x_TD + layer.post_attention_layernorm(layer.self_attn.o_proj(attended_TD))
    inner_TD = layer.mlp(layer.pre_feedforward_layernorm(x_TD))
    return x_TD + layer.post_feedforward_layernorm(inner_TD)  # type: ignore[no-any-return]


@torch.no_grad()
def reset_tower(encoder: ImageEncoder) -> None:
    """Draw weights; positions begin as waves of different lengths."""
    for name, weight in encoder.named_parameters():
        if name.endswith("position_embedding_table"):
            weight.copy_(torch.stack([_waves(*weight.shape[1:]) for _ in range(2)]))
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.fill_(encoder.config.head_dim**-0.25)
        elif weight.dim() == 1:
            weight.fill_(0.4 if "post_" in name else 1.0)
        else:
            weight.normal_(0, weight.shape[1] ** -0.5)


def _waves(count: int, width: int) -> Tensor:
    """Return sines of many wavelengths, mixed by a random rotation."""
    angle = torch.arange(count)[:, None] * torch.logspace(0, -2.2, width // 2)
    waves = torch.cat([angle.sin(), angle.cos()], 1)
    rotation, _ = torch.linalg.qr(torch.randn(width, width))
    return waves @ rotation * 0.7


def to_patches(pixels_BHWC: Tensor) -> Tensor:
    """Cut pixels to patches as `Picture.patches` does."""
    count, height, width, _ = pixels_BHWC.shape
    size = CONFIG.patch_size
    grid = pixels_BHWC.view(count, height // size, size, width // size, size, 3)
    return grid.transpose(2, 3).reshape(count, -1, CONFIG.patch_width)
