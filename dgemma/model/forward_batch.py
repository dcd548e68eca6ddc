"""One forward pass over new tokens of several sequences, packed end to end.

A *commit* segment is causal and stays in the cache. A *canvas* segment is bidirectional; it is
written after the sequence's last token, so that keys need no concatenation, and then dropped.

T tokens of a pass, L of one segment, S keys, N query heads, M key heads, H head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.model.attention import KVSegment, attention
from dgemma.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one sequence in a pass."""

    cache: KVCache
    count: int
    commit: bool  # True: causal, stays in the cache; False: a canvas
    images: tuple[tuple[int, int], ...] = ()  # positions [begin, end) of whole pictures


class ForwardBatch:
    """Positions of a pass's tokens, and the keys each of them sees.

    A batch of canvases only can be run repeatedly: nothing in it depends on the step.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.starts = self._reserve()
        device = self.segments[0].cache.device
        self.positions_T = torch.cat(
            [
                torch.arange(start, start + segment.count, device=device)
                for start, segment in zip(self.starts, self.segments, strict=True)
            ]
        )
        self.masks: dict[tuple[int, int | None], Tensor] = {}

    def _reserve(self) -> list[int]:
        """Return each segment's first position; a sequence may commit and denoise in one pass."""
        added: dict[int, int] = {}
        starts = []
        for segment in self.segments:
            before = added.get(id(segment.cache), 0)
            starts.append(segment.cache.length + before)
            added[id(segment.cache)] = before + segment.count
        for segment in self.segments:
            segment.cache.reserve(added[id(segment.cache)])
        return starts

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        """Write the new keys and values, then run attention per segment."""
        if len(self.segments) == 1:
            return self._attend(0, layer, q_TNH, k_TMH, v_TMH)
        counts = [segment.count for segment in self.segments]
        slices = zip(*(torch.split(x, counts) for x in (q_TNH, k_TMH, v_TMH)), strict=True)
        return torch.cat([self._attend(index, layer, *qkv) for index, qkv in enumerate(slices)])

    def _attend(
        self, index: int, layer: int, q_LNH: Tensor, k_LMH: Tensor, v_LMH: Tensor
    ) -> Tensor:
        segment, start = self.segments[index], self.starts[index]
        segment.cache.buffers[layer].write(start, k_LMH, v_LMH)
        return attention(q_LNH, self._visible(index, layer))

    def attend_written(self, layer: int, q_TNH: Tensor) -> Tensor:
        """Run `attend` after a kernel has written the keys and values."""
        queries = torch.split(q_TNH, [segment.count for segment in self.segments])
        return torch.cat(
            [attention(q_LNH, self._visible(i, layer)) for i, q_LNH in enumerate(queries)]
        )

    def has_images(self, layer: int) -> bool:
        """True if tokens of a picture see each other in this layer."""
        windows = ((s, s.cache.config.attention(layer).window) for s in self.segments)
        return any(
            segment.images and _is_bidirectional(segment, window) for segment, window in windows
        )

    def kv_table(self) -> NDArray[np.int64] | None:
        """KV pointers of all segments and layers, [segments, layers, 6]; see `KVCache.kv_table`."""
        pairs = zip(self.segments, self.starts, strict=True)
        tables = [segment.cache.kv_table(start, segment.count) for segment, start in pairs]
        return None if any(table is None for table in tables) else np.stack(tables)  # type: ignore[arg-type]

    def close(self) -> None:
        """Commit the tokens of the commit segments."""
        for segment in self.segments:
            if segment.commit:
                segment.cache.length += segment.count

    def _visible(self, index: int, layer: int) -> list[KVSegment]:
        segment, start = self.segments[index], self.starts[index]
        window = segment.cache.config.attention(layer).window
        first = 0 if window is None else max(0, start - (window - 1))
        if not segment.commit or segment.count == 1:
            return segment.cache.read(layer, first, start + segment.count)
        if window is None:
            new = segment.cache.read(layer, start, start + segment.count)[-1]
            causal = KVSegment(new.k_SMH, new.v_SMH, self._mask(index, start, None))
            return [*segment.cache.read(layer, 0, start), causal]
        mask_LS = self._mask(index, first, window)
        visible = segment.cache.read(layer, first, start + segment.count)
        masks = torch.split(mask_LS, [len(s.k_SMH) for s in visible], dim=1)
        return [KVSegment(s.k_SMH, s.v_SMH, m) for s, m in zip(visible, masks, strict=True)]

    def _mask(self, index: int, first: int, window: int | None) -> Tensor:
        """Causal mask of a segment over keys [first, end of segment), within the window."""
        if (index, window) not in self.masks:
            start, segment = self.starts[index], self.segments[index]
            device = self.positions_T.device
            query_L1 = torch.arange(start, start + segment.count, device=device)[:, None]
            key_1S = torch.arange(first, start + segment.count, device=device)[None]
            mask_LS = key_1S <= query_L1
            if window is not None:
                mask_LS &= query_L1 - key_1S < window
            if segment.images and _is_bidirectional(segment, window):
                mask_LS |= _image_mask(segment, query_L1, key_1S, window)
            self.masks[index, window] = mask_LS
        return self.masks[index, window]


def _is_bidirectional(segment: Segment, window: int | None) -> bool:
    """True if tokens of a picture see each other in such a layer (decision 040)."""
    rule = segment.cache.config.image_attention
    return rule == "all" or (rule == "sliding" and window is not None)


def _image_mask(segment: Segment, query_L1: Tensor, key_1S: Tensor, window: int | None) -> Tensor:
    """Mark pairs of tokens of one picture within the window."""
    mask_LS = torch.zeros(len(query_L1), key_1S.shape[1], dtype=torch.bool, device=key_1S.device)
    for begin, end in segment.images:
        inside_L1 = (query_L1 >= begin) & (query_L1 < end)
        mask_LS |= inside_L1 & (key_1S >= begin) & (key_1S < end)
    if window is not None and segment.cache.config.image_attention == "sliding":
        mask_LS &= (query_L1 - key_1S).abs() < window
    return mask_LS
