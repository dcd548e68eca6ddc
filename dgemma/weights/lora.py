"""LoRA adapters: low-rank changes of frozen weights, attached to a model, read back, or merged.

    y = W x + scale * B (A x)         scale = alpha / rank; with rsLoRA, alpha / sqrt(rank)

Experts and the embedding table take no adapter. `lora_files` reads and writes PEFT's files.

R rank, I inputs and O outputs of a module.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.config import Family, ModelConfig
from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.model.gemma import Gemma
from dgemma.weights.files import listing
from dgemma.weights.names import skeleton
from dgemma.weights.safetensors_io import DTYPES

NO_TARGETS = {"experts", "gate_up_proj", "embed_tokens", "lm_head"}
NO_TARGET = "the experts' stacked weights and the embedding table take no adapter"


class LoRAPair(NamedTuple):
    """The two matrices of one module."""

    a_RI: Tensor
    b_OR: Tensor


Pairs = Mapping[str, LoRAPair]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """Pairs by the name of their module in `Gemma`, with one rank and dtype."""

    family: Family
    rank: int
    alpha: float
    use_rslora: bool = False
    base_model: str | None = None  # name in the file
    pairs: Pairs

    def __post_init__(self) -> None:
        check_rank(self.rank, self.alpha)
        if not self.pairs:
            raise CheckpointError("an adapter needs a pair of tensors for at least one module")
        self._check_shapes()
        dtypes = {half.dtype for pair in self.pairs.values() for half in pair}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
            raise CheckpointError(
                f"the tensors are {listing(sorted(map(str, dtypes)))}; they must all be one of "
                f"{listing(map(str, DTYPES.values()))}"
            )

    def _check_shapes(self) -> None:
        wrong = [
            f"{name} ({list(a_RI.shape)} and {list(b_OR.shape)})"
            for name, (a_RI, b_OR) in self.pairs.items()
            if a_RI.dim() != 2 or b_OR.dim() != 2 or {len(a_RI), b_OR.shape[1]} != {self.rank}
        ]
        if wrong:
            raise CheckpointError(
                f"A and B must be [{self.rank}, inputs] and [outputs, {self.rank}], which they are "
                f"not in {listing(wrong)}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted modules in `Gemma`."""
        return tuple(self.pairs)


def check_rank(rank: Any, alpha: Any) -> None:
    if type(rank) is not int or rank <= 0:
        raise ConfigError(f"the rank (r) must be a positive whole number, not {rank!r}")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ConfigError(f"alpha (lora_alpha) must be a positive number, not {alpha!r}")


def ends_in(name: str, target: str) -> bool:
    """True if a target is a module's name, or a suffix of it after a dot."""
    return f".{name}".endswith(f".{target}")


class LoRALinear(nn.Module):
    """A linear module plus a low-rank term; shares the base module."""

    def __init__(self, base: nn.Linear, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
        super().__init__()
        self.base: nn.Module = base  # not an nn.Linear once packed
        self.scale = scale
        self.a_RI, self.b_OR = (
            nn.Parameter(half.detach().to(base.weight, copy=True), requires_grad=False)
            for half in (a_RI, b_OR)
        )

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = F.linear(self.scale * F.linear(x, self.a_RI), self.b_OR)
        return self.base(x) + change  # type: ignore[no-any-return]


def attach(model: Gemma, adapter: Adapter) -> Gemma:
    """Attach an adapter to a model in place, before weights are packed."""
    for name, linear in _linears(model, adapter).items():
        _replace(model, name, LoRALinear(linear, *adapter.pairs[name], adapter.scale))
    return model


def detach(model: Gemma) -> Gemma:
    """Remove a model's adapter, if any, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            _replace(model, name, module.base)
    return model


def read_back(model: Gemma, adapter: Adapter) -> Adapter:
    """Return the adapter with its current values in the model, as after training."""
    modules = dict(model.named_modules())
    pairs = {}
    for name in adapter.targets:
        module = modules.get(name)
        if not isinstance(module, LoRALinear):
            raise UsageError(f"the model has no adapter on {name}; attach this one first")
        pairs[name] = LoRAPair(
            *(half.detach().cpu().clone() for half in (module.a_RI, module.b_OR))
        )
    return replace(adapter, pairs=pairs)


@torch.no_grad()
def merge(model: Gemma, adapter: Adapter) -> Gemma:
    """Merge an adapter into the weights in place: W + scale * B A, in float32 or better."""
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
    """Return an adapter without effect: A random as in PEFT, B zero, both float32.

    A target is a suffix of a module name: `q_proj`, `mlp.gate_proj`, `layers.3.router.proj`.
    """
    check_rank(rank, alpha)
    generator, pairs = torch.Generator().manual_seed(seed), {}
    for name, linear in _resolve(model.config, targets).items():
        bound = linear.in_features**-0.5
        a_RI = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        pairs[name] = LoRAPair(a_RI, torch.zeros(linear.out_features, rank))
    return Adapter(family=model.config.family, rank=rank, alpha=alpha, pairs=pairs)


def _replace(model: Gemma, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _linears(model: Gemma, adapter: Adapter) -> dict[str, nn.Linear]:
    """Return the modules that an adapter targets; refuses mismatches."""
    modules = dict(model.named_modules())
    if any(isinstance(module, LoRALinear) for module in modules.values()):
        raise UsageError("the model already has an adapter; detach it first")
    if adapter.family != model.config.family:
        raise CheckpointError(
            f"the adapter is for a {adapter.family}, but the model is a {model.config.family}"
        )
    # From the plain model: a packed one has merged modules.
    known = {name for name, _ in skeleton(model.config).named_modules()}
    missing = [name for name in adapter.targets if name not in known]
    if missing:
        raise CheckpointError(
            f"the adapter is for {listing(missing)}, which the model does not have; it belongs to "
            "a model of another shape"
        )
    targets = {name: modules.get(name) for name in adapter.targets}
    linears = {name: module for name, module in targets.items() if isinstance(module, nn.Linear)}
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
    """Return the linear modules, on the meta device, whose names end in a target."""
    linears = {n: m for n, m in skeleton(config).named_modules() if isinstance(m, nn.Linear)}
    for target in targets:
        if not any(ends_in(name, target) for name in linears):
            allowed = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in linears)
            reason = f": {NO_TARGET}" if NO_TARGETS & set(target.split(".")) else ""
            raise UsageError(
                f"{target!r} is not a target{reason}; targets are {', '.join(allowed)}, the ends "
                "of these names, or one layer's, such as layers.0.mlp.up_proj"
            )
    return {n: m for n, m in linears.items() if any(ends_in(n, target) for target in targets)}
