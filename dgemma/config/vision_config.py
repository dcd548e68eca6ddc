"""The image tower of a checkpoint and the budget of its pictures, read strictly.

The tower is Gemma 4's: patches of a picture, a bidirectional stack, and a mean over square blocks
of patches that become the soft tokens of the language model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dgemma.errors import ConfigError

# Soft tokens of a picture, at most: the budgets of the released image processor.
IMAGE_BUDGETS = (70, 140, 280, 560, 1120)
VIDEO_FRAME_BUDGET = 70
MAX_SIZE = 1 << 20  # of a width or a count, far above any model's: more is damage
MODEL_TYPE = "gemma4_vision"
ACTIVATION = "gelu_pytorch_tanh"

# Keys with exactly one supported value each; a missing one has it.
REQUIRED_VISION: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE,),
    "hidden_activation": (ACTIVATION,),
    "attention_bias": (False, None),
    "use_clipped_linears": (False,),
    "is_encoder_decoder": (False,),
}
IGNORED_VISION: dict[str, str] = {
    "_name_or_path": "bookkeeping of another library",
    "architectures": "the class is always the same",
    "attention_dropout": "zero at inference, and our training uses none",
    "chunk_size_feed_forward": "bookkeeping of another library",
    "dtype": "the top-level dtype counts",
    "global_head_dim": "every layer of the tower is alike",
    "id2label": "bookkeeping of another library",
    "initializer_range": "only used to draw random weights",
    "label2id": "bookkeeping of another library",
    "max_position_embeddings": "position_embedding_size counts",
    "output_attentions": "output format of another library",
    "output_hidden_states": "output format of another library",
    "problem_type": "bookkeeping of another library",
    "return_dict": "output format of another library",
}
# What another library writes into every config, as the released file has it.
BOOKKEEPING: dict[str, Any] = {
    "_name_or_path": "",
    "architectures": None,
    "chunk_size_feed_forward": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "max_position_embeddings": 131072,
    "output_attentions": False,
    "output_hidden_states": False,
    "problem_type": None,
    "return_dict": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The architecture of an image tower. Field names are those of the released file."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    patch_size: int = 16  # pixels
    pooling_kernel_size: int = 3  # patches of a soft token, in each direction
    position_embedding_size: int = 10_240  # patches of a picture, in each direction, at most
    default_output_length: int = 280  # soft tokens of a picture, where a request names none
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    standardize: bool = False  # a bias and a scale after pooling

    def __post_init__(self) -> None:
        for size in (f.name for f in fields(self) if f.type is int):
            value = getattr(self, size)
            if type(value) is not int or not 0 < value <= MAX_SIZE:
                raise ConfigError(
                    f"vision_config: {size} must be a positive whole number, at most {MAX_SIZE:,}, "
                    f"not {value!r}"
                )
        for name, most in (("rms_norm_eps", 1.0), ("rope_theta", 1e12)):
            number = getattr(self, name)
            if type(number) not in (int, float) or not 0 < number <= most:
                raise ConfigError(
                    f"vision_config: {name} must be a number above 0, at most {most:g}, not "
                    f"{number!r}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"vision_config: {self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key/value heads"
            )
        if self.head_dim % 4:
            raise ConfigError(
                f"vision_config: head_dim is {self.head_dim}; it must be a multiple of 4, since "
                "half of it rotates by the column and half by the row"
            )
        if self.default_output_length not in IMAGE_BUDGETS:
            raise ConfigError(
                f"vision_config: default_output_length is {self.default_output_length}; it must "
                f"be one of {', '.join(map(str, IMAGE_BUDGETS))}"
            )
        if type(self.standardize) is not bool:
            raise ConfigError("vision_config: standardize must be true or false")

    @property
    def cell(self) -> int:
        """Pixels of a soft token, in each direction."""
        return self.patch_size * self.pooling_kernel_size

    @property
    def patch_width(self) -> int:
        """Numbers of a patch: rows, columns, then red, green and blue."""
        return 3 * self.patch_size**2


# Of google/diffusiongemma-26B-A4B-it.
RELEASED_TOWER = VisionConfig(
    hidden_size=1152,
    intermediate_size=4304,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=72,
    standardize=True,
)


SIZES = tuple(f.name for f in fields(VisionConfig) if f.name != "rope_theta")
VISION_KEYS = (
    frozenset(SIZES) | {"rope_parameters"} | REQUIRED_VISION.keys() | IGNORED_VISION.keys()
)


def read_vision(raw: Mapping[str, Any], source: str) -> VisionConfig:
    """Read `vision_config`, whose keys are known to be `VISION_KEYS`."""
    for key, allowed in REQUIRED_VISION.items():
        if key in raw and raw[key] not in allowed:
            raise ConfigError(f"{source}: {key} is {raw[key]!r}; this build needs {allowed[0]!r}")
    needed = "hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim".split()
    for key in (*needed, "num_key_value_heads", "patch_size"):
        if raw.get(key) is None:
            raise ConfigError(f"{source}: {key} is missing")
    values = {key: raw[key] for key in SIZES if raw.get(key) is not None}
    rope = raw.get("rope_parameters") or {}
    # The reference calls the same rotation by either name.
    if not isinstance(rope, Mapping) or rope.get("rope_type", "default") not in (
        "default",
        "axial",
    ):
        raise ConfigError(f"{source}: rope_parameters are {rope!r}; this build needs 'default'")
    if unknown := sorted(rope.keys() - {"rope_type", "rope_theta"}):
        raise ConfigError(f"{source}: rope_parameters has the unknown {', '.join(unknown)}")
    return VisionConfig(**values, rope_theta=rope.get("rope_theta", 100.0))


def vision_to_json(vision: VisionConfig) -> dict[str, Any]:
    """Return a tower as `vision_config` spells it."""
    return {
        **BOOKKEEPING,
        "model_type": MODEL_TYPE,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "global_head_dim": vision.head_dim,
        "hidden_activation": ACTIVATION,
        "use_clipped_linears": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": vision.rope_theta},
        **{key: getattr(vision, key) for key in SIZES},
    }
