"""Add a trained image tower to the package's model, or replace the one it has.

    python -m recipes.nano.pictures.ship OUT/state.safetensors [--into dgemma/models/nano]

The tower's projection is aimed anew: the embeddings that it was trained towards are mapped to those
of the model that it joins. The shards of the language model stay as they are, but for the count in
their names; the tower is one shard more. `config.json` gets the tower's architecture and causal
attention among soft tokens, as in training, `processor_config.json` its budget. The result is
loaded and checked before it takes the place of the old one.

K tokens that soft tokens stand for, D width of the language model, C of the tower.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgemma.config import VisionConfig
from dgemma.config.vision_config import vision_to_json
from dgemma.errors import CheckpointError
from dgemma.images import RESCALE
from dgemma.model.gemma import Gemma
from dgemma.weights.files import (
    INT8_INDEX,
    INT8_ITEM_BYTES,
    SHA256,
    file_digest,
    read_header,
    verify_digests,
)
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.int_layout import to_int_layout
from dgemma.weights.load import has_tower, load_model
from dgemma.weights.names import VISION_PREFIX
from recipes.nano.pictures.tower import CONFIG, ENCODER, IDS, ROWS

MAX_TOWER_BYTES = 4_000_000
SHARD = "int8-{:05}-of-{:05}.safetensors"
BICUBIC = 3


def ship(state: Path, into: Path = NANO_DIRECTORY, vision: VisionConfig = CONFIG) -> int:
    """Write the tower into a model's directory; returns the bytes of its shard."""
    with tempfile.TemporaryDirectory(prefix=".nano-", dir=into.parent) as temporary:
        tower = Path(temporary) / "tower.safetensors"
        size = write_tower(state, load_model(into).model, tower)
        directory = Path(temporary) / into.name
        shutil.copytree(into, directory)
        _add_shard(directory, tower)
        _edit(directory / "config.json", lambda raw: _configure(raw, vision))
        processor = directory / "processor_config.json"
        processor.write_text(json.dumps(processor_config(vision), indent=2) + "\n")
        verify_digests(directory)
        if not has_tower(load_model(directory, verify=True)):
            raise CheckpointError(f"{state} has a projection of zeros; train it first")
        shutil.rmtree(into)
        directory.rename(into)
    return size


def write_tower(state: Path, model: Gemma, out: Path) -> int:
    """Write the tower of a training's state, aimed at a model's embeddings, in the integer layout.

    Returns the file's size.
    """
    tensors = load_file(state)
    with torch.no_grad():
        new_KD = model.embed(tensors[IDS])
    old_KD = tensors[ROWS]
    weights = {
        VISION_PREFIX["diffusion_gemma"] + name.removeprefix(ENCODER): x
        for name, x in tensors.items()
        if name.startswith(ENCODER)
    }
    for name, weight in weights.items():
        if name.endswith("embedding_projection.weight"):
            weights[name] = aimed(weight, old_KD, new_KD)
    save_file(to_int_layout(weights), out)
    size = out.stat().st_size
    if size > MAX_TOWER_BYTES:
        raise CheckpointError(f"{state} gives {size:,} bytes; at most {MAX_TOWER_BYTES:,} may ship")
    return size


def aimed(projection_DC: Tensor, old_KD: Tensor, new_KD: Tensor) -> Tensor:
    """Return a projection that gives new embeddings where it gave old ones.

    Of all linear maps that do so, the one nearest to the identity is applied.
    """
    old_DK, new_DK = old_KD.double().T, new_KD.double().T
    change_DD = (new_DK - old_DK) @ torch.linalg.pinv(old_DK)
    return (projection_DC.double() + change_DD @ projection_DC.double()).float()


def _add_shard(directory: Path, tower: Path) -> None:
    """Copy the tower as the last shard; shards of an earlier one are dropped."""
    path = directory / INT8_INDEX
    index = json.loads(path.read_text())
    prefixes = tuple(f"{VISION_PREFIX['diffusion_gemma']}{x}" for x in ("vision_", "embed_vision"))
    text = {n: f for n, f in index["weight_map"].items() if not n.startswith(prefixes)}
    names = sorted(set(text.values()))
    for name in set(index["weight_map"].values()) - set(names):
        (directory / name).unlink()
    renamed = {old: SHARD.format(i, len(names) + 1) for i, old in enumerate(names, start=1)}
    for old, new in renamed.items():
        (directory / old).rename(directory / new)
    last = SHARD.format(len(names) + 1, len(names) + 1)
    shutil.copyfile(tower, directory / last)
    found = read_header(directory / last, INT8_ITEM_BYTES)
    files = [*renamed.values(), last]
    headers = [read_header(directory / name, INT8_ITEM_BYTES) for name in files]
    weight_map = {n: renamed[f] for n, f in text.items()} | dict.fromkeys(found, last)
    index["weight_map"] = dict(sorted(weight_map.items()))
    index["metadata"][SHA256] = {name: file_digest(directory / name) for name in files}
    index["metadata"]["total_size"] = sum(t.num_bytes for h in headers for t in h.values())
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _configure(raw: dict[str, Any], vision: VisionConfig) -> dict[str, Any]:
    text = {**raw["text_config"], "use_bidirectional_attention": None}
    return {**raw, "text_config": text, "vision_config": vision_to_json(vision)}


def processor_config(vision: VisionConfig) -> dict[str, Any]:
    """Return the released processor's settings with a tower's budget and sizes."""
    image = {
        "do_convert_rgb": True,
        "do_normalize": False,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.0, 0.0, 0.0],
        "image_processor_type": "Gemma4ImageProcessor",
        "image_seq_length": vision.default_output_length,
        "image_std": [1.0, 1.0, 1.0],
        "max_soft_tokens": vision.default_output_length,
        "patch_size": vision.patch_size,
        "pooling_kernel_size": vision.pooling_kernel_size,
        "resample": BICUBIC,
        "rescale_factor": RESCALE,
    }
    return {
        "image_processor": image,
        "image_seq_length": vision.default_output_length,
        "processor_class": "Gemma4Processor",
    }


def _edit(path: Path, change: Any) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("--into", type=Path, default=NANO_DIRECTORY)
    options = parser.parse_args()
    size = ship(options.state, options.into)
    total = sum(path.stat().st_size for path in options.into.iterdir())
    print(f"{options.into}: {total:,} bytes, of them {size:,} of the tower")


if __name__ == "__main__":
    main()
