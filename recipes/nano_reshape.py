"""Give a trained `nano` another shape: more layers or experts, narrower blocks, fewer heads.

    python -m recipes.nano_reshape nano out/nano/deep --layers 12 --experts 64

Blocks that become narrower keep the neurons that say most on the data of `recipes/nano_more.toml`
(`recipes/loudness.py`). Heads of keys and values that become one are their mean. Of the last
layers, as many as are wanted come twice: first as copies that say a tenth of what they would, then
as they are. More experts are copies, too, which routers tell apart (`recipes/more_experts.py`). So
the new model is nearly the old one, and is trained further (`recipes/nano_more.toml`) to be better.

E experts, M neurons of one, F of the dense block, D width of the stream.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import AttentionShape, ModelConfig
from dgemma.errors import UsageError
from dgemma.train.build import opened
from dgemma.train.context import Batch
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import Checkpoint, fill, load_model
from dgemma.weights.names import skeleton
from dgemma.weights.save import save_checkpoint
from recipes.loudness import Loudness, loudness
from recipes.more_experts import Heard, copied, hearing

Weights = dict[str, Tensor]
RECIPE = Path("recipes/nano_more.toml")
BATCHES, SEQUENCES = 4, 8  # that neurons are heard on
SAID = 0.1  # by a copied layer: nothing at all would teach it nothing
CLOSING = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is asked for; None leaves a size as it is."""

    dense: int | None = None  # neurons of the dense block
    count: int | None = None  # of experts
    inner: int | None = None  # neurons of each expert
    kv_heads: int | None = None  # of both kinds of attention
    layers: int | None = None

    @property
    def wants_data(self) -> bool:
        """Whether neurons are chosen or routers parted, by what is heard on data."""
        return (self.dense, self.count, self.inner) != (None, None, None)

    def within(self, config: ModelConfig) -> ModelConfig:
        sizes = {
            "intermediate_size": self.dense,
            "num_experts": self.count,
            "moe_intermediate_size": self.inner,
            "num_key_value_heads": self.kv_heads,
            "num_global_key_value_heads": self.kv_heads,
        }
        more = self.more_layers(config)
        kinds = config.layer_types + config.layer_types[len(config.layer_types) - more :]
        known = {name: n for name, n in sizes.items() if n is not None}
        return replace(config, layer_types=kinds, **known)

    def more_layers(self, config: ModelConfig) -> int:
        old = config.num_hidden_layers
        more = 0 if self.layers is None else self.layers - old
        if not 0 <= more <= old:
            raise UsageError(f"{self.layers} layers; there are {old}, each of which can come twice")
        return more


def reshaped(found: Checkpoint, shape: Shape, loud: Loudness, heard: Heard) -> Checkpoint:
    """By how loud neurons are, and what routers were given, both heard on the old model."""
    config = found.model.config
    made = shape.within(config)
    _check(config, made)
    weights = dict(found.model.state_dict())
    for name, loud_F in loud.items():
        narrow = _experts if name.endswith(".experts") else _block
        weights |= narrow(weights, f"{name}.", loud_F, made)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        weights |= _attention(weights, f"{at}self_attn.", made.attention(layer))
        if made.num_experts > config.num_experts:
            weights |= copied(weights, at, made.num_experts, heard[f"{at}router"])
    weights = _deepened(weights, config.num_hidden_layers, shape.more_layers(config))
    return replace(found, model=fill(skeleton(made), weights))


def _check(old: ModelConfig, made: ModelConfig) -> None:
    sizes = ("intermediate_size", "moe_intermediate_size", "num_key_value_heads")
    for name in sizes:
        has, wanted = getattr(old, name), getattr(made, name)
        if wanted > has:
            raise UsageError(f"{name} of {wanted}; it is {has}, and blocks and heads only shrink")
    if made.num_experts < old.num_experts:
        raise UsageError(
            f"{made.num_experts} experts; there are {old.num_experts}, and they only grow in number"
        )
    for layer in range(old.num_hidden_layers):
        heads, wanted = (c.attention(layer).num_kv_heads for c in (old, made))
        if heads % wanted:
            raise UsageError(
                f"{wanted} heads of keys and values; layer {layer} has {heads}, which can become "
                "one of every few, equally many each"
            )


def _loudest(loud: Tensor, count: int) -> Tensor:
    """Which neurons stay, in their old order."""
    return loud.topk(count, dim=-1).indices.sort(dim=-1).values


