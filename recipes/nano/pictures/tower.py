"""Nano's image tower in training: the package's own, with a local head that is dropped afterwards.

B pictures, S soft tokens, P patches, T = B * P, C numbers of a patch, D width.
"""

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
TAP = 3  # layers before the local head
# Names in a training's state: of the tower, and of the tokens it spells and their embeddings.
ENCODER, IDS, ROWS = "encoder.", "spelled.ids", "spelled.rows"


class SeeingTower(nn.Module):
    """The tower, and a linear after its third layer, for what each patch shows, that is dropped."""

    def __init__(self, width: int, config: VisionConfig = CONFIG) -> None:
        super().__init__()
        self.encoder = ImageEncoder(config, width)
        self.local = nn.Linear(config.hidden_size, NUM_KINDS)
        self.attention_inputs, self.after_attention = attention_inputs, after_attention
        reset_tower(self.encoder)

    def forward(self, pixels_BHWC: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return features [B, S, D] and local logits [B, P, ...]."""
        tower = self.encoder.vision_tower
        patches_BPC = to_patches(pixels_BHWC)
        positions_2P = grid.positions(patches_BPC.device)
        hidden_BPD = tower.patch_embedder(patches_BPC, positions_2P)
        axes = tower._axes(positions_2P, len(hidden_BPD))
        x_TD = hidden_BPD.flatten(0, 1).clone()  # no view, or layers would be compiled twice
        local = None
        for number, layer in enumerate(tower.encoder.layers, start=1):
            heads = self.attention_inputs(layer, x_TD, axes)
            q, k, v = (x.unflatten(0, hidden_BPD.shape[:2]).transpose(1, 2) for x in heads)
            out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
            x_TD = self.after_attention(layer, x_TD, out.transpose(1, 2).flatten(2).flatten(0, 1))
            if number == TAP:
                local = self.local(rms_norm(x_TD, None, 1e-6))
        assert local is not None
        pooled = tower._pool(x_TD.float().view(hidden_BPD.shape), grid)
        return self.encoder.embed_vision(pooled), local.view(*patches_BPC.shape[:2], -1)

    def compile(self) -> None:  # type: ignore[override]
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
