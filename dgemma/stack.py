"""A model's layers in few launches: products with joined weights, and a kernel between any two.

Computes what `Gemma.stack` does, with weights outside the experts in 16 bits or in 8. Where no
kernel is at hand each stretch is done by its definition, so the wiring is the same everywhere and
can be tested without a GPU. Weights that belong together are laid behind one another in memory,
and the model's modules keep views of them: nothing is stored twice.

T tokens of a pass, L of them in one span, D width, X outputs of joined products, A choices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import get_ident
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from dgemma.cache import Pass
from dgemma.model import Attention, Context, FeedForward, Gemma, Layer, Turns
from dgemma.ops.dense import Fp8Linear, Rows, Weight, gated_product, is_few, product, reads_8
from dgemma.ops.fast import is_on
from dgemma.ops.fp8 import quantize
from dgemma.ops.fused import (
    CloseWeights,
    Joined,
    JoinWeights,
    Routed,
    RouterWeights,
    close,
    join,
    join_few,
    routed,
)
from dgemma.ops.kernels import cuts
from dgemma.ops.norm import rms_norm
from dgemma.ops.quantized import Quantized
from dgemma.ops.rope import rotate

if TYPE_CHECKING:
    from dgemma.ops.kernels.heads import Heads


@runtime_checkable
class Choosing(Protocol):
    """Experts that a stack can use: they weigh nothing, and say which rows they take."""

    def choices(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor: ...

    def reads_8(self, x_TD: Tensor) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """The weights of one layer, as they are used."""

    index: int
    attention: Attention
    qkv: Weight
    out: Weight
    dense: Weight  # gate and up
    down: Weight
    router: RouterWeights
    choices: Callable[..., Tensor]  # of the experts
    reads_8: Callable[[Tensor], bool]  # whether they take such rows in 8 bits
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


# Told where the tokens of a layer go, before they do; they go where it says.
Watch = Callable[[Fused, Joined, Routed], Routed]


class Stack:
    """Runs the layers of a model; set as its `runner`."""

    def __init__(self, model: Gemma) -> None:
        self.config, self.eps = model.config, model.config.rms_norm_eps
        layers = layers_of(model)
        norms = [*(layer.input_layernorm.weight for layer in layers), model.norm.weight]
        self.first_D = norms[0]
        self.watch: Watch | None = None
        self.layers = [
            _fused(index, layer, after)
            for index, (layer, after) in enumerate(zip(layers, norms[1:], strict=True))
        ]

    def __call__(self, x_TD: Tensor, context: Context, turns: Turns) -> Tensor | None:
        if torch.is_grad_enabled() or not isinstance(context, Pass):
            return None
        if not is_on(x_TD, "attention"):
            return self.run(x_TD, turns, ByContext(context, self.eps))
        places = Places.of(context)
        return None if places is None else self.run(x_TD, turns, ByTable(places, self))

    def run(
        self, x_TD: Tensor, turns: Turns, attend: "Attend", normed_TD: Tensor | None = None
    ) -> Tensor:
        """All layers, and the last norm. `normed_TD`: what the first layer reads, if at hand."""
        few = is_few(x_TD)
        if normed_TD is None:
            normed_TD = rms_norm(x_TD, self.first_D, self.eps)
        is_8 = not few and self.layers[0].qkv.is_8
        normed: Rows = quantize(normed_TD) if is_8 else normed_TD
        del normed_TD
        for layer, after in zip(self.layers, [*self.layers[1:], None], strict=True):
            eight = not few and after is not None and after.qkv.is_8
            heads = attend(layer, product(normed, layer.qkv, x_TD.dtype, cuts.QKV), turns)
            x_TD, normed = self._behind(layer, x_TD, heads, eight=eight)
            del heads  # no layer's memory is held in the next, here and below
        assert isinstance(normed, Tensor)
        return normed

    def _behind(
        self, layer: Fused, x_TD: Tensor, heads: Rows, *, eight: bool
    ) -> tuple[Tensor, Rows]:
        """All of a layer behind its attention: the stream, and what the next layer reads of it.

        `eight`: that reads 8 bits.
        """
        few, dtype = is_few(x_TD), x_TD.dtype
        attended = product(heads, layer.out, dtype, cuts.OUT)
        joined, found = self._read(layer, x_TD, attended, few)
        del attended
        dense, mixed = self._parts(layer, joined, found, dtype)
        return close(joined.x_TD, dense, mixed, layer.closing, self.eps, eight=eight)

    def _read(
        self, layer: Fused, x_TD: Tensor, attended: Tensor, few: bool
    ) -> tuple[Joined, Routed | None]:
        """The stream behind attention, and where each token goes, if that is known already."""
        if few:
            joined, found = join_few(x_TD, attended, layer.joining, layer.router, self.eps)
            return joined, self._watched(layer, joined, found)
        how = {"eight": layer.dense.is_8, "experts_eight": layer.reads_8(x_TD)}
        return join(x_TD, attended, layer.joining, self.eps, **how), None

    def _parts(
        self, layer: Fused, joined: Joined, found: Routed | None, dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What the dense part gives, and the experts with their shares."""
        try:
            with self._beside(joined.x_TD):
                hidden = gated_product(joined.dense_TD, layer.dense, dtype)
                dense_TD = product(hidden, layer.down, dtype, cuts.DOWN)
            if found is None:
                found = self._watched(layer, joined, routed(joined.router_TD, layer.router))
            out_AD = _choices(layer, joined.expert_TD, found, dtype)
        finally:  # a capture that is not joined cannot be ended, and torch never gets over it
            self._join(joined.x_TD)
        return dense_TD, (out_AD, found.share_TK)

    def _watched(self, layer: Fused, joined: Joined, found: Routed) -> Routed:
        return found if self.watch is None else self.watch(layer, joined, found)

    @contextmanager
    def _beside(self, x_TD: Tensor) -> Iterator[None]:
        """Work inside goes on beside what follows, until `_join`. Both wait for what was before."""
        if x_TD.device.type != "cuda":
            yield
            return
        side = side_stream(x_TD.device)
        side.wait_stream(torch.cuda.current_stream(x_TD.device))
        with torch.cuda.stream(side):
            yield

    def _join(self, x_TD: Tensor) -> None:
        if x_TD.device.type == "cuda":
            torch.cuda.current_stream(x_TD.device).wait_stream(side_stream(x_TD.device))


