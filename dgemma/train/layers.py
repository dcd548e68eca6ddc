"""Run the layer stack in training: record router outputs, recompute activations, compile.

T rows, D width, E experts, K of them per token.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgemma.model.gemma import Gemma, Layer, Router, rounded
from dgemma.train.masks import PackedContext

P = ParamSpec("P")
R = TypeVar("R")
# Units of compilation on a GPU: one per layer type (faster to compile), or whole passes.
CompileMode = Literal["layer_types", "whole_pass"]


class RouterOutput(NamedTuple):
    probs_TE: Tensor
    topk_ids_TK: Tensor


class RecordingRouter(Router):
    """A router that records its last output and shares the parameters of the one it replaces.

    Forward hooks would work too, but they carry numbers that compiled code guards on.
    """

    def __init__(self, router: Router) -> None:
        nn.Module.__init__(self)
        self.top_k, self.eps = router.top_k, router.eps
        self.proj = router.proj
        self.scale, self.per_expert_scale = router.scale, router.per_expert_scale
        self.recorded: RouterOutput | None = None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        topk_ids_TK, topk_weights_TK = super().forward(x_TD)
        self.recorded = RouterOutput(self.probs(x_TD), topk_ids_TK)
        return topk_ids_TK, topk_weights_TK


def run_layer(layer: Layer, x_TD: Tensor, context: PackedContext) -> tuple[Tensor, RouterOutput]:
    """Run a layer; return and clear the router's record, so that it keeps no tensors."""
    x_TD = layer(x_TD, context.cos_sin, context)
    router = cast(RecordingRouter, layer.router)
    recorded, router.recorded = router.recorded, None
    assert recorded is not None
    return x_TD, recorded


def run_recomputed(
    layer: Layer, x_TD: Tensor, context: PackedContext
) -> tuple[Tensor, RouterOutput]:
    """Run a layer and keep only its input; the backward recomputes it."""
    out = checkpoint(run_layer, layer, x_TD, context, use_reentrant=False)
    return cast(tuple[Tensor, RouterOutput], out)


@dataclass(frozen=True, slots=True, eq=False)
class LayerStack:
    """All layers of a model and the final norm, with the routers' outputs."""

    layers: Sequence[Layer]
    run_layer: Callable[[Layer, Tensor, PackedContext], tuple[Tensor, RouterOutput]]
    norm: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, model: Gemma, *, recompute: bool = False) -> "LayerStack":
        """Make the stack of a model, whose routers are replaced by recording ones."""
        for layer in model.layers:
            layer.router = RecordingRouter(cast(Router, layer.router))
        if recompute:
            _allow_recorded_outputs()
        layers = cast(list[Layer], list(model.layers))
        return cls(layers, run_recomputed if recompute else run_layer, model.norm)

    def __call__(self, x_TD: Tensor, context: PackedContext) -> tuple[Tensor, list[RouterOutput]]:
        outputs = []
        for layer in self.layers:
            x_TD, output = self.run_layer(layer, x_TD, context)
            outputs.append(output)
        return self.norm(x_TD), outputs

    def compiled(self, layer_types: Sequence[str]) -> "LayerStack":
        """Compile one function per layer type instead of one per layer."""
        allow_recompiles(4 * len(self.layers))
        layers = [
            _with_layer_number(layer, layer_types.index(kind))
            for layer, kind in zip(self.layers, layer_types, strict=True)
        ]
        norm = compiled(cast(nn.Module, self.norm).forward)
        return LayerStack(layers, compiled(self.run_layer), norm)


def _with_layer_number(layer: Layer, number: int) -> Layer:
    """Return a view of a layer with another layer number.

    Compiled code guards on the number, of which packed contexts use only the layer type.
    """
    attention, view = copy.copy(layer.self_attn), copy.copy(layer)
    attention.layer = number
    view._modules = {**layer._modules, "self_attn": attention}
    return view


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile for fixed shapes, with rounded constants as constants."""
    # Not declared in model/gemma.py, which would then load the compiler: two seconds.
    torch.compiler.assume_constant_result(rounded)  # type: ignore[no-untyped-call]
    return torch.compile(function, dynamic=False)


def allow_recompiles(count: int) -> None:
    """Raise dynamo's limit of variants per function, beyond which it runs uncompiled."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def _allow_recorded_outputs() -> None:
    """Let compiled checkpointing accept that a router records its output in the first run only."""
    config = torch._dynamo.config
    if hasattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def compile_sharded_layers(model: Gemma) -> None:
    """Compile each layer's forward in place: FSDP gathers its weights in hooks around it."""
    # Layers share their code, and each layer number is a variant.
    allow_recompiles(4 * len(model.layers))
    for layer in model.layers:
        layer.forward = compiled(layer.forward)
