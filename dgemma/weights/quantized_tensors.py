"""Checkpoints of the released quantization schemes: dequantized tensors, or packed modules.

    nvfp4  float32(e2m1 * scale) * weight_scale_2     fp8  float32(e4m3) * float32(weight_scale)

`stored` lists what the plain layout would hold, with the experts stacked again, so that checks and
loader need not know of the scheme. Missing, surplus and misshapen tensors are refused by name.
`input_scale` is required and not used: activations are not quantized by it.

E experts, O outputs, I inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError
from dgemma.model.gemma import Layer
from dgemma.quant import QTensor
from dgemma.quant.fp8 import E4M3, Fp8Experts, Fp8Linear
from dgemma.quant.nvfp4 import Nvfp4Experts, Nvfp4Tensor
from dgemma.weights.files import (
    ITEM_BYTES,
    StoredTensor,
    TensorShape,
    describe,
    listing,
    read_headers,
)
from dgemma.weights.gguf_checkpoint import is_gguf, open_gguf
from dgemma.weights.int_layout import open_tensors
from dgemma.weights.quant_schemes import (
    EXPERT_PARTS,
    ONE_EXPERT,
    STACKED,
    QuantScheme,
    expert_slices,
    read_scheme,
)
from dgemma.weights.safetensors_io import MappedTensors, Tensors

WEIGHT = ".weight"
SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")
NAN_BITS = 0x7F  # e4m3 NaN without its sign
CHECKED_EXPERTS = 16  # checked for NaN together


def open_checkpoint(directory: Path, config: ModelConfig) -> Tensors:
    """Open the weights of a checkpoint under their plain names, in any layout."""
    if is_gguf(directory):
        return open_gguf(directory).tensors
    scheme = read_scheme(directory)
    if scheme is None:
        return open_tensors(read_headers(directory), directory)
    stored = read_headers(directory, {**ITEM_BYTES, **scheme.item_bytes})
    return QuantizedTensors(MappedTensors(stored), scheme, config.num_experts, directory)


class QuantizedTensors:
    """Tensors under their plain names, dequantized to float32 on access."""

    def __init__(
        self, mapped: MappedTensors, scheme: QuantScheme, num_experts: int, directory: Path
    ) -> None:
        self.mapped, self.scheme, self.directory = mapped, scheme, directory
        self.packed = _check_packed(mapped.stored, scheme, directory)
        self.stacks = _stacks(self._expert_shapes(), num_experts, directory)
        self.stored: Mapping[str, StoredTensor] = self._plain_layout()

    def __getitem__(self, name: str) -> Tensor:
        if name in self.stacks:
            return self._stack(name)
        module = name.removesuffix(WEIGHT)
        return self._dequantize(module) if module in self.packed else self.mapped[name]

    def _stack(self, name: str) -> Tensor:
        """Stack all experts of a layer; only one is in memory twice."""
        modules = list(self.stacks[name])
        count, rows, columns = self.stored[name].shape
        stack = torch.empty(count, rows, columns)
        for slice_, module in zip(stack.view(len(modules), -1, columns), modules, strict=True):
            slice_.copy_(self[module + WEIGHT])
        return stack

    def _dequantize(self, module: str) -> Tensor:
        if self.scheme.name == "nvfp4":
            return self.nvfp4(module).dequantize()
        values, scale = self.fp8(module)
        return values.float() * scale.float().view(-1, 1)

    def nvfp4(self, module: str) -> Nvfp4Tensor:
        """Return a packed matrix; refuses scales that are not positive."""
        values, scale, scale_2 = (self.mapped[module + end] for end in (WEIGHT, *SCALES[:2]))
        for suffix, tensor in zip(SCALES, (scale, scale_2), strict=False):
            self.check_scale(tensor, module + suffix)
        return Nvfp4Tensor(values, scale.view(len(values), -1), scale_2.view(()))

    def fp8(self, module: str, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return values and scale of a matrix; refuses NaN and scales that are not positive."""
        values, scale = (self.mapped[module + end].to(device) for end in (WEIGHT, SCALES[0]))
        self.check_values(values, module)
        self.check_scale(scale, module + SCALES[0])
        return values, scale

    def check_values(self, values: Tensor, module: str) -> None:
        size = CHECKED_EXPERTS if values.dim() == 3 else max(len(values), 1)
        for chunk in torch.split(values.view(torch.uint8), size):
            if ((chunk & NAN_BITS) == NAN_BITS).any():
                raise CheckpointError(
                    f"{self.directory}: {module}{WEIGHT} holds NaN; the checkpoint is damaged"
                )

    def check_scale(self, scale: Tensor, name: str) -> None:
        values = scale.float()
        if not (values.isfinite() & (values >= 0)).all():
            raise CheckpointError(
                f"{self.directory}: {name} should hold positive numbers, and holds others; the "
                "checkpoint is damaged"
            )

    def _expert_shapes(self) -> dict[str, TensorShape]:
        """Return the shapes of all single experts' matrices, packed or plain, by module."""
        modules = {n.removesuffix(WEIGHT) for n in self.mapped.stored if n.endswith(WEIGHT)}
        return {m: self._shape(m) for m in sorted(modules) if ONE_EXPERT.fullmatch(m)}

    def _shape(self, module: str) -> TensorShape:
        stored = self.mapped.stored[module + WEIGHT].shape
        return self.scheme.unpacked_shape(stored) if module in self.packed else stored

    def _plain_layout(self) -> dict[str, StoredTensor]:
        files = self.mapped.stored
        in_stacks = {module for stack in self.stacks.values() for module in stack}
        packed = {module + suffix for module in self.packed for suffix in (WEIGHT, *SCALES)}
        replaced = packed | {module + WEIGHT for module in in_stacks}
        tensors = {name: tensor for name, tensor in files.items() if name not in replaced}
        if not tensors:
            raise CheckpointError(f"{self.directory} holds packed tensors alone")
        # Packed weights take the dtype of the plain ones.
        dtype = next(iter(tensors.values())).dtype
        for module in sorted(self.packed - in_stacks):
            name = module + WEIGHT
            tensors[name] = replace(files[name], dtype=dtype, shape=self._shape(module))
        for name, stack in self.stacks.items():
            first = files[next(iter(stack)) + WEIGHT]
            size = sum(files[module + WEIGHT].num_bytes for module in stack)
            shape = _stacked_shape(stack)
            tensors[name] = replace(first, dtype=dtype, shape=shape, start=0, stop=size)
        return tensors