_sides: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where the dense part runs beside the experts.

    One for all stacks: libraries keep up to 63 MB for each stream they have seen, and every layer
    that is checked at the start is a stack of its own. But one for each thread: what another
    thread captures must not be joined.
    """
    key = device, get_ident()
    if key not in _sides:
        _sides[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _sides[key]


def _choices(layer: Fused, rows: Rows, found: Routed, dtype: torch.dtype) -> Tensor:
    """What each choice of each token gives."""
    if isinstance(rows, Quantized):
        return layer.choices(rows, found.ids_TK, found.into, dtype)
    return layer.choices(rows, found.ids_TK, found.into)


# A layer and its joined products to what attention gives for them, rows of all heads.
Attend = Callable[[Fused, Tensor, Turns], Rows]


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

    def __call__(self, layer: Fused, qkv_TX: Tensor, turns: Turns) -> Rows:
        from dgemma.ops.kernels import attention as kernels
        from dgemma.ops.kernels.heads import heads

        places, part = self.places, layer.attention
        shape = _heads(layer, self.stack.config.num_attention_heads)
        cos_TP, sin_TP = turns[part.kind]
        eight = reads_8(qkv_TX, layer.out)
        outs: list[Rows] = []
        end = 0
        for index, count in enumerate(places.counts):
            own = slice(end, end := end + count)
            place_6 = places.table_IX6[index, layer.index]
            q_LNH = heads(qkv_TX[own], shape, (cos_TP[own], sin_TP[own]), place_6, self.stack.eps)
            window = (part.shape.window or 0) if places.is_causal[index] else None
            given = (q_LNH, place_6, shape.keys, window)
            if eight:
                outs.append(Quantized(*kernels.attention_8(*given)))
            else:
                outs.append(kernels.attention(*given).flatten(1))
        return outs[0] if len(outs) == 1 else _cat_rows(outs)


def _cat_rows(outs: list[Rows]) -> Rows:
    """Rows of several spans; all are in 8 bits, or none."""
    eight = [out for out in outs if isinstance(out, Quantized)]
    if not eight:
        return torch.cat([out for out in outs if isinstance(out, Tensor)])
    return Quantized(_cat([out.numbers for out in eight]), torch.cat([out.factor for out in eight]))


def _heads(layer: Fused, queries: int) -> "Heads":
    from dgemma.ops.kernels.heads import Heads

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
    """Whether the products outside the experts are plain ones, or all in 8 bits; none adapted.

    What is joined has to be of one kind; a layer's other products may be of another.
    """
    return all(can_join(layer) for layer in layers_of(model))


def can_join(layer: Layer) -> bool:
    parts: list[nn.Module] = [layer.self_attn, layer.mlp]
    if not all(isinstance(part, Attention | FeedForward) for part in parts):
        return False  # laid out for a CPU
    groups = (_qkv(layer), _gate_up(layer), [layer.self_attn.o_proj], [layer.mlp.down_proj])
    kinds = [{type(module) for module in group} for group in groups]
    is_known = all(kind in ({nn.Linear}, {Fp8Linear}) for kind in kinds)
    return is_known and type(layer.router.proj) is nn.Linear and isinstance(layer.experts, Choosing)


def layers_of(model: Gemma) -> list[Layer]:
    return cast(list[Layer], list(model.layers))


def join_layer(layer: Layer) -> None:
    """Join what a stack will join, while the layer is made.

    What its parts leave free is used for the next layer then; later, nothing would be as small.
    """
    for group in (_qkv(layer), _gate_up(layer)):
        join_weights(group)


def _fused(index: int, layer: Layer, after_D: Tensor) -> Fused:
    router = layer.router
    return Fused(
        index=index,
        attention=layer.self_attn,
        qkv=join_weights(_qkv(layer)),
        out=_weight(layer.self_attn.o_proj),
        dense=join_weights(_gate_up(layer)),
        down=_weight(layer.mlp.down_proj),
        router=RouterWeights(router.proj.weight, router.per_expert_scale, router.top_k),
        choices=layer.experts.choices,
        reads_8=layer.experts.reads_8,
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


# A product's module, of either kind.
Product = nn.Linear | Fp8Linear


def _qkv(layer: Layer) -> list[Product]:
    part = layer.self_attn
    return [p for p in (part.q_proj, part.k_proj, part.v_proj) if p is not None]


def _gate_up(layer: Layer) -> list[Product]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


def _weight(source: Product) -> Weight:
    return source.stored if isinstance(source, Fp8Linear) else Weight(source.weight)


@torch.no_grad()
def join_weights(products: list[Product]) -> Weight:
    """One weight that holds those of several products, which from then on are parts of it."""
    weights = [part.weight for part in products]
    is_done, numbers_XD = _lie_joined(weights), _cat(weights)
    factors_X1 = [part.weight_scale for part in products if isinstance(part, Fp8Linear)]
    factor_X1 = _cat(factors_X1) if factors_X1 else None
    end = 0
    for part in products:
        own = slice(end, end := end + len(part.weight))
        if isinstance(part, Fp8Linear):
            assert factor_X1 is not None
            part.weight, part.weight_scale = numbers_XD[own], factor_X1[own]
        elif not is_done:
            wants = part.weight.requires_grad
            part.weight = nn.Parameter(numbers_XD[own], requires_grad=wants)
    return Weight(numbers_XD, None if factor_X1 is None else factor_X1[:, 0])


def _cat(weights: list[Tensor]) -> Tensor:
    """Concatenation, byte by byte where the type has no arithmetic; a view of what lies joined."""
    if _lie_joined(weights):
        rows = sum(len(weight) for weight in weights)
        return weights[0].detach().as_strided((rows, weights[0].shape[1]), weights[0].stride())
    if weights[0].dtype.itemsize > 1:
        return torch.cat(weights)
    return torch.cat([weight.view(torch.uint8) for weight in weights]).view(weights[0].dtype)


def _lie_joined(weights: list[Tensor]) -> bool:
    """Whether each begins where the one before it ends, in the same memory."""
    places = [(w.untyped_storage().data_ptr(), w.data_ptr(), w.nbytes) for w in weights]
    is_whole = all(weight.is_contiguous() for weight in weights)
    return is_whole and all(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in pairwise(places))
