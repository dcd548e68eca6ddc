"""Products with a constant weight: plain, and with the weight laid out once for the CPU's kernels.

oneDNN keeps a weight in blocks of its own; `F.linear` has to block it again in every call, or, in
float32, goes to a library that is slower on many CPUs. A packed weight cannot be read back.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]

TYPICAL_ROWS = 256  # a canvas; oneDNN picks the blocking for this many rows


def can_pack(weight_OI: Tensor) -> bool:
    """True if this build can pack such a weight."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight_OI.device.type != "cpu" or not has_onednn:
        return False
    if weight_OI.dtype == torch.bfloat16:
        # Without AVX-512 there is no such kernel, and packing fails.
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32


def linear(weight_OI: Tensor) -> Linear:
    """The plain product, x @ weight.T."""
    return lambda x: F.linear(x, weight_OI)


def packed_linear(weight_OI: Tensor) -> Linear:
    """The same product on a packed copy of the weight."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), TYPICAL_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
