"""Shapes for benchmarks with random weights: the released 26B-A4B model, and two small ones."""

from dataclasses import replace

from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.roofline.table import RELEASED

__all__ = ["EXAMPLE", "RELEASED", "SHAPES", "TINY", "shallow", "shape"]

EXAMPLE = ModelConfig(
    vocab_size=16_384,
    hidden_size=384,
    intermediate_size=384,
    moe_intermediate_size=384,
    num_experts=16,
    top_k_experts=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    head_dim=64,
    global_head_dim=128,
    layer_types=(SLIDING, SLIDING, SLIDING, FULL),
    sliding_window=1024,
    dtype="float32",
    vision={
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    },
)


TINY = replace(
    EXAMPLE,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=32,
    moe_intermediate_size=64,
    num_experts=4,
    head_dim=8,
    global_head_dim=16,
    sliding_window=24,
    canvas_length=16,
)
SHAPES = {"released": RELEASED, "example": EXAMPLE, "tiny": TINY}


def shape(name: str, layers: int | None) -> ModelConfig:
    """One of `SHAPES`, with as many layers as asked for; the last one is always full."""
    found = SHAPES[name]
    if found is RELEASED:
        return shallow(layers or found.num_hidden_layers)
    return replace(found, layer_types=found.layer_types[-(layers or found.num_hidden_layers) :])


def shallow(layers: int) -> ModelConfig:
    """The released shapes with fewer layers; the last one is always full."""
    kinds = (*RELEASED.layer_types[: layers - 1], FULL)
    return replace(RELEASED, layer_types=kinds)
