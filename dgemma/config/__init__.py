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
    MODES,
    SLIDING,
    WHOLE_MODES,
    AttentionShape,
    Family,
    GenerationConfig,
    LayerType,
    LongReply,
    Mode,
    ModelConfig,
)
from dgemma.config.vision_config import IMAGE_BUDGETS, VisionConfig

__all__ = [
    "FULL",
    "GENERATION_CONFIG",
    "IMAGE_BUDGETS",
    "MODES",
    "SLIDING",
    "WHOLE_MODES",
    "AttentionShape",
    "Family",
    "GenerationConfig",
    "LayerType",
    "LongReply",
    "Mode",
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
