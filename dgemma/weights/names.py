"""Tensor names and shapes of a checkpoint, and the check that its files hold exactly these.

    text    a weight of `Gemma`, under the released prefix; shapes come from the model itself
    twin    the encoder's copy of a decoder's layer scalar; the released files store both
    vision  the image tower and its projection; a checkpoint has all of it or none
    tied    a copy that the released files leave out but other writers may store

Differences are refused by name, never repaired. Data is read only to compare copies. GGUF files use
other names for the same matrices: one table translates both ways, and no data is permuted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dgemma.config import Family, ModelConfig
from dgemma.errors import CheckpointError
from dgemma.model.gemma import Gemma
from dgemma.model.vision import ImageEncoder
from dgemma.weights.files import StoredTensor, TensorShape, describe, listing
from dgemma.weights.safetensors_io import Tensors

TensorGroup = Literal["text", "twin", "vision", "tied"]

TEXT_PREFIX: dict[Family, str] = {
    "diffusion_gemma": "model.decoder.",
    "gemma4": "model.language_model.",
}
VISION_PREFIX: dict[Family, str] = {"diffusion_gemma": "model.encoder.", "gemma4": "model."}
ENCODER_PREFIX = "model.encoder.language_model."
LAYERS = "layers."
LAYER_SCALAR = ".layer_scalar"
SELF_CONDITIONING = "self_conditioning."
# Buffers in the reference, whose parameter counts exclude them.
BUFFER_ENDINGS = (LAYER_SCALAR, ".std_bias", ".std_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Group, shape and target of one tensor name."""

    group: TensorGroup
    shape: TensorShape
    target: str  # text: the name in `Gemma`; twin and tied: the stored original; vision: itself


def skeleton(config: ModelConfig) -> Gemma:
    """Return the model on the meta device: names and shapes, no storage."""
    with torch.device("meta"):
        return Gemma(config)


def layer_of(parameter: str) -> int | None:
    """Return the layer index of a parameter; None outside the layers."""
    return int(parameter.split(".")[1]) if parameter.startswith(LAYERS) else None


