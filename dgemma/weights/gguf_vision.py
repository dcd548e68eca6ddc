"""The image tower of a GGUF model, which is stored in a separate file.

Either an `mmproj` file, as llama.cpp's converter writes for Gemma 4 (architecture `clip`, projector
`gemma4v`), or released safetensors: the shard that holds the tower, or a directory. An mmproj file
has other tensor names, and the patch embedding as a convolution. Every key and tensor is checked,
as in a model file.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dgemma.config import ModelConfig, VisionConfig, load_config
from dgemma.config.vision_config import RELEASED_TOWER
from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.weights.files import GGUF_SUFFIX, describe, read_header, read_headers
from dgemma.weights.gguf import GGUFFile
from dgemma.weights.gguf_config import GGUFKeys
from dgemma.weights.load import Checkpoint
from dgemma.weights.names import VISION_PREFIX, stored_names
from dgemma.weights.safetensors_io import MappedTensors

logger = logging.getLogger("dgemma")

AUTO, NONE = "auto", "none"
SAFETENSORS_SUFFIX = ".safetensors"
ARCHITECTURE, PROJECTOR = "clip", "gemma4v"
SIZES = {
    "vision.embedding_length": "hidden_size",
    "vision.feed_forward_length": "intermediate_size",
    "vision.block_count": "num_hidden_layers",
    "vision.attention.head_count": "num_attention_heads",
    "vision.patch_size": "patch_size",
}
POOLING, EPS = "vision.projector.scale_factor", "vision.attention.layer_norm_epsilon"
WIDTH = "vision.projection_dim"
# GGUFKeys with one supported value each; absent means that value.
FIXED: dict[str, object] = {
    "has_vision_encoder": True,
    "has_audio_encoder": False,
    "use_silu": False,
    "vision.image_mean": [0.0, 0.0, 0.0],
    "vision.image_std": [1.0, 1.0, 1.0],
}
# Ignored: the architecture fixes the activation, and requests set picture sizes.
IGNORED = ("use_gelu", "vision.image_size", "vision.image_min_pixels", "vision.image_max_pixels")
PROJECTOR_KEYS = ("projector_type", "vision.projector_type")
PARTS = re.compile(r"^model\.(encoder\.)?(vision_tower|embed_vision)\.")
PATCHES, POSITIONS, BIAS = "v.patch_embd", "v.position_embd", "v.std_bias"
# Names without `.weight`, which buffers do not have.
GLOBAL_NAMES = {
    PATCHES: "vision_tower.patch_embedder.input_proj.weight",
    POSITIONS: "vision_tower.patch_embedder.position_embedding_table",
    BIAS: "vision_tower.std_bias",
    "v.std_scale": "vision_tower.std_scale",
    "mm.input_projection": "embed_vision.embedding_projection.weight",
}
LAYER_NAMES = {
    "ln1": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.linear.weight",
    "attn_k": "self_attn.k_proj.linear.weight",
    "attn_v": "self_attn.v_proj.linear.weight",
    "attn_out": "self_attn.o_proj.linear.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "attn_post_norm": "post_attention_layernorm.weight",
    "ln2": "pre_feedforward_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.linear.weight",
    "ffn_up": "mlp.up_proj.linear.weight",
    "ffn_down": "mlp.down_proj.linear.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
}


class Tower(NamedTuple):
    config: VisionConfig
    weights: Mapping[str, Tensor]  # by released name


def find_tower(model: Path, choice: str) -> Path | None:
    """Return the files of a tower: those given, or the only mmproj file next to the model."""
    if choice == NONE:
        return None
    if model.is_dir():
        if choice != AUTO:
            raise UsageError(
                f"--vision {choice} is for GGUF models; the checkpoint {model} has its own image "
                "tower or none"
            )
        return None
    if choice != AUTO:
        path = Path(choice).expanduser()
        is_known = path.is_dir() or path.suffix.lower() in (GGUF_SUFFIX, SAFETENSORS_SUFFIX)
        if not path.exists() or not is_known:
            what = "holds no image tower" if path.exists() else "does not exist"
            raise UsageError(
                f"--vision {choice} {what}; give an mmproj file (.gguf), the release's safetensors "
                "file that has it, or a checkpoint directory"
            )
        return path
    beside = sorted(model.parent.glob(f"*mmproj*{GGUF_SUFFIX}"))
    if len(beside) > 1:
        names = ", ".join(path.name for path in beside)
        raise UsageError(
            f"beside {model} there are {names}; name one by --vision, or --vision none"
        )
    return beside[0] if beside else None


def open_tower(path: Path, config: ModelConfig) -> Tower:
    """Open a tower for a language model; refuses the tower of another model."""
    logger.warning("the image tower is that of %s", path)
    if path.suffix.lower() == GGUF_SUFFIX:
        return _from_mmproj(GGUFFile(path), config)
    return _from_release(path, config)


def with_tower(checkpoint: Checkpoint, tower: Tower) -> Checkpoint:
    """Give a GGUF model its image tower."""
    model = checkpoint.model
    model.config = replace(model.config, vision=tower.config)
    return replace(checkpoint, vision=tower.weights)


# --- released files


def _from_release(path: Path, config: ModelConfig) -> Tower:
    directory = path if path.is_dir() else path.parent
    vision: VisionConfig | None = RELEASED_TOWER  # default for a shard, which has no config
    if path.is_dir() or (directory / "config.json").is_file():
        vision = load_config(directory).vision
    if vision is None:
        raise CheckpointError(
            f"{directory / 'config.json'} has no vision_config, so no image tower"
        )
    headers = read_headers(path) if path.is_dir() else read_header(path)
    stored = {name: tensor for name, tensor in headers.items() if PARTS.search(name)}
    _check(path, vision, config, {name: tensor.shape for name, tensor in stored.items()})
    tensors = MappedTensors(stored)
    return Tower(vision, {name: tensors[name] for name in stored})


def _check(
    path: Path, vision: VisionConfig, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse missing, unknown and misshapen weights, by their released names."""
    specs = stored_names(replace(config, vision=vision)).items()
    wanted = {name: spec.shape for name, spec in specs if spec.group == "vision"}
    findings = {
        "it lacks": [name for name in wanted if name not in shapes],
        "it has the unknown": [name for name in shapes if name not in wanted],
        "other shapes have": [
            f"{name} ({list(shape)}, not {list(wanted[name])})"
            for name, shape in shapes.items()
            if shape != wanted.get(name, shape)
        ],
    }
    if problems := describe(findings):
        raise CheckpointError(f"{path} is not an image tower for this model: {problems}")


