"""Compiling the passes, and recomputing activations in the backward instead of keeping them."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from dgemma.model import Gemma
from dgemma.train.objective import Objective


def compiled(objective: Objective) -> Objective:
    """Compile an objective's two passes in place; the first step then takes a minute."""
    objective.losses = torch.compile(objective.losses, dynamic=False)  # type: ignore[method-assign]
    objective.guess = torch.compile(objective.guess, dynamic=False)  # type: ignore[method-assign]
    return objective


def compiled_layers(model: Gemma) -> Gemma:
    """Compile layer by layer, in place: where weights are sharded, they come and go between."""
    # Layers share their code, and each number of a layer is a case of its own.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 4 * len(model.layers))
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    return model


def recomputed(model: Gemma) -> Gemma:
    """Keep only what enters each layer, in place; the backward runs the layer again."""
    # Compiled, the router's scores are noted in the first run of a layer alone.
    config = torch._dynamo.config
    if hasattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model
