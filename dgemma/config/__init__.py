"""Model and generation configs of a checkpoint. Imports only the standard library."""

from dgemma.config.json_files import (
    GENERATION_CONFIG,
    config_to_json,
    generation_config_to_json,
    load_config,
    load_config_file,
    load_generation_config,
    read_config,
    read_generation_config,
)
from dgemma.config.model_config import (
    FULL,
    SLIDING,
    AttentionShape,
    Family,
    GenerationConfig,
    LayerType,
    LongReply,
    ModelConfig,
)
from dgemma.config.vision_config import IMAGE_BUDGETS, VisionConfig

__all__ = [
    "FULL",
    "GENERATION_CONFIG",
    "IMAGE_BUDGETS",
    "SLIDING",
    "AttentionShape",
    "Family",
    "GenerationConfig",
    "LayerType",
    "LongReply",
    "ModelConfig",
    "VisionConfig",
    "config_to_json",
    "generation_config_to_json",
    "load_config",
    "load_config_file",
    "load_generation_config",
    "read_config",
    "read_generation_config",
]