# --- mmproj files


class MmprojTensors(Mapping[str, Tensor]):
    """The weights of a file by released name, in float32, dequantized on access."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file, self.patches = file, prefix + GLOBAL_NAMES[PATCHES]
        self.names = {_released_name(stored, prefix): stored for stored in file.tensors}

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> Tensor:
        weight = self.file.dequantize(self.names[name])
        if not self._is_convolution(name):
            return weight
        # In the release the colour channel comes last.
        return weight.permute(0, 2, 3, 1).reshape(len(weight), -1)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.file.tensors[self.names[name]].shape
        return (shape[0], prod(shape[1:])) if self._is_convolution(name) else shape

    def _is_convolution(self, name: str) -> bool:
        return name == self.patches and len(self.file.tensors[self.names[name]].shape) == 4


def _from_mmproj(file: GGUFFile, config: ModelConfig) -> Tower:
    try:
        vision = _mmproj_config(file, config)
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    weights = MmprojTensors(file, VISION_PREFIX[config.family])
    _check(file.path, vision, config, {name: weights.shape(name) for name in weights})
    return Tower(vision, weights)


def _mmproj_config(file: GGUFFile, config: ModelConfig) -> VisionConfig:
    name = file.value("general.architecture", str)
    if name != ARCHITECTURE:
        raise CheckpointError(
            f"{file.path} is a {name!r} model, not an image tower; --vision takes an mmproj file"
        )
    keys = GGUFKeys(file)
    kinds = [keys.of_model(key, str) for key in PROJECTOR_KEYS if keys.has(keys.prefix + key)]
    if kinds != [PROJECTOR]:
        stated = " and ".join(map(repr, kinds)) or "none"
        raise CheckpointError(
            f"{file.path} has the projector {stated}; this build runs {PROJECTOR!r}, Gemma "
            "4's, and --vision none leaves it out"
        )
    for key, value in FIXED.items():
        keys.used.add(keys.prefix + key)
        stated = file.metadata.get(keys.prefix + key, value)
        if stated != value:
            raise CheckpointError(
                f"{file.path}: {keys.prefix}{key} is {stated!r}; this build needs {value!r}"
            )
    keys.used |= {keys.prefix + key for key in IGNORED}
    width = keys.size(WIDTH)
    if width != config.hidden_size:
        raise CheckpointError(
            f"{file.path} projects to a width of {width}, and the model has {config.hidden_size}; "
            "it belongs to another model, and --vision none leaves it out"
        )
    sizes = {field: keys.size(key) for key, field in SIZES.items()}
    if keys.has(keys.prefix + POOLING):
        sizes["pooling_kernel_size"] = keys.size(POOLING)
    vision = VisionConfig(
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        head_dim=_length(file, "v.blk.0.attn_q_norm", -1),
        position_embedding_size=_length(file, POSITIONS, -2),
        rms_norm_eps=keys.of_model(EPS, float),
        standardize=BIAS in file.tensors,
    )
    keys.leftover_notes()  # refuses unknown keys
    return vision


def _length(file: GGUFFile, name: str, dimension: int) -> int:
    """Read a size without a key from the shape of a tensor."""
    tensor = file.tensors.get(f"{name}.weight") or file.tensors.get(name)
    if tensor is None or len(tensor.shape) < -dimension:
        raise CheckpointError(f"{file.path} has no {name}.weight, or of another shape")
    return tensor.shape[dimension]


def _released_name(stored: str, prefix: str) -> str:
    """Return the released name; an unknown name is returned unchanged and refused later."""
    name = stored.removesuffix(".weight")
    if name in GLOBAL_NAMES:
        return prefix + GLOBAL_NAMES[name]
    kind, _, rest = name.partition(".blk.")
    layer, _, inside = rest.partition(".")
    if kind != "v" or not layer.isdecimal() or inside not in LAYER_NAMES:
        return stored
    return f"{prefix}vision_tower.encoder.layers.{layer}.{LAYER_NAMES[inside]}"


def tower_bytes(path: Path) -> int:
    """Return the size of a tower in 16 bits, from its file headers."""
    if path.suffix.lower() == GGUF_SUFFIX:
        return sum(2 * prod(tensor.shape) for tensor in GGUFFile(path).tensors.values())
    headers = read_headers(path) if path.is_dir() else read_header(path)
    return sum(2 * prod(headers[name].shape) for name in headers if PARTS.search(name))
