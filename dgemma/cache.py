"""Keys and values of what has been committed, one `KVCache` per row, in buffers allocated ahead.

A pass lays the new tokens of several rows end to end. A *commit* span is causal and stays; a
*denoise* span (the canvas) is bidirectional, written behind the row's last token so that keys need
no joining, and forgotten. Full layers keep every key; sliding layers keep the window, move it to
the front of their buffer when they reach its end, and so do not grow with the context.

    row:      0 ........ origin ............... length ...... length + canvas
              shared prefix | committed here     | scratch of a denoise span

T tokens of a pass, L of them in one span, S keys, M key heads, H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.errors import UsageError
from dgemma.ops.attention import Segment, attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a cache is built for."""

    tokens: int  # committed tokens and one canvas; full layers grow past it by doubling
    span: int = 512  # the most tokens one pass brings: a prefill chunk, or commit plus canvas
    slack: int = 256  # how far back a truncation may go once the window has moved


class Buffer:
    """Keys and values of one layer; slot 0 holds position `base`."""

    def __init__(self, k_SMH: Tensor, v_SMH: Tensor, base: int) -> None:
        self.k_SMH, self.v_SMH, self.base = k_SMH, v_SMH, base

    @property
    def slots(self) -> int:
        return self.k_SMH.shape[0]

    def write(self, position: int, k_LMH: Tensor, v_LMH: Tensor) -> None:
        first = position - self.base
        self.k_SMH[first : first + len(k_LMH)].copy_(k_LMH)
        self.v_SMH[first : first + len(v_LMH)].copy_(v_LMH)

    def read(self, start: int, stop: int) -> Segment:
        slots = slice(start - self.base, stop - self.base)
        return Segment(self.k_SMH[slots], self.v_SMH[slots])

    def slide(self, start: int, stop: int) -> None:
        """Move positions [start, stop) to the front."""
        kept = self.read(start, stop)
        self.k_SMH[: stop - start] = kept.k_SMH.clone()
        self.v_SMH[: stop - start] = kept.v_SMH.clone()
        self.base = start

    def enlarge(self, slots: int) -> None:
        k_SMH = self.k_SMH.new_empty(slots, *self.k_SMH.shape[1:])
        v_SMH = torch.empty_like(k_SMH)
        k_SMH[: self.slots], v_SMH[: self.slots] = self.k_SMH, self.v_SMH
        self.k_SMH, self.v_SMH = k_SMH, v_SMH


