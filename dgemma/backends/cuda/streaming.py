"""Experts in host memory, copied to the device while earlier layers are computed.

A pass reads such layers in order, whatever its routing. Two staging buffers alternate: the copy of
a layer starts when the layer two before it has been computed. A pass of few tokens needs few
experts, which kernels read from pinned host memory in place. Works for any packed weight format
whose module stores weights in buffers.
"""

from copy import copy
from itertools import pairwise
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn

ALIGNMENT = 256  # bytes, per tensor in a staging buffer
NUM_SLOTS = 2
MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class Staging:
    """The staging buffers of a model, each as large as the largest streamed layer."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_bytes = device, 0
        self._slots: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, num_bytes: int) -> None:
        self.num_bytes = max(self.num_bytes, num_bytes)
        self._slots = []

    def slot(self, index: int) -> Tensor:
        if not self._slots:
            with torch.inference_mode(False):
                self._slots = [
                    torch.zeros(self.num_bytes, dtype=torch.uint8, device=self.device)
                    for _ in range(NUM_SLOTS)
                ]
        return self._slots[index % NUM_SLOTS]

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream of the copies."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream


class StreamedExperts(nn.Module):
    """Experts with weights in host memory; `source` becomes a view of them."""

    def __init__(self, source: nn.Module, staging: Staging) -> None:
        super().__init__()
        buffers = dict(source.named_buffers())
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in buffers.values()]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self._memory = host_memory(sum(sizes), staging.device)
        self._staging = staging
        staging.reserve(sum(sizes))
        host = self._over(source, self._memory)
        for name, tensor in buffers.items():
            host.get_buffer(name).copy_(tensor)
        if staging.device.type == "cuda":
            finalize(self, _unpin, self._memory)
        self._host = (host,)  # in a tuple, so that `Module.to` does not move its buffers

    @property
    def host(self) -> nn.Module:
        """The experts on host memory."""
        return self._host[0]

    @property
    def staging(self) -> Staging:
        return self._staging

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def staged(self, slot: int) -> nn.Module:
        """Return the experts on a staging buffer."""
        return self._over(self.host, self._staging.slot(slot))

    def copy_to(self, slot: int) -> None:
        """Copy the weights to a staging buffer, on the current stream."""
        self._staging.slot(slot)[: self.num_bytes].copy_(self._memory, non_blocking=True)

    def _over(self, source: nn.Module, memory: Tensor) -> nn.Module:
        """Return a module like another one, with buffers that are views of a byte tensor."""
        twin = copy(source)
        twin._buffers = {
            name: memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), start in zip(source.named_buffers(), self._starts, strict=True)
        }
        return twin

    def forward(self, x_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Compute with the reference module, after waiting for a copy."""
        self.copy_to(0)
        out: Tensor = self.staged(0)(x_TD, topk_ids_TK, topk_weights_TK)
        return out


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate host memory, for a GPU pinned and mapped for kernels.

    Torch's pinned memory would be rounded up to a power of two.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(memory.data_ptr(), num_bytes, MAPPED)
        if int(error) != 0:
            raise torch.OutOfMemoryError(
                f"{num_bytes / 1e9:.1f} GB of host memory cannot be pinned: CUDA error {int(error)}"
            )
    return memory


def _unpin(memory: Tensor) -> None:
    torch.cuda.synchronize()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    runtime.cudaHostUnregister(memory.data_ptr())


class ExpertStream:
    """The copies of one pass's streamed layers."""

    def __init__(self, layers: list[StreamedExperts]) -> None:
        self.layers = layers
        self.ready: list[torch.cuda.Event] = []

    @property
    def _is_cuda(self) -> bool:
        return self.layers[0].staging.device.type == "cuda"

    def begin(self) -> None:
        """Start the copies of the first layers."""
        self.ready = []
        if self._is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
        for index in range(min(NUM_SLOTS, len(self.layers))):
            self._copy(index)

    def acquire(self, index: int) -> None:
        """Make the current stream wait for a layer."""
        if self._is_cuda:
            torch.cuda.current_stream().wait_event(self.ready[index])

    def release(self, index: int) -> None:
        """After a layer is computed, start the copy that overwrites its buffer."""
        if index + NUM_SLOTS >= len(self.layers):
            return
        if self._is_cuda:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._copy(index + NUM_SLOTS)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self.layers[0].staging.stream

    def _copy(self, index: int) -> None:
        layer = self.layers[index]
        if not self._is_cuda:
            layer.copy_to(index)
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            layer.copy_to(index)
            event.record()
        self.ready.append(event)


def streamed_layers(num_layers: int, count: int) -> frozenset[int]:
    """Spread streamed layers evenly, so that layers between them hide each copy."""
    if count <= 0:
        return frozenset()
    ends = [round(index * num_layers / count) for index in range(count + 1)]
    return frozenset(end - 1 for _, end in pairwise(ends))
