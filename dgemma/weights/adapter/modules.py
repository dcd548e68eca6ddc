"""An adapter in a model: beside the weights, taken away again, read back or merged into them.

R rank, I inputs and O outputs of a module.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.gemma import Gemma
from dgemma.weights.adapter.pairs import (
    NO_TARGET,
    NO_TARGETS,
    Adapter,
    Pair,
    check_numbers,
    ends_in,
)
from dgemma.weights.files import listing
from dgemma.weights.names import skeleton


class LoRALinear(nn.Module):
    """A linear module and the low-rank term beside it; the base is the module itself, no copy."""

    def __init__(self, base: nn.Linear, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
        super().__init__()
        self.base: nn.Module = base  # no longer an nn.Linear once it is packed
        self.scale = scale
        self.a_RI, self.b_OR = (
            nn.Parameter(half.detach().to(base.weight, copy=True), requires_grad=False)
            for half in (a_RI, b_OR)
        )

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = F.linear(self.scale * F.linear(x, self.a_RI), self.b_OR)
        return self.base(x) + change  # type: ignore[no-any-return]


def attach(model: Gemma, adapter: Adapter) -> Gemma:
    """Put the adapter beside the weights of a model, in place; before packing, if that is done."""
    for name, linear in _linears(model, adapter).items():
        _put(model, name, LoRALinear(linear, *adapter.pairs[name], adapter.scale))
    return model


def detach(model: Gemma) -> Gemma:
    """Give the model its own modules back, in place; without an adapter there is nothing to do."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            _put(model, name, module.base)
    return model


def read_back(model: Gemma, adapter: Adapter) -> Adapter:
    """The adapter with the values it now has in the model, such as training has left them."""
    modules = dict(model.named_modules())
    pairs = {}
    for name in adapter.targets:
        module = modules.get(name)
        if not isinstance(module, LoRALinear):
            raise UsageError(f"the model has no adapter on {name}; attach this one first")
        pairs[name] = Pair(*(half.detach().cpu().clone() for half in (module.a_RI, module.b_OR)))
    return replace(adapter, pairs=pairs)


@torch.no_grad()
def merge(model: Gemma, adapter: Adapter) -> Gemma:
    """Give the adapted modules new weights W + scale * B A, in place; in float32 or better."""
    for name, linear in _linears(model, adapter).items():
        old_OI = linear.weight
        exact_OI = old_OI.to(torch.promote_types(old_OI.dtype, torch.float32))
        a_RI, b_OR = (half.to(exact_OI) for half in adapter.pairs[name])
        new_OI = torch.addmm(exact_OI, b_OR, a_RI, alpha=adapter.scale).to(old_OI.dtype)
        linear.weight = nn.Parameter(new_OI, requires_grad=old_OI.requires_grad)
    return model


def new_adapter(
    model: Gemma, targets: Sequence[str], rank: int, alpha: float, seed: int
) -> Adapter:
    """An adapter that changes nothing yet: A random as PEFT draws it, B zero, both float32.

    A target is the end of a module's name: `q_proj`, `mlp.gate_proj`, `layers.3.router.proj`.
    """
    check_numbers(rank, alpha)
    generator, pairs = torch.Generator().manual_seed(seed), {}
    for name, linear in _resolve(model.config, targets).items():
        bound = linear.in_features**-0.5
        a_RI = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        pairs[name] = Pair(a_RI, torch.zeros(linear.out_features, rank))
    return Adapter(family=model.config.family, rank=rank, alpha=alpha, pairs=pairs)


def _put(model: Gemma, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _linears(model: Gemma, adapter: Adapter) -> dict[str, nn.Linear]:
    """The modules an adapter is for, once all of them fit."""
    modules = dict(model.named_modules())
    if any(isinstance(module, LoRALinear) for module in modules.values()):
        raise UsageError("the model already has an adapter; detach it first")
    if adapter.family != model.config.family:
        raise CheckpointError(
            f"the adapter is for a {adapter.family}, but the model is a {model.config.family}"
        )
    # Those of its shape: once packed it has fewer, since several are one.
    known = {name for name, _ in skeleton(model.config).named_modules()}
    missing = [name for name in adapter.targets if name not in known]
    if missing:
        raise CheckpointError(
            f"the adapter is for {listing(missing)}, which the model does not have; it belongs to "
            "a model of another shape"
        )
    found = {name: modules.get(name) for name in adapter.targets}
    linears = {name: module for name, module in found.items() if isinstance(module, nn.Linear)}
    others = sorted(adapter.pairs.keys() - linears.keys())
    if others:
        raise UsageError(
            f"{listing(others)} cannot be adapted: only plain linear modules can, before they are "
            f"packed or quantized; {NO_TARGET}"
        )
    _check_fit(linears, adapter)
    return linears


def _check_fit(linears: Mapping[str, nn.Linear], adapter: Adapter) -> None:
    changes = {name: (len(p.b_OR), p.a_RI.shape[1]) for name, p in adapter.pairs.items()}
    wrong = [
        f"{name} ({list(changes[name])}, not {list(linear.weight.shape)})"
        for name, linear in linears.items()
        if changes[name] != tuple(linear.weight.shape)
    ]
    if wrong:
        raise CheckpointError(f"the adapter changes weights of other shapes: {listing(wrong)}")


def _resolve(config: ModelConfig, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear modules, without storage, whose names end in one of the targets."""
    linears = {n: m for n, m in skeleton(config).named_modules() if isinstance(m, nn.Linear)}
    for target in targets:
        if not any(ends_in(name, target) for name in linears):
            allowed = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in linears)
            reason = f": {NO_TARGET}" if NO_TARGETS & set(target.split(".")) else ""
            raise UsageError(
                f"{target!r} is no target{reason}; targets are {', '.join(allowed)}, the ends of "
                "these names, or one layer's, such as layers.0.mlp.up_proj"
            )
    return {n: m for n, m in linears.items() if any(ends_in(n, target) for target in targets)}