def stored_names(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return all names of the released layout."""
    return _text(config) | _twins(config) | _vision(config)


def tied_names(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return names of copies of stored weights, which other writers may add."""
    text, prefix = _text(config), TEXT_PREFIX[config.family]
    embedding = prefix + "embed_tokens.weight"
    head = {
        "lm_head.weight": TensorSpec(group="tied", shape=text[embedding].shape, target=embedding)
    }
    if config.family != "diffusion_gemma":
        return head
    return head | {
        ENCODER_PREFIX + spec.target: TensorSpec(group="tied", shape=spec.shape, target=name)
        for name, spec in text.items()
        if not name.endswith(LAYER_SCALAR) and not spec.target.startswith(SELF_CONDITIONING)
    }


def _text(config: ModelConfig) -> dict[str, TensorSpec]:
    prefix = TEXT_PREFIX[config.family]
    return {
        prefix + name: TensorSpec(group="text", shape=tuple(weight.shape), target=name)
        for name, weight in skeleton(config).state_dict().items()
    }


def _twins(config: ModelConfig) -> dict[str, TensorSpec]:
    if config.family != "diffusion_gemma":
        return {}
    scalars = (f"layers.{layer}{LAYER_SCALAR}" for layer in range(config.num_hidden_layers))
    decoder = TEXT_PREFIX[config.family]
    return {
        ENCODER_PREFIX + name: TensorSpec(group="twin", shape=(1,), target=decoder + name)
        for name in scalars
    }


def vision_skeleton(config: ModelConfig) -> ImageEncoder | None:
    """Return the image tower on the meta device; None if the config has none."""
    if config.vision is None:
        return None
    with torch.device("meta"):
        return ImageEncoder(config.vision, config.hidden_size)


def _vision(config: ModelConfig) -> dict[str, TensorSpec]:
    tower, prefix = vision_skeleton(config), VISION_PREFIX[config.family]
    weights = {} if tower is None else tower.state_dict()
    return {
        prefix + name: TensorSpec(group="vision", shape=tuple(weight.shape), target=prefix + name)
        for name, weight in weights.items()
    }


def check_names(
    config: ModelConfig, stored: Mapping[str, StoredTensor], directory: Path
) -> dict[str, TensorSpec]:
    """Return the spec of each stored tensor; refuses missing, unknown and misshapen tensors."""
    table, tied = stored_names(config), tied_names(config)
    vision = {name for name, spec in table.items() if spec.group == "vision"}
    has_vision = not vision.isdisjoint(stored)
    known = table | tied
    specs = {name: known[name] for name in stored if name in known}
    findings = {
        "it lacks": [name for name in table if name not in stored and name not in vision],
        "of the image tower, which may only be absent as a whole, it lacks": [
            name for name in table if has_vision and name in vision and name not in stored
        ],
        "it has the unknown": [name for name in stored if name not in known],
        "other shapes have": [
            f"{name} ({list(stored[name].shape)}, not {list(spec.shape)})"
            for name, spec in specs.items()
            if spec.shape != stored[name].shape
        ],
    }
    if problems := describe(findings):
        raise CheckpointError(f"{directory} does not fit its config.json: {problems}")
    return specs


def check_copies(specs: Mapping[str, TensorSpec], tensors: Tensors, directory: Path) -> None:
    """Refuse copies of a weight that differ in any bit."""
    copies = {name: spec.target for name, spec in specs.items() if spec.group in ("twin", "tied")}
    unequal = [
        f"{name} differs from {original}"
        for name, original in copies.items()
        if not _are_same_bits(tensors[name], tensors[original])
    ]
    if unequal:
        raise CheckpointError(
            f"{directory}: {listing(unequal)}; each pair is one weight, and which is meant cannot "
            "be guessed"
        )


def _are_same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- names of GGUF tensors

FAMILY_OF: dict[str, Family] = {"diffusion-gemma": "diffusion_gemma", "gemma4": "gemma4"}
ARCHITECTURE_OF: dict[Family, str] = {family: name for name, family in FAMILY_OF.items()}
TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"  # a copy of token_embd, omitted by most files
ROPE_FREQS = "rope_freqs.weight"  # divisors of the angles on full layers: derived, not a weight
BLOCK = "blk."
GLOBAL_NAMES = {
    TOKEN_EMBD: "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "self_cond_pre_norm.weight": "self_conditioning.pre_norm.weight",
    "self_cond_gate.weight": "self_conditioning.gate_proj.weight",
    "self_cond_up.weight": "self_conditioning.up_proj.weight",
    "self_cond_down.weight": "self_conditioning.down_proj.weight",
}
GATE_UP_EXPERTS = "ffn_gate_up_exps.weight"
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    GATE_UP_EXPERTS: "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    "layer_output_scale.weight": "layer_scalar",
}
ENCODER_SCALE = "enc_layer_output_scale.weight"
# Accepted alternatives: an older converter's name, and separate gate and up experts.
ALIASES = {"self_cond_pre_norm.weight": "self_cond_norm.weight"}
SEPARATE_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
TO_GGUF = {released: name for name, released in (GLOBAL_NAMES | LAYER_NAMES).items()}


def gguf_name(released: str, config: ModelConfig) -> str:
    """Return the GGUF name of a text weight, or of the encoder's copy of a layer scalar."""
    if released.startswith(ENCODER_PREFIX):
        layer = released.removeprefix(ENCODER_PREFIX + LAYERS).removesuffix(LAYER_SCALAR)
        return f"{BLOCK}{layer}.{ENCODER_SCALE}"
    parameter = released.removeprefix(TEXT_PREFIX[config.family])
    if not parameter.startswith(LAYERS):
        return TO_GGUF[parameter]
    layer, inside = parameter.removeprefix(LAYERS).split(".", 1)
    return f"{BLOCK}{layer}.{TO_GGUF[inside]}"


def text_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Return the released names stored in a GGUF file: all but the image tower's."""
    specs = stored_names(config).items()
    return {name: spec for name, spec in specs if spec.group in ("text", "twin")}


def separate_names(name: str) -> tuple[str, ...]:
    """Return the names of separate gate and up stacks for the fused stack's name, or nothing."""
    if not name.endswith("." + GATE_UP_EXPERTS):
        return ()
    block = name.removesuffix(GATE_UP_EXPERTS)
    return tuple(block + ending for ending in SEPARATE_GATE_UP)
