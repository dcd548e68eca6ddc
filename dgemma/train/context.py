"""Who sees whom in a packed pass, and attention under that rule.

Clean rows see the clean rows of their example up to themselves. Canvas rows see the clean rows
before their canvas, and their own canvas. Sliding layers see as far back as the cache reaches: from
a clean row its window, itself included; from every row of a canvas one less than that before the
canvas. This is the rule of inference, so nothing is learned that is not there later.

B packed sequences, T rows in each, N/M query/key heads, H head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dgemma.config import ModelConfig
from dgemma.ops.rope import turns_by_kind
from dgemma.train.rows import FIELDS, NOTHING

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
NOBODY = -(1 << 31)  # no place: clean rows see no canvas
# Of the forward kernel. Texts and canvases are short and begin anywhere, so that smaller tiles than
# its own waste less: 0.57 against 0.97 ms a layer on an H200 (bench/train_attention.py).
TILES: Any = {"BLOCK_M": 64, "BLOCK_N": 64}


@dataclass(frozen=True, slots=True)
class Batch:
    """The fields of packed rows, each [B, T], on a device."""

    token: Tensor
    target: Tensor
    position: Tensor
    canvas: Tensor
    start: Tensor
    pinned: Tensor
    example: Tensor
    lot: Tensor

    @classmethod
    def of(cls, rows: Tensor, device: torch.device | str) -> "Batch":
        """Of rows as `Mixture.batch` makes them."""
        return cls(*rows.to(device, non_blocking=True).long().unbind(0))

    def every_second(self) -> "Batch":
        """The sequences that are conditioned on the model's own guess."""
        return Batch(*[getattr(self, name)[::2] for name in FIELDS])

    @property
    def is_canvas(self) -> Tensor:
        return self.canvas > NOTHING


def rule(batch: Batch, window: int | None) -> Sees:
    """Whether a query row sees a key row, for indices that broadcast; a FlexAttention mask.

    It is evaluated for every pair, so it is brought to three comparisons of small numbers: each
    row has a place, clean rows in the order of their texts, canvas rows the negative number of
    their canvas; each row sees a range of places, and one more, its own canvas.
    """
    is_canvas, apart = batch.is_canvas, batch.token.shape[1]
    base = (batch.example + 1) * apart
    own_canvas = -1 - base - batch.canvas
    place = torch.where(is_canvas, own_canvas, base + batch.position).int()
    own = torch.where(is_canvas, own_canvas, place.new_full((), NOBODY)).int()
    end = (base + batch.start).int()
    # How far back: all of the text, or the window; canvas rows do not count themselves.
    reach = batch.start if window is None else batch.start.clamp(max=window - is_canvas.long())
    begin = (base + batch.start - reach).int()

    def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        key_place = place[b, key]
        is_before = (key_place >= begin[b, query]) & (key_place < end[b, query])
        return is_before | (key_place == own[b, query])

    return sees


class PackedContext:
    """A context over packed rows, laid end to end. Attention is dense or by FlexAttention."""

    def __init__(self, config: ModelConfig, batch: Batch, *, is_flex: bool) -> None:
        self.kinds = config.layer_types
        self.sequences, self.rows = batch.token.shape
        self.positions_T = batch.position.flatten()
        shapes = {kind: config.attention(self.kinds.index(kind)) for kind in set(self.kinds)}
        # Outside the compiled pass, which would compute sines anew in every layer.
        self.turns = turns_by_kind(config, self.positions_T)
        make = flex_mask if is_flex else dense_mask
        self.masks: dict[str, Any] = {k: make(batch, s.window) for k, s in shapes.items()}

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        shape = (self.sequences, self.rows)
        q, k, v = [x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q_TNH, k_TMH, v_TMH)]
        mask = self.masks[self.kinds[layer]]
        if isinstance(mask, BlockMask):
            out = flex_attention(
                q, k, v, block_mask=mask, scale=1.0, enable_gqa=True, kernel_options=TILES
            )
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(0, 1)


def dense_mask(batch: Batch, window: int | None) -> Tensor:
    """The rule written out, [B, 1, T, T]."""
    b, t = (torch.arange(size, device=batch.token.device) for size in batch.token.shape)
    return rule(batch, window)(b[:, None, None, None], t, t[:, None], t[None, :])


def flex_mask(batch: Batch, window: int | None) -> BlockMask:
    """The rule by blocks of rows, so that blocks nobody sees cost nothing."""
    sequences, rows = batch.token.shape
    device = str(batch.token.device)
    return create_block_mask(
        rule(batch, window), sequences, None, rows, rows, device=device, _compile=True
    )
