"""The package's integer layout: weights of 8, 6, 5 or 4 bits on disk, the same float32 everywhere.

    8 bits          weight = I8 * row_scale      F32, one per row: all but the last dimension
    4, 5 or 6 bits  weight = value * group_scale F16, one per 32 inputs of a row; the values are
                    stored in bit planes, U8 [bits, ..., inputs / 8]: bit k of eight values, the
                    first lowest, each + 2^(bits - 1)

Tensors of two or more dimensions are quantized and have scales; the others stay float32. Dtype and
shape of a tensor say which encoding it has. Routers, which are small, and rows that are not a
multiple of 32 always have 8 bits. Scales keep 16 and 11 significant bits, so that a dequantized
weight is exact in float32, equal on every machine, and gives the same bytes when it is quantized
again.

A group's largest magnitude takes the sign that has one integer more, so group scales may be
negative; in four bits that reduces the error by a twentieth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dgemma.errors import CheckpointError, UsageError
from dgemma.quant import QTensor, quantize_int8
from dgemma.weights.files import (
    GROUP_SCALE,
    INT8_INDEX,
    ROW_SCALE,
    StoredTensor,
    TensorShape,
    describe,
    listing,
)
from dgemma.weights.safetensors_io import MappedTensors, Tensors

GROUP = 32  # inputs that share a scale
PLANE_BITS = (4, 5, 6)
# Candidate scales of a group clip its largest magnitude to 1 / CLIPS of itself.
CLIPS = tuple(1 + k / 32 for k in range(12))
# The eight bits of a byte as the lowest bits of eight bytes.
BYTES = np.arange(256, dtype=np.uint8)[:, None]
SPREAD = np.unpackbits(BYTES, axis=1, bitorder="little").view(np.uint64)[:, 0]


class GroupQuantized(NamedTuple):
    """Integers, and the scale of each group of them along the last dimension."""

    values: Tensor  # int8 [..., I]
    scale: Tensor  # float16 [..., I / 32]

    def dequantize(self) -> Tensor:
        # int8 * float16 would be float16.
        return (_groups(self.values.float()) * self.scale.float()[..., None]).flatten(-2)


def max_magnitude(bits: int) -> float:
    """Return the largest magnitude that so many bits can store."""
    return float(torch.finfo(torch.float16).max * 2 ** (bits - 1))


def quantize_groups(weight: Tensor, bits: int) -> GroupQuantized:
    """Quantize per group with the scale of least squared error, of the candidates in CLIPS.

    Idempotent: the largest magnitude of a dequantized group is the lowest integer.
    """
    exact = _groups(weight.detach().to("cpu", torch.float32))
    lowest = -(2 ** (bits - 1))
    low, high = exact.aminmax(dim=-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    best, best_scale = torch.zeros_like(exact), torch.ones_like(largest)
    best_error = torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        scale = (largest / (lowest * clip)).half().float()
        scale = torch.where(scale == 0, 1.0, scale)
        values = (exact / scale).round_().clamp_(lowest, -lowest - 1)
        error = (values * scale - exact).square_().sum(-1, keepdim=True)
        is_better = error < best_error
        best = torch.where(is_better, values, best)
        best_scale = torch.where(is_better, scale, best_scale)
        best_error = torch.where(is_better, error, best_error)
    return GroupQuantized(best.to(torch.int8).flatten(-2), best_scale.half().squeeze(-1))


def pack_planes(values: Tensor, bits: int) -> Tensor:
    """Pack integers into bit planes, [bits, ..., I / 8]; the last byte is filled with zeros."""
    unsigned = values.numpy().astype(np.int16) + 2 ** (bits - 1)
    planes = np.stack([(unsigned >> k) & 1 for k in range(bits)])
    return torch.from_numpy(np.packbits(planes.astype(np.bool_), axis=-1, bitorder="little"))


def unpack_planes(planes: Tensor, count: int) -> Tensor:
    """Return the first `count` integers of each row, int8 [..., I]."""
    # Eight integers at a time, each in a byte of a 64-bit word.
    words = np.zeros(planes.shape[1:], np.uint64)
    for k, plane in enumerate(planes.numpy()):
        words |= np.take(SPREAD << np.uint64(k), plane)
    unsigned = words.view(np.uint8)
    unsigned -= np.uint8(2 ** (len(planes) - 1))  # negative values wrap, as in int8
    return torch.from_numpy(unsigned.view(np.int8))[..., :count]


def _groups(weight: Tensor) -> Tensor:
    return weight.reshape(*weight.shape[:-1], -1, GROUP)


# --- files


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The scales of one value dtype, and wording for refusals."""

    values: str
    shapes: str
    scale_suffix: str
    scale_dtype: str
    scale_count: str
    scale_range: str


