"""Who sees whom in a packed pass, and attention under that rule.

Clean rows see the clean rows of their example up to themselves. Canvas rows see the clean rows
before their canvas, and their own canvas. Sliding layers see as far back as the cache reaches: from
a clean row its window, itself included; from every row of a canvas one less than that before the
canvas. This is the rule of inference, so nothing is learned that is not there later.

B packed sequences, T rows in each, N/M query/key heads, H head width, X blocks of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dgemma.config import AttentionShape, LayerType, ModelConfig
from dgemma.model.rope import CosSin, cos_sin, inverse_frequencies, rope_cos_sin
from dgemma.train.rows import FIELDS, NOTHING

Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BLOCK = 128  # rows that FlexAttention skips, or takes without looking, together
NOBODY = -(1 << 31)  # no place: clean rows see no canvas
# Of the forward kernel. Texts and canvases are short and begin anywhere, so that smaller tiles than
# its own waste less: 0.57 against 0.97 ms a layer on an H200 (LOG.md).
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
    weight: Tensor

    @classmethod
    def of(cls, rows: Tensor, device: torch.device | str) -> "Batch":
        """Of rows as `Mixture.batch` makes them."""
        return cls(*rows.to(device, non_blocking=True).long().unbind(0))

    def every_second(self, among: int | None = None) -> "Batch":
        """The sequences that are conditioned on the model's own guess, among the first so many.

        Laid out as what a guess gives in their place, so that the same compiled code serves both.
        """
        return Batch(*[getattr(self, name)[:among:2].contiguous() for name in FIELDS])

    def parted(self, count: int) -> "tuple[Batch, Batch]":
        """The first sequences, and the others."""
        fields = [getattr(self, name) for name in FIELDS]
        return Batch(*[x[:count] for x in fields]), Batch(*[x[count:] for x in fields])

    def beside(self, others: "Batch") -> "Batch":
        """These sequences and those of another batch behind them."""
        return Batch(*[torch.cat([getattr(self, n), getattr(others, n)]) for n in FIELDS])

    @property
    def is_canvas(self) -> Tensor:
        return self.canvas > NOTHING


class Sight(NamedTuple):
    """What each row sees, in numbers that are quickly compared; each [B, T], int32.

    Every row has a place: clean rows in the order of their texts, canvas rows the negative number
    of their canvas. It sees a range of places, and one more, its own canvas.
    """

    place: Tensor
    begin: Tensor
    end: Tensor
    own: Tensor

    @classmethod
    def of(cls, batch: Batch, window: int | None) -> "Sight":
        is_canvas, apart = batch.is_canvas, batch.token.shape[1]
        base = (batch.example + 1) * apart
        own_canvas = -1 - base - batch.canvas
        place = torch.where(is_canvas, own_canvas, base + batch.position).int()
        own = torch.where(is_canvas, own_canvas, place.new_full((), NOBODY)).int()
        # How far back: all of the text, or the window; canvas rows do not count themselves.
        reach = batch.start if window is None else batch.start.clamp(max=window - is_canvas.long())
        begin, end = (base + batch.start - reach).int(), (base + batch.start).int()
        return cls(place, begin, end, own)

    def every_second(self, among: int | None = None) -> "Sight":
        return Sight(*[field[:among:2].contiguous() for field in self])


def seeing(sight: Sight) -> Sees:
    """Whether a query row sees a key row, for indices that broadcast; a FlexAttention mask.

    It is evaluated for every pair, hence three comparisons and no more.
    """
    place, begin, end, own = sight

    def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        key_place = place[b, key]
        is_before = (key_place >= begin[b, query]) & (key_place < end[b, query])
        return is_before | (key_place == own[b, query])

    return sees


def rule(batch: Batch, window: int | None) -> Sees:
    return seeing(Sight.of(batch, window))


class Ready(NamedTuple):
    """What the layers of a pass share, by kind of layer."""

    cos_sin: CosSin
    masks: dict[LayerType, Any]


class PackedContext:
    """A context over packed rows, laid end to end. Attention is dense or by FlexAttention."""

    def __init__(self, config: ModelConfig, batch: Batch, ready: Ready | None = None) -> None:
        self.kinds = config.layer_types
        self.sequences, self.rows = batch.token.shape
        self.positions_T = batch.position.flatten()
        # Outside the compiled pass, which would compute sines anew in every layer.
        self.cos_sin, self.masks = dense(config, batch) if ready is None else ready

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        """`layer`: any of the same kind."""
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


def contexts(
    config: ModelConfig, batch: Batch, *, is_flex: bool, among: int | None = None
) -> tuple[Batch, PackedContext, PackedContext]:
    """Every second sequence, among the first so many, and the contexts of those and of all."""
    half = batch.every_second(among)
    if not is_flex:
        return half, PackedContext(config, half), PackedContext(config, batch)
    own, whole = flex(config, batch, among)
    return half, PackedContext(config, half, own), PackedContext(config, batch, whole)


def _shapes(config: ModelConfig) -> dict[LayerType, AttentionShape]:
    kinds = config.layer_types
    return {kind: config.attention(kinds.index(kind)) for kind in dict.fromkeys(kinds)}


def dense(config: ModelConfig, batch: Batch) -> Ready:
    """The rule written out."""
    masks = {kind: dense_mask(batch, shape.window) for kind, shape in _shapes(config).items()}
    return Ready(rope_cos_sin(config, batch.position.flatten()), masks)


def dense_mask(batch: Batch, window: int | None) -> Tensor:
    """The rule written out, [B, 1, T, T]."""
    b, t = (torch.arange(size, device=batch.token.device) for size in batch.token.shape)
    return rule(batch, window)(b[:, None, None, None], t, t[:, None], t[None, :])


# What `BlockMask` wants: blocks of keys that each block of queries sees in part, those it sees in
# full, and the reverse of both.
BLOCKS = ("kv", "full_kv", "q", "full_q")


class Blocks(NamedTuple):
    """Which blocks of rows see which, for each of `BLOCKS`, int32."""

    counts: Tensor  # [4, B, 1, X]
    numbers: Tensor  # [4, B, 1, X, X]

    @classmethod
    def of(cls, sight: Sight) -> "Blocks":
        sequences, rows = sight.place.shape
        device, missing = sight.place.device, -rows % BLOCK
        b, t = (torch.arange(size, device=device) for size in (sequences, rows))
        mask = seeing(sight)(b[:, None, None, None], t, t[:, None], t[None, :])
        mask = F.pad(mask, (0, missing, 0, missing))
        count = (rows + missing) // BLOCK
        pairs = mask.view(sequences, 1, count, BLOCK, count, BLOCK).sum((3, 5))
        full = pairs == BLOCK * BLOCK
        part = (pairs > 0) & ~full
        return cls(*listed(torch.stack([part, full, part.mT, full.mT])))

    def every_second(self, among: int | None = None) -> "Blocks":
        return Blocks(*[field[:, :among:2].contiguous() for field in self])

    def named(self) -> dict[str, Any]:
        counts = {f"{name}_num_blocks": own for name, own in zip(BLOCKS, self.counts, strict=True)}
        numbers = {f"{name}_indices": own for name, own in zip(BLOCKS, self.numbers, strict=True)}
        return counts | numbers


def listed(is_seen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are seen, and their numbers, the unseen ones behind them.

    Comparing all with all instead of sorting: they are few, and it is one piece of compiled code.
    """
    number = torch.arange(is_seen.shape[-1], device=is_seen.device)
    earlier = number[:, None] < number  # of two blocks, whether the first comes before
    seen = is_seen.long()
    count = seen.sum(-1)
    before = (seen[..., :, None] * earlier).sum(-2)
    rank = torch.where(is_seen, before, count[..., None] + number - before)
    order = ((rank[..., None, :] == number[:, None]) * number).sum(-1)
    return count.int(), order.int()


