"""A model in fewer bits, made layer by layer while it is loaded: no layer but one is ever whole.

What a checkpoint of a released layout holds packed is put on the device as it is, number by number;
all else is quantized there, and its source dropped. A layer's modules are swapped from outside:

    fp8    experts, attention and dense MLP in e4m3, a factor for each output
    nvfp4  experts in four bits; attention and dense MLP as in fp8
    nvfp4_bf16  experts in four bits, all else in 16: for GPUs without fp8 arithmetic
    own    what the file packs stays packed, the rest is as it is
    int8   all products in whole numbers, for CPUs (see `cpu_int8`)

Router, norms, self-conditioning, embedding and head keep their type (but see `cpu_int8`, and `head`
for a second head and soft embeddings in 8 bits).

E experts, O outputs, I inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from dgemma.backends.cpu.pack_int8 import Int8Table, swap_int8
from dgemma.backends.cuda.merge import is_mergeable, merge_layer
from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError, UsageError
from dgemma.model.gemma import Experts, Gemma, Layer
from dgemma.quant.fp4_experts import Fp4Experts
from dgemma.quant.fp8 import E4M3, Fp8Linear
from dgemma.quant.fp8_experts import Fp8Experts
from dgemma.quant.nvfp4 import Packed
from dgemma.quant.nvfp4_tiles import DEPTH, fits
from dgemma.quant.qtensor import Quantized
from dgemma.weights.layouts import ONE_EXPERT, PARTS, STACKED, SchemeName
from dgemma.weights.quantized import EXTRAS, NAN_BITS, WEIGHT, QuantizedTensors

Quant = Literal["none", "own", "int8", "fp8", "nvfp4", "nvfp4_bf16"]
Kind = Literal["plain", "int8", "fp8", "nvfp4"]
QUANTS: tuple[Quant, ...] = get_args(Quant)
DENSE = {"self_attn": "q_proj k_proj v_proj o_proj", "mlp": "gate_proj up_proj down_proj"}
EXPERTS = "experts"  # of a layer: set by name, since its type changes
CHUNK = 16  # experts looked at together


@dataclass(frozen=True, slots=True)
class Form:
    """How the weights of a layer lie in memory."""

    experts: Kind = "plain"
    dense: Kind = "plain"
    is_own: bool = False  # the file's: what it does not pack is left alone


FORMS: dict[Quant, Form] = {
    "none": Form(),
    "int8": Form("int8", "int8"),
    "fp8": Form("fp8", "fp8"),
    "nvfp4": Form("nvfp4", "fp8"),
    "nvfp4_bf16": Form("nvfp4", "plain"),
}
OWN: dict[SchemeName, Form] = {
    "fp8": Form("fp8", "fp8", is_own=True),
    "nvfp4": Form("nvfp4", "plain", is_own=True),
}


def form_of(quant: Quant, scheme: SchemeName | None) -> Form:
    """The form that was asked for, of a checkpoint that is stored in a scheme; refuses the rest."""
    if quant not in QUANTS:
        raise UsageError(f"quant {quant!r} is not known; use {', '.join(QUANTS)}")
    if quant == "own":
        return Form() if scheme is None else OWN[scheme]
    stored_as = quant.removesuffix("_bf16")
    if scheme is not None and stored_as in ("fp8", "nvfp4") and stored_as != scheme:
        raise UsageError(
            f"the checkpoint is stored as {scheme}, and rounding it again to {quant} would lose "
            f"more than either; use --quant auto or {scheme}, or load its original as {quant}"
        )
    return FORMS[quant]


def check_widths(form: Form, config: ModelConfig) -> None:
    """Refuse widths that a form cannot hold."""
    widths = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
    }
    odd = [f"{name} {size}" for name, size in widths.items() if not fits(size, size)]
    if form.experts == "nvfp4" and odd:
        raise UsageError(
            f"nvfp4 takes widths that are multiples of {DEPTH}, which are not {' and '.join(odd)}; "
            "use fp8, or none"
        )


@torch.no_grad()
def shrink(layer: Layer, form: Form) -> None:
    """Swap a layer's plain modules for their smaller form, in place."""
    if form.is_own:
        return
    if form.experts == "int8" or form.dense == "int8":
        assert form.experts == form.dense, "int8 is for all products of a layer or none"
        swap_int8(layer)
        return
    if isinstance(layer.experts, Experts) and form.experts != "plain":
        source, is_8 = layer.experts, form.experts == "fp8"
        small = Fp8Experts(source) if is_8 else Fp4Experts.quantized(source)
        setattr(layer, EXPERTS, small)
    if form.dense != "fp8":
        return
    for owner, names in DENSE.items():
        part = getattr(layer, owner)
        for name in names.split():
            if type(source := getattr(part, name)) is nn.Linear:
                setattr(part, name, Fp8Linear.of(source))
    if is_mergeable(layer):
        merge_layer(layer)


