"""Shapes for benchmarks with random weights: the released 26B-A4B model, and a 40M example."""

from dataclasses import replace

from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.cost.table import RELEASED

__all__ = ["EXAMPLE", "RELEASED", "shallow"]

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


def shallow(layers: int) -> ModelConfig:
    """The released shapes with fewer layers; the last one is always full."""
    kinds = (*RELEASED.layer_types[: layers - 1], FULL)
    return replace(RELEASED, layer_types=kinds)
