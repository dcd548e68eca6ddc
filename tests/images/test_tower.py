"""The image tower against transformers, on random weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.config import VisionConfig, load_config
from dgemma.errors import UsageError
from dgemma.model.vision import Grid, ImageEncoder
from dgemma.weights.names import vision_skeleton
from tests.images.tiny_tower import SEEING, TOWER, encoder_of, padded, random_patches, reference_of
from tests.tiny import gemma4_twin
from tests.weights.sample import SHARED

TOLERANCE = 2e-6


@st.composite
def towers(draw: Any) -> VisionConfig:
    heads, width = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([4, 8, 12]))
    return replace(
        TOWER,
        hidden_size=draw(st.sampled_from([12, 24])),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width,
        num_hidden_layers=draw(st.integers(1, 3)),
        pooling_kernel_size=draw(st.sampled_from([2, 3])),
        patch_size=draw(st.sampled_from([2, 4])),
        standardize=draw(st.booleans()),
    )


@settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(
    tower=towers(),
    blocks=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_features_agree_with_the_reference_on_padded_batches(
    tower: VisionConfig, blocks: list[tuple[int, int]], seed: int
) -> None:
    config = replace(SEEING, vision=tower)
    reference = reference_of(config, seed)
    encoder = encoder_of(config, reference)
    pool = tower.pooling_kernel_size
    grids = [Grid(pool * rows, pool * columns) for rows, columns in blocks]
    patches = [random_patches(tower, grid, seed + i) for i, grid in enumerate(grids)]
    length = max(map(len, patches))
    pixels, positions = padded(list(zip(patches, grids, strict=True)), length)
    theirs = reference.model.encoder.get_image_features(pixels, positions).pooler_output
    mine = torch.cat([encoder(p[None], g)[0] for p, g in zip(patches, grids, strict=True)])
    scale = theirs.abs().max().clamp(min=1)
    assert (mine - theirs).abs().max() / scale < TOLERANCE


def test_the_autoregressive_sibling_has_the_same_tower() -> None:
    config = replace(SEEING, family="gemma4")
    reference = gemma4_twin(config)
    encoder = encoder_of(config, reference, prefix="model.")
    grid = Grid(6, 9)
    patches = random_patches(TOWER, grid, 1)
    (theirs,) = reference.model.get_image_features(*padded([(patches, grid)])).pooler_output
    assert (encoder(patches[None], grid)[0] - theirs).abs().max() < TOLERANCE


def test_pictures_of_one_size_share_a_pass() -> None:
    encoder, grid = encoder_of(SEEING, reference_of(SEEING)), Grid(6, 9)
    patches = torch.stack([random_patches(TOWER, grid, seed) for seed in range(3)])
    with torch.inference_mode():
        together = encoder(patches, grid)
        alone = torch.cat([encoder(one[None], grid) for one in patches])
    assert together.shape == (3, 6, SEEING.hidden_size)
    assert (together - alone).abs().max() < TOLERANCE


def test_half_precision_keeps_the_mean_of_a_block_in_the_reference_s_order() -> None:
    reference = reference_of(SEEING)
    grid = Grid(6, 9)
    patches = random_patches(TOWER, grid, 5)
    encoder = encoder_of(SEEING, reference).to(torch.bfloat16)
    reference = reference.to(torch.bfloat16)
    theirs = reference.model.encoder.get_image_features(*padded([(patches, grid)])).pooler_output
    mine = encoder(patches[None], grid)[0]
    assert mine.dtype == theirs.dtype == torch.bfloat16
    assert (mine.float() - theirs.float()).abs().mean() < 0.05


def test_the_tower_learns() -> None:
    encoder = encoder_of(SEEING, reference_of(SEEING)).requires_grad_(True)
    encoder(random_patches(TOWER, Grid(3, 3), 0)[None], Grid(3, 3)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())


def test_a_picture_with_more_patches_than_positions_is_refused() -> None:
    encoder, grid = ImageEncoder(TOWER, SEEING.hidden_size), Grid(3, 66)
    with pytest.raises(UsageError, match=r"3 by 66 patches is too long.*64 positions"):
        encoder(random_patches(TOWER, grid, 0)[None], grid)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the released config is not beside this checkout")
def test_the_released_tower_has_its_published_size() -> None:
    tower = vision_skeleton(load_config(SHARED))
    assert tower is not None
    parameters = {n: p.numel() for n, p in tower.named_parameters()}
    projection = parameters.pop("embed_vision.embedding_projection.weight")
    assert (sum(parameters.values()), projection) == (569_548_080, 3_244_032)
    assert len(tower.state_dict()) == 356
