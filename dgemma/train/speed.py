"""Compiling the passes, and recomputing activations in the backward instead of keeping them."""

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dgemma.model.gemma import Context, Gemma, Layer, rounded
from dgemma.model.rope import CosSin
from dgemma.train.objective import NotingRouter, Objective, Route

P = ParamSpec("P")
R = TypeVar("R")


def compiled(objective: Objective) -> Objective:
    """Compile an objective's two passes in place, each whole; the first step takes minutes."""
    objective.losses = _compile(objective.losses)  # type: ignore[method-assign]
    objective.guess = _compile(objective.guess)  # type: ignore[method-assign]
    return objective


def compiled_by_kind(objective: Objective) -> Objective:
    """Compile both passes in place, a layer at a time: layers of one kind share their code.

    The compiler then has two layers to work on instead of all of them.
    """
    _allow_cases(4 * len(objective.model.layers))
    objective.enter = _compile(objective.enter)  # type: ignore[method-assign]
    objective.read = _compile(objective.read)  # type: ignore[method-assign]
    objective.score = _compile(objective.score)  # type: ignore[method-assign]
    objective.model.runner = ByKind(objective.model)
    return objective


class ByKind:
    """Runs the layers of a model by code that is compiled for each kind; set as its `runner`."""

    def __init__(self, model: Gemma) -> None:
        self.layers = cast(list[Layer], list(model.layers))
        self.run, self.norm = _compile(run_layer), _compile(model.norm.forward)
        kinds = model.config.layer_types
        for layer, kind in zip(self.layers, kinds, strict=True):
            # Compiled code looks at the number, of which packed contexts read the kind alone.
            layer.self_attn.layer = kinds.index(kind)

    def __call__(self, x_TD: Tensor, context: Context, cos_sin: CosSin) -> Tensor:
        for layer in self.layers:
            ran = self.run(layer, x_TD, context, cos_sin)
            x_TD, cast(NotingRouter, layer.router).noted = cast(tuple[Tensor, Route], ran)
        return self.norm(x_TD)


def run_layer(
    layer: Layer, x_TD: Tensor, context: Context, cos_sin: CosSin
) -> tuple[Tensor, Route | None]:
    """A layer, and what its router noted, which compiled code must not leave lying about."""
    x_TD = layer(x_TD, cos_sin, context)
    router = cast(NotingRouter, layer.router)
    noted, router.noted = router.noted, None
    return x_TD, noted


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """For the shapes it is called with; what rounds a constant is then a constant itself."""
    # Not said where it is written: that would load the compiler, two seconds, wherever a model is.
    torch.compiler.assume_constant_result(rounded)  # type: ignore[no-untyped-call]
    return torch.compile(function, dynamic=False)


def _allow_cases(count: int) -> None:
    """How often a function may be compiled anew, before it is run plainly, and slowly, instead."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def compiled_layers(model: Gemma) -> Gemma:
    """Compile layer by layer, in place: where weights are sharded, they come and go between."""
    # Layers share their code, and each number of a layer is a case of its own.
    _allow_cases(4 * len(model.layers))
    for layer in model.layers:
        layer.forward = _compile(layer.forward)
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
