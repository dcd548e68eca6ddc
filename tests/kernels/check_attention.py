"""Attention by kernel: keys in one buffer or two, every length, canvas or causal, any window."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import AttentionConfig, attention_config
from dgemma.backends.cuda.kernels import attention as kernels
from dgemma.backends.cuda.kernels.attention import CANVAS, CAUSAL, MIXED, Segments
from dgemma.backends.cuda.kernels.residual_norm import quantize
from dgemma.model.attention import KVSegment, attention_reference

CASES = [
    # length, heads, key heads, width, past, own, window (None: a canvas), splits
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
PLAIN = AttentionConfig(queries=16, keys=16, warps=4, stages=2)


def mask(length: int, past: int, own: int, window: int | None) -> list[Tensor | None]:
    if window is None:
        return [None, None]
    back = torch.arange(past + own - length, past + own)[:, None] - torch.arange(past + own)[None]
    seen = (back >= 0) & (back < (window or 1 << 30))
    return [seen[:, :past], seen[:, past:]]


@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_its_definition(case: tuple[int, ...]) -> None:
    width, splits = case[3], case[7]
    config = replace(PLAIN, splits=splits, v_slices=2 if width > 16 else 1, mask_edges=splits != 2)
    got, want = both(case[:7], config)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("splits", "length", "heads", "width"), [(2, 34, 4, 16), (4, 45, 3, 32), (8, 9, 16, 16)]
)
def test_splits_reduced_in_fp8_are_the_reduced_ones_quantized(
    splits: int, length: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(splits)
    out_PTNH = torch.randn(splits, length, heads, width, generator=generator)
    out_PTNH *= torch.logspace(-4, 3, length)[:, None, None]
    lse_PTN = 3 * torch.randn(splits, length, heads, generator=generator)
    lse_PTN[1, 0] = float("-inf")  # a part without keys
    out_PTNH[:, 1] = 0.0
    lse_PTN[:, 2], out_PTNH[:, 2] = float("-inf"), 0.0  # padding: no part has any
    reduced_LNH = kernels.reduce_splits(out_PTNH, lse_PTN, dtype)
    assert not reduced_LNH[2].any()
    want_LX, want_L = quantize(reduced_LNH.flatten(1))
    got_LX, got_L = kernels.reduce_splits_fp8(out_PTNH, lse_PTN, dtype)
    assert torch.equal(got_L, want_L)
    assert torch.equal(got_LX.view(torch.uint8), want_LX.view(torch.uint8))
    # The row's own type is in between: rounded from float32 at once, many would be others.
    other_LX, _ = kernels.reduce_splits_fp8(out_PTNH, lse_PTN, torch.float32)
    assert torch.equal(other_LX.float(), got_LX.float()) == (dtype == torch.float32)


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_attention_in_fp8_is_attention_rounded(splits: int) -> None:
    """Merged and rounded at once, rounded alone, and merged first where splits are many."""
    case, config = (34, 4, 2, 16, 5, 40, None), replace(PLAIN, splits=splits)
    want_LX, want_L = quantize(both(case, config)[0].flatten(1))
    (got_LX, got_L), _ = both(case, config, reduce=kernels.reduce_splits_fp8)
    assert torch.equal(got_L, want_L)
    assert torch.equal(got_LX.view(torch.uint8), want_LX.view(torch.uint8))


def both(
    case: tuple[int | None, ...],
    config: AttentionConfig | None,
    dtype: torch.dtype = torch.float32,
    reduce: Callable[..., Any] = kernels.reduce_splits,
) -> tuple[Any, Tensor]:
    """Return what the kernel gives for one segment, and the definition."""
    length, heads, kv_heads, width, past, own, window = case
    assert length is not None and heads is not None and kv_heads is not None
    assert width is not None and past is not None and own is not None
    item = Item(length, past, own, causal=window is not None)
    given = Given([item], (heads, kv_heads, width), window or 0, dtype=dtype)
    kind = CANVAS if window is None else CAUSAL
    return given.kernel(kind, config, reduce), given.definition(0)


@dataclass(frozen=True)
class Item:
    """A segment: its tokens, and its keys in either place."""

    count: int
    past: int
    own: int
    causal: bool = False


class Given:
    """Random queries and keys of some segments, in memory that holds more than these."""

    def __init__(
        self,
        items: list[Item],
        shape: tuple[int, int, int],
        window: int = 0,
        stride: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.items, self.shape, self.window = items, shape, window
        heads, kv_heads, width = shape
        self.stride = stride or max(item.count for item in items)
        generator = torch.Generator().manual_seed(sum(i.past + i.own + i.count for i in items))
        size = (len(items) * self.stride, heads, width)
        self.q_TNH = torch.randn(size, generator=generator).to(dtype)
        self.buffers = [
            [
                torch.randn(2, n + 9, kv_heads, width, generator=generator).to(dtype)
                for n in (item.past, item.own)
            ]
            for item in items
        ]

    def keys(self, index: int) -> list[KVSegment]:
        item = self.items[index]
        window = self.window if item.causal else None
        masks = mask(item.count, item.past, item.own, window)
        counts = (item.past, item.own)
        return [
            KVSegment(k[4 : 4 + n], v[4 : 4 + n], m)
            for (k, v), n, m in zip(self.buffers[index], counts, masks, strict=True)
            if n
        ]

    def table(self) -> Tensor:
        """Return the table, [E, 6]: entry 0 is padding; entries of other layers are in between."""
        table_EX6 = torch.zeros(len(self.items) + 1, 2, 6, dtype=torch.long)
        for index in range(len(self.items)):
            found = self.keys(index)
            numbers = [[s.k_SMH.data_ptr(), s.v_SMH.data_ptr(), len(s.k_SMH)] for s in found]
            if numbers:
                first = [0, 0, 0] if len(numbers) == 1 else numbers[0]
                table_EX6[self.entry(index), 1] = torch.tensor([*first, *numbers[-1]])
        return table_EX6[:, 1]

    def entry(self, index: int) -> int:
        """Return the entry of a segment; the order of entries is not that of the segments."""
        return len(self.items) - index

    def segments(self, kind: int) -> Segments:
        order = sorted(range(len(self.items)), key=self.entry)
        meta_E2 = torch.tensor([[0, 7], *([self.items[i].count, 7] for i in order)])
        causal_E = torch.tensor([0, *(int(self.items[i].causal) for i in order)])
        return Segments(
            entry_I=torch.tensor([self.entry(i) for i in range(len(self.items))]).int(),
            count_E=meta_E2[:, 0],
            causal_E=causal_E.int(),
            stride=self.stride,
            kind=kind,
        )

    def kernel(
        self,
        kind: int,
        config: AttentionConfig | None,
        reduce: Callable[..., Any] = kernels.reduce_splits,
    ) -> Any:
        given = (self.q_TNH, self.table(), self.segments(kind), self.shape[1], self.window, config)
        return reduce(*kernels.attend(*given), self.q_TNH.dtype)

    def definition(self, index: int) -> Tensor:
        q_TNH = self.q_TNH[index * self.stride :][: self.items[index].count]
        return attention_reference(q_TNH, self.keys(index))

    def check(self, kind: int, config: AttentionConfig | None) -> None:
        """Compare each segment with its definition; padding is finite."""
        got_ITNH = self.kernel(kind, config).view(len(self.items), self.stride, *self.shape[::2])
        assert got_ITNH.isfinite().all()
        for index, (item, got_TNH) in enumerate(zip(self.items, got_ITNH, strict=True)):
            if not item.own:
                assert not got_TNH.any()
                continue
            got_LNH, want_LNH = got_TNH[: item.count], self.definition(index)
            torch.testing.assert_close(got_LNH, want_LNH, atol=4e-6, rtol=1e-5)


PADDING = Item(0, 0, 0)
BATCHES = {
    CANVAS: [Item(7, 0, 7), Item(4, 19, 30), PADDING, Item(9, 3, 9)],
    CAUSAL: [
        Item(9, 0, 9, causal=True),
        Item(2, 5, 40, causal=True),
        Item(7, 21, 7, causal=True),
        Item(0, 0, 0, causal=True),
    ],
    MIXED: [
        Item(5, 6, 25),
        Item(9, 0, 53, causal=True),
        PADDING,
        Item(1, 17, 1, causal=True),
        Item(9, 0, 31),
    ],
}


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("kind", [CANVAS, CAUSAL, MIXED])
@pytest.mark.parametrize(("splits", "edges"), [(1, True), (3, False)])
def test_segments_of_a_pass_are_attended_in_one_launch(
    kind: int, window: int, splits: int, edges: bool
) -> None:
    """Of any count up to the stride, each with its own keys; padding has none and gives zeros."""
    given = Given(BATCHES[kind], (4, 2, 16), window, stride=9)
    given.check(kind, replace(PLAIN, splits=splits, mask_edges=edges))


def test_the_default_config_takes_all_segments_too() -> None:
    for kind, stride in ((CANVAS, 9), (MIXED, 9), (CAUSAL, 1)):
        items = BATCHES[kind]
        if stride == 1:
            items = [replace(item, count=min(item.count, 1)) for item in items]
        Given(items, (4, 2, 16), 6, stride).check(kind, None)


def test_segments_in_fp8_are_those_rounded() -> None:
    given = Given(BATCHES[MIXED], (4, 2, 16), 6, stride=9)
    for splits in (1, 3):
        config = replace(PLAIN, splits=splits)
        want_TX, want_T = quantize(given.kernel(MIXED, config).flatten(1))
        got_TX, got_T = given.kernel(MIXED, config, kernels.reduce_splits_fp8)
        assert torch.equal(got_T, want_T)
        assert torch.equal(got_TX.view(torch.uint8), want_TX.view(torch.uint8))
        assert got_TX.float().isfinite().all() and got_T.isfinite().all()


def test_outputs_of_splits_may_be_float16() -> None:
    case = (20, 4, 2, 32, 7, 53, 12)
    want = both(case, PLAIN, torch.float32)[1]
    errors = []
    for half in (False, True):
        got, _ = both(case, replace(PLAIN, splits=3, fp16_splits=half), torch.float16)
        errors.append((got.float() - want).square().mean().sqrt())
    # The inputs' rounding is in both.
    assert errors[1] < 1.1 * errors[0] < 2e-3


def test_one_token_has_a_config_of_its_own() -> None:
    got, want = both((1, 4, 2, 32, 40, 23, 0), None)
    torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)
    assert attention_config(2, 8, 256).splits == 16
    assert attention_config(8, 2, 512).splits == 66
    assert attention_config(2, 8, 256, 16).splits == 1  # many segments fill the GPU


def test_the_default_config_splits_the_keys_of_a_canvas() -> None:
    assert attention_config(512, 8, 256).splits > 1
    assert attention_config(512, 8, 256, 8).splits == 1
    assert attention_config(8192, 8, 256).splits == 1
    assert attention_config(2048, 2, 512).keys < attention_config(2048, 2, 256).keys
