"""Give a trained `nano` another shape: narrower experts, another width of the dense block, which
every token runs, more heads of keys and values.

    python -m recipes.nano_reshape nano out/nano/wide --dense 960 --experts 80
    python -m recipes.nano_reshape out/nano/wide out/nano/heads --dense 640 --kv-heads 8

A block that becomes narrower keeps the neurons that say most. What experts lose, new neurons of the
dense block read from now on, and say nothing yet; a head of keys and values becomes several that
are alike. The new model is the old one without the neurons that had to go, and is trained further
(`recipes/nano_more.toml`) to be better than it.

E experts, M neurons of one, F of the dense block, N heads of keys and values, each of width H, D
width of the stream.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import AttentionShape, ModelConfig
from dgemma.errors import UsageError
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import Checkpoint, fill, load_model
from dgemma.weights.names import skeleton
from dgemma.weights.save import save_checkpoint

Weights = dict[str, Tensor]
SPREAD = 0.02  # of new numbers, where there is nothing to take them from


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is asked for; None leaves a size as it is."""

    dense: int | None = None  # neurons of the dense block
    inner: int | None = None  # neurons of each expert
    kv_heads: int | None = None  # of both kinds of attention

    def within(self, config: ModelConfig) -> ModelConfig:
        sizes = {
            "intermediate_size": self.dense,
            "moe_intermediate_size": self.inner,
            "num_key_value_heads": self.kv_heads,
            "num_global_key_value_heads": self.kv_heads,
        }
        return replace(config, **{name: n for name, n in sizes.items() if n is not None})


def reshaped(found: Checkpoint, shape: Shape, seed: int = 0) -> Checkpoint:
    config = found.model.config
    made = shape.within(config)
    _check(config, made)
    weights = dict(found.model.state_dict())
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        weights |= _feedforward(weights, at, made)
        weights |= _attention(weights, f"{at}self_attn.", made.attention(layer))
    generator = torch.Generator().manual_seed(seed)
    weights |= _self_conditioning(weights, made.intermediate_size, generator)
    return replace(found, model=fill(skeleton(made), weights))


def _check(old: ModelConfig, made: ModelConfig) -> None:
    dense, inner = made.intermediate_size, made.moe_intermediate_size
    spare = old.num_experts * (old.moe_intermediate_size - inner)
    if inner > old.moe_intermediate_size or dense > old.intermediate_size + spare:
        raise UsageError(
            f"{dense} neurons in the dense block and {inner} in each of {old.num_experts} experts; "
            f"experts have {old.moe_intermediate_size} and cannot grow, and the dense block, of "
            f"{old.intermediate_size}, can take up no more than they lose"
        )
    for layer in range(old.num_hidden_layers):
        heads, wanted = (c.attention(layer).num_kv_heads for c in (old, made))
        if wanted % heads:
            raise UsageError(
                f"{wanted} heads of keys and values; layer {layer} has {heads}, and each of them "
                "can become several that are alike"
            )


def _feedforward(weights: Mapping[str, Tensor], at: str, config: ModelConfig) -> Weights:
    inner = config.moe_intermediate_size
    gate_up, down_EDM = (weights[f"{at}experts.{n}"] for n in ("gate_up_proj", "down_proj"))
    experts = (*gate_up.chunk(2, dim=1), down_EDM.mT)
    order_EM = _loudest(*experts)
    kept = [_rows(x, order_EM[:, :inner]) for x in experts]
    # The loudest of those that are freed, from all experts alike.
    freed = [_rows(x, order_EM[:, inner:]).transpose(0, 1).flatten(0, 1) for x in experts[:2]]
    # Experts read the stream through a norm of their own.
    norms = [weights[f"{at}pre_feedforward_layernorm{n}.weight"] for n in ("_2", "")]
    new = [x * (norms[0] / norms[1]) for x in freed]
    return {
        f"{at}experts.gate_up_proj": torch.cat(kept[:2], dim=1),
        f"{at}experts.down_proj": kept[2].mT.contiguous(),
        **_block(weights, f"{at}mlp.", config.intermediate_size, new),
    }


def _self_conditioning(
    weights: Mapping[str, Tensor], dense: int, generator: torch.Generator
) -> Weights:
    """It is as wide as the dense block; its new neurons read at random."""
    at = "self_conditioning."
    old_FD = weights[f"{at}gate_proj.weight"]
    size = (max(0, dense - len(old_FD)), old_FD.shape[1])
    new = [(torch.randn(size, generator=generator) * SPREAD).to(old_FD) for _ in range(2)]
    return _block(weights, at, dense, new)


def _block(weights: Mapping[str, Tensor], at: str, dense: int, new: list[Tensor]) -> Weights:
    """A gated block with so many neurons: its loudest, then of `new`, as gates and as values."""
    gate_FD, up_FD, down_DF = (weights[f"{at}{n}_proj.weight"] for n in ("gate", "up", "down"))
    room = max(0, dense - len(gate_FD))
    order_F = torch.arange(len(gate_FD))
    if dense < len(gate_FD):
        order_F = _loudest(gate_FD, up_FD, down_DF.mT)[:dense]
    return {
        f"{at}gate_proj.weight": torch.cat([gate_FD[order_F], new[0][:room]]),
        f"{at}up_proj.weight": torch.cat([up_FD[order_F], new[1][:room]]),
        f"{at}down_proj.weight": torch.cat(
            [down_DF[:, order_F], down_DF.new_zeros(len(down_DF), room)], dim=1
        ),
    }


def _loudest(gate_MD: Tensor, up_MD: Tensor, down_MD: Tensor) -> Tensor:
    """Neurons by what they can say, the product of their weights' lengths; the loudest first."""
    says_M = gate_MD.norm(dim=-1) * up_MD.norm(dim=-1) * down_MD.norm(dim=-1)
    return says_M.argsort(dim=-1, descending=True)


def _rows(x_EMD: Tensor, chosen_EN: Tensor) -> Tensor:
    return x_EMD.gather(1, chosen_EN[:, :, None].expand(-1, -1, x_EMD.shape[2]))


def _attention(weights: Mapping[str, Tensor], at: str, shape: AttentionShape) -> Weights:
    """Queries that shared a head have heads of their own, which are alike at first."""
    made: Weights = {}
    for name in ("k_proj.weight", "v_proj.weight"):
        if (old := weights.get(f"{at}{name}")) is not None:  # full layers have no values
            heads_NHD = old.view(-1, shape.head_dim, old.shape[1])
            several = shape.num_kv_heads // len(heads_NHD)
            made[f"{at}{name}"] = heads_NHD.repeat_interleave(several, dim=0).flatten(0, 1)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", help="a directory, or nano")
    parser.add_argument("into", type=Path)
    parser.add_argument("--dense", type=int, help="neurons of the dense block")
    parser.add_argument("--experts", type=int, help="neurons of each expert")
    parser.add_argument("--kv-heads", type=int, help="heads of keys and values")
    given = parser.parse_args()
    directory = find_checkpoint(given.checkpoint)
    found = load_model(directory, dtype=torch.float32)
    shape = Shape(dense=given.dense, inner=given.experts, kv_heads=given.kv_heads)
    made = reshaped(found, shape)
    save_checkpoint(made, given.into, tokenizer_from=directory, overwrite=True)
    print(f"{given.into}: {sum(w.numel() for w in made.model.parameters()):,} weights")


if __name__ == "__main__":
    main()
