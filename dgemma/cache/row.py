"""Keys and values of what one row has committed, in buffers allocated ahead.

Full layers keep every key; sliding layers keep the window, move it to the front of their buffer
when they reach its end, and so do not grow with the context.

A row can be cut back as far as its windows reach. What lies before a *mark* is set aside when the
buffer moves on, so that the row can later be cut back to the mark, or to a little before it.

    row:      0 ........ origin ............... length ...... length + canvas
              shared prefix | committed here     | scratch of a denoise span

L new tokens, S keys, M key heads, H head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dgemma.config import SLIDING, ModelConfig
from dgemma.errors import UsageError
from dgemma.ops.attention import Segment

MAX_MARKS = 2  # of a row; each may cost the memory of its sliding windows and their slack


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a cache is built for."""

    tokens: int  # committed tokens and one canvas; full layers grow past it by doubling
    span: int = 512  # the most tokens one pass brings: a prefill chunk, or commit plus canvas
    slack: int = 256  # how far back a truncation may go, from the end or from a mark


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

    def spot(self, start: int, stop: int) -> list[int]:
        """The same as numbers: addresses of keys and values, and how many there are."""
        stride = self.k_SMH.stride(0) * self.k_SMH.element_size()
        offset = (start - self.base) * stride
        return [self.k_SMH.data_ptr() + offset, self.v_SMH.data_ptr() + offset, stop - start]

    def slide(self, start: int, stop: int) -> None:
        """Move positions [start, stop) to the front."""
        kept = self.read(start, stop)
        # Both before either is written: without memory for them the buffer stays as it was.
        k_SMH, v_SMH = kept.k_SMH.clone(), kept.v_SMH.clone()
        self.k_SMH[: stop - start], self.v_SMH[: stop - start] = k_SMH, v_SMH
        self.base = start

    @torch.inference_mode(False)
    def resize(self, slots: int) -> None:
        """Move to other memory. It is ordinary memory, since passes of both modes write to it."""
        kept, shape = min(slots, self.slots), (slots, *self.k_SMH.shape[1:])
        k_SMH, v_SMH = self.k_SMH.new_empty(shape), self.v_SMH.new_empty(shape)
        k_SMH[:kept], v_SMH[:kept] = self.k_SMH[:kept], self.v_SMH[:kept]
        self.k_SMH, self.v_SMH = k_SMH, v_SMH

    def replace(self, length: int, segments: list[Segment]) -> None:
        """Hold the keys and values before `length`, and nothing else."""
        count = sum(len(segment.k_SMH) for segment in segments)
        if count > self.slots:
            self.resize(count)
        self.base = position = length - count
        for segment in segments:
            self.write(position, segment.k_SMH, segment.v_SMH)
            position += len(segment.k_SMH)