def _check_packed(
    stored: Mapping[str, StoredTensor], scheme: QuantScheme, directory: Path
) -> frozenset[str]:
    """Return the packed modules; refuses missing, misshapen and unexpected tensors."""
    modules = sorted(
        name.removesuffix(WEIGHT)
        for name, tensor in stored.items()
        if name.endswith(WEIGHT) and tensor.dtype == scheme.packed
    )
    shapes = {module: stored[module + WEIGHT].shape for module in modules}
    wrong = [f"{m}{WEIGHT} ({list(shape)})" for m, shape in shapes.items() if len(shape) != 2]
    if wrong:
        raise CheckpointError(f"{directory}: packed weights are matrices, not {listing(wrong)}")
    specs = {
        module + suffix: spec
        for module, shape in shapes.items()
        for suffix, spec in scheme.tensors(scheme.unpacked_shape(shape)).items()
    }
    for name, spec in specs.items():
        tensor = stored.get(name)
        if tensor and not (tensor.dtype in spec.dtypes and _is_shape(tensor.shape, spec.shape)):
            expected = f"{'/'.join(spec.dtypes)} {list(spec.shape)}"
            wrong.append(f"{name} ({tensor.dtype} {list(tensor.shape)}, not {expected})")
    surplus = [
        name
        for name, tensor in stored.items()
        if name not in specs and (name.endswith(SCALES) or tensor.dtype in scheme.item_bytes)
    ]
    missing = [name for name in specs if name not in stored]
    findings = {"it lacks": missing, "not as they should be": wrong, "nothing belongs to": surplus}
    if problems := describe(findings):
        raise CheckpointError(f"{directory} is not a complete {scheme.name} checkpoint: {problems}")
    return frozenset(modules)


def _is_shape(stored: TensorShape, shape: TensorShape) -> bool:
    # Writers disagree on dimensions of size 1.
    return [n for n in stored if n != 1] == [n for n in shape if n != 1]


