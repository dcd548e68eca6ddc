"""The released checkpoint at its true size, in files of holes that take no room on the disk."""

import json
import shutil
import sys
from math import prod
from pathlib import Path

import pytest
import torch

from dgemma.config import load_config
from dgemma.errors import CheckpointError
from dgemma.weights.load import load_model
from dgemma.weights.names import stored_names
from tests.weights.sample import SHARED

SHARD_BYTES = 5_000_000_000
TOTAL_BYTES = 51_647_562_456

pytestmark = [
    pytest.mark.skipif(
        not SHARED.is_dir(), reason="the released config.json is not beside this checkout"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files and /proc"),
]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven shards with all names of the released index; every weight is zero."""
    directory = tmp_path_factory.mktemp("released")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(SHARED / name, directory / name)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, entry in stored_names(load_config(directory)).items():
        num_bytes = 2 * prod(entry.shape)
        if num_bytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = entry.shape
        room -= num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_sparse(directory / file_name, shard)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": TOTAL_BYTES}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, position = {}, 0
    for name, shape in shapes.items():
        stop = position + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def test_the_released_size_loads_without_reading_or_copying_it(released: Path) -> None:
    shards = list(released.glob("*.safetensors"))
    assert len(shards) == 11
    assert sum(path.stat().st_size for path in shards) > TOTAL_BYTES
    before, seen = resident_bytes(), []
    checkpoint = load_model(released, on_tensor=lambda done, total: seen.append((done, total)))
    assert resident_bytes() - before < 200_000_000
    tensors = [*checkpoint.model.state_dict().values(), *checkpoint.vision.values()]
    assert len(tensors) + 30 == 1047
    assert 2 * (sum(tensor.numel() for tensor in tensors) + 30) == TOTAL_BYTES
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert seen[-1][0] == seen[-1][1] == 2 * (25_250_986_812 - 30)


def test_the_last_byte_of_the_released_size_is_missed(released: Path) -> None:
    path = sorted(released.glob("*.safetensors"))[6]
    size = path.stat().st_size
    try:
        with path.open("r+b") as file:
            file.truncate(size - 1)
        with pytest.raises(CheckpointError, match=f"{path.name} is cut short"):
            load_model(released)
    finally:
        with path.open("r+b") as file:
            file.truncate(size)