class KVCache:
    """What one row has committed. Passes write to it; its owner may mark it and cut it back."""

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
        self.is_whole = True  # False while memory is moved: an interrupt may leave it torn
        self.moves = 0  # how often it was: as long as that is the same, all keys lie where they lay
        kinds = enumerate(config.layer_types)
        self.windows = {layer: config.sliding_window for layer, kind in kinds if kind == SLIDING}
        # Marked lengths, each with what lay before it in the layers that have moved on.
        self.marks: dict[int, dict[int, Buffer]] = {}
        self.buffers = [self._buffer(layer) for layer in range(config.num_hidden_layers)]

    @torch.inference_mode(False)
    def _buffer(self, layer: int) -> Buffer:
        shape = self.config.attention(layer)
        size = (self._slots(layer), shape.num_kv_heads, shape.head_dim)
        k_SMH, v_SMH = (torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return Buffer(k_SMH, v_SMH, self.origin)

    def _slots(self, layer: int) -> int:
        """What the room asks for."""
        slots = max(self.room.tokens - self.origin, 1)
        window = self.windows.get(layer)
        if window is not None:
            slots = min(slots, window - 1 + self.room.slack + self.room.span)
        return slots

    @property
    def num_bytes(self) -> int:
        """Memory of this row's own buffers and marks, a shared prefix not counted."""
        aside = [buffer for kept in self.marks.values() for buffer in kept.values()]
        return sum(2 * b.k_SMH.numel() * b.k_SMH.element_size() for b in (*self.buffers, *aside))

    def branch(self, tokens: int) -> "KVCache":
        """A new row that continues from here. The prefix is shared, so this row stays as it is."""
        self.is_shared = True
        room = Room(tokens=self.length + tokens, span=self.room.span, slack=self.room.slack)
        return KVCache(self.config, room, self.dtype, self.device, past=self)

    def has_room(self, count: int) -> bool:
        """Whether `reserve` would move nothing."""
        end = self.length + count
        return all(end - buffer.base <= buffer.slots for buffer in self.buffers)

    def fork(self) -> "KVCache":
        """Another row behind the same past that holds what this one has committed so far."""
        assert self.past is not None, "only a branch has a past to share"
        twin = KVCache(self.config, self.room, self.dtype, self.device, past=self.past)
        for layer, buffer in enumerate(self.buffers):
            own = buffer.read(buffer.base, self.length)
            twin.buffers[layer].replace(self.length, [own])
        twin.length = self.length
        return twin

    def reserve(self, count: int) -> None:
        """Make place for `count` tokens behind the last; where a pass moves memory, it is here."""
        self._refuse_if_shared()
        self.is_whole = False
        for layer, buffer in enumerate(self.buffers):
            if self.length + count - buffer.base <= buffer.slots:
                continue
            self.moves += 1
            window = self.windows.get(layer)
            if window is not None:
                start = max(buffer.base, self.length - (window - 1) - self.room.slack)
                if start > buffer.base:
                    self._set_aside(layer, start)
                    buffer.slide(start, self.length)
            needed = self.length + count - buffer.base
            if needed > buffer.slots:
                slots = self._slots(layer)
                if window is None and needed > slots:
                    slots = 2 * buffer.slots
                buffer.resize(max(needed, slots))
        self.is_whole = True

    def trim(self) -> None:
        """Give back the memory behind the last token, until the next pass asks for it."""
        self.moves += 1
        for buffer in self.buffers:
            buffer.resize(self.length - buffer.base)

    def mark(self) -> None:
        """Remember this length, to be able to cut the row back to it; the newest marks stay."""
        if self.length:  # cutting back to nothing needs no window
            self.marks.setdefault(self.length, {})
        if len(self.marks) > MAX_MARKS:
            del self.marks[min(self.marks)]

    def reusable(self, length: int) -> int:
        """The greatest length up to `length` that the row can be cut back to."""
        length = min(length, self.length)
        held = (
            self._is_here(layer, length) or self._aside(layer, length) for layer in self.windows
        )
        if all(held):
            return length
        shorter = [marked for marked in self.marks if marked <= length]
        if self.past is not None:
            shorter.append(self.past.reusable(min(length, self.origin)))
        return max(shorter, default=0)

    def can_truncate(self, length: int) -> bool:
        """Whether the sliding windows before `length` are still here, or set aside."""
        return 0 <= length <= self.length and self.reusable(length) == length

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        self._refuse_if_shared()
        self._refuse_if_gone(length)
        self.moves += 1
        for layer in self.windows:
            if not self._is_here(layer, length):
                self.buffers[layer].replace(length, self._tail(layer, length, self.room.slack))
        self.length, self.origin = length, min(self.origin, length)
        for buffer in self.buffers:
            buffer.base = min(buffer.base, length)
        self.marks = {marked: kept for marked, kept in self.marks.items() if marked <= length}

    def copy(self, length: int, room: Room | None = None) -> "KVCache":
        """A row of its own with the first `length` tokens, in this row's room or another.

        It shares nothing with this row: a past is joined to it, and the marks go along.
        """
        self._refuse_if_gone(length)
        twin = KVCache(self.config, room or self.room, self.dtype, self.device)
        twin.length = length
        for layer, buffer in enumerate(twin.buffers):
            buffer.replace(length, self._tail(layer, length, twin.room.slack))
        for marked in self._marked(length)[-MAX_MARKS:]:
            gone = [i for i in self.windows if twin._needs(i, marked, twin.buffers[i].base)]
            twin.marks[marked] = {layer: self._before(layer, marked) for layer in gone}
        return twin

    def read(self, layer: int, start: int, stop: int) -> list[Segment]:
        """Keys and values of positions [start, stop), wherever they lie."""
        segments, buffer = [], self.buffers[layer]
        if self.past is not None and start < buffer.base:
            segments += self.past.read(layer, start, min(stop, buffer.base))
        if stop > buffer.base:
            segments.append(buffer.read(max(start, buffer.base), stop))
        return segments

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """Where the buffers lie and begin; as long as it is the same, so are all places."""
        return tuple((buffer.k_SMH.data_ptr(), buffer.base) for buffer in self.buffers)

    def places(self, start: int, count: int) -> list[list[int]] | None:
        """Where the keys lie, layer by layer, that `count` tokens from `start` on see.

        As `ops/kernels/attention.py` reads it; None if the past has a past of its own.
        """
        rows = []
        for layer in range(len(self.buffers)):
            spots = self._spots(layer, self._window_start(layer, start), start + count)
            if len(spots) > 6:
                return None
            rows.append(spots if len(spots) == 6 else [0, 0, 0, *spots])
        return rows

    def _spots(self, layer: int, start: int, stop: int) -> list[int]:
        """`read` as numbers, three for each place; quicker than to make tensors of them."""
        found, buffer = [], self.buffers[layer]
        if self.past is not None and start < buffer.base:
            found += self.past._spots(layer, start, min(stop, buffer.base))
        if stop > buffer.base:
            found += buffer.spot(max(start, buffer.base), stop)
        return found

    def _marked(self, length: int) -> list[int]:
        """Marks up to `length`, of this row and its past."""
        older = [] if self.past is None else self.past._marked(min(length, self.origin))
        return sorted({*older, *(marked for marked in self.marks if marked <= length)})

    def _set_aside(self, layer: int, start: int) -> None:
        """Keep what marks need of the keys before `start`, which are about to be forgotten."""
        for length, kept in self.marks.items():
            if layer not in kept and self._needs(layer, length, start):
                kept[layer] = self._before(layer, length)

    def _needs(self, layer: int, length: int, start: int) -> bool:
        """Whether a mark at `length` needs keys from before `start`."""
        return max(0, self._window_start(layer, length) - self.room.slack) < start

    def _window_start(self, layer: int, length: int) -> int:
        window = self.windows.get(layer)
        return 0 if window is None else max(0, length - (window - 1))

    def _is_here(self, layer: int, length: int) -> bool:
        """Whether what the layer sees before `length` lies in a buffer, of this row or its past."""
        return self._first(layer) <= self._window_start(layer, length)

    def _first(self, layer: int) -> int:
        """The position from which on no key of the layer is missing."""
        base = self.buffers[layer].base
        if self.past is None or base > self.origin:
            return base
        return min(base, self.past._first(layer))

    def _aside(self, layer: int, length: int, slack: int = 0) -> list[Segment]:
        """What the layer sees before `length`, out of a mark; nothing if no mark reaches it."""
        start = self._window_start(layer, length)
        for marked, kept in self.marks.items():
            if length <= marked and layer in kept and kept[layer].base <= start:
                return [kept[layer].read(max(kept[layer].base, start - slack), length)]
        return []

    def _tail(self, layer: int, length: int, slack: int) -> list[Segment]:
        """What the layer sees before `length`, a reusable length, and up to `slack` keys more."""
        if self._is_here(layer, length):
            start = self._window_start(layer, length)
            return self.read(layer, max(self._first(layer), start - slack), length)
        if aside := self._aside(layer, length, slack):
            return aside
        return [] if self.past is None else self.past._tail(layer, length, slack)

    def _before(self, layer: int, length: int) -> Buffer:
        """A copy of what a mark at `length` needs of the layer."""
        tail = self._tail(layer, length, self.room.slack)
        k_SMH, v_SMH = torch.cat([x.k_SMH for x in tail]), torch.cat([x.v_SMH for x in tail])
        return Buffer(k_SMH, v_SMH, length - len(k_SMH))

    def _refuse_if_gone(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise UsageError(f"a row of {self.length} tokens cannot be cut back to {length}")
        if not self.can_truncate(length):
            raise UsageError(
                f"cannot cut a row of {self.length} tokens back to {length}: its sliding window "
                "has moved on; encode the tokens again"
            )

    def _refuse_if_shared(self) -> None:
        if self.is_shared:
            raise UsageError("this row's keys are shared by branches; change a branch instead")
