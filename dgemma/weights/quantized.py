"""Checkpoints in fewer bits, read as numbers: each weight is multiplied out when it is asked for.

    nvfp4  float32(e2m1 * scale) * weight_scale_2     fp8  float32(e4m3) * float32(weight_scale)

`stored` lists what the plain layout would hold, the experts stacked again, so that what checks and
loads a checkpoint needs to know nothing of this. A tensor that is missing, left over, or of another
type or shape is refused by name. `input_scale` is required and not used: activations stay as they
are.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError
from dgemma.quant.nvfp4 import Packed
from dgemma.weights.files import ITEM_BYTES, StoredTensor, listing, read_headers
from dgemma.weights.int8 import open_tensors
from dgemma.weights.layouts import ONE_EXPERT, Scheme, expert_slices, read_scheme
from dgemma.weights.mapped import MappedTensors, Tensors

WEIGHT = ".weight"
EXTRAS = (".weight_scale", ".weight_scale_2", ".input_scale")
NAN_BITS = 0x7F  # of an e4m3 number without its sign


def open_checkpoint(directory: Path, config: ModelConfig) -> Tensors:
    """The weights of a checkpoint by their plain names, whichever way its files hold them."""
    scheme = read_scheme(directory)
    if scheme is None:
        return open_tensors(read_headers(directory), directory)
    stored = read_headers(directory, {**ITEM_BYTES, **scheme.item_bytes})
    return QuantizedTensors(MappedTensors(stored), scheme, config.num_experts, directory)


class QuantizedTensors:
    """Tensors by their plain names, multiplied out in float32 when they are asked for."""

    def __init__(
        self, mapped: MappedTensors, scheme: Scheme, num_experts: int, directory: Path
    ) -> None:
        self.mapped, self.scheme, self.directory = mapped, scheme, directory
        self.packed = _check_packed(mapped.stored, scheme, directory)
        self.stacks = _stacks(self._matrices(), num_experts, directory)
        self.stored: Mapping[str, StoredTensor] = self._list()

    def __getitem__(self, name: str) -> Tensor:
        if name in self.stacks:
            return self._stack(name)
        module = name.removesuffix(WEIGHT)
        return self._whole(module) if module in self.packed else self.mapped[name]

    def _stack(self, name: str) -> Tensor:
        """All experts of a layer in their places; one at a time is there twice."""
        modules = list(self.stacks[name])
        count, rows, columns = self.stored[name].shape
        whole = torch.empty(count, rows, columns)
        parts = whole.view(len(modules), -1, columns)
        for place, module in zip(parts, modules, strict=True):
            place.copy_(self[module + WEIGHT])
        return whole

    def _whole(self, module: str) -> Tensor:
        numbers, scale = self.mapped[module + WEIGHT], self.mapped[module + EXTRAS[0]]
        self._check_scale(module + EXTRAS[0], scale)
        if self.scheme.name == "fp8":
            if ((numbers.view(torch.uint8) & NAN_BITS) == NAN_BITS).any():
                raise CheckpointError(
                    f"{self.directory}: {module + WEIGHT} holds NaN; the checkpoint is damaged"
                )
            return numbers.float() * scale.float().view(-1, 1)
        factor = self.mapped[module + EXTRAS[1]]
        self._check_scale(module + EXTRAS[1], factor)
        return Packed(numbers, scale.view(len(numbers), -1), factor.view(())).whole()

    def _check_scale(self, name: str, scale: Tensor) -> None:
        numbers = scale.float()
        if not (numbers.isfinite() & (numbers >= 0)).all():
            raise CheckpointError(
                f"{self.directory}: {name} should hold positive numbers, and holds others; the "
                "checkpoint is damaged"
            )

    def _matrices(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all matrices of single experts, packed or plain, by module."""
        shapes = {}
        for name, tensor in self.mapped.stored.items():
            module = name.removesuffix(WEIGHT)
            if ONE_EXPERT.fullmatch(module) and name != module:
                is_packed = module in self.packed
                shapes[module] = self.scheme.matrix(tensor.shape) if is_packed else tensor.shape
        return shapes

    def _list(self) -> dict[str, StoredTensor]:
        files = self.mapped.stored
        taken = {module + ending for module in self.packed for ending in (WEIGHT, *EXTRAS)}
        taken |= {module + WEIGHT for stack in self.stacks.values() for module in stack}
        plain = {name: tensor for name, tensor in files.items() if name not in taken}
        if not plain:
            raise CheckpointError(f"{self.directory} holds packed tensors alone")
        # What packed weights are read as: the type of those beside them.
        dtype = next(iter(plain.values())).dtype
        found = dict(plain)
        inside = {module for stack in self.stacks.values() for module in stack}
        for module in sorted(self.packed - inside):
            tensor = files[module + WEIGHT]
            found[module + WEIGHT] = replace(
                tensor, dtype=dtype, shape=self.scheme.matrix(tensor.shape)
            )
        for name, stack in self.stacks.items():
            first = files[next(iter(stack)) + WEIGHT]
            size = sum(files[module + WEIGHT].num_bytes for module in stack)
            shape = _stacked_shape(stack)
            found[name] = replace(first, dtype=dtype, shape=shape, start=0, stop=size)
        return found


