"""Tiny real models: configs drawn by hypothesis, and their twins in transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig, VisionConfig, config_to_json
from dgemma.model.gemma import Gemma
from examples.tiny_model import tiny_config

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion, Gemma4ForConditionalGeneration

# No sampler parameter has its default value.
GENERATION = GenerationConfig(
    max_denoising_steps=9,
    t_max=2.0,
    t_min=1.0,
    entropy_bound=0.7,
    stability_threshold=3,
    confidence_threshold=0.2,
)
CPU = torch.device("cpu")
VISION = VisionConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    patch_size=2,
    position_embedding_size=4,
)
TINY = tiny_config(
    61,
    vision=VISION,
    layer_types=(SLIDING, FULL),
    hidden_size=32,
    intermediate_size=24,
    moe_intermediate_size=12,
    head_dim=8,
    global_head_dim=16,
    sliding_window=12,
    canvas_length=8,
)


@st.composite
def configs(draw: Any) -> ModelConfig:
    """Layer patterns, head counts, experts, windows and canvases of every relation."""
    heads = draw(st.sampled_from([2, 4]))
    experts = draw(st.integers(1, 5))
    sliding_layers = draw(st.lists(st.sampled_from([SLIDING, FULL]), min_size=1, max_size=3))
    return replace(
        TINY,
        vocab_size=draw(st.sampled_from([40, 61, 128])),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([1, 2])),
        num_global_key_value_heads=draw(st.sampled_from([1, heads])),
        head_dim=draw(st.sampled_from([4, 8])),
        global_head_dim=draw(st.sampled_from([8, 16])),
        num_experts=experts,
        top_k_experts=draw(st.integers(1, experts)),
        layer_types=(*sliding_layers, FULL),
        sliding_window=draw(st.sampled_from([2, 3, 7, 16, 64])),
        canvas_length=draw(st.integers(4, 12)),
        final_logit_softcapping=draw(st.sampled_from([10.0, 30.0])),
    )


def twin(config: ModelConfig) -> DiffusionGemmaForBlockDiffusion:
    """Return the reference model of the same config, with random weights."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    raw = config_to_json(config)
    reference = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**raw))
    return reference.eval().requires_grad_(False)


def gemma4_twin(config: ModelConfig) -> Gemma4ForConditionalGeneration:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    raw = config_to_json(replace(config, family="gemma4"))
    return Gemma4ForConditionalGeneration(Gemma4Config(**raw)).eval().requires_grad_(False)


def shake(reference: torch.nn.Module, seed: int, size: float = 0.3) -> None:
    """Give every weight a random value; matrices of `size`, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(size * noise if parameter.dim() > 1 else 1 + 0.2 * noise)


def ours(config: ModelConfig, reference: torch.nn.Module, prefix: str = "model.decoder.") -> Gemma:
    """Return our model with the reference's weights."""
    model = Gemma(config)
    names = model.state_dict().keys()
    theirs = reference.state_dict()
    model.load_state_dict({name: theirs[prefix + name].clone() for name in names})
    return model.eval().requires_grad_(False)


def copy_weights(model: Gemma, reference: torch.nn.Module) -> None:
    """Copy our weights into the reference model."""
    theirs = reference.state_dict()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            theirs["model.decoder." + name].copy_(value)
            if name.endswith("layer_scalar"):
                theirs["model.encoder.language_model." + name].copy_(value)
