"""One forward pass over new tokens of several rows, laid end to end.

A *commit* span is causal and stays; a *denoise* span (the canvas) is bidirectional, written behind
the row's last token so that keys need no joining, and forgotten.

T tokens of a pass, L of them in one span, S keys, N query heads, M key heads, H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.cache.row import KVCache
from dgemma.ops.attention import Segment, attention


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
        if len(self.spans) == 1:
            return self._attend(0, layer, q_TNH, k_TMH, v_TMH)
        counts = [span.count for span in self.spans]
        parts = zip(*(torch.split(x, counts) for x in (q_TNH, k_TMH, v_TMH)), strict=True)
        return torch.cat([self._attend(index, layer, *part) for index, part in enumerate(parts)])

    def _attend(
        self, index: int, layer: int, q_LNH: Tensor, k_LMH: Tensor, v_LMH: Tensor
    ) -> Tensor:
        span, start = self.spans[index], self.starts[index]
        span.cache.buffers[layer].write(start, k_LMH, v_LMH)
        return attention(q_LNH, self._visible(index, layer))

    def places(self) -> list[list[list[int]]] | None:
        """`KVCache.places` of each span; None if there are none. Holds until a row is changed."""
        found = [
            span.cache.places(start, span.count)
            for span, start in zip(self.spans, self.starts, strict=True)
        ]
        known = [rows for rows in found if rows is not None]
        return known if len(known) == len(found) else None

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