def _check_packed(
    stored: Mapping[str, StoredTensor], scheme: Scheme, directory: Path
) -> frozenset[str]:
    """Modules with packed numbers, once all that belongs to each is there as it should be."""
    modules = {
        name.removesuffix(WEIGHT)
        for name, tensor in stored.items()
        if name.endswith(WEIGHT) and tensor.dtype == scheme.packed
    }
    wrong: list[str] = [
        f"{module}{WEIGHT} ({list(stored[module + WEIGHT].shape)})"
        for module in sorted(modules)
        if len(stored[module + WEIGHT].shape) != 2
    ]
    if wrong:
        raise CheckpointError(f"{directory}: packed weights are matrices, not {listing(wrong)}")
    lacking, wanted = [], set()
    for module in sorted(modules):
        shape = scheme.matrix(stored[module + WEIGHT].shape)
        for ending, want in scheme.beside(shape).items():
            name = module + ending
            wanted.add(name)
            if name not in stored:
                lacking.append(name)
            elif stored[name].dtype not in want.types or not _is_shape(stored[name], want.shape):
                have = f"{stored[name].dtype} {list(stored[name].shape)}"
                wrong.append(f"{name} ({have}, not {'/'.join(want.types)} {list(want.shape)})")
    left = [
        name
        for name, tensor in stored.items()
        if name not in wanted and (name.endswith(EXTRAS) or tensor.dtype in scheme.item_bytes)
    ]
    findings = {"it lacks": lacking, "not as they should be": wrong, "nothing belongs to": left}
    problems = [f"{what} {listing(names)}" for what, names in findings.items() if names]
    if problems:
        raise CheckpointError(
            f"{directory} is no whole {scheme.name} checkpoint: {'; '.join(problems)}"
        )
    return frozenset(modules)


def _is_shape(tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
    # Writers store a single number, and a column, with a dimension more or less.
    return tensor.shape == shape or [n for n in tensor.shape if n != 1] == [
        n for n in shape if n != 1
    ]


def _stacks(
    matrices: Mapping[str, tuple[int, ...]], num_experts: int, directory: Path
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The modules of each stack of experts with their shapes, in order; all must be there."""
    prefixes = {found["prefix"] for m in matrices if (found := ONE_EXPERT.fullmatch(m))}
    stacks, lacking = {}, []
    used: set[str] = set()
    for prefix in sorted(prefixes):
        for kind, rows in (("gate_up", 2), ("down", 1)):
            name = f"{prefix}.{kind}_proj"
            modules = list(expert_slices(name, (num_experts, rows, 1)))
            lacking += [module + WEIGHT for module in modules if module not in matrices]
            stacks[name] = {m: matrices[m] for m in modules if m in matrices}
            used |= set(modules)
    left = sorted(module + WEIGHT for module in matrices if module not in used)
    if lacking or left:
        findings = {"it lacks": lacking, f"a model of {num_experts} experts has no": left}
        problems = [f"{what} {listing(names)}" for what, names in findings.items() if names]
        raise CheckpointError(f"{directory} does not fit its config.json: {'; '.join(problems)}")
    for name, stack in stacks.items():
        first = next(iter(stack.values()))
        odd = [f"{module} ({list(s)})" for module, s in stack.items() if s != first]
        if odd:
            raise CheckpointError(
                f"{directory}: in {name} all should be {list(first)}, but not so {listing(odd)}"
            )
    return stacks


def _stacked_shape(stack: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int]:
    rows, columns = next(iter(stack.values()))
    per_expert = 2 if any(module.endswith("gate_proj") for module in stack) else 1
    return len(stack) // per_expert, per_expert * rows, columns
