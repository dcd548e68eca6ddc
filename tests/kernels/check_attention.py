"""Attention by kernel: keys in one place or two, every length, canvas or causal, any window."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.ops.attention import Segment, attention_reference
from dgemma.ops.kernels import attention as kernels
from dgemma.ops.kernels import merge_8
from dgemma.ops.kernels.experts import quantize

CASES = [
    # length, heads, key heads, width, past, own, window (None: a canvas), parts
    (8, 4, 2, 16, 0, 8, None, 1),
    (8, 4, 2, 16, 5, 40, None, 3),
    (20, 4, 1, 32, 7, 53, 0, 2),
    (20, 4, 2, 32, 0, 53, 12, 3),
    (20, 4, 2, 16, 6, 25, 12, 2),
    (20, 4, 4, 16, 6, 25, 12, 2),  # every head its own keys
    (1, 4, 2, 16, 3, 9, 0, 4),
    (1, 2, 2, 16, 30, 1, 8, 2),
    (40, 4, 2, 16, 17, 70, 20, 1),
    (1, 4, 1, 32, 33, 8, None, 9),
]
PLAIN = kernels.Cut(queries=16, keys=16, warps=4, stages=2)


def mask(length: int, past: int, own: int, window: int | None) -> list[Tensor | None]:
    if window is None:
        return [None, None]
    back = torch.arange(past + own - length, past + own)[:, None] - torch.arange(past + own)[None]
    seen = (back >= 0) & (back < (window or 1 << 30))
    return [seen[:, :past], seen[:, past:]]


@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_its_definition(case: tuple[int, ...]) -> None:
    width, parts = case[3], case[7]
    form = replace(PLAIN, parts=parts, slices=2 if width > 16 else 1, edges=parts != 2)
    got, want = both(case[:7], form)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("parts", "length", "heads", "width"), [(2, 34, 4, 16), (4, 45, 3, 32), (8, 9, 16, 16)]
)
def test_parts_merged_in_8_bits_are_the_merged_ones_rounded(
    parts: int, length: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(parts)
    out_PLNH = torch.randn(parts, length, heads, width, generator=generator)
    out_PLNH *= torch.logspace(-4, 3, length)[:, None, None]
    log_PLN = 3 * torch.randn(parts, length, heads, generator=generator)
    log_PLN[1, 0] = float("-inf")  # a part without keys
    out_PLNH[:, 1] = 0.0
    merged_LNH = torch.empty(length, heads, width, dtype=dtype)
    kernels.merge(out_PLNH, log_PLN, merged_LNH)
    want_LX, want_L = quantize(merged_LNH.flatten(1))
    got_LX, got_L = merge_8.merge(out_PLNH, log_PLN, dtype)
    assert torch.equal(got_L, want_L)
    assert torch.equal(got_LX.view(torch.uint8), want_LX.view(torch.uint8))
    # The row's own type is in between: rounded from float32 at once, many would be others.
    other_LX, _ = merge_8.merge(out_PLNH, log_PLN, torch.float32)
    assert torch.equal(other_LX.float(), got_LX.float()) == (dtype == torch.float32)


@pytest.mark.parametrize("parts", [1, 3, 9])
def test_attention_in_8_bits_is_attention_rounded(parts: int) -> None:
    """Merged and rounded at once, rounded alone, and merged first where parts are many."""
    case, form = (34, 4, 2, 16, 5, 40, None), replace(PLAIN, parts=parts)
    want_LX, want_L = quantize(both(case, form)[0].flatten(1))
    (got_LX, got_L), _ = both(case, form, work=kernels.attention_8)
    assert torch.equal(got_L, want_L)
    assert torch.equal(got_LX.view(torch.uint8), want_LX.view(torch.uint8))


def both(
    case: tuple[int | None, ...],
    form: kernels.Cut | None,
    dtype: torch.dtype = torch.float32,
    work: Callable[..., Any] | None = None,
) -> tuple[Any, Tensor]:
    """What the kernel gives, and the definition."""
    length, heads, kv_heads, width, past, own, window = case
    generator = torch.Generator().manual_seed(sum(x or 0 for x in case))
    q = torch.randn(length, heads, width, generator=generator).to(dtype)
    sizes = [(2, n + 9, kv_heads, width) for n in (past, own)]
    buffers = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    masks = mask(length, past, own, window)
    segments = [
        Segment(k[4 : 4 + n], v[4 : 4 + n], m)
        for (k, v), n, m in zip(buffers, (past, own), masks, strict=True)
        if n
    ]
    numbers = [[s.k_SMH.data_ptr(), s.v_SMH.data_ptr(), len(s.k_SMH)] for s in segments]
    place = torch.tensor([*([0, 0, 0] if len(numbers) == 1 else numbers[0]), *numbers[-1]])
    got = (work or kernels.attention)(q, place, kv_heads, window, form)
    return got, attention_reference(q, segments)


def test_parts_may_wait_in_16_bits() -> None:
    case = (20, 4, 2, 32, 7, 53, 12)
    want = both(case, PLAIN, torch.float32)[1]
    errors = []
    for half in (False, True):
        got, _ = both(case, replace(PLAIN, parts=3, half=half), torch.float16)
        errors.append((got.float() - want).square().mean().sqrt())
    # The inputs' rounding is in both.
    assert errors[1] < 1.1 * errors[0] < 2e-3


def test_one_token_has_a_cut_of_its_own() -> None:
    got, want = both((1, 4, 2, 32, 40, 23, 0), None)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)
    assert kernels.cut(2, 8, 256).parts == 16
    assert kernels.cut(8, 2, 512).parts == 66


def test_the_default_cut_shares_out_the_keys_of_a_canvas() -> None:
    assert kernels.cut(512, 8, 256).parts > 1
    assert kernels.cut(8192, 8, 256).parts == 1
    assert kernels.cut(2048, 2, 512).keys < kernels.cut(2048, 2, 256).keys
