"""KV cache of one sequence, in buffers allocated ahead.

Full layers keep every key; sliding layers keep their window, move it to the front of the buffer
when they reach its end, and so do not grow with the context.

A sequence can be truncated as far as its windows reach back. The windows before a *checkpoint* are
saved when the buffers move on, so that the sequence can later be truncated to the checkpoint, or to
a little before it.

    sequence: 0 ........ prefix_length ......... length ...... length + canvas
              shared prefix | committed here     | scratch of a canvas segment

L new tokens, S keys, M key heads, H head width, X layers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.config import SLIDING, ModelConfig
from dgemma.errors import UsageError
from dgemma.model.attention import KVSegment

MAX_CHECKPOINTS = (
    2  # checkpoints per sequence; each may cost a copy of the sliding windows and their slack
)
NO_WINDOW = 1 << 40
SEGMENT = 512  # tokens of a prompt in one pass, by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The sizes a cache is allocated for."""

    tokens: int  # committed tokens and one canvas; full layers double beyond it
    segment: int = SEGMENT  # most tokens of a pass: a prefill chunk, or commit plus canvas
    slack: int = 256  # most tokens to truncate, from the end or from a checkpoint


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

    def read(self, start: int, stop: int) -> KVSegment:
        slots = slice(start - self.base, stop - self.base)
        return KVSegment(self.k_SMH[slots], self.v_SMH[slots])

    def slide(self, start: int, stop: int) -> None:
        """Move positions [start, stop) to the front."""
        window = self.read(start, stop)
        # Clone both before writing: if memory runs out, the buffer is unchanged.
        k_SMH, v_SMH = window.k_SMH.clone(), window.v_SMH.clone()
        self.k_SMH[: stop - start], self.v_SMH[: stop - start] = k_SMH, v_SMH
        self.base = start

    @torch.inference_mode(False)
    def resize(self, slots: int) -> None:
        """Reallocate as ordinary tensors: passes inside and outside of inference mode write to
        them.
        """
        common, shape = min(slots, self.slots), (slots, *self.k_SMH.shape[1:])
        k_SMH, v_SMH = self.k_SMH.new_empty(shape), self.v_SMH.new_empty(shape)
        k_SMH[:common], v_SMH[:common] = self.k_SMH[:common], self.v_SMH[:common]
        self.k_SMH, self.v_SMH = k_SMH, v_SMH

    def replace(self, length: int, segments: list[KVSegment]) -> None:
        """Hold exactly the given keys and values, which end before `length`."""
        count = sum(len(segment.k_SMH) for segment in segments)
        if count > self.slots:
            self.resize(count)
        self.base = position = length - count
        for segment in segments:
            self.write(position, segment.k_SMH, segment.v_SMH)
            position += len(segment.k_SMH)


@dataclass(frozen=True, slots=True)
class BufferPointers:
    """Addresses of all layers' buffers, valid until the cache reallocates."""

    num_moves: int
    k_X: NDArray[np.int64]
    v_X: NDArray[np.int64]
    base_X: NDArray[np.int64]
    stride_X: NDArray[np.int64]  # bytes per slot