class KVCache:
    """What one row has committed. Passes write to it; nothing else does."""

    def __init__(
        self,
        config: ModelConfig,
        room: Room,
        dtype: torch.dtype,
        device: torch.device,
        past: "KVCache | None" = None,
    ) -> None:
        self.config, self.room, self.dtype, self.device = config, room, dtype, device
        self.past = past  # a prefix shared with other rows; it no longer changes
        self.origin: int = 0 if past is None else past.length
        self.length: int = self.origin
        self.is_shared = False
        self.buffers = [self._buffer(layer) for layer in range(config.num_hidden_layers)]

    def _buffer(self, layer: int) -> Buffer:
        shape = self.config.attention(layer)
        slots = max(self.room.tokens - self.origin, 1)
        if shape.window is not None:
            slots = min(slots, shape.window - 1 + self.room.slack + self.room.span)
        k_SMH, v_SMH = (
            torch.empty(
                slots, shape.num_kv_heads, shape.head_dim, dtype=self.dtype, device=self.device
            )
            for _ in range(2)
        )
        return Buffer(k_SMH, v_SMH, self.origin)

    @property
    def num_bytes(self) -> int:
        """Memory of this row's own buffers, a shared prefix not counted."""
        return sum(2 * b.k_SMH.numel() * b.k_SMH.element_size() for b in self.buffers)

    def branch(self, tokens: int) -> "KVCache":
        """A new row that continues from here. The prefix is shared, so this row stays as it is."""
        self.is_shared = True
        room = Room(tokens=self.length + tokens, span=self.room.span, slack=self.room.slack)
        return KVCache(self.config, room, self.dtype, self.device, past=self)

    def reserve(self, count: int) -> None:
        """Make place for `count` tokens behind the last; the only call that moves memory."""
        if self.is_shared:
            raise UsageError("this row's keys are shared by branches; append to a branch instead")
        for layer, buffer in enumerate(self.buffers):
            if self.length + count - buffer.base <= buffer.slots:
                continue
            window = self.config.attention(layer).window
            if window is not None:
                start = max(buffer.base, self.length - (window - 1) - self.room.slack)
                buffer.slide(start, max(start, self.length))
            needed = self.length + count - buffer.base
            if needed > buffer.slots:
                buffer.enlarge(needed if window is not None else max(needed, 2 * buffer.slots))

    def can_truncate(self, length: int) -> bool:
        """Whether the sliding windows before `length` are still here."""
        if length > self.length:
            return False
        if length < self.origin:
            return self.past is not None and self.past.can_truncate(length)
        return all(
            buffer.base <= max(self.origin, length - (window - 1))
            for layer, buffer in enumerate(self.buffers)
            if (window := self.config.attention(layer).window) is not None
        )

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not self.can_truncate(length):
            raise UsageError(
                f"cannot cut a row of {self.length} tokens back to {length}: its sliding window "
                "has moved on; encode the tokens again"
            )
        if length < self.origin:
            self.origin = length
            for buffer in self.buffers:
                buffer.base = length
        self.length = length

    def read(self, layer: int, start: int, stop: int) -> list[Segment]:
        """Keys and values of positions [start, stop), wherever they lie."""
        segments = []
        if self.past is not None and start < self.origin:
            segments += self.past.read(layer, start, min(stop, self.origin))
        if stop > self.origin:
            segments.append(self.buffers[layer].read(max(start, self.origin), stop))
        return segments


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one row in a pass."""

    cache: KVCache
    count: int
    commit: bool  # True: causal, and kept; False: a canvas


class Pass:
    """Where the tokens of one forward pass stand and what each of them sees.

    A pass over canvases alone may be run again and again: nothing in it depends on the step.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.starts = self._reserve()
        device = self.spans[0].cache.device
        self.positions_T = torch.cat(
            [
                torch.arange(start, start + span.count, device=device)
                for start, span in zip(self.starts, self.spans, strict=True)
            ]
        )
        self.masks: dict[tuple[int, int | None], Tensor] = {}

    def _reserve(self) -> list[int]:
        """First position of each span; a row may commit a block and denoise the next at once."""
        brought: dict[int, int] = {}
        starts = []
        for span in self.spans:
            so_far = brought.get(id(span.cache), 0)
            starts.append(span.cache.length + so_far)
            brought[id(span.cache)] = so_far + span.count
        for span in self.spans:
            span.cache.reserve(brought[id(span.cache)])
        return starts

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        """Store the new keys and values, and let each query see what its span allows."""
        counts = [span.count for span in self.spans]
        outs = []
        for index, (q_LNH, k_LMH, v_LMH) in enumerate(
            zip(*(torch.split(x, counts) for x in (q_TNH, k_TMH, v_TMH)), strict=True)
        ):
            span, start = self.spans[index], self.starts[index]
            span.cache.buffers[layer].write(start, k_LMH, v_LMH)
            outs.append(attention(q_LNH, self._visible(index, layer)))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def close(self) -> None:
        """Keep what the commit spans wrote."""
        for span in self.spans:
            if span.commit:
                span.cache.length += span.count

    def _visible(self, index: int, layer: int) -> list[Segment]:
        span, start = self.spans[index], self.starts[index]
        window = span.cache.config.attention(layer).window
        first = 0 if window is None else max(0, start - (window - 1))
        if not span.commit or span.count == 1:
            return span.cache.read(layer, first, start + span.count)
        if window is None:
            own = span.cache.read(layer, start, start + span.count)[-1]
            causal = Segment(own.k_SMH, own.v_SMH, self._mask(index, start, None))
            return [*span.cache.read(layer, 0, start), causal]
        mask_LS = self._mask(index, first, window)
        segments = span.cache.read(layer, first, start + span.count)
        masks = torch.split(mask_LS, [len(s.k_SMH) for s in segments], dim=1)
        return [Segment(s.k_SMH, s.v_SMH, m) for s, m in zip(segments, masks, strict=True)]

    def _mask(self, index: int, first: int, window: int | None) -> Tensor:
        """Causal mask of a span against keys [first, its end): itself and `window - 1` before."""
        if (index, window) not in self.masks:
            start, count = self.starts[index], self.spans[index].count
            device = self.positions_T.device
            query_L1 = torch.arange(start, start + count, device=device)[:, None]
            key_1S = torch.arange(first, start + count, device=device)[None]
            mask_LS = key_1S <= query_L1
            if window is not None:
                mask_LS &= query_L1 - key_1S < window
            self.masks[index, window] = mask_LS
        return self.masks[index, window]
