"""The shapes of the released 26B-A4B model, for benchmarks with random weights."""

from dataclasses import replace

from dgemma.config import FULL, SLIDING, ModelConfig

RELEASED = ModelConfig(
    vocab_size=262_144,
    hidden_size=2816,
    intermediate_size=2112,
    moe_intermediate_size=704,
    num_experts=128,
    top_k_experts=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    head_dim=256,
    global_head_dim=512,
    layer_types=((SLIDING,) * 5 + (FULL,)) * 5,
    sliding_window=1024,
)


def shallow(layers: int) -> ModelConfig:
    """The released shapes with fewer layers; the last one is always full."""
    kinds = (*RELEASED.layer_types[: layers - 1], FULL)
    return replace(RELEASED, layer_types=kinds)