def shrink_model(model: Gemma, form: Form) -> Gemma:
    """The same for a whole model that stands already, in place; it can then only be run."""
    model.requires_grad_(False)
    for layer in model.layers:
        shrink(cast(Layer, layer), form)
    shrink_table(model, form)
    return model


def shrink_table(model: Gemma, form: Form) -> None:
    """The same for what stands outside the layers."""
    if form.dense == "int8":
        model.embed_tokens = Int8Table(model.embed_tokens)
        if model.self_conditioning is not None:
            swap_int8(model.self_conditioning)


def put_packed(
    layer: Layer, names: Mapping[str, str], tensors: QuantizedTensors, device: torch.device | str
) -> set[str]:
    """Put what a file holds packed into a layer, unchanged; the stored names it stands for.

    `names` are a layer's stored names with those inside the layer. What is packed but has no
    module of its kind is left to be multiplied out.
    """
    taken = set()
    stacks = [name for name in names if STACKED.fullmatch(name)]
    if stacks and all(_is_packed(name, tensors) for name in stacks):
        (prefix,) = {name.rpartition(".")[0] for name in stacks}
        setattr(layer, EXPERTS, _experts(prefix, tensors, device))
        taken |= set(stacks)
    for name, inside in names.items():
        module = name.removesuffix(WEIGHT)
        owner, _, leaf = inside.removesuffix(WEIGHT).rpartition(".")
        if tensors.scheme.name == "fp8" and module in tensors.packed and owner in DENSE:
            numbers, scale = (
                tensors.mapped[module + end].to(device) for end in (WEIGHT, EXTRAS[0])
            )
            _check_numbers(numbers, module)
            _check_scale(scale, module)
            setattr(layer.get_submodule(owner), leaf, Fp8Linear(numbers, scale.view(-1, 1)))
            taken.add(name)
    return taken


def _is_packed(stack: str, tensors: QuantizedTensors) -> bool:
    modules = tensors.stacks.get(stack, ())
    return bool(modules) and all(module in tensors.packed for module in modules)


def _experts(prefix: str, tensors: QuantizedTensors, device: torch.device | str) -> nn.Module:
    modules = [_modules(prefix, part, tensors) for part in PARTS]
    where = torch.device(device)
    if tensors.scheme.name == "nvfp4":
        each = (
            (_packed(gate, tensors), _packed(up, tensors), _packed(down, tensors))
            for gate, up, down in zip(*modules, strict=True)
        )
        return Fp4Experts.packed(each, len(modules[0]), where)
    gate, up, down = (_stacked_8(part, tensors, where) for part in modules)
    # Not all operations know these numbers; bytes they all know.
    numbers = torch.cat([part.numbers.view(torch.uint8) for part in (gate, up)], dim=1).view(E4M3)
    return Fp8Experts.packed(Quantized(numbers, torch.cat([gate.factor, up.factor], dim=1)), down)


def _modules(prefix: str, part: str, tensors: QuantizedTensors) -> list[str]:
    """One part of each expert, in order."""
    stack = tensors.stacks[f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"]
    found = ((module, ONE_EXPERT.fullmatch(module)) for module in stack)
    return [module for module, match in found if match is not None and match["part"] == part]


def _packed(module: str, tensors: QuantizedTensors) -> Packed:
    numbers, scale, factor = (tensors.mapped[module + end] for end in (WEIGHT, *EXTRAS[:2]))
    for end, each in zip(EXTRAS, (scale, factor), strict=False):
        _check_scale(each, module + end)
    return Packed(numbers, scale.view(len(numbers), -1), factor.view(()))


def _stacked_8(
    modules: Sequence[str], tensors: QuantizedTensors, device: torch.device
) -> Quantized:
    """A part of all experts, [E, O, I], moved as one."""
    numbers = torch.stack([tensors.mapped[m + WEIGHT].view(torch.uint8) for m in modules])
    factor = torch.stack([tensors.mapped[m + EXTRAS[0]].float().view(-1) for m in modules])
    found = Quantized(numbers.to(device).view(E4M3), factor.to(device))
    _check_numbers(found.numbers, f"{modules[0]} to {modules[-1]}")
    _check_scale(found.factor, f"{modules[0]} to {modules[-1]}{EXTRAS[0]}")
    return found


def _check_numbers(numbers: Tensor, module: str) -> None:
    size = CHUNK if numbers.dim() == 3 else len(numbers)
    for part in torch.split(numbers.view(torch.uint8), size):
        if ((part & NAN_BITS) == NAN_BITS).any():
            raise CheckpointError(f"{module}{WEIGHT} holds NaN; the checkpoint is damaged")


def _check_scale(scale: Tensor, name: str) -> None:
    numbers = scale.float()
    if not (numbers.isfinite() & (numbers >= 0)).all():
        raise CheckpointError(
            f"{name} should hold positive numbers, and holds others; the checkpoint is damaged"
        )
