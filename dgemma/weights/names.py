"""The one table of tensor names: what a checkpoint of a given config holds, and in which shape.

    text    one weight of `Gemma`, under the released prefix; shapes come from the model itself
    twin    the encoder's copy of a decoder's layer scalar; the released files store both
    vision  the image tower and its projection; a checkpoint has all of it or none
    tied    a copy the released files leave out but other writers may store

Knows names and shapes; it opens no files and touches no data.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dgemma.config import Family, ModelConfig
from dgemma.errors import ConfigError
from dgemma.model.gemma import Gemma

Group = Literal["text", "twin", "vision", "tied"]
Shape = tuple[int, ...]

TEXT_PREFIX: dict[Family, str] = {
    "diffusion_gemma": "model.decoder.",
    "gemma4": "model.language_model.",
}
VISION_PREFIX: dict[Family, str] = {"diffusion_gemma": "model.encoder.", "gemma4": "model."}
ENCODER_PREFIX = "model.encoder.language_model."
LAYERS = "layers."
LAYER_SCALAR = ".layer_scalar"
SELF_CONDITIONING = "self_conditioning."
# The reference keeps these as buffers, and its parameter counts leave them out.
BUFFER_ENDINGS = (LAYER_SCALAR, ".std_bias", ".std_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name of a checkpoint."""

    group: Group
    shape: Shape
    of: str  # text: the name in `Gemma`; twin and tied: the stored name it repeats; vision: itself


def skeleton(config: ModelConfig) -> Gemma:
    """The model without storage: names, shapes and a place to put weights."""
    with torch.device("meta"):
        return Gemma(config)


def layer_of(parameter: str) -> int | None:
    """The number of the layer that a parameter is in; None if it is in none."""
    return int(parameter.split(".")[1]) if parameter.startswith(LAYERS) else None


def stored_names(config: ModelConfig) -> dict[str, Entry]:
    """Every name of the released layout."""
    return _text(config) | _twins(config) | _vision(config)


def tied_names(config: ModelConfig) -> dict[str, Entry]:
    """Names that may appear although they repeat a stored weight."""
    text, prefix = _text(config), TEXT_PREFIX[config.family]
    embedding = prefix + "embed_tokens.weight"
    head = {"lm_head.weight": Entry(group="tied", shape=text[embedding].shape, of=embedding)}
    if config.family != "diffusion_gemma":
        return head
    return head | {
        ENCODER_PREFIX + entry.of: Entry(group="tied", shape=entry.shape, of=name)
        for name, entry in text.items()
        if not name.endswith(LAYER_SCALAR) and not entry.of.startswith(SELF_CONDITIONING)
    }


def _text(config: ModelConfig) -> dict[str, Entry]:
    prefix = TEXT_PREFIX[config.family]
    return {
        prefix + name: Entry(group="text", shape=tuple(weight.shape), of=name)
        for name, weight in skeleton(config).state_dict().items()
    }


def _twins(config: ModelConfig) -> dict[str, Entry]:
    if config.family != "diffusion_gemma":
        return {}
    scalars = (f"layers.{layer}{LAYER_SCALAR}" for layer in range(config.num_hidden_layers))
    decoder = TEXT_PREFIX[config.family]
    return {
        ENCODER_PREFIX + name: Entry(group="twin", shape=(1,), of=decoder + name)
        for name in scalars
    }


def _vision(config: ModelConfig) -> dict[str, Entry]:
    if config.vision is None:
        return {}
    shapes = _vision_shapes(config.vision)
    width = _size(config.vision, "hidden_size")
    shapes["embed_vision.embedding_projection.weight"] = (config.hidden_size, width)
    prefix = VISION_PREFIX[config.family]
    return {
        prefix + name: Entry(group="vision", shape=shape, of=prefix + name)
        for name, shape in shapes.items()
    }


def _vision_shapes(vision: Mapping[str, Any]) -> dict[str, Shape]:
    tower, width = "vision_tower.", _size(vision, "hidden_size")
    patch, positions = _size(vision, "patch_size"), _size(vision, "position_embedding_size")
    shapes: dict[str, Shape] = {
        tower + "patch_embedder.input_proj.weight": (width, 3 * patch**2),
        tower + "patch_embedder.position_embedding_table": (2, positions, width),
    }
    for layer in range(_size(vision, "num_hidden_layers")):
        inside = f"{tower}encoder.layers.{layer}."
        shapes |= {inside + name: shape for name, shape in _vision_layer(vision).items()}
    if vision.get("standardize", False):
        shapes |= {tower + "std_bias": (width,), tower + "std_scale": (width,)}
    return shapes


def _vision_layer(vision: Mapping[str, Any]) -> dict[str, Shape]:
    width, inner = _size(vision, "hidden_size"), _size(vision, "intermediate_size")
    head_dim = _size(vision, "head_dim")
    query = _size(vision, "num_attention_heads") * head_dim
    key = _size(vision, "num_key_value_heads") * head_dim
    linear: dict[str, Shape] = {
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (key, width),
        "self_attn.v_proj": (key, width),
        "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = "input post_attention pre_feedforward post_feedforward".split()
    shapes = {f"{name}.linear.weight": shape for name, shape in linear.items()}
    shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    return shapes | {f"{name}_layernorm.weight": (width,) for name in norms}


def _size(vision: Mapping[str, Any], key: str) -> int:
    value = vision.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"vision_config: {key} must be a positive whole number, not {value!r}")
    return value
