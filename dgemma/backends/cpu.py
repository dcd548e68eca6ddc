"""CPU forms of a model, swapped in after loading: merged linears, packed by oneDNN or in int8.

A pass over a canvas of a small model spends most of its time between GEMMs, so linears that read
the same rows are merged. `Attention` and `FeedForward` stay the definition; only the projections in
them are replaced. The result computes the same function (in int8, up to the rounding of
activations) and cannot be trained or saved. The token table is kept beside its packed forms, since
tokens are looked up in it.

oneDNN keeps a weight in blocks of its own; `F.linear` packs it again in every call or, in float32,
calls a library that is slower on many CPUs. A packed weight cannot be read back.

    int8:  y = (round(x / a) @ w.T) * a * b        a: scale of each row of x; b: of each output

CPUs with VNNI multiply int8 about four times as fast as float32. Weights that are stored in int8
lose nothing; activations are quantized per row. Sums are exact integers, so a row's result never
depends on the other rows.

T tokens, A assignments, E experts, K of a token, I inputs, O outputs, V vocabulary, D width, N/M
query/key heads, X both and perhaps those of the values, H head width.
"""

from collections.abc import Callable
from math import pi

import torch
from torch import Tensor, nn

from dgemma.device import has_bfloat16
from dgemma.model.gemma import Attention, Experts, FeedForward, Gemma, Norm, Router, TokenTable
from dgemma.model.moe import (
    Linear,
    gelu_and_mul,
    linear,
    moe_forward,
    per_expert,
)
from dgemma.model.norm_rope import CosSin, apply_rope, rms_norm
from dgemma.quant import QTensor, quantize_int8

TYPICAL_ROWS = 256  # a canvas; oneDNN picks the blocking for this many rows
# Tensors: small ops are several times faster with them than with Python numbers.
INV_INT8_MAX = torch.tensor(1 / 127)
MIN_AMAX = torch.tensor(1e-12)  # keeps the scale of a zero row positive
# gelu_tanh(x) = x * sigmoid(SLOPE * x + CUBIC * x^3); SLOPE as a tensor, to start an addcmul with.
SLOPE = torch.tensor(2 * (2 / pi) ** 0.5)
CUBIC = 0.044715 * SLOPE.item()
# Relative rounding error of a mean over the vocabulary.
SOFT_EMBED_ERROR = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.int8: 2e-3}

# (quantized rows sorted by expert, expert of each) -> expert output of each row
Int8Grouped = Callable[[QTensor, Tensor], Tensor]
MakeLinear = Callable[[Tensor], Linear]  # makes a linear of a weight [O, I]


def gelu_and_mul_cpu(gate_up: Tensor) -> Tensor:
    """Compute `gelu_and_mul` in float32 without gradients, twice as fast as with `tanh`."""
    gate_up = gate_up.float()
    gate, up = gate_up.chunk(2, dim=-1)
    # Strided like the gate, so that each row is a loop of its own: torch rounds the last elements
    # of a loop differently, and the result must not depend on the number of rows.
    sigmoid = torch.empty_like(gate_up).chunk(2, dim=-1)[0]
    torch.addcmul(SLOPE, gate, gate, value=CUBIC, out=sigmoid).mul_(gate).sigmoid_()
    return sigmoid.mul_(gate).mul_(up)


def can_pack(weight_OI: Tensor) -> bool:
    """True if this build of torch can pack such a weight."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight_OI.device.type != "cpu" or not has_onednn:
        return False
    if weight_OI.dtype == torch.bfloat16:
        # Packing fails where there is no kernel, such as without AVX-512.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32


def packed_linear(weight_OI: Tensor) -> Linear:
    """Return x -> x @ weight.T with a copy of the weight packed by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), TYPICAL_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


# --- int8


def quantize_rows(x_TI: Tensor) -> QTensor:
    """Quantize per row: scale = absmax / 127."""
    x_TI = x_TI.float()
    scratch_TI = x_TI.abs()
    scale_T1 = torch.maximum(scratch_TI.amax(-1, keepdim=True), MIN_AMAX).mul_(INV_INT8_MAX)
    torch.div(x_TI, scale_T1, out=scratch_TI).round_()
    return QTensor(scratch_TI.to(torch.int8), scale_T1.squeeze(-1))


