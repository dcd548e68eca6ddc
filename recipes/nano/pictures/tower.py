"""Nano's image tower in training: the package's own, with local heads that are dropped afterwards.

B pictures, S soft tokens, P patches, T = B * P, C numbers of a patch, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dgemma.config import VisionConfig
from dgemma.model.norm_rope import rms_norm
from dgemma.model.vision import Axis, Grid, ImageEncoder, VisionLayer
from recipes.nano.pictures.compose import NO_OFFSET, NUM_KINDS

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
TAP = 4  # layers before the local heads
MAX_INDEX = 132  # tokens that the second head tells apart; the last class is none


class SeeingTower(nn.Module):
    """The tower, and local heads after its fourth layer that only training uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = ImageEncoder(CONFIG, width)
        self.local = nn.Linear(CONFIG.hidden_size, NUM_KINDS + MAX_INDEX + 1 + NO_OFFSET + 1)
        self.run_layer: Callable[..., Tensor] = run_layer
        reset_tower(self.encoder)

    def forward(self, pixels_BHWC: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Return features [B, S, D] and local logits [B, P, ...]."""
        tower = self.encoder.vision_tower
        patches_BPC = to_patches(pixels_BHWC)
        positions_2P = grid.positions(patches_BPC.device)
        hidden_BPD = tower.patch_embedder(patches_BPC, positions_2P)
        count, x_TD = len(hidden_BPD), hidden_BPD.flatten(0, 1)
        axes = tower._axes(positions_2P, count)
        local = None
        for number, layer in enumerate(tower.encoder.layers, start=1):
            x_TD = self.run_layer(layer, x_TD, axes, count)
            if number == TAP:
                local = self.local(rms_norm(x_TD, None, 1e-6))
        assert local is not None
        pooled = tower._pool(x_TD.float().view(hidden_BPD.shape), grid)
        return self.encoder.embed_vision(pooled), local.view(*patches_BPC.shape[:2], -1)


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


def run_layer(layer: VisionLayer, x_TD: Tensor, axes: tuple[Axis, Axis], count: int) -> Tensor:
    return layer(x_TD, axes, count)  # type: ignore[no-any-return]


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
