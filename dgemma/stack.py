"""A model's layers in few launches: products with joined weights, and a kernel between any two.

Computes what `Gemma.stack` does. Where no kernel is at hand each stretch is done by its definition,
so the wiring is the same everywhere and can be tested without a GPU. Weights that belong together
are laid behind one another in memory, and the model's modules keep views of them: nothing is stored
twice.

T tokens of a pass, L of them in one span, D width, X outputs of joined products, A choices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.cache import Pass
from dgemma.model import Attention, Context, Gemma, Layer, Turns
from dgemma.ops.fast import is_on
from dgemma.ops.fused import CloseWeights, JoinWeights, close, gated, join, route
from dgemma.ops.norm import rms_norm
from dgemma.ops.rope import rotate

if TYPE_CHECKING:
    from dgemma.ops.kernels.layer import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """The weights of one layer, as they are used."""

    index: int
    attention: Attention
    qkv_XD: Tensor
    dense_XD: Tensor  # gate and up
    down: nn.Linear
    router_ED: Tensor
    scale_E: Tensor
    top_k: int
    choices: Callable[[Tensor, Tensor], Tensor]  # of the experts
    joining: JoinWeights
    closing: CloseWeights


@dataclass(frozen=True, slots=True)
class Places:
    """Where the keys of each span lie, layer by layer, on the device."""

    counts: list[int]
    is_causal: list[bool]
    table_IX6: Tensor  # spans, layers; see `ops/kernels/attention.py`

    @classmethod
    def of(cls, context: Pass) -> "Places | None":
        found = context.places()
        if found is None:
            return None
        table_IX6 = torch.tensor(found).to(context.positions_T.device, non_blocking=True)
        spans = context.spans
        return cls([span.count for span in spans], [span.commit for span in spans], table_IX6)


class Stack:
    """Runs the layers of a model; set as its `runner`."""

    def __init__(self, model: Gemma, *, overlap: bool = True) -> None:
        self.config, self.eps, self.overlap = model.config, model.config.rms_norm_eps, overlap
        layers = layers_of(model)
        norms = [*(layer.input_layernorm.weight for layer in layers), model.norm.weight]
        self.first_D = norms[0]
        self.layers = [
            _fused(index, layer, after)
            for index, (layer, after) in enumerate(zip(layers, norms[1:], strict=True))
        ]
        self.side: torch.cuda.Stream | None = None

    def __call__(self, x_TD: Tensor, context: Context, turns: Turns) -> Tensor | None:
        if torch.is_grad_enabled() or not isinstance(context, Pass):
            return None
        if not is_on(x_TD):
            return self.run(x_TD, turns, ByContext(context, self.eps))
        places = Places.of(context)
        return None if places is None else self.run(x_TD, turns, ByTable(places, self))

    def run(self, x_TD: Tensor, turns: Turns, attend: "Attend") -> Tensor:
        """All layers, and the last norm."""
        normed_TD = rms_norm(x_TD, self.first_D, self.eps)
        for layer in self.layers:
            heads_TX = attend(layer, F.linear(normed_TD, layer.qkv_XD), turns)
            attended_TD = layer.attention.o_proj(heads_TX)
            joined = join(x_TD, attended_TD, layer.joining, self.eps)
            with self._beside(x_TD):
                dense_TD = layer.down(gated(F.linear(joined.dense_TD, layer.dense_XD)))
            logits_TE = F.linear(joined.router_TD, layer.router_ED)
            ids_TK, share_TK = route(logits_TE, layer.scale_E, layer.top_k)
            out_AD = layer.choices(joined.expert_TD, ids_TK)
            self._join(x_TD)
            mixed = (out_AD, share_TK)
            x_TD, normed_TD = close(joined.x_TD, dense_TD, mixed, layer.closing, self.eps)
        return normed_TD

    @contextmanager
    def _beside(self, x_TD: Tensor) -> Iterator[None]:
        """Work inside goes on beside what follows, until `_join`. Both wait for what was before."""
        if not self.overlap or x_TD.device.type != "cuda":
            yield
            return
        if self.side is None:
            self.side = torch.cuda.Stream(x_TD.device)  # type: ignore[no-untyped-call]
        self.side.wait_stream(torch.cuda.current_stream(x_TD.device))
        with torch.cuda.stream(self.side):
            yield

    def _join(self, x_TD: Tensor) -> None:
        if self.overlap and self.side is not None and x_TD.device.type == "cuda":
            torch.cuda.current_stream(x_TD.device).wait_stream(self.side)


# A layer and its joined products to what attention gives for them.
Attend = Callable[[Fused, Tensor, Turns], Tensor]


class ByContext:
    """Attention as the context defines it."""

    def __init__(self, context: Pass, eps: float) -> None:
        self.context, self.eps = context, eps

    def __call__(self, layer: Fused, qkv_TX: Tensor, turns: Turns) -> Tensor:
        part = layer.attention
        width, keys = part.shape.head_dim, part.shape.num_kv_heads
        heads_TNH = qkv_TX.view(len(qkv_TX), -1, width)
        queries = heads_TNH.shape[1] - keys * (1 if part.v_proj is None else 2)
        q_TNH, k_TMH = heads_TNH[:, :queries], heads_TNH[:, queries : queries + keys]
        v_TMH = k_TMH if part.v_proj is None else heads_TNH[:, queries + keys :]
        q_TNH = rotate(part.q_norm(q_TNH), *turns[part.kind])
        k_TMH = rotate(part.k_norm(k_TMH), *turns[part.kind])
        v_TMH = rms_norm(v_TMH, None, self.eps)
        return self.context.attend(layer.index, q_TNH, k_TMH, v_TMH).flatten(1)


class ByTable:
    """Attention by kernels, over the places that a table on the device names."""

    def __init__(self, places: Places, stack: Stack) -> None:
        self.places, self.stack = places, stack

    def __call__(self, layer: Fused, qkv_TX: Tensor, turns: Turns) -> Tensor:
        from dgemma.ops.kernels import attention as kernels
        from dgemma.ops.kernels.layer import heads

        places, part = self.places, layer.attention
        shape = _heads(layer, self.stack.config.num_attention_heads)
        cos_TP, sin_TP = turns[part.kind]
        outs, end = [], 0
        for index, count in enumerate(places.counts):
            own = slice(end, end := end + count)
            place_6 = places.table_IX6[index, layer.index]
            q_LNH = heads(qkv_TX[own], shape, (cos_TP[own], sin_TP[own]), place_6, self.stack.eps)
            window = (part.shape.window or 0) if places.is_causal[index] else None
            outs.append(kernels.attention(q_LNH, place_6, shape.keys, window))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


def _heads(layer: Fused, queries: int) -> "Heads":
    from dgemma.ops.kernels.layer import Heads

    part = layer.attention
    return Heads(
        queries=queries,
        keys=part.shape.num_kv_heads,
        width=part.shape.head_dim,
        q_weight=part.q_norm.weight,
        k_weight=part.k_norm.weight,
        has_value=part.v_proj is not None,
    )


def can_fuse(model: Gemma) -> bool:
    """Whether the products outside the experts are plain ones, neither packed nor adapted."""
    return all(
        type(module) is nn.Linear
        for layer in layers_of(model)
        for module in (*_qkv(layer), *_gate_up(layer), layer.mlp.down_proj, layer.router.proj)
    ) and all(hasattr(layer.experts, "choices") for layer in layers_of(model))


def layers_of(model: Gemma) -> list[Layer]:
    return cast(list[Layer], list(model.layers))


def _fused(index: int, layer: Layer, after_D: Tensor) -> Fused:
    router = layer.router
    return Fused(
        index=index,
        attention=layer.self_attn,
        qkv_XD=join_weights(_qkv(layer)),
        dense_XD=join_weights(_gate_up(layer)),
        down=layer.mlp.down_proj,
        router_ED=router.proj.weight,
        scale_E=router.per_expert_scale,
        top_k=router.top_k,
        choices=layer.experts.choices,
        joining=JoinWeights(
            layer.post_attention_layernorm.weight,
            layer.pre_feedforward_layernorm.weight,
            layer.pre_feedforward_layernorm_2.weight,
            router.scale,
        ),
        closing=CloseWeights(
            layer.post_feedforward_layernorm_1.weight,
            layer.post_feedforward_layernorm_2.weight,
            layer.post_feedforward_layernorm.weight,
            layer.layer_scalar,
            after_D,
        ),
    )


def _qkv(layer: Layer) -> list[nn.Linear]:
    part = layer.self_attn
    return [p for p in (part.q_proj, part.k_proj, part.v_proj) if p is not None]


def _gate_up(layer: Layer) -> list[nn.Linear]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


@torch.no_grad()
def join_weights(products: list[nn.Linear]) -> Tensor:
    """One weight that holds those of several products, which from then on are parts of it."""
    joined_XD = torch.cat([product.weight for product in products])
    parts = torch.split(joined_XD, [len(product.weight) for product in products])
    for product, part in zip(products, parts, strict=True):
        product.weight = nn.Parameter(part, requires_grad=product.weight.requires_grad)
    return joined_XD