def int8_linear(weight: QTensor) -> Linear:
    """Return x -> x @ weight.T with quantized rows, for a weight [O, I]."""
    values_IO = weight.values.t()

    def apply(x: Tensor) -> Tensor:
        values_TI, scale_T = quantize_rows(x.reshape(-1, x.shape[-1]))
        sums_TO = torch._int_mm(values_TI, values_IO)
        out_TO = _dequantize_(sums_TO, weight.scale, scale_T)
        return out_TO.view(*x.shape[:-1], -1).to(x.dtype)

    return apply


def int8_grouped(weight_EOI: QTensor) -> Int8Grouped:
    """Multiply stacked experts by sorted, quantized rows."""
    values_IO_by_expert = [values_OI.t() for values_OI in weight_EOI.values]
    num_experts, outputs = weight_EOI.values.shape[:2]

    def apply(rows: QTensor, expert_A: Tensor) -> Tensor:
        counts = torch.bincount(expert_A, minlength=num_experts).tolist()
        sums_AO = torch.empty(len(expert_A), outputs, dtype=torch.int32)
        values, sums = torch.split(rows.values, counts), torch.split(sums_AO, counts)
        for x, values_IO, out in zip(values, values_IO_by_expert, sums, strict=True):
            if len(x):
                torch._int_mm(x, values_IO, out=out)
        return _dequantize_(sums_AO, weight_EOI.scale.index_select(0, expert_A), rows.scale)

    return apply


def int8_experts(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    gate_up: Int8Grouped,
    down: Int8Grouped,
) -> Tensor:
    """Compute `moe_forward` with tokens quantized once, not once per expert.

    The router's weights are folded into the scales of the second GEMM, one number per row.
    """
    expert_A, order_A = topk_ids_TK.flatten().sort(stable=True)
    token_A = order_A // topk_ids_TK.shape[1]
    rows = QTensor(*(x.index_select(0, token_A) for x in quantize_rows(x_TD)))
    hidden = quantize_rows(gelu_and_mul_cpu(gate_up(rows, expert_A)))
    weight_A = topk_weights_TK.flatten().index_select(0, order_A)
    out_AD = down(QTensor(hidden.values, hidden.scale * weight_A), expert_A)
    # In the order of each token's assignments: sums do not depend on other tokens.
    out_TKD = out_AD.index_select(0, order_A.argsort()).view(*topk_ids_TK.shape, -1)
    return out_TKD.sum(1).to(x_TD.dtype)


def int8_reference(x_TI: Tensor, weight: QTensor) -> Tensor:
    """Define `int8_linear`, with exact sums in float64."""
    values_TI, scale_T = quantize_rows(x_TI)
    sums_TO = values_TI.double() @ weight.values.double().T
    return (sums_TO.float() * weight.scale * scale_T[:, None]).to(x_TI.dtype)


def _dequantize_(sums_TO: Tensor, output_scale: Tensor, row_scale_T: Tensor) -> Tensor:
    """Dequantize integer sums in place by the scales of outputs and rows."""
    out_TO = sums_TO.view(torch.float32).copy_(sums_TO)
    return out_TO.mul_(output_scale).mul_(row_scale_T[:, None])


# --- soft embeddings


def soft_embed(p_TV: Tensor, weight_VD: Tensor, gemm: Linear, error: float) -> Tensor:
    """Return the mean of the weight's rows; `gemm`: p @ weight, for positions that need it.

    A position whose argmax has all but `error` of the probability takes that token's vector. Each
    position is decided independently, so results do not depend on other positions.
    """
    dtype = weight_VD.dtype
    is_sure_T = p_TV.amax(-1) >= 1 - error  # False for NaN
    sure, unsure = is_sure_T.nonzero()[:, 0], is_sure_T.logical_not().nonzero()[:, 0]
    if not len(sure):
        return gemm(p_TV.to(dtype))
    top_p, top = p_TV.index_select(0, sure).max(-1)
    mean_TD = weight_VD.new_empty(len(p_TV), weight_VD.shape[1])
    mean_TD.index_copy_(0, sure, weight_VD.index_select(0, top) * top_p[:, None].to(dtype))
    if len(unsure):
        mean_TD.index_copy_(0, unsure, gemm(p_TV.index_select(0, unsure).to(dtype)))
    return mean_TD


