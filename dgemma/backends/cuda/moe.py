"""Expert outputs by kernels, for each form of expert weights.

T tokens, K experts per token, A = T * K assignments, E experts, D width, I expert width.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from dgemma.backends.cuda.gemm import Rows, quantize_rows
from dgemma.backends.cuda.kernels import moe, moe_decode, moe_nvfp4
from dgemma.backends.cuda.kernels.moe_sort import Buckets
from dgemma.model.gemma import Experts
from dgemma.quant.fp4_experts import Fp4Experts
from dgemma.quant.fp8_experts import Fp8Experts


class MoeKernels(Protocol):
    """Runs one layer's experts."""

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        """True if rows of this shape may be passed quantized to fp8."""

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        """Compute each assignment's output, [A, D], unweighted; `buckets`: sorted assignments."""


def moe_kernels(experts: nn.Module, dtype: torch.dtype) -> MoeKernels | None:
    """Return the kernels for a module's form of weights and a dtype of activations, if any."""
    if isinstance(experts, Experts):
        both = (experts.gate_up_proj, experts.down_proj)
        return Bf16Moe(experts) if all(weight.shape[2] % 8 == 0 for weight in both) else None
    if isinstance(experts, Fp8Experts):
        # TMA wants rows of a multiple of 16 bytes.
        is_aligned = all(weight.numbers.shape[2] % 16 == 0 for weight in experts.stored)
        return Fp8Moe(experts) if is_aligned else None
    # Unpacked values are bfloat16; the interpreter tests them in float32.
    is_known = dtype in (torch.bfloat16, torch.float32)
    return Fp4Moe(experts) if isinstance(experts, Fp4Experts) and is_known else None


class Bf16Moe:
    def __init__(self, experts: Experts) -> None:
        self.experts = experts

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        return False

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        assert isinstance(x, Tensor)
        weights = (self.experts.gate_up_proj, self.experts.down_proj)
        return moe.expert_outputs(x, topk_ids_TK, *weights, buckets)


class Fp8Moe:
    """fp8 weights; activations are quantized per row unless the rows are very few."""

    def __init__(self, experts: Fp8Experts) -> None:
        self.gate_up, self.down = experts.stored

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        return len(x_TD) > moe_decode.FEW

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        gate_up, down = self.gate_up, self.down
        if isinstance(x, Tensor):
            if not self.accepts_fp8(x):
                scales = (gate_up.factor, down.factor)
                return moe_decode.expert_outputs(
                    x, topk_ids_TK, gate_up.numbers, down.numbers, scales
                )
            x = quantize_rows(x)
        return moe.expert_outputs_fp8(x, topk_ids_TK, gate_up, down, dtype, buckets)


class Fp4Moe:
    """NVFP4 weights with 16-bit activations."""

    def __init__(self, experts: Fp4Experts) -> None:
        self.gate_up, self.down = experts.gate_up, experts.down

    def accepts_fp8(self, x_TD: Tensor) -> bool:
        return False

    def outputs(
        self, x: Rows, topk_ids_TK: Tensor, buckets: Buckets | None, dtype: torch.dtype
    ) -> Tensor:
        assert isinstance(x, Tensor)
        return moe_nvfp4.expert_outputs_nvfp4(x, topk_ids_TK, self.gate_up, self.down, buckets)