def _stacks(
    shapes: Mapping[str, TensorShape], num_experts: int, directory: Path
) -> dict[str, dict[str, TensorShape]]:
    """Return the modules of each stack of experts with their shapes, in order; refuses gaps."""
    prefixes = {match["prefix"] for m in shapes if (match := ONE_EXPERT.fullmatch(m))}
    stacks, missing = {}, []
    used: set[str] = set()
    for prefix in sorted(prefixes):
        for stack, rows in (("gate_up", 2), ("down", 1)):
            name = f"{prefix}.{stack}_proj"
            modules = list(expert_slices(name, (num_experts, rows, 1)))
            missing += [module + WEIGHT for module in modules if module not in shapes]
            stacks[name] = {m: shapes[m] for m in modules if m in shapes}
            used |= set(modules)
    surplus = sorted(module + WEIGHT for module in shapes if module not in used)
    findings = {"it lacks": missing, f"a model of {num_experts} experts has no": surplus}
    if problems := describe(findings):
        raise CheckpointError(f"{directory} does not fit its config.json: {problems}")
    for name, modules_of in stacks.items():
        first = next(iter(modules_of.values()))
        odd = [f"{module} ({list(s)})" for module, s in modules_of.items() if s != first]
        if odd:
            raise CheckpointError(
                f"{directory}: in {name} all should be {list(first)}, but not so {listing(odd)}"
            )
    return stacks


def _stacked_shape(stack: Mapping[str, TensorShape]) -> tuple[int, int, int]:
    rows, columns = next(iter(stack.values()))
    per_expert = 2 if any(module.endswith("gate_proj") for module in stack) else 1
    return len(stack) // per_expert, per_expert * rows, columns


# --- packed modules


def load_packed(
    layer: Layer, names: Mapping[str, str], tensors: QuantizedTensors, device: torch.device | str
) -> set[str]:
    """Load packed weights into a layer, unchanged; return the stored names they replace.

    `names`: name inside the layer by stored name. Packed weights without a matching module are left
    to be dequantized.
    """
    loaded = set()
    stacks = [name for name in names if STACKED.fullmatch(name)]
    if stacks and all(_is_packed(name, tensors) for name in stacks):
        (prefix,) = {name.rpartition(".")[0] for name in stacks}
        layer.experts = _packed_experts(prefix, tensors, torch.device(device))  # type: ignore[assignment]
        loaded |= set(stacks)
    for name, inside in names.items():
        module = name.removesuffix(WEIGHT)
        owner, _, leaf = inside.removesuffix(WEIGHT).rpartition(".")
        is_dense = owner in ("self_attn", "mlp")
        if tensors.scheme.name == "fp8" and module in tensors.packed and is_dense:
            values, scale = tensors.fp8(module, device)
            setattr(layer.get_submodule(owner), leaf, Fp8Linear(values, scale.view(-1, 1)))
            loaded.add(name)
    return loaded


def _is_packed(stack: str, tensors: QuantizedTensors) -> bool:
    modules = tensors.stacks.get(stack, ())
    return bool(modules) and all(module in tensors.packed for module in modules)


def _packed_experts(prefix: str, tensors: QuantizedTensors, device: torch.device) -> nn.Module:
    modules = [_expert_modules(prefix, part, tensors) for part in EXPERT_PARTS]
    if tensors.scheme.name == "nvfp4":
        experts = (
            (tensors.nvfp4(gate), tensors.nvfp4(up), tensors.nvfp4(down))
            for gate, up, down in zip(*modules, strict=True)
        )
        return Nvfp4Experts.from_tensors(experts, len(modules[0]), device)
    gate, up, down = (_stacked_fp8(part, tensors, device) for part in modules)
    # As bytes: some torch operations do not support e4m3.
    values = torch.cat([part.values.view(torch.uint8) for part in (gate, up)], dim=1).view(E4M3)
    return Fp8Experts(QTensor(values, torch.cat([gate.scale, up.scale], dim=1)), down)


def _expert_modules(prefix: str, part: str, tensors: QuantizedTensors) -> list[str]:
    """Return one part of each expert, in order."""
    stack = tensors.stacks[f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"]
    matches = map(ONE_EXPERT.fullmatch, stack)
    return [match[0] for match in matches if match is not None and match["part"] == part]


def _stacked_fp8(
    modules: Sequence[str], tensors: QuantizedTensors, device: torch.device
) -> QTensor:
    """Move one part of all experts, [E, O, I], as one tensor."""
    values = torch.stack([tensors.mapped[m + WEIGHT].view(torch.uint8) for m in modules])
    scale = torch.stack([tensors.mapped[m + SCALES[0]].float().view(-1) for m in modules])
    stacked = QTensor(values.to(device).view(E4M3), scale.to(device))
    tensors.check_values(stacked.values, f"{modules[0]} to {modules[-1]}")
    tensors.check_scale(stacked.scale, f"{modules[0]} to {modules[-1]}{SCALES[0]}")
    return stacked
