"""Attention by kernel: keys in one place or two, every length, canvas or causal, any window."""

import pytest
import torch
from torch import Tensor

from dgemma.ops.attention import Segment, attention_reference
from dgemma.ops.kernels import attention as kernels

CASES = [
    # length, heads, key heads, width, past, own, window (None: a canvas), parts
    (8, 4, 2, 16, 0, 8, None, 1),
    (8, 4, 2, 16, 5, 40, None, 3),
    (20, 4, 1, 32, 7, 53, 0, 2),
    (20, 4, 2, 32, 0, 53, 12, 3),
    (20, 4, 2, 16, 6, 25, 12, 2),
    (1, 4, 2, 16, 3, 9, 0, 4),
    (1, 2, 2, 16, 30, 1, 8, 2),
]


def mask(length: int, past: int, own: int, window: int | None) -> list[Tensor | None]:
    if window is None:
        return [None, None]
    back = torch.arange(past + own - length, past + own)[:, None] - torch.arange(past + own)[None]
    seen = (back >= 0) & (back < (window or 1 << 30))
    return [seen[:, :past], seen[:, past:]]


@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_its_definition(case: tuple[int, ...]) -> None:
    length, heads, kv_heads, width, past, own, window, parts = case
    generator = torch.Generator().manual_seed(sum(x or 0 for x in case))
    q = torch.randn(length, heads, width, generator=generator)
    buffers = [torch.randn(2, n + 9, kv_heads, width, generator=generator) for n in (past, own)]
    masks = mask(length, past, own, window)
    segments = [
        Segment(k[4 : 4 + n], v[4 : 4 + n], m)
        for (k, v), n, m in zip(buffers, (past, own), masks, strict=True)
        if n
    ]
    slices = 2 if width > 16 else 1
    form = kernels.Cut(queries=16, keys=16, warps=4, stages=2, parts=parts, slices=slices)
    numbers = [[s.k_SMH.data_ptr(), s.v_SMH.data_ptr(), len(s.k_SMH)] for s in segments]
    place = torch.tensor([*([0, 0, 0] if len(numbers) == 1 else numbers[0]), *numbers[-1]])
    got = kernels.attention(q, place, kv_heads, window, form)
    torch.testing.assert_close(got, attention_reference(q, segments), atol=4e-6, rtol=1e-5)


def test_the_default_cut_shares_out_the_keys_of_a_canvas() -> None:
    assert kernels.cut(512, 8, 256).parts > 1
    assert kernels.cut(8192, 8, 256).parts == 1
    assert kernels.cut(2048, 2, 512).keys < kernels.cut(2048, 2, 256).keys
