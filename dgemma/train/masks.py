"""Attention masks of packed sequences, dense or as FlexAttention blocks.

A clean row attends to the clean rows of its example up to itself. A canvas row attends to the clean
rows before its canvas, and to its own canvas. Sliding layers reach as far back as the KV cache does
in inference: a clean row sees its window, itself included; all rows of a canvas see one row less
than that before the canvas.

B packed sequences, T rows in each, N/M query/key heads, H head width, X blocks of rows.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dgemma.config import AttentionShape, LayerType, ModelConfig
from dgemma.model.norm_rope import CosSin, cos_sin, inverse_frequencies, rope_cos_sin
from dgemma.train.packing import Batch

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128  # block size of FlexAttention
NO_CANVAS = -(1 << 31)  # clean rows attend to no canvas
# Of the forward kernel. Texts and canvases are short and begin anywhere, so that smaller tiles than
# the default waste less: 0.57 instead of 0.97 ms a layer on an H200 (LOG.md).
KERNEL_OPTIONS: Any = {"BLOCK_M": 64, "BLOCK_N": 64}


class AttnVisibility(NamedTuple):
    """The rows visible to each row, as numbers that compare fast; each [B, T], int32.

    Every row has an id: clean rows count up in text order, canvas rows have the negative number of
    their canvas. A row attends to a range of ids and to one more id, its canvas.
    """

    row_id: Tensor
    first: Tensor
    end: Tensor
    own_canvas: Tensor

    @classmethod
    def of(cls, batch: Batch, window: int | None) -> "AttnVisibility":
        is_canvas, num_rows = batch.is_canvas, batch.token.shape[1]
        base = (batch.example + 1) * num_rows
        canvas_id = -1 - base - batch.canvas
        row_id = torch.where(is_canvas, canvas_id, base + batch.position).int()
        own_canvas = torch.where(is_canvas, canvas_id, row_id.new_full((), NO_CANVAS)).int()
        # Rows back: all of the text, or the window; canvas rows are not part of their own window.
        reach = batch.start if window is None else batch.start.clamp(max=window - is_canvas.long())
        first, end = (base + batch.start - reach).int(), (base + batch.start).int()
        return cls(row_id, first, end, own_canvas)

    def even(self, limit: int | None = None) -> "AttnVisibility":
        return AttnVisibility(*[field[:limit:2].contiguous() for field in self])

    def mask_mod(self) -> MaskMod:
        """Return the FlexAttention mask of (query row, key row).

        Evaluated for every pair, hence only three comparisons.
        """
        row_id, first, end, own_canvas = self

        def is_visible(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            key_id = row_id[b, key]
            is_before = (key_id >= first[b, query]) & (key_id < end[b, query])
            return is_before | (key_id == own_canvas[b, query])

        return is_visible

    def dense(self) -> Tensor:
        """Evaluate the mask for all pairs, [B, 1, T, T]."""
        b, t = (torch.arange(size, device=self.row_id.device) for size in self.row_id.shape)
        return self.mask_mod()(b[:, None, None, None], t, t[:, None], t[None, :])


def dense_mask(batch: Batch, window: int | None) -> Tensor:
    return AttnVisibility.of(batch, window).dense()


class LayerInputs(NamedTuple):
    """RoPE tables and masks of a pass, by layer type."""

    cos_sin: CosSin
    masks: dict[LayerType, Any]


class PackedContext:
    """Attention over packed sequences, end to end; dense or by FlexAttention."""

    def __init__(
        self, config: ModelConfig, batch: Batch, inputs: LayerInputs | None = None
    ) -> None:
        self.layer_types = config.layer_types
        self.num_sequences, self.num_rows = batch.token.shape
        self.positions_T = batch.position.flatten()
        # Outside the compiled pass, which would recompute the sines in each layer.
        self.cos_sin, self.masks = dense_inputs(config, batch) if inputs is None else inputs

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        """Run attention in a layer; `layer` may be any layer of the same type."""
        shape = (self.num_sequences, self.num_rows)
        q, k, v = [x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q_TNH, k_TMH, v_TMH)]
        mask = self.masks[self.layer_types[layer]]
        if isinstance(mask, BlockMask):
            out = flex_attention(
                q, k, v, block_mask=mask, scale=1.0, enable_gqa=True, kernel_options=KERNEL_OPTIONS
            )
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(0, 1)


def make_contexts(
    config: ModelConfig, batch: Batch, *, is_flex: bool, limit: int | None = None
) -> tuple[Batch, PackedContext, PackedContext]:
    """Make the even sequences, their context, and the context of all; see `Batch.even`."""
    even = batch.even(limit)
    if not is_flex:
        return even, PackedContext(config, even), PackedContext(config, batch)
    of_even, of_all = flex_inputs(config, batch, limit)
    return even, PackedContext(config, even, of_even), PackedContext(config, batch, of_all)


def _attention_shapes(config: ModelConfig) -> dict[LayerType, AttentionShape]:
    types = config.layer_types
    return {kind: config.attention(types.index(kind)) for kind in dict.fromkeys(types)}


def dense_inputs(config: ModelConfig, batch: Batch) -> LayerInputs:
    shapes = _attention_shapes(config)
    masks = {kind: dense_mask(batch, shape.window) for kind, shape in shapes.items()}
    return LayerInputs(rope_cos_sin(config, batch.position.flatten()), masks)


# --- FlexAttention

# The lists of a `BlockMask`: key blocks that each query block attends to in part, those it attends
# to in full, and the transpose of both.
BLOCK_LISTS = ("kv", "full_kv", "q", "full_q")


class VisibleBlocks(NamedTuple):
    """Blocks of rows that attend to each other, for each of `BLOCK_LISTS`, int32."""

    counts: Tensor  # [4, B, 1, X]
    indices: Tensor  # [4, B, 1, X, X]

    @classmethod
    def of(cls, visibility: AttnVisibility) -> "VisibleBlocks":
        sequences, rows = visibility.row_id.shape
        missing = -rows % BLOCK
        mask = F.pad(visibility.dense(), (0, missing, 0, missing))
        count = (rows + missing) // BLOCK
        pairs = mask.view(sequences, 1, count, BLOCK, count, BLOCK).sum((3, 5))
        full = pairs == BLOCK * BLOCK
        partial = (pairs > 0) & ~full
        return cls(*list_blocks(torch.stack([partial, full, partial.mT, full.mT])))

    def even(self, limit: int | None = None) -> "VisibleBlocks":
        return VisibleBlocks(*[field[:, :limit:2].contiguous() for field in self])

    def block_mask_fields(self) -> dict[str, Any]:
        counts = {f"{name}_num_blocks": x for name, x in zip(BLOCK_LISTS, self.counts, strict=True)}
        indices = {f"{name}_indices": x for name, x in zip(BLOCK_LISTS, self.indices, strict=True)}
        return counts | indices


def list_blocks(is_visible: Tensor) -> tuple[Tensor, Tensor]:
    """Count the visible blocks of each row, and list their indices before the others.

    Compares all pairs instead of sorting: they are few, and it compiles to one kernel.
    """
    index = torch.arange(is_visible.shape[-1], device=is_visible.device)
    is_earlier = index[:, None] < index
    visible = is_visible.long()
    count = visible.sum(-1)
    num_before = (visible[..., :, None] * is_earlier).sum(-2)
    rank = torch.where(is_visible, num_before, count[..., None] + index - num_before)
    order = ((rank[..., None, :] == index[:, None]) * index).sum(-1)
    return count.int(), order.int()


class LayerTypePlan(NamedTuple):
    """RoPE tables and visibility of one layer type for a pass over a batch."""

    cos_sin: tuple[Tensor, Tensor]
    visibility: AttnVisibility
    blocks: VisibleBlocks

    def even(self, limit: int | None = None) -> "LayerTypePlan":
        sequences = len(self.visibility.row_id)
        cos, sin = (
            x.view(sequences, -1, x.shape[-1])[:limit:2].flatten(0, 1) for x in self.cos_sin
        )
        return LayerTypePlan((cos, sin), self.visibility.even(limit), self.blocks.even(limit))

    def block_mask(self) -> BlockMask:
        rows = self.visibility.row_id.shape[1]
        fields = self.blocks.block_mask_fields()
        mask_mod = self.visibility.mask_mod()
        return BlockMask((rows, rows), **fields, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)


def plan_layer_types(
    batch: Batch,
    windows: tuple[int | None, ...],
    frequencies: tuple[Tensor, ...],
    limit: int | None = None,
) -> list[tuple[LayerTypePlan, LayerTypePlan]]:
    """Plan each layer type for the even sequences and for all of them."""
    positions_T, plans = batch.position.flatten(), []
    for window, frequencies_P in zip(windows, frequencies, strict=True):
        visibility = AttnVisibility.of(batch, window)
        of_all = LayerTypePlan(
            cos_sin(positions_T, frequencies_P), visibility, VisibleBlocks.of(visibility)
        )
        plans.append((of_all.even(limit), of_all))
    return plans


@cache
def _compiled_plan() -> Callable[..., list[tuple[LayerTypePlan, LayerTypePlan]]]:
    return torch.compile(plan_layer_types, dynamic=False)


def flex_inputs(
    config: ModelConfig, batch: Batch, limit: int | None = None
) -> tuple[LayerInputs, LayerInputs]:
    """Make the inputs of both passes with block masks, so that invisible blocks are skipped.

    Compiled as one function: a hundred small launches would make the GPU wait for the host.
    """
    shapes, device = _attention_shapes(config), batch.token.device
    plan = _compiled_plan() if device.type == "cuda" else plan_layer_types
    windows = tuple(shape.window for shape in shapes.values())
    frequencies = tuple(inverse_frequencies(shape, device) for shape in shapes.values())
    plans = dict(zip(shapes, plan(batch, windows, frequencies, limit), strict=True))
    of_even, of_all = (
        LayerInputs(
            {kind: pair[i].cos_sin for kind, pair in plans.items()},
            {kind: pair[i].block_mask() for kind, pair in plans.items()},
        )
        for i in (0, 1)
    )
    return of_even, of_all