def soft_embed_reference(p_TV: Tensor, weight_VD: Tensor) -> Tensor:
    """Define `soft_embed`, in float64."""
    return p_TV.double() @ weight_VD.double()


# --- modules


def pack(model: Gemma) -> Gemma:
    """Pack all weights in place; does nothing if this build of torch cannot."""
    if not can_pack(model.embed_tokens.weight):
        return model
    model.requires_grad_(False)
    model.embed_tokens = PackedTable(model.embed_tokens)
    replace_modules(model, _packed)
    return model


@torch.no_grad()
def pack_int8(model: Gemma) -> Gemma:
    """Quantize GEMM weights to int8 in place; adapters stay.

    Except the router, which is small and selects experts, and soft embeddings, whose probabilities
    need more than eight bits.
    """
    model.requires_grad_(False)
    model.embed_tokens = Int8Table(model.embed_tokens)
    pack_layers_int8(model)
    return model


def pack_layers_int8(module: nn.Module) -> None:
    """Quantize all GEMM weights below a module to int8, in place."""
    replace_modules(module, _int8)


def make_int8(weight_OI: Tensor) -> Linear:
    return int8_linear(quantize_int8(weight_OI))


@torch.no_grad()
def replace_modules(module: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace modules below one by what `make` returns; None descends into the children."""
    # Names, not modules: each weight must be freed when its replacement is made.
    for name in [name for name, _ in module.named_children()]:
        child = module.get_submodule(name)
        replacement = make(child)
        if replacement is None:
            replace_modules(child, make)
        else:
            setattr(module, name, replacement)


def merged_module(module: nn.Module, make: MakeLinear) -> nn.Module | None:
    """Return the merged version of a linear, MLP or attention; None for other modules."""
    if isinstance(module, nn.Linear):
        return MergedLinear(make, module)
    # A linear with an adapter is another module.
    is_plain = all(isinstance(child, nn.Linear | Norm) for child in module.children())
    if type(module) is FeedForward and is_plain:
        return MergedFeedForward(module, make)
    if type(module) is Attention and is_plain:
        return MergedAttention(module, make)
    return None


def _packed(module: nn.Module) -> nn.Module | None:
    if isinstance(module, Experts):
        return PackedExperts(module)
    return merged_module(module, packed_linear)


def _int8(module: nn.Module) -> nn.Module | None:
    if isinstance(module, Router):
        return module
    if isinstance(module, Experts):
        return Int8Experts(module)
    return merged_module(module, make_int8)


class MergedLinear(nn.Module):
    """One or several linears with the same input, outputs concatenated."""

    def __init__(self, make: MakeLinear, *sources: nn.Linear) -> None:
        super().__init__()
        self.gemm = make(torch.cat([source.weight for source in sources]))

    def forward(self, x: Tensor) -> Tensor:
        return self.gemm(x)


class MergedFeedForward(FeedForward):
    """Gate and up as one GEMM."""

    def __init__(self, source: FeedForward, make: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = MergedLinear(make, source.gate_proj, source.up_proj)
        self.down_proj = MergedLinear(make, source.down_proj)  # type: ignore[assignment]

    def hidden(self, x_TD: Tensor) -> Tensor:
        # In 16 bits each op rounds, as elsewhere.
        activate = gelu_and_mul_cpu if x_TD.dtype == torch.float32 else gelu_and_mul
        return activate(self.gate_up_proj(x_TD))


class MergedAttention(Attention):
    """QKV as one GEMM, one norm and one rotation (values are not rotated)."""

    def __init__(self, source: Attention, make: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.layer, self.layer_type, self.eps = source.layer, source.layer_type, source.eps
        self.shape, width = source.shape, source.shape.head_dim
        self.queries = source.q_proj.out_features // width
        projections = [p for p in (source.q_proj, source.k_proj, source.v_proj) if p is not None]
        self.qkv_proj = MergedLinear(make, *projections)
        self.o_proj = MergedLinear(make, source.o_proj)  # type: ignore[assignment]
        q_H, k_H = source.q_norm.weight.float(), source.k_norm.weight.float()
        keys = source.shape.num_kv_heads
        self.scale_XH = torch.cat([q_H.expand(self.queries, -1), k_H.expand(keys, -1)])

    def heads(self, x_TD: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        heads_TXH = self.qkv_proj(x_TD).view(len(x_TD), -1, self.shape.head_dim)
        normed_TXH = rms_norm(heads_TXH.float(), None, self.eps)
        qk_TXH = (normed_TXH[:, : len(self.scale_XH)] * self.scale_XH).to(x_TD.dtype)
        qk_TXH = apply_rope(qk_TXH, *cos_sin[self.layer_type])
        # The last heads are the values or, if the raw keys serve as values, the keys.
        v_TMH = normed_TXH[:, -self.shape.num_kv_heads :].to(x_TD.dtype)
        return qk_TXH[:, : self.queries], qk_TXH[:, self.queries :], v_TMH


class PackedExperts(nn.Module):
    def __init__(self, source: Experts) -> None:
        super().__init__()
        self.gate_up = per_expert([packed_linear(weight) for weight in source.gate_up_proj])
        self.down = per_expert([packed_linear(weight) for weight in source.down_proj])

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        return moe_forward(x_TD, topk_ids_TK, topk_weights_TK, self.gate_up, self.down)


class Int8Experts(nn.Module):
    def __init__(self, source: Experts) -> None:
        super().__init__()
        self.gate_up = int8_grouped(quantize_int8(source.gate_up_proj))
        self.down = int8_grouped(quantize_int8(source.down_proj))

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        return int8_experts(x_TD, topk_ids_TK, topk_weights_TK, self.gate_up, self.down)


class CpuTable(TokenTable):
    """A token table with separate GEMMs for logits and soft embeddings."""

    def __init__(self, source: TokenTable, head: Linear, gemm: Linear, error: float) -> None:
        super().__init__(*source.weight.shape)
        self.weight = source.weight
        self.head, self.gemm, self.error = head, gemm, error

    def raw_logits(self, hidden_TD: Tensor) -> Tensor:
        return self.head(hidden_TD)

    def soft_embed(self, p_TV: Tensor) -> Tensor:
        return soft_embed(p_TV, self.weight, self.gemm, self.error) * self.scale


class PackedTable(CpuTable):
    def __init__(self, source: TokenTable) -> None:
        weight_VD = source.weight
        error = SOFT_EMBED_ERROR[weight_VD.dtype]
        super().__init__(source, packed_linear(weight_VD), packed_linear(weight_VD.T), error)


class Int8Table(CpuTable):
    def __init__(self, source: TokenTable) -> None:
        # Soft embeddings are quantized to int8 next, so more precision would be wasted.
        error = SOFT_EMBED_ERROR[torch.int8]
        super().__init__(source, make_int8(source.weight), _soft_embed_gemm(source.weight), error)


def _soft_embed_gemm(weight_VD: Tensor) -> Linear:
    """Return p -> p @ weight, in bfloat16 where this CPU is twice as fast with it."""
    if has_bfloat16(weight_VD.device) and can_pack(weight_VD[:1].to(torch.bfloat16)):
        gemm = packed_linear(weight_VD.T.to(torch.bfloat16))
        return lambda p_TV: gemm(p_TV.to(torch.bfloat16)).to(weight_VD.dtype)
    return packed_linear(weight_VD.T) if can_pack(weight_VD) else linear(weight_VD.T)