ENCODINGS = {
    "I8": Encoding(
        values="8-bit tensor",
        shapes="8-bit tensors should have two dimensions or more",
        scale_suffix=ROW_SCALE,
        scale_dtype="F32",
        scale_count="one for each row",
        scale_range="positive numbers",
    ),
    "U8": Encoding(
        values="packed tensor",
        shapes="packed tensors should have 4, 5 or 6 planes of two dimensions or more, whose rows "
        f"are multiples of {GROUP // 8} bytes",
        scale_suffix=GROUP_SCALE,
        scale_dtype="F16",
        scale_count=f"one for each {GROUP} numbers of a row",
        scale_range="numbers other than zero",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Bits of the stored matrices: experts, and all others."""

    experts: int = 8
    rest: int = 8

    def __post_init__(self) -> None:
        for bits in (self.experts, self.rest):
            if bits not in (*PLANE_BITS, 8):
                raise UsageError(f"weights can be stored in 4, 5, 6 or 8 bits, not in {bits}")

    def of(self, name: str, shape: TensorShape) -> int:
        if ".router." in name or shape[-1] % GROUP:
            return 8
        return self.experts if ".experts." in name else self.rest

    def __str__(self) -> str:
        return f"experts in {self.experts} bits, the rest in {self.rest}"


INT8 = Bits()


def to_int_layout(tensors: Mapping[str, Tensor], bits: Bits = INT8) -> dict[str, Tensor]:
    """Quantize tensors for storage: integers with scales, vectors in float32."""
    return dict(_quantized(tensors, bits))


def open_tensors(stored: Mapping[str, StoredTensor], directory: Path) -> Tensors:
    """Open the weights of a checkpoint, plain or in the integer layout."""
    mapped = MappedTensors(stored)
    return IntTensors(mapped, directory) if (directory / INT8_INDEX).is_file() else mapped


class IntTensors:
    """Tensors by name, dequantized on access; scales are not listed as tensors.

    Refuses, by name, values without scales, scales without values, and invalid scales.
    """

    def __init__(self, mapped: MappedTensors, directory: Path) -> None:
        self.mapped = mapped
        _check_pairs(mapped.stored, directory)
        self.scales = {
            name: mapped[name + ENCODINGS[tensor.dtype].scale_suffix]
            for name, tensor in sorted(mapped.stored.items())
            if tensor.dtype in ENCODINGS
        }
        _check_scales(self.scales, mapped.stored, directory)
        # Dtype and shape as they are read; byte ranges as stored.
        self.stored: Mapping[str, StoredTensor] = {
            name: replace(t, dtype="F32", shape=_weight_shape(t)) if name in self.scales else t
            for name, t in mapped.stored.items()
            if not name.endswith((ROW_SCALE, GROUP_SCALE))
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.mapped[name]
        if name not in self.scales:
            return tensor
        if tensor.dtype == torch.int8:
            return QTensor(tensor, self.scales[name]).dequantize()
        values = unpack_planes(tensor, self.stored[name].shape[-1])
        return GroupQuantized(values, self.scales[name]).dequantize()


def _quantized(tensors: Mapping[str, Tensor], all_bits: Bits) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            yield name, tensor.to(torch.float32)
            continue
        bits = all_bits.of(name, tensor.shape)
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name} holds NaN or infinity; it cannot be stored in {bits} bits"
            )
        if bits == 8:
            values, scale = quantize_int8(tensor)
            yield name, values
            yield name + ROW_SCALE, scale
            continue
        if tensor.abs().max() > max_magnitude(bits):
            raise CheckpointError(
                f"{name} holds values beyond {max_magnitude(bits):g}, the largest in {bits} bits; "
                "store it in 8"
            )
        values, scale = quantize_groups(tensor, bits)
        yield name, pack_planes(values, bits)
        yield name + GROUP_SCALE, scale


def _weight_shape(stored: StoredTensor) -> TensorShape:
    shape = stored.shape
    return shape if stored.dtype == "I8" else (*shape[1:-1], 8 * shape[-1])


def _scale_shape(stored: StoredTensor) -> TensorShape:
    *rows, inputs = _weight_shape(stored)
    return tuple(rows) if stored.dtype == "I8" else (*rows, inputs // GROUP)


def _has_valid_shape(stored: StoredTensor) -> bool:
    shape = stored.shape
    if stored.dtype == "I8":
        return len(shape) > 1
    return len(shape) > 2 and shape[0] in PLANE_BITS and 8 * shape[-1] % GROUP == 0


def _check_pairs(stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Refuse values and scales that do not match in dtype, shape or name."""
    problems = [problem for dtype in ENCODINGS if (problem := _problems(dtype, stored))]
    halves = [
        f"{name} (F16)"
        for name, tensor in sorted(stored.items())
        if tensor.dtype == "F16" and not name.endswith(GROUP_SCALE)
    ]
    if halves:
        problems.append(f"what is not a scale should be F32, but not so {listing(halves)}")
    if problems:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(problems)}")


def _problems(dtype: str, stored: Mapping[str, StoredTensor]) -> str:
    encoding = ENCODINGS[dtype]
    values = {name: tensor for name, tensor in sorted(stored.items()) if tensor.dtype == dtype}
    scales = {name for name in stored if name.endswith(encoding.scale_suffix)}
    by_scale = {name + encoding.scale_suffix: tensor for name, tensor in values.items()}
    paired = {
        name: tensor
        for name, tensor in by_scale.items()
        if name in scales and _has_valid_shape(tensor)
    }
    scale_dtype = encoding.scale_dtype
    return describe(
        {
            f"{encoding.shapes}, but not so": [
                f"{name} ({list(tensor.shape)})"
                for name, tensor in values.items()
                if not _has_valid_shape(tensor)
            ],
            "it lacks": sorted(by_scale.keys() - scales),
            f"there is no {encoding.values} for": sorted(scales - by_scale.keys()),
            f"scales should be {scale_dtype}, {encoding.scale_count}, but not so": [
                f"{name} ({scale.dtype} {list(scale.shape)}, not {scale_dtype} {shape})"
                for name, tensor in paired.items()
                for scale, shape in [(stored[name], list(_scale_shape(tensor)))]
                if scale.dtype != scale_dtype or list(scale.shape) != shape
            ],
        }
    )


def _check_scales(
    scales: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], directory: Path
) -> None:
    for dtype, encoding in ENCODINGS.items():
        wrong = [
            name + encoding.scale_suffix
            for name, scale in scales.items()
            if stored[name].dtype == dtype
            # Only group scales may be negative.
            if not (scale.isfinite() & (scale != 0) & ((scale > 0) | (dtype == "U8"))).all()
        ]
        if wrong:
            raise CheckpointError(
                f"{directory}: {listing(wrong)} should hold {encoding.scale_range}, and holds "
                "others; the checkpoint is damaged"
            )
