"""Image towers of GGUF models: mmproj files as gguf-py names them, and released safetensors."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dgemma.config import GenerationConfig, VisionConfig
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import DgemmaError
from dgemma.server.limits import IMAGE_BODY, Limits, default_max_body
from dgemma.weights.gguf_vision import RELEASED_TOWER, find_tower, tower_bytes
from dgemma.weights.gguf_write import export_gguf
from dgemma.weights.load import Checkpoint
from dgemma.weights.safetensors_io import write_safetensors
from dgemma.weights.save import save_checkpoint
from tests.images.tiny_tower import LARGE, NANO, noise_image, seeing_engine, seeing_weights, seen
from tests.weights.sample import finish_gguf

PARAMS = SamplingParams(seed=1, max_tokens=8)
Keys = dict[str, tuple[str, Any]]
Tensors = dict[str, NDArray[Any]]


@cache
def name_table(num_layers: int) -> Any:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, num_layers)


def gguf_py_name(released: str, num_layers: int) -> str:
    """Return the name that the reference converter's table gives a weight of the tower."""
    name = "model." + released.removesuffix(".weight")
    name = name.replace("model.vision_tower.encoder.layers.", "vision_model.model.layers.")
    if ".mlp." in name:
        name = name.removesuffix(".linear")
    found = name_table(num_layers).get_name(name)
    assert found is not None, name
    return found + (".weight" if not found.startswith("v.std_") else "")


def mmproj_parts(vision: VisionConfig = LARGE) -> tuple[Keys, Tensors]:
    """Return keys and tensors as the converter writes them."""
    model, encoder = seeing_weights()
    sizes = {
        "projection_dim": model.config.hidden_size,
        "patch_size": vision.patch_size,
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "block_count": vision.num_hidden_layers,
        "attention.head_count": vision.num_attention_heads,
        "image_size": 224,
        "projector.scale_factor": vision.pooling_kernel_size,
    }
    keys: Keys = {
        "general.type": ("string", "mmproj"),
        "clip.has_vision_encoder": ("bool", True),
        "clip.projector_type": ("string", "gemma4v"),
        **{f"clip.vision.{key}": ("uint32", value) for key, value in sizes.items()},
        "clip.vision.attention.layer_norm_epsilon": ("float32", vision.rms_norm_eps),
        "clip.vision.image_mean": ("array", [0.0, 0.0, 0.0]),
        "clip.vision.image_std": ("array", [1.0, 1.0, 1.0]),
        "clip.use_gelu": ("bool", True),
    }
    tensors: Tensors = {}
    for name, weight in encoder.state_dict().items():
        stored = gguf_py_name(name, vision.num_hidden_layers)
        values = weight.numpy()
        if stored == "v.patch_embd.weight":
            size = vision.patch_size
            values = values.reshape(-1, size, size, 3).transpose(0, 3, 1, 2)
        tensors[stored] = np.ascontiguousarray(values)
    return keys, tensors