def _block(weights: Mapping[str, Tensor], at: str, loud_F: Tensor, config: ModelConfig) -> Weights:
    kept_F = _loudest(loud_F, config.intermediate_size)
    return {
        f"{at}gate_proj.weight": weights[f"{at}gate_proj.weight"][kept_F],
        f"{at}up_proj.weight": weights[f"{at}up_proj.weight"][kept_F],
        f"{at}down_proj.weight": weights[f"{at}down_proj.weight"][:, kept_F].contiguous(),
    }


def _experts(
    weights: Mapping[str, Tensor], at: str, loud_EM: Tensor, config: ModelConfig
) -> Weights:
    kept_EM = _loudest(loud_EM, config.moe_intermediate_size)
    gate_up, down_EDM = weights[f"{at}gate_up_proj"], weights[f"{at}down_proj"]
    gate_EMD, up_EMD, down_EMD = (
        part.take_along_dim(kept_EM[:, :, None], dim=1)
        for part in (*gate_up.chunk(2, dim=1), down_EDM.mT)
    )
    return {
        f"{at}gate_up_proj": torch.cat([gate_EMD, up_EMD], dim=1),
        f"{at}down_proj": down_EMD.mT.contiguous(),
    }


def _attention(weights: Mapping[str, Tensor], at: str, shape: AttentionShape) -> Weights:
    """Queries whose heads become one read their mean: what is normed behind it has no length."""
    made: Weights = {}
    for name in ("k_proj.weight", "v_proj.weight"):
        if (old := weights.get(f"{at}{name}")) is not None:  # full layers have no values
            heads = old.view(shape.num_kv_heads, -1, shape.head_dim, old.shape[1])
            made[f"{at}{name}"] = heads.mean(1).flatten(0, 1)
    return made


def _deepened(weights: Mapping[str, Tensor], layers: int, more: int) -> Weights:
    """The last `more` of the layers twice, the first time quietly."""
    first = layers - more
    made = {name: weight for name, weight in weights.items() if not name.startswith("layers.")}
    for place, layer in enumerate([*range(layers), *range(first, layers)]):
        is_copy = first <= place < layers
        at = f"layers.{layer}."
        for name in [name for name in weights if name.startswith(at)]:
            rest = name.removeprefix(at)
            weight = weights[name]
            if is_copy and rest in CLOSING:
                weight = weight * SAID
            if is_copy and rest == "layer_scalar":
                weight = torch.ones_like(weight)
            made[f"layers.{place}.{rest}"] = weight
    return made


def batches(checkpoint: Path, recipe: Path) -> Iterator[Batch]:
    """The first of a recipe, as a model of another shape would be trained on them."""
    settings = [f"model.checkpoint={checkpoint.resolve()}", "batch.carried=0", "run.workers=0"]
    with opened(recipe, [*settings, f"batch.sequences={SEQUENCES}"]) as (_, _, mixture):
        for step in range(BATCHES):
            yield Batch.of(torch.from_numpy(mixture.batch(step)), "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", help="a directory, or nano")
    parser.add_argument("into", type=Path)
    parser.add_argument("--layers", type=int, help="how many; the last come twice")
    parser.add_argument("--dense", type=int, help="neurons of the dense block")
    parser.add_argument("--experts", type=int, help="neurons of each expert")
    parser.add_argument("--count", type=int, help="how many experts; new ones are copies")
    parser.add_argument("--kv-heads", type=int, help="heads of keys and values")
    parser.add_argument(
        "--recipe", type=Path, default=RECIPE, help="whose data neurons are heard on"
    )
    given = parser.parse_args()
    directory = find_checkpoint(given.checkpoint)
    found = load_model(directory, dtype=torch.float32)
    shape = Shape(
        dense=given.dense,
        count=given.count,
        inner=given.experts,
        kv_heads=given.kv_heads,
        layers=given.layers,
    )
    _check(found.model.config, shape.within(found.model.config))  # before minutes of listening
    with hearing(found.model) as heard:
        some = batches(directory, given.recipe) if shape.wants_data else ()
        loud = loudness(found.model, some)
    made = reshaped(found, shape, loud, heard)
    save_checkpoint(made, given.into, tokenizer_from=directory, overwrite=True)
    print(f"{given.into}: {sum(w.numel() for w in made.model.parameters()):,} weights")


if __name__ == "__main__":
    main()
