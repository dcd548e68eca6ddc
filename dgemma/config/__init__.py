"""What a checkpoint says about itself: `config.json` and `generation_config.json`, read strictly.

This package knows no tensors and imports only the standard library.
"""

from dgemma.config.read import (
    load_config,
    load_config_file,
    load_generation_config,
    read_config,
    read_generation_config,
)
from dgemma.config.shape import (
    FULL,
    SLIDING,
    AttentionShape,
    Family,
    GenerationConfig,
    LayerType,
    LongReply,
    ModelConfig,
)
from dgemma.config.write import config_to_json, generation_config_to_json

__all__ = [
    "FULL",
    "SLIDING",
    "AttentionShape",
    "Family",
    "GenerationConfig",
    "LayerType",
    "LongReply",
    "ModelConfig",
    "config_to_json",
    "generation_config_to_json",
    "load_config",
    "load_config_file",
    "load_generation_config",
    "read_config",
    "read_generation_config",
]