def write_mmproj(path: Path, keys: Keys, tensors: Tensors, architecture: str = "clip") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, (kind, value) in keys.items():
        getattr(writer, f"add_{kind}")(key, value)
    finish_gguf(writer, tensors)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint that has a tower, and a GGUF file of it, which has none."""
    place = tmp_path_factory.mktemp("seeing")
    model, encoder = seeing_weights()
    vision = {f"model.encoder.{name}": weight for name, weight in encoder.state_dict().items()}
    generation = GenerationConfig(max_denoising_steps=1, max_new_tokens=8, stop_ids=(1,))
    checkpoint = Checkpoint(model=model, generation=generation, vision=vision)
    save_checkpoint(checkpoint, place / "whole", tokenizer_from=NANO)
    export_gguf(place / "whole", place / "model.gguf", "F32")
    return place


@pytest.fixture
def file(models: Path, tmp_path: Path) -> Path:
    """The GGUF file, alone in a directory."""
    return Path(shutil.copy(models / "model.gguf", tmp_path / "model.gguf"))


def load(path: Path, vision: object = "auto") -> Engine:
    return Engine.load(path, device="cpu", dtype="float32", vision=str(vision))


def answer(engine: Engine) -> tuple[int, ...]:
    return engine.generate(engine.prompt([seen(noise_image(1), "What is it?")]), PARAMS).ids


def features(engine: Engine) -> torch.Tensor:
    assert engine.images is not None
    return engine.images.features(noise_image(1).prepare(LARGE))


def test_an_mmproj_file_beside_the_model_is_its_tower(
    models: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DgemmaError, match="has no image tower"):
        answer(load(file))
    tower = write_mmproj(file.with_name("mmproj-F32.gguf"), *mmproj_parts())
    ours, theirs = load(file), load(models / "whole")
    assert f"the image tower is that of {tower}" in caplog.text
    assert torch.equal(features(ours), features(theirs))
    assert answer(ours) == answer(theirs) == answer(seeing_engine())
    assert default_max_body(str(file)) == IMAGE_BODY
    assert default_max_body(str(file), "none") == Limits().max_body
    assert load(file, "none").images is None


def test_half_precision_files_give_the_features_of_their_weights(models: Path, file: Path) -> None:
    keys, tensors = mmproj_parts()
    halves = {n: x.astype(np.float16) if x.ndim > 1 else x for n, x in tensors.items()}
    tower = write_mmproj(file.with_name("tower.gguf"), keys, halves)
    got, want = features(load(file, tower)), features(load(models / "whole"))
    assert 0 < (got - want).norm() < 2e-3 * want.norm()


def test_the_released_shard_or_directory_is_a_tower_too(
    models: Path, file: Path, tmp_path: Path
) -> None:
    _, encoder = seeing_weights()
    weights = {f"model.encoder.{name}": weight for name, weight in encoder.state_dict().items()}
    shard = tmp_path / "model-00011-of-00011.safetensors"
    write_safetensors(shard, {**weights, "model.decoder.norm.weight": torch.ones(3)}, None)
    # Without a config it would be the released tower.
    with pytest.raises(DgemmaError, match="is not an image tower for this model: it lacks"):
        load(file, shard)
    shutil.copy(models / "whole" / "config.json", tmp_path)
    want = features(load(models / "whole"))
    for vision in (shard, models / "whole"):
        assert torch.equal(features(load(file, vision)), want)
        assert tower_bytes(vision) == 2 * sum(weight.numel() for weight in weights.values())
    write_safetensors(shard, dict(list(weights.items())[1:]), None)
    with pytest.raises(DgemmaError, match="it lacks"):
        load(file, shard)


def test_the_released_tower_has_its_356_tensors() -> None:
    names = [gguf_py_name(name, 27) for name in released_names()]
    assert len(set(names)) == 356
    patterns = {re.sub(r"blk\.\d+", "blk.N", name) for name in names}
    assert len(patterns) == 18 and "v.blk.N.attn_post_norm.weight" in patterns


def released_names() -> list[str]:
    from dgemma.model.vision import ImageEncoder

    with torch.device("meta"):
        return list(ImageEncoder(RELEASED_TOWER, 2816).state_dict())


def keyed(key: str, kind: str, value: Any) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        keys[f"clip.{key}"] = (kind, value)

    return change


def lacking(name: str) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        keys.pop(name, None)
        tensors.pop(name, None)

    return change


def another(name: str, *shape: int) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        tensors[name] = np.ones(shape, np.float32)

    return change


REFUSALS: dict[str, tuple[Callable[[Keys, Tensors], None], str]] = {
    "another projector": (
        keyed("projector_type", "string", "gemma3"),
        "has the projector 'gemma3'; this build runs 'gemma4v'",
    ),
    "no projector": (lacking("clip.projector_type"), "has the projector none"),
    "another width": (
        keyed("vision.projection_dim", "uint32", 96),
        "projects to a width of 96, and the model has",
    ),
    "another activation": (keyed("use_silu", "bool", True), "clip.use_silu is True"),
    "sound": (keyed("has_audio_encoder", "bool", True), "clip.has_audio_encoder is True"),
    "other pixels": (
        keyed("vision.image_std", "array", [0.5, 0.5, 0.5]),
        r"clip.vision.image_std is \[0.5, 0.5, 0.5\]",
    ),
    "an unknown key": (keyed("vision.n_wa_pattern", "uint32", 4), "does not know clip.vision.n_wa"),
    "a missing key": (
        lacking("clip.vision.block_count"),
        "clip.vision.block_count should be a int",
    ),
    "a missing tensor": (
        lacking("v.blk.1.ln2.weight"),
        "it lacks model.encoder.vision_tower.encoder.layers.1.pre_feedforward_layernorm.weight",
    ),
    "no position table": (lacking("v.position_embd.weight"), "has no v.position_embd.weight"),
    "half of the standardization": (lacking("v.std_scale"), "it lacks .*std_scale"),
    "an unknown tensor": (another("v.blk.0.ls1.weight", 16), "the unknown v.blk.0.ls1.weight"),
    "another shape": (another("v.blk.0.ln1.weight", 8), r"other shapes have .*\(\[8\], not \[16\]"),
    "more layers": (keyed("vision.block_count", "uint32", 3), "it lacks .*layers.2"),
    "no width": (keyed("vision.embedding_length", "uint32", 0), "hidden_size must be a positive"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_towers_that_do_not_fit_are_refused_by_name(file: Path, kind: str) -> None:
    change, message = REFUSALS[kind]
    keys, tensors = mmproj_parts()
    change(keys, tensors)
    tower = write_mmproj(file.with_name("mmproj.gguf"), keys, tensors)
    with pytest.raises(DgemmaError, match=message):
        load(file, tower)


def test_what_names_no_tower_is_refused(models: Path, file: Path, tmp_path: Path) -> None:
    keys, tensors = mmproj_parts()
    for name in ("mmproj-F16.gguf", "mmproj-BF16.gguf"):
        write_mmproj(tmp_path / name, keys, tensors)
    (tmp_path / "notes.txt").write_text("none")
    cases: list[tuple[Path, object, str]] = [
        (file, "auto", "mmproj-BF16.gguf, mmproj-F16.gguf; name one by --vision"),
        (file, tmp_path / "gone.gguf", "does not exist"),
        (file, file, "is a 'diffusion-gemma' model, not an image tower"),
        (file, tmp_path / "notes.txt", "holds no image tower"),
        (models / "whole", tmp_path / "mmproj-F16.gguf", "is for GGUF models"),
        (tmp_path / "mmproj-F16.gguf", "none", "this one by --vision"),
    ]
    for model, vision, message in cases:
        with pytest.raises(DgemmaError, match=message):
            load(model, vision)
    assert find_tower(models / "whole", "auto") is None
