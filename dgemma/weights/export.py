"""A checkpoint for other programs: in the released layout, and with every tensor they insist on.

The classes of transformers and mlx-vlm have an image tower and want its tensors. Where a config
describes one and the checkpoint has none, as with `nano`, zeros are written in its place: such a
tower sees nothing, and the text model is whole.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.weights.adapter import load_adapter, merge
from dgemma.weights.load import load_model
from dgemma.weights.names import stored_names
from dgemma.weights.save import save_checkpoint


def export(
    source: Path,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    adapter: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint again in the released layout; an adapter is merged into its weights."""
    lora = None if adapter is None else load_adapter(adapter)
    checkpoint = load_model(source, dtype=dtype)
    if lora is not None:
        merge(checkpoint.model, lora)
    vision = checkpoint.vision or blank_vision(checkpoint.config)
    whole = replace(checkpoint, vision=vision)
    save_checkpoint(whole, directory, tokenizer_from=source, overwrite=overwrite)


def blank_vision(config: ModelConfig) -> Mapping[str, Tensor]:
    """The image tower of a config, all zeros; nothing where it has none."""
    entries = stored_names(config).items()
    return {name: torch.zeros(entry.shape) for name, entry in entries if entry.group == "vision"}