class Plan(NamedTuple):
    """What one kind of layer needs for a pass over a batch."""

    cos_sin: tuple[Tensor, Tensor]
    sight: Sight
    blocks: Blocks

    def every_second(self, among: int | None = None) -> "Plan":
        sequences = len(self.sight.place)
        cos, sin = (
            x.view(sequences, -1, x.shape[-1])[:among:2].flatten(0, 1) for x in self.cos_sin
        )
        return Plan((cos, sin), self.sight.every_second(among), self.blocks.every_second(among))

    def mask(self) -> BlockMask:
        rows = self.sight.place.shape[1]
        size, sees = (BLOCK, BLOCK), seeing(self.sight)
        return BlockMask((rows, rows), **self.blocks.named(), BLOCK_SIZE=size, mask_mod=sees)


def plans(
    batch: Batch,
    windows: tuple[int | None, ...],
    rates: tuple[Tensor, ...],
    among: int | None = None,
) -> list[tuple[Plan, Plan]]:
    """For each kind of layer what every second sequence needs, and what all of them do."""
    positions_T, found = batch.position.flatten(), []
    for window, rates_P in zip(windows, rates, strict=True):
        sight = Sight.of(batch, window)
        whole = Plan(cos_sin(positions_T, rates_P), sight, Blocks.of(sight))
        found.append((whole.every_second(among), whole))
    return found


@cache
def _compiled_plans() -> Callable[..., list[tuple[Plan, Plan]]]:
    return torch.compile(plans, dynamic=False)


def flex(config: ModelConfig, batch: Batch, among: int | None = None) -> tuple[Ready, Ready]:
    """The rule by blocks of rows, so that blocks nobody sees cost nothing; see `contexts`.

    In one piece of compiled code for both passes and all kinds of layers: a hundred small steps,
    each begun by the host, would keep a GPU waiting.
    """
    shapes, device = _shapes(config), batch.token.device
    make = _compiled_plans() if device.type == "cuda" else plans
    windows = tuple(shape.window for shape in shapes.values())
    rates = tuple(inverse_frequencies(shape, device) for shape in shapes.values())
    pairs = dict(zip(shapes, make(batch, windows, rates, among), strict=True))
    own, whole = (
        Ready(
            {k: p[i].cos_sin for k, p in pairs.items()}, {k: p[i].mask() for k, p in pairs.items()}
        )
        for i in (0, 1)
    )
    return own, whole