class KVCache:
    """Committed keys and values of a sequence. Passes write to it; its owner may truncate it."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        dtype: torch.dtype,
        device: torch.device,
        shared_prefix: "KVCache | None" = None,
    ) -> None:
        self.config, self.capacity, self.dtype, self.device = config, capacity, dtype, device
        self.shared_prefix = shared_prefix  # shared with other sequences, immutable
        self.prefix_length: int = 0 if shared_prefix is None else shared_prefix.length
        self.length: int = self.prefix_length
        self.is_shared = False
        self.is_consistent = True  # False while memory is moved; an interrupt leaves it so
        self.num_moves = 0  # changes with buffer addresses and bases
        types = enumerate(config.layer_types)
        self.windows = {layer: config.sliding_window for layer, kind in types if kind == SLIDING}
        # Checkpointed lengths, with saved windows of layers that have since slid past them.
        self.checkpoints: dict[int, dict[int, Buffer]] = {}
        self.buffers = [self._allocate(layer) for layer in range(config.num_hidden_layers)]
        self._pointers: BufferPointers | None = None
        layers = range(config.num_hidden_layers)
        self._window_X = np.array([self.windows.get(i, NO_WINDOW) for i in layers], dtype=np.int64)

    @torch.inference_mode(False)
    def _allocate(self, layer: int) -> Buffer:
        shape = self.config.attention(layer)
        size = (self._num_slots(layer), shape.num_kv_heads, shape.head_dim)
        k_SMH, v_SMH = (torch.empty(size, dtype=self.dtype, device=self.device) for _ in range(2))
        return Buffer(k_SMH, v_SMH, self.prefix_length)

    def _num_slots(self, layer: int) -> int:
        """Slots required by the capacity."""
        slots = max(self.capacity.tokens - self.prefix_length, 1)
        window = self.windows.get(layer)
        if window is not None:
            slots = min(slots, window - 1 + self.capacity.slack + self.capacity.segment)
        return slots

    @property
    def num_bytes(self) -> int:
        """Memory of this sequence's buffers and checkpoints, without a shared prefix."""
        saved = [buffer for windows in self.checkpoints.values() for buffer in windows.values()]
        return sum(2 * b.k_SMH.numel() * b.k_SMH.element_size() for b in (*self.buffers, *saved))

    def fork(self, tokens: int) -> "KVCache":
        """Start a new sequence that shares this one as its prefix; this one becomes immutable."""
        self.is_shared = True
        sizes = self.capacity
        capacity = Capacity(tokens=self.length + tokens, segment=sizes.segment, slack=sizes.slack)
        return KVCache(self.config, capacity, self.dtype, self.device, shared_prefix=self)

    def clone(self) -> "KVCache":
        """Copy a fork: a second sequence over the same shared prefix with the same tokens."""
        assert self.shared_prefix is not None, "only a fork has a prefix to share"
        twin = KVCache(
            self.config, self.capacity, self.dtype, self.device, shared_prefix=self.shared_prefix
        )
        for layer, buffer in enumerate(self.buffers):
            twin.buffers[layer].replace(self.length, [buffer.read(buffer.base, self.length)])
        twin.length = self.length
        return twin

    def has_slots(self, count: int) -> bool:
        """True if `reserve` would not reallocate."""
        end = self.length + count
        return all(end - buffer.base <= buffer.slots for buffer in self.buffers)

    def reserve(self, count: int) -> None:
        """Make slots for `count` more tokens. The only place where a pass moves memory."""
        self._require_unshared()
        if self.has_slots(count):
            return
        self.is_consistent = False
        for layer, buffer in enumerate(self.buffers):
            if self.length + count - buffer.base <= buffer.slots:
                continue
            self.num_moves += 1
            window = self.windows.get(layer)
            if window is not None:
                start = max(buffer.base, self.length - (window - 1) - self.capacity.slack)
                if start > buffer.base:
                    self._save_window(layer, start)
                    buffer.slide(start, self.length)
            needed = self.length + count - buffer.base
            if needed > buffer.slots:
                slots = self._num_slots(layer)
                if window is None and needed > slots:
                    slots = 2 * buffer.slots
                buffer.resize(max(needed, slots))
        self.is_consistent = True

    def trim(self) -> None:
        """Free unused slots until the next pass reserves them."""
        self.num_moves += 1
        for buffer in self.buffers:
            buffer.resize(self.length - buffer.base)

    def checkpoint(self) -> None:
        """Keep this length truncatable. Only the newest checkpoints are stored."""
        if self.length:  # truncating to zero needs no window
            self.checkpoints.setdefault(self.length, {})
        if len(self.checkpoints) > MAX_CHECKPOINTS:
            del self.checkpoints[min(self.checkpoints)]

    def max_reusable(self, length: int) -> int:
        """Return the greatest length up to `length` to which the sequence can be truncated."""
        length = min(length, self.length)
        is_available = (
            self._is_buffered(layer, length) or self._saved_window(layer, length)
            for layer in self.windows
        )
        if all(is_available):
            return length
        shorter = [saved for saved in self.checkpoints if saved <= length]
        if self.shared_prefix is not None:
            shorter.append(self.shared_prefix.max_reusable(min(length, self.prefix_length)))
        return max(shorter, default=0)

    def can_truncate(self, length: int) -> bool:
        """True if the sliding windows before `length` are buffered or saved."""
        return 0 <= length <= self.length and self.max_reusable(length) == length

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on."""
        self._require_unshared()
        self._require_truncatable(length)
        self.num_moves += 1
        for layer in self.windows:
            if not self._is_buffered(layer, length):
                tail = self._tail(layer, length, self.capacity.slack)
                self.buffers[layer].replace(length, tail)
        self.length, self.prefix_length = length, min(self.prefix_length, length)
        for buffer in self.buffers:
            buffer.base = min(buffer.base, length)
        saved = self.checkpoints.items()
        self.checkpoints = {at: windows for at, windows in saved if at <= length}

    def end_sharing(self) -> None:
        """Allow appending without a copy: no fork reads it any more."""
        self.is_shared = False

    def set_capacity(self, capacity: Capacity) -> None:
        """Set the sizes for which buffers are allocated from now on."""
        self.capacity = capacity

    def copy(self, length: int, capacity: Capacity | None = None) -> "KVCache":
        """Copy the first `length` tokens into an independent sequence.

        Includes a shared prefix and the checkpoints.
        """
        self._require_truncatable(length)
        twin = KVCache(self.config, capacity or self.capacity, self.dtype, self.device)
        twin.length = length
        for layer, buffer in enumerate(twin.buffers):
            buffer.replace(length, self._tail(layer, length, twin.capacity.slack))
        for saved in self._checkpoint_lengths(length)[-MAX_CHECKPOINTS:]:
            gone = [i for i in self.windows if twin._needs(i, saved, twin.buffers[i].base)]
            twin.checkpoints[saved] = {layer: self._window_before(layer, saved) for layer in gone}
        return twin

    def read(self, layer: int, start: int, stop: int) -> list[KVSegment]:
        """Return keys and values of positions [start, stop) in one or more buffers."""
        segments, buffer = [], self.buffers[layer]
        if self.shared_prefix is not None and start < buffer.base:
            segments += self.shared_prefix.read(layer, start, min(stop, buffer.base))
        if stop > buffer.base:
            segments.append(buffer.read(max(start, buffer.base), stop))
        return segments

    def kv_table(self, start: int, count: int) -> NDArray[np.int64] | None:
        """Addresses and counts of keys visible to `count` tokens from `start` on, [X, 6].

        Per layer: k pointer, v pointer and number of keys of the shared prefix, then of the
        sequence's buffer, as read by the attention kernel. None if the shared prefix has a shared
        prefix itself.
        """
        own, stop = self._buffer_pointers(), start + count
        first_X = np.maximum(0, start - self._window_X + 1)
        begin_X = np.maximum(first_X, own.base_X)
        offset_X = (begin_X - own.base_X) * own.stride_X
        table_X6 = np.zeros((len(first_X), 6), dtype=np.int64)
        table_X6[:, 3], table_X6[:, 4] = own.k_X + offset_X, own.v_X + offset_X
        table_X6[:, 5] = stop - begin_X
        in_prefix_X = first_X < own.base_X
        if self.shared_prefix is not None and in_prefix_X.any():
            prefix = self.shared_prefix._buffer_pointers()
            if (in_prefix_X & (first_X < prefix.base_X)).any():
                return None
            offset_X = (first_X - prefix.base_X) * prefix.stride_X
            columns = (prefix.k_X + offset_X, prefix.v_X + offset_X, own.base_X - first_X)
            for column, values_X in enumerate(columns):
                table_X6[:, column] = np.where(in_prefix_X, values_X, 0)
        return table_X6

    def _buffer_pointers(self) -> BufferPointers:
        if self._pointers is None or self._pointers.num_moves != self.num_moves:
            k, v = ([getattr(b, name) for b in self.buffers] for name in ("k_SMH", "v_SMH"))
            strides = [x.stride(0) * x.element_size() for x in k]
            columns = (
                [x.data_ptr() for x in k],
                [x.data_ptr() for x in v],
                [buffer.base for buffer in self.buffers],
                strides,
            )
            arrays = (np.array(column, dtype=np.int64) for column in columns)
            self._pointers = BufferPointers(self.num_moves, *arrays)
        return self._pointers

    def _checkpoint_lengths(self, length: int) -> list[int]:
        """Return checkpoints up to `length`, of this sequence and its shared prefix."""
        prefix = self.shared_prefix
        older = (
            [] if prefix is None else prefix._checkpoint_lengths(min(length, self.prefix_length))
        )
        return sorted({*older, *(saved for saved in self.checkpoints if saved <= length)})

    def _save_window(self, layer: int, start: int) -> None:
        """Save the keys before `start` that checkpoints need; they are about to be dropped."""
        for length, windows in self.checkpoints.items():
            if layer not in windows and self._needs(layer, length, start):
                windows[layer] = self._window_before(layer, length)

    def _needs(self, layer: int, length: int, start: int) -> bool:
        """True if a checkpoint at `length` needs keys before `start`."""
        return max(0, self._window_start(layer, length) - self.capacity.slack) < start

    def _window_start(self, layer: int, length: int) -> int:
        window = self.windows.get(layer)
        return 0 if window is None else max(0, length - (window - 1))

    def _is_buffered(self, layer: int, length: int) -> bool:
        """True if the layer's window before `length` is in this buffer or the prefix's."""
        return self._first_buffered(layer) <= self._window_start(layer, length)

    def _first_buffered(self, layer: int) -> int:
        """Return the first position from which all keys of the layer are buffered."""
        base = self.buffers[layer].base
        if self.shared_prefix is None or base > self.prefix_length:
            return base
        return min(base, self.shared_prefix._first_buffered(layer))

    def _saved_window(self, layer: int, length: int, slack: int = 0) -> list[KVSegment]:
        """Read the layer's window before `length` from a checkpoint; empty if there is none."""
        start = self._window_start(layer, length)
        for saved, windows in self.checkpoints.items():
            if length <= saved and layer in windows and windows[layer].base <= start:
                window = windows[layer]
                return [window.read(max(window.base, start - slack), length)]
        return []

    def _tail(self, layer: int, length: int, slack: int) -> list[KVSegment]:
        """Read the window before a reusable `length`, and up to `slack` earlier keys."""
        if self._is_buffered(layer, length):
            start = self._window_start(layer, length)
            return self.read(layer, max(self._first_buffered(layer), start - slack), length)
        if saved := self._saved_window(layer, length, slack):
            return saved
        return [] if self.shared_prefix is None else self.shared_prefix._tail(layer, length, slack)

    def _window_before(self, layer: int, length: int) -> Buffer:
        """Copy the layer's keys that a checkpoint at `length` needs."""
        tail = self._tail(layer, length, self.capacity.slack)
        k_SMH, v_SMH = torch.cat([x.k_SMH for x in tail]), torch.cat([x.v_SMH for x in tail])
        return Buffer(k_SMH, v_SMH, length - len(k_SMH))

    def _require_truncatable(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise UsageError(f"a sequence of {self.length} tokens cannot be truncated to {length}")
        if not self.can_truncate(length):
            raise UsageError(
                f"cannot truncate a sequence of {self.length} tokens to {length}: its sliding "
                "window has moved on; encode the tokens again"
            )

    def _require_unshared(self) -> None:
        if self.is_shared:
            raise UsageError("this KV cache is shared by forks; change a fork instead")
