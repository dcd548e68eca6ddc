"""Towers in checkpoints: loading, saving, dtypes, quantized forms, and the command line."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma.cli import main
from dgemma.config import GenerationConfig
from dgemma.engine import Engine, SamplingParams
from dgemma.engine.image_features import image_features
from dgemma.server.limits import IMAGE_BODY, Limits, default_max_body
from dgemma.weights.load import Checkpoint, has_tower, load_model, load_tower
from dgemma.weights.quant_schemes import SCHEMES
from dgemma.weights.quantize import quantize_checkpoint
from dgemma.weights.save import export, save_checkpoint
from tests.images.tiny_tower import (
    LARGE,
    NANO,
    encoder_of,
    noise_image,
    reference_of,
    seeing_engine,
    seeing_weights,
    seen,
)
from tests.weights.sample import CONFIG

PARAMS = SamplingParams(seed=1, max_tokens=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a random tower, and nano's tokenizer and template."""
    model, encoder = seeing_weights()
    vision = {f"model.encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    generation = GenerationConfig(max_denoising_steps=1, max_new_tokens=8, stop_ids=(1,))
    path = tmp_path_factory.mktemp("seeing") / "model"
    checkpoint = Checkpoint(model=model, generation=generation, vision=vision)
    save_checkpoint(checkpoint, path, tokenizer_from=NANO)
    return path


def test_a_tower_from_disk_answers_as_the_one_that_was_saved(directory: Path) -> None:
    engine, other = Engine.load(directory, device="cpu", dtype="float32"), seeing_engine()
    assert engine.images is not None and not engine.images.is_loaded
    messages = [seen(noise_image(1), "What is it?")]
    answers = [e.generate(e.prompt(messages), PARAMS).ids for e in (engine, other)]
    assert answers[0] == answers[1] and engine.images.is_loaded


@pytest.mark.parametrize(
    ("dtype", "tower"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float32)],
)
def test_the_tower_never_runs_in_float16(directory: Path, dtype: str, tower: torch.dtype) -> None:
    checkpoint = load_model(directory, dtype=getattr(torch, dtype))
    features = image_features(checkpoint)
    assert features is not None
    assert features.features(noise_image(1).prepare(LARGE)).dtype == tower


def test_a_tower_of_zeros_is_none(directory: Path, tmp_path: Path) -> None:
    """`export` writes one where other programs demand it."""
    checkpoint = load_model(directory)
    assert has_tower(checkpoint) and default_max_body(str(directory)) == IMAGE_BODY
    save_checkpoint(replace(checkpoint, vision={}), tmp_path / "text", tokenizer_from=NANO)
    assert image_features(load_model(tmp_path / "text")) is None
    export(tmp_path / "text", tmp_path / "whole")
    blank = load_model(tmp_path / "whole")
    assert blank.vision.keys() == checkpoint.vision.keys() and not has_tower(blank)
    assert default_max_body(str(tmp_path / "text")) == Limits().max_body
    assert image_features(blank) is None


def test_the_tower_of_transformers_loads_and_is_saved_again(tmp_path: Path) -> None:
    config = replace(CONFIG, vision=LARGE)
    reference = reference_of(config)
    for name, buffer in reference.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(1.0)
    reference.save_pretrained(tmp_path / "theirs")
    checkpoint = load_model(tmp_path / "theirs")
    tower = load_tower(checkpoint, torch.device("cpu"), torch.float32)
    expected = encoder_of(config, reference).state_dict()
    assert tower.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in tower.state_dict().items())
    save_checkpoint(checkpoint, tmp_path / "ours")
    again = load_model(tmp_path / "ours").vision
    assert again.keys() == checkpoint.vision.keys()
    assert all(torch.equal(tensor, checkpoint.vision[n]) for n, tensor in again.items())


def test_quantized_checkpoints_keep_the_tower_in_16_bits(directory: Path, tmp_path: Path) -> None:
    source = tmp_path / "bf16"
    export(directory, source, dtype=torch.bfloat16)
    quantize_checkpoint(source, tmp_path / "fp8", SCHEMES["fp8"])
    before, after = load_model(source).vision, load_model(tmp_path / "fp8").vision
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process; returns its code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dgemma", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return call


def test_generate_shows_pictures_to_the_model(directory: Path, tmp_path: Path, run: Any) -> None:
    paths = []
    for seed in (1, 2):
        paths.append(tmp_path / f"{seed}.png")
        source = noise_image(seed, (300, 240)).source
        assert isinstance(source, bytes)
        paths[-1].write_bytes(source)
    options = ("--model", directory, "--dtype", "float32", "--seed", 1, "--json")
    texts = []
    for shown in ([paths[0]], [paths[1]], paths):
        images = [argument for path in shown for argument in ("--image", path)]
        call = ("generate", "What is it?", *images, "--image-tokens", 70, *options)
        code, out, err = run(*call)
        assert code == 0, err
        report = json.loads(out)
        texts.append(report["text"])
        assert 60 * len(shown) <= report["image_tokens"] <= 70 * len(shown)
        assert "1.png was shrunk from 300x240" in err or paths[0] not in shown
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--image", "nothing.png"], "the picture nothing.png cannot be read: No such file"),
        (["--image-tokens", "70"], "--image-tokens is given without --image"),
        (["--image", __file__, "--image-tokens", "71"], "image tokens are 71; they must be one of"),
        (["--image", __file__, "--plain"], "--plain has no chat turns"),
        (["--image", __file__], "is not a JPEG, PNG, WEBP or GIF file"),
    ],
)
def test_pictures_that_cannot_be_shown_are_refused_by_a_sentence(
    options: list[str], sentence: str, run: Any
) -> None:
    code, _, err = run("generate", "What is it?", *options)
    assert code == 2 and sentence in err
