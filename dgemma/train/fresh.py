"""Weights to start training from.

Every block is between norms, so what matters is the weight of the norm that closes it: small, so
that the stream is at first the embedding and each layer adds a little. Everything is drawn from a
seed of its own name, as for random models.
"""

import torch

from dgemma.config import ModelConfig
from dgemma.model.gemma import Gemma
from dgemma.weights.load import fill
from dgemma.weights.names import LAYER_SCALAR, skeleton
from dgemma.weights.random import draw, name_seed

CLOSING = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")


def fresh_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Gemma:
    """A float32 model that has learned nothing."""
    model = skeleton(config)
    weights = {}
    for name, weight in model.state_dict().items():
        generator = torch.Generator().manual_seed(name_seed(seed, name))
        mean, deviation = _scale(name, tuple(weight.shape), config)
        weights[name] = draw(torch.empty(weight.shape), mean, deviation, generator).to(device)
    return fill(model, weights).requires_grad_(True)


def _scale(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[float, float]:
    """Mean and standard deviation of a weight."""
    fan_in = shape[-1]
    if name.endswith(LAYER_SCALAR):
        return 1.0, 0.0
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return fan_in**-0.25, 0.0  # scores have no other scale: this makes them of unit size
    if name.endswith(CLOSING):
        return (2 * config.num_hidden_layers) ** -0.5, 0.0
    if len(shape) == 1:
        return 1.0, 0.0
    return 0.0, fan_in**-0.5
