"""Weights in whole numbers of eight bits or fewer: on disk alone, the same float32 everywhere.

    8 bits          weight = I8 * row_scale       F32, one for each row: all but the last dimension
    4, 5 or 6 bits  weight = number * group_scale F16, one for each 32 inputs of a row; the numbers
                    lie in planes, U8 [bits, ..., inputs / 8] (`bits`)

Tensors of two or more dimensions are stored so, beside their scales; the others stay as they are.
Which of the two it is says the type of a tensor, and its shape the rest. Routers, which decide and
are small, and rows that are no multiple of 32 have 8 bits whatever is asked for. What is multiplied
out is the weight, there is no other: scales keep 16 and 11 significant bits, so that each product
is exact in float32, alike on every machine, and gives the same bytes when it is stored again. Knows
tensors by name; neither models nor where their files lie.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.errors import CheckpointError, UsageError
from dgemma.quant.int8 import quantize
from dgemma.quant.qtensor import Quantized
from dgemma.weights.bits import GROUP, Grouped, pack, quantize_groups, reach, unpack
from dgemma.weights.files import GROUP_SCALE, INT8_INDEX, ROW_SCALE, StoredTensor, listing
from dgemma.weights.mapped import MappedTensors, Tensors

FEW = (4, 5, 6)  # bits of numbers in planes
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What belongs to numbers of one type, and what is said of it where it is not so."""

    numbers: str
    shapes: str
    ending: str  # of the name of their scales
    scale_type: str
    places: str
    scales: str


