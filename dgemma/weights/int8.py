"""Weights in eight bits: a quarter of the bytes on disk, and the same float32 in memory everywhere.

    weight = int8 * row_scale          one scale for each row, that is, all but the last dimension

Tensors of two or more dimensions are stored as whole numbers from -127 to 127 beside the scales of
their rows: one scale for each output, for each expert and output, for each token. The others stay
as they are. What is multiplied out is the weight, there is no other: scales keep 16 significant
bits, so that each product is exact in float32, alike on every machine, and gives the same bytes
when it is stored again. Knows tensors by name; neither models nor where their files lie.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.errors import CheckpointError
from dgemma.ops.quantized import Quantized
from dgemma.weights.files import ROW_SCALE, StoredTensor, listing
from dgemma.weights.mapped import MappedTensors, Tensors

LARGEST = 127
DROPPED_BITS = 0xFF  # of a scale's 24: the seven of a whole number more still fit a float32


def quantize(weight: Tensor) -> Quantized:
    """The whole numbers nearest to a weight, and the scales that its rows' largest values set."""
    exact = weight.detach().to("cpu", torch.float32)
    scale = exact.abs().amax(-1) / LARGEST
    # Upwards, so that the largest value is not cut off.
    scale = ((scale.view(torch.int32) + DROPPED_BITS) & ~DROPPED_BITS).view(torch.float32)
    scale = torch.where(scale > 0, scale, 1.0)
    whole = (exact / scale[..., None]).round()
    return Quantized(whole.to(torch.int8), scale)


def to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are stored: whole numbers with their scales, vectors in float32."""
    return dict(_stored(tensors))


def open_tensors(stored: Mapping[str, StoredTensor], directory: Path) -> Tensors:
    """The weights of a checkpoint as numbers, whichever way its files hold them."""
    mapped = MappedTensors(stored)
    if not any(tensor.dtype == "I8" for tensor in stored.values()):
        return mapped
    return Int8Tensors(mapped, directory)


class Int8Tensors:
    """Tensors by name, multiplied out when they are asked for; scales are no tensors of their own.

    Refuses, by name, numbers without scales, scales without numbers, and scales that are none.
    """

    def __init__(self, mapped: MappedTensors, directory: Path) -> None:
        self.mapped = mapped
        self.whole = {name for name, tensor in mapped.stored.items() if tensor.dtype == "I8"}
        _check_pairs(self.whole, mapped.stored, directory)
        self.scales = {name: mapped[name + ROW_SCALE] for name in sorted(self.whole)}
        wrong = [
            name + ROW_SCALE
            for name, scale in self.scales.items()
            if not (scale.isfinite() & (scale > 0)).all()
        ]
        if wrong:
            raise CheckpointError(
                f"{directory}: {listing(wrong)} should hold positive numbers, and holds others; "
                "the checkpoint is damaged"
            )
        # As they are read; their bytes are those of the file.
        self.stored: Mapping[str, StoredTensor] = {
            name: replace(tensor, dtype="F32") if name in self.whole else tensor
            for name, tensor in mapped.stored.items()
            if not name.endswith(ROW_SCALE)
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.mapped[name]
        return tensor * self.scales[name][..., None] if name in self.whole else tensor


def _stored(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            yield name, tensor.to(torch.float32)
            continue
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} holds NaN or infinity; it cannot be stored in 8 bits")
        whole, scale = quantize(tensor)
        yield name, whole
        yield name + ROW_SCALE, scale


def _check_pairs(whole: set[str], stored: Mapping[str, StoredTensor], directory: Path) -> None:
    scales = {name for name in stored if name.endswith(ROW_SCALE)}
    paired = [name for name in sorted(whole) if name + ROW_SCALE in scales]
    findings = {
        "8-bit tensors should have two dimensions or more, but not so": [
            f"{name} ({list(stored[name].shape)})"
            for name in sorted(whole)
            if len(stored[name].shape) < 2
        ],
        "it lacks": sorted({name + ROW_SCALE for name in whole} - scales),
        "there is no 8-bit tensor for": sorted(scales - {name + ROW_SCALE for name in whole}),
        "scales should be F32, one for each row, but not so": [
            f"{scale} ({stored[scale].dtype} {list(stored[scale].shape)}, not F32 {rows})"
            for name in paired
            for scale, rows in [(name + ROW_SCALE, list(stored[name].shape[:-1]))]
            if stored[scale].dtype != "F32" or list(stored[scale].shape) != rows
        ],
    }
    problems = [f"{what} {listing(names)}" for what, names in findings.items() if names]
    if problems:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(problems)}")
