"""Training an adapter: the weights stay as they are, a low-rank change beside them is learned.

One adapter serves both modes, so that it can be merged into the weights.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from dgemma.model.gemma import Gemma
from dgemma.train.recipe import LoRASettings
from dgemma.weights.adapter import Adapter, Pair, attach, new_adapter

HALVES = ("a_RI", "b_OR")  # names of the parameters of an adapted module


def add_adapter(model: Gemma, settings: LoRASettings, seed: int, base: str) -> Adapter:
    """Put a new adapter on a model, which changes nothing yet, and leave only it to be trained."""
    adapter = new_adapter(model, settings.targets, settings.rank, settings.alpha, seed)
    model.requires_grad_(False)
    attach(model, adapter)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.rpartition(".")[2] in HALVES)
    return replace(adapter, base_model=base)


def trained(adapter: Adapter, names: Sequence[str], weights: Sequence[Tensor]) -> Adapter:
    """The adapter with weights of these names, in float32: the model may hold them rounded."""
    by_name = dict(zip(names, weights, strict=True))
    pairs = {
        module: Pair(*(by_name[f"{module}.{half}"].detach().float().cpu() for half in HALVES))
        for module in adapter.targets
    }
    return replace(adapter, pairs=pairs)