FORMS = {
    "I8": Form(
        numbers="8-bit tensor",
        shapes="8-bit tensors should have two dimensions or more",
        ending=ROW_SCALE,
        scale_type="F32",
        places="one for each row",
        scales="positive numbers",
    ),
    "U8": Form(
        numbers="packed tensor",
        shapes="packed tensors should have 4, 5 or 6 planes of two dimensions or more, whose rows "
        f"are multiples of {GROUP // 8} bytes",
        ending=GROUP_SCALE,
        scale_type="F16",
        places=f"one for each {GROUP} numbers of a row",
        scales="numbers other than zero",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """In how many bits matrices are stored: those of the experts, and all others."""

    experts: int = 8
    rest: int = 8

    def __post_init__(self) -> None:
        for bits in (self.experts, self.rest):
            if bits not in (*FEW, 8):
                raise UsageError(f"weights can be stored in 4, 5, 6 or 8 bits, not in {bits}")

    def of(self, name: str, shape: Shape) -> int:
        if ".router." in name or shape[-1] % GROUP:
            return 8
        return self.experts if ".experts." in name else self.rest

    def __str__(self) -> str:
        return f"experts in {self.experts} bits, the rest in {self.rest}"


EIGHT = Bits()


def to_int8(tensors: Mapping[str, Tensor], bits: Bits = EIGHT) -> dict[str, Tensor]:
    """Tensors as they are stored: whole numbers with their scales, vectors in float32."""
    return dict(_stored(tensors, bits))


def open_tensors(stored: Mapping[str, StoredTensor], directory: Path) -> Tensors:
    """The weights of a checkpoint as numbers, whichever way its files hold them."""
    mapped = MappedTensors(stored)
    if not (directory / INT8_INDEX).is_file():
        return mapped
    return Int8Tensors(mapped, directory)


class Int8Tensors:
    """Tensors by name, multiplied out when they are asked for; scales are no tensors of their own.

    Refuses, by name, numbers without scales, scales without numbers, and scales that are none.
    """

    def __init__(self, mapped: MappedTensors, directory: Path) -> None:
        self.mapped = mapped
        _check_pairs(mapped.stored, directory)
        self.scales = {
            name: mapped[name + FORMS[tensor.dtype].ending]
            for name, tensor in sorted(mapped.stored.items())
            if tensor.dtype in FORMS
        }
        _check_scales(self.scales, mapped.stored, directory)
        # As they are read; their bytes are those of the file.
        self.stored: Mapping[str, StoredTensor] = {
            name: replace(t, dtype="F32", shape=_shape(t)) if name in self.scales else t
            for name, t in mapped.stored.items()
            if not name.endswith((ROW_SCALE, GROUP_SCALE))
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.mapped[name]
        if name not in self.scales:
            return tensor
        if tensor.dtype == torch.int8:
            return Quantized(tensor, self.scales[name]).whole()
        return Grouped(unpack(tensor, self.stored[name].shape[-1]), self.scales[name]).whole()


def _stored(tensors: Mapping[str, Tensor], wanted: Bits) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            yield name, tensor.to(torch.float32)
            continue
        bits = wanted.of(name, tensor.shape)
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name} holds NaN or infinity; it cannot be stored in {bits} bits"
            )
        if bits == 8:
            whole, scale = quantize(tensor)
            yield name, whole
            yield name + ROW_SCALE, scale
            continue
        if tensor.abs().max() > reach(bits):
            raise CheckpointError(
                f"{name} holds values beyond {reach(bits):g}, the largest in {bits} bits; store it "
                "in 8"
            )
        numbers, factor = quantize_groups(tensor, bits)
        yield name, pack(numbers, bits)
        yield name + GROUP_SCALE, factor


def _shape(stored: StoredTensor) -> Shape:
    """Of the weight that numbers stand for."""
    shape = stored.shape
    return shape if stored.dtype == "I8" else (*shape[1:-1], 8 * shape[-1])


def _scale_shape(stored: StoredTensor) -> Shape:
    *rows, inputs = _shape(stored)
    return tuple(rows) if stored.dtype == "I8" else (*rows, inputs // GROUP)


def _is_whole(stored: StoredTensor) -> bool:
    """Whether numbers have a shape that such numbers can have."""
    if stored.dtype == "I8":
        return len(stored.shape) > 1
    return len(stored.shape) > 2 and stored.shape[0] in FEW and 8 * stored.shape[-1] % GROUP == 0


def _check_pairs(stored: Mapping[str, StoredTensor], directory: Path) -> None:
    """Numbers and scales belong together, in the right types and shapes, and nothing is left."""
    problems = [problem for dtype in FORMS for problem in _problems(dtype, stored)]
    halves = [
        f"{name} (F16)"
        for name, tensor in sorted(stored.items())
        if tensor.dtype == "F16" and not name.endswith(GROUP_SCALE)
    ]
    if halves:
        problems.append(f"what is no scale should be F32, but not so {listing(halves)}")
    if problems:
        raise CheckpointError(f"{directory} is damaged: {'; '.join(problems)}")


def _problems(dtype: str, stored: Mapping[str, StoredTensor]) -> list[str]:
    form = FORMS[dtype]
    numbers = {name: tensor for name, tensor in sorted(stored.items()) if tensor.dtype == dtype}
    scales = {name for name in stored if name.endswith(form.ending)}
    wanted = {name + form.ending: tensor for name, tensor in numbers.items()}
    paired = {
        name: tensor for name, tensor in wanted.items() if name in scales and _is_whole(tensor)
    }
    findings = {
        f"{form.shapes}, but not so": [
            f"{name} ({list(tensor.shape)})"
            for name, tensor in numbers.items()
            if not _is_whole(tensor)
        ],
        "it lacks": sorted(wanted.keys() - scales),
        f"there is no {form.numbers} for": sorted(scales - wanted.keys()),
        f"scales should be {form.scale_type}, {form.places}, but not so": [
            f"{name} ({have.dtype} {list(have.shape)}, not {form.scale_type} {want})"
            for name, tensor in paired.items()
            for have, want in [(stored[name], list(_scale_shape(tensor)))]
            if have.dtype != form.scale_type or list(have.shape) != want
        ],
    }
    return [f"{what} {listing(names)}" for what, names in findings.items() if names]


def _check_scales(
    scales: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], directory: Path
) -> None:
    for dtype, form in FORMS.items():
        wrong = [
            name + form.ending
            for name, scale in scales.items()
            if stored[name].dtype == dtype
            # Only those of groups may be below zero.
            if not (scale.isfinite() & (scale != 0) & ((scale > 0) | (dtype == "U8"))).all()
        ]
        if wrong:
            raise CheckpointError(
                f"{directory}: {listing(wrong)} should hold {form.scales}, and holds others; the "
                "checkpoint is damaged"
            )
