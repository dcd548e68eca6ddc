"""Random weights of any config, for tests and benchmarks, and the number of weights there are.

Each tensor is drawn on its device, in its type, from a seed of its own name: neither the order nor
the other tensors matter. Scales keep the stream near unit size and spread the logits.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.device import give_back
from dgemma.model.gemma import Gemma, Layer
from dgemma.weights.names import LAYER_SCALAR, layer_of, skeleton

SPREAD = 0.1  # of weights that multiply, around their mean
LOGIT_SCALE = 2.0  # embedding rows have this length; as many as the logits' deviation


class ParameterCount(NamedTuple):
    total: int
    active: int  # those one token uses


def random_model(
    config: ModelConfig,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    on_layer: Callable[[Layer], None] | None = None,
) -> Gemma:
    """A model whose weights depend on the seed, their names and shapes, and the kind of device.

    `on_layer` may change each layer as soon as it stands, such as into fewer bits, so that a model
    needs no more memory than it has in the end.
    """
    model = skeleton(config)
    parts: dict[int | None, dict[str, Tensor]] = {}
    for name, weight in model.state_dict().items():
        parts.setdefault(layer_of(name), {})[name] = weight
    parts[None] = parts.pop(None)  # the token table comes last: by then no layer is whole
    for number, shapes in parts.items():
        if number is None:
            give_back(device)  # what layers were made from
        weights = {}
        for name, weight in shapes.items():
            generator = torch.Generator(device).manual_seed(name_seed(seed, name))
            mean, deviation = _scale(name, tuple(weight.shape))
            empty = torch.empty(weight.shape, dtype=dtype, device=device)
            weights[name] = draw(empty, mean, deviation, generator)
        model.load_state_dict(weights, strict=False, assign=True)
        model.requires_grad_(False)
        if number is not None and on_layer is not None:
            del weights
            on_layer(cast(Layer, model.layers[number]))
    return model.eval()


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Weights of the text model, the embedding once, and those that one token uses."""
    sizes = {name: weight.numel() for name, weight in skeleton(config).state_dict().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    used = experts * config.top_k_experts // config.num_experts
    total = sum(sizes.values())
    return ParameterCount(total=total, active=total - experts + used)


def short_count(count: int) -> str:
    """As model cards print it: cut, not rounded, to one digit."""
    unit, letter = (10**9, "B") if count >= 10**9 else (10**6, "M")
    return f"{count * 10 // unit / 10:.1f}{letter}"


def draw(empty: Tensor, mean: float, deviation: float, generator: torch.Generator) -> Tensor:
    if deviation == 0:
        return empty.fill_(mean)
    return empty.normal_(mean, deviation, generator=generator)


def name_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _scale(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a weight."""
    fan_in = shape[-1]
    if name.endswith(LAYER_SCALAR):
        return 1.0, 0.0
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # Attention scores have no scale of their own: these two bring them to unit size.
        return fan_in**-0.25, SPREAD * fan_in**-0.25
    if len(shape) == 1:
        return 1.0, SPREAD
    if name.endswith("router.proj.weight"):
        return 0.0, 1.0  # the router divides by the root of its width itself
    if name == "embed_tokens.weight":
        return 0.0, LOGIT_SCALE * fan_in**-0.5
    return 0.0, fan_in**-0.5
