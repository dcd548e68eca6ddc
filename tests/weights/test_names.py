"""The name table against the released numbers and against what transformers writes."""

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from dgemma.config import load_config
from dgemma.weights.names import stored_names, tied_names
from tests.weights.sample import CONFIG, SHARED, SIBLING, header

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the released config.json is not beside this checkout"
)


@needs_shared
def test_the_released_layout_has_the_published_names_and_bytes() -> None:
    names = stored_names(load_config(SHARED))
    groups = Counter(entry.group for entry in names.values())
    assert groups == {"text": 661, "twin": 30, "vision": 356}
    assert 2 * sum(prod(entry.shape) for entry in names.values()) == 51_647_562_456
    assert len(tied_names(load_config(SHARED))) == 628


@needs_shared
def test_the_sibling_has_its_published_names_and_bytes() -> None:
    names = stored_names(replace(load_config(SHARED), family="gemma4"))
    assert len(names) == 1013
    assert 2 * sum(prod(entry.shape) for entry in names.values()) == 51_611_872_412


@needs_shared
def test_released_shapes_are_those_of_the_published_index() -> None:
    names = stored_names(load_config(SHARED))
    vision = "model.encoder.vision_tower."
    shapes = {
        "model.decoder.embed_tokens.weight": (262144, 2816),
        "model.decoder.layers.4.self_attn.v_proj.weight": (2048, 2816),
        "model.decoder.layers.5.self_attn.k_proj.weight": (1024, 2816),
        "model.decoder.layers.29.self_attn.o_proj.weight": (2816, 8192),
        "model.decoder.layers.0.experts.gate_up_proj": (128, 1408, 2816),
        "model.encoder.language_model.layers.29.layer_scalar": (1,),
        vision + "patch_embedder.position_embedding_table": (2, 10240, 1152),
        vision + "encoder.layers.26.mlp.down_proj.linear.weight": (1152, 4304),
        vision + "std_scale": (1152,),
        "model.encoder.embed_vision.embedding_projection.weight": (2816, 1152),
    }
    assert {name: names[name].shape for name in shapes} == shapes
    assert "model.decoder.layers.5.self_attn.v_proj.weight" not in names


def test_the_table_is_what_transformers_writes(single: Path) -> None:
    raw, _ = header(single / "model.safetensors")
    raw.pop("__metadata__")
    written = {name: tuple(entry["shape"]) for name, entry in raw.items()}
    assert {name: entry.shape for name, entry in stored_names(CONFIG).items()} == written


def test_the_table_of_the_sibling_is_what_transformers_writes(sibling: Any, tmp_path: Path) -> None:
    sibling.save_pretrained(tmp_path)
    raw, _ = header(tmp_path / "model.safetensors")
    raw.pop("__metadata__")
    written = {name: tuple(entry["shape"]) for name, entry in raw.items()}
    assert {name: entry.shape for name, entry in stored_names(SIBLING).items()} == written


@pytest.mark.parametrize("config", [CONFIG, SIBLING], ids=["diffusion", "sibling"])
def test_stored_and_tied_names_are_all_that_transformers_has(
    config: Any, theirs: Any, sibling: Any
) -> None:
    model = theirs if config is CONFIG else sibling
    known = stored_names(config) | tied_names(config)
    assert known.keys() == model.state_dict().keys()
    for name, entry in tied_names(config).items():
        theirs_too = model.state_dict()
        assert theirs_too[name].data_ptr() == theirs_too[entry.target].data_ptr()


def test_a_config_without_vision_has_no_vision_names() -> None:
    groups = {entry.group for entry in stored_names(replace(CONFIG, vision=None)).values()}
    assert groups == {"text", "twin"}
