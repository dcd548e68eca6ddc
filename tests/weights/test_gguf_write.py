"""Checkpoints written as GGUF: quantizers, types of each tensor, keys, and what is read back."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgemma.config import GENERATION_CONFIG, RELEASED, GenerationConfig, ModelConfig, load_config
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import CheckpointError, UsageError
from dgemma.quant.gguf_encode import BY_NAME, ENCODERS, encode
from dgemma.weights.gguf_checkpoint import open_gguf
from dgemma.weights.gguf_write import FILE_TYPES, export_gguf, gguf_shapes, size_label, tensor_types
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import load_model
from dgemma.weights.names import gguf_name, text_specs
from tests.taught import LONG, SHORT, ask
from tests.weights.gguf_tiny import (
    TINY_GGUF,
    tiny_keys,
    tiny_tensors,
    unpack,
    write_tiny,
)

# Relative error on normal weights that llama.cpp's own quantizers have.
PUBLISHED_RMS = {"Q8_0": 0.0054, "Q6_K": 0.0178, "Q5_0": 0.0427, "Q4_K": 0.0714, "Q4_0": 0.0860}


def decoded(weight: Tensor, name: str) -> Tensor:
    block = BY_NAME[name]
    return block.dequantize(encode(weight, block).flatten(), tuple(weight.shape))


# --- quantizers


@pytest.mark.parametrize("name", PUBLISHED_RMS)
def test_quantizers_are_as_exact_as_llama_cpp(name: str) -> None:
    weight = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0))
    error = (decoded(weight, name) - weight).norm() / weight.norm()
    assert error <= 1.02 * PUBLISHED_RMS[name]


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_0"])
def test_plain_quantizers_give_the_bytes_of_gguf_py(name: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    weight[3], weight[4], weight[5, :40] = 0.0, -2.5, 1e-30
    expected = gguf.quantize(weight.numpy(), GGMLQuantizationType[name])
    assert np.array_equal(encode(weight, BY_NAME[name]).numpy(), expected.view(np.uint8))


@pytest.mark.parametrize("name", ENCODERS)
def test_blocks_are_decoded_alike_by_gguf_py(name: str) -> None:
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(2)) * 0.02
    packed = encode(weight, BY_NAME[name]).numpy()
    views = {"F32": np.float32, "F16": np.float16}
    theirs = unpack(packed.view(views.get(name, np.uint8)), name)
    assert np.array_equal(decoded(weight, name).numpy(), theirs)


@pytest.mark.parametrize("name", ENCODERS)
def test_odd_blocks_stay_finite(name: str) -> None:
    """Zeros, constants, one sign, one outlier and tiny values."""
    rows = torch.zeros(7, 256)
    rows[1], rows[2], rows[3] = 3.0, -3.0, torch.linspace(0.5, 1, 256)
    rows[4], rows[5, 17], rows[6] = -rows[3], 100.0, 1e-7
    back = decoded(rows, name)
    assert back.isfinite().all() and torch.equal(back[0], rows[0])
    assert (back[1:5] - rows[1:5]).abs().max() < 0.13 * 3
    assert (back[5] - rows[5]).abs().max() < 1.7


def test_quantizing_twice_changes_nothing_in_plain_types() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
    for name in ("Q8_0", "Q5_0", "Q4_0"):
        once = decoded(weight, name)
        assert (decoded(once, name) - once).abs().max() < 1e-3


# --- types


def test_the_types_of_each_class_are_those_of_the_published_file() -> None:
    types = tensor_types(gguf_shapes(RELEASED), "Q4_K_M")
    classes: dict[str, Counter[str]] = {}
    for name, block in types.items():
        inside = name.split(".", 2)[2] if name.startswith("blk.") else name
        classes.setdefault(inside, Counter())[block.name] += 1
    quantized = {name: dict(kinds) for name, kinds in classes.items() if set(kinds) != {"F32"}}
    assert quantized == {
        "token_embd.weight": {"Q6_K": 1},
        "self_cond_gate.weight": {"Q4_K": 1},
        "self_cond_up.weight": {"Q4_K": 1},
        "self_cond_down.weight": {"Q5_0": 1},
        "attn_q.weight": {"Q4_K": 30},
        "attn_k.weight": {"Q4_K": 30},
        "attn_v.weight": {"Q6_K": 13, "Q4_K": 12},
        "attn_output.weight": {"Q4_K": 30},
        "ffn_gate.weight": {"Q4_K": 30},
        "ffn_up.weight": {"Q4_K": 30},
        "ffn_down.weight": {"Q8_0": 14, "Q5_0": 16},
        "ffn_gate_up_exps.weight": {"Q4_K": 30},
        "ffn_down_exps.weight": {"Q8_0": 14, "Q5_0": 16},
    }
    downs = [n for n in range(30) if types[f"blk.{n}.ffn_down_exps.weight"].name == "Q8_0"]
    assert downs == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    values = [n for n in range(30) if f"blk.{n}.attn_v.weight" in types]
    more = [n for n in values if types[f"blk.{n}.attn_v.weight"].name == "Q6_K"]
    assert more == [0, 1, 2, 6, 9, 13, 16, 20, 24, 25, 26, 27, 28]


@pytest.mark.parametrize(
    ("file_type", "counts", "published"),
    [
        ("BF16", {"BF16": 269}, 50_540_834_528),
        ("Q8_0", {"Q8_0": 269}, 26_878_831_328),
        ("Q6_K", {"Q6_K": 208, "Q8_0": 61}, 22_654_490_592),
        ("Q4_K_M", {"Q4_K": 194, "Q6_K": 14, "Q5_0": 33, "Q8_0": 28}, 16_806_810_336),
        ("Q4_0", {"Q4_0": 268, "Q6_K": 1}, 14_449_412_832),
        ("Q4_K", {"Q4_K": 207, "Q5_0": 61, "Q6_K": 1}, None),
        ("Q5_0", {"Q5_0": 268, "Q6_K": 1}, None),
    ],
)
def test_counts_and_sizes_are_those_of_published_files(
    file_type: str, counts: dict[str, int], published: int | None
) -> None:
    shapes = gguf_shapes(RELEASED)
    types = tensor_types(shapes, file_type)
    assert Counter(block.name for block in types.values()) == {**counts, "F32": 423}
    size = sum(types[n].row_bytes(torch.Size(shape).numel()) for n, shape in shapes.items())
    padding = sum(-types[n].row_bytes(torch.Size(s).numel()) % 32 for n, s in shapes.items())
    # Their data begin at byte 15,824,736: the tokenizer's pieces, mostly.
    assert published is None or size + padding == published - 15_824_736


def test_the_sibling_has_its_published_counts() -> None:
    sibling = replace(RELEASED, family="gemma4")
    types = tensor_types(gguf_shapes(sibling), "Q4_K_M")
    counts = {"F32": 392, "Q4_K": 192, "Q5_0": 32, "Q8_0": 28, "Q6_K": 14}
    assert Counter(block.name for block in types.values()) == counts


def test_rows_that_fit_no_block_are_halves() -> None:
    shapes = {"blk.0.attn_q.weight": (8, 48), "token_embd.weight": (9, 48)}
    types = tensor_types(shapes, "Q4_K_M")
    assert {block.name for block in types.values()} == {"F16"}
    with pytest.raises(UsageError, match="GGUF type 'Q3_K' is not known; use F32, F16, BF16"):
        tensor_types(shapes, "Q3_K")


# --- files


def test_the_size_label_is_that_of_the_published_file() -> None:
    assert size_label(RELEASED) == "128x2.6B"


def test_keys_and_tensors_are_read_by_gguf_py(checkpoint: Path, tmp_path: Path) -> None:
    export_gguf(checkpoint, tmp_path / "a.gguf", "F32")
    reader = GGUFReader(tmp_path / "a.gguf")
    config, model = load_config(checkpoint), load_model(checkpoint).model
    keys = [key for key in reader.fields if not key.startswith(("GGUF.", "dgemma."))]
    arch = "diffusion-gemma."
    assert keys == [
        *(f"general.{key}" for key in ("architecture", "type", "name", "size_label")),
        *(f"{arch}{key}" for key in ("block_count", "context_length", "embedding_length")),
        *(f"{arch}{key}" for key in ("feed_forward_length", "attention.head_count")),
        *(f"{arch}{key}" for key in ("attention.head_count_kv", "rope.freq_base")),
        *(f"{arch}{key}" for key in ("rope.freq_base_swa", "attention.layer_norm_rms_epsilon")),
        *(f"{arch}{key}" for key in ("expert_count", "expert_used_count")),
        *(f"{arch}attention.{key}" for key in ("key_length", "value_length")),
        *(f"{arch}{key}" for key in ("final_logit_softcapping", "attention.sliding_window")),
        f"{arch}attention.shared_kv_layers",
        f"{arch}embedding_length_per_layer_input",
        *(f"{arch}attention.{key}" for key in ("sliding_window_pattern", "key_length_swa")),
        *(f"{arch}{key}" for key in ("attention.value_length_swa", "expert_feed_forward_length")),
        *(f"{arch}{key}" for key in ("rope.dimension_count", "rope.dimension_count_swa")),
        f"{arch}attention.causal",
        "diffusion.canvas_length",
        *(f"diffusion.eb_{key}" for key in ("max_steps", "t_min", "t_max", "entropy_bound")),
        *(f"diffusion.eb_{key}" for key in ("stability_threshold", "confidence_threshold")),
        *(f"tokenizer.ggml.{key}" for key in ("model", "tokens", "scores", "token_type")),
        "tokenizer.ggml.merges",
        *(f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "unknown", "padding", "mask")),
        "tokenizer.chat_template",
        *(f"tokenizer.ggml.{key}" for key in ("add_space_prefix", "add_bos_token")),
        *(f"general.{key}" for key in ("quantization_version", "file_type")),
    ]
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    assert len(theirs) == len(text_specs(config)) + 1
    weights = model.state_dict()
    for name, spec in text_specs(config).items():
        if spec.group == "text":
            stored = theirs[gguf_name(name, config)].data.reshape(spec.shape)
            assert np.array_equal(stored, weights[spec.target].numpy()), name


def exported_config(directory: Path) -> ModelConfig:
    """Return what a file keeps of a config: all but images and the stored dtype."""
    config = replace(load_config(directory), vision=None, media_ids={}, dtype="float32")
    return replace(config, image_attention="sliding")


def test_presets_of_the_sampler_come_back(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "with-presets"
    shutil.copytree(checkpoint, source)
    raw = json.loads((source / GENERATION_CONFIG).read_text())
    raw["presets"] = {"fast": {"max_denoising_steps": 3, "entropy_bound": 2.5}}
    (source / GENERATION_CONFIG).write_text(json.dumps(raw))
    export_gguf(source, tmp_path / "a.gguf", "F32")
    back = open_gguf(tmp_path / "a.gguf").generation
    assert back == load_model(source).generation
    assert back.with_preset("fast").entropy_bound == 2.5


@pytest.mark.parametrize("file_type", ["F32", "BF16", "Q8_0", "Q4_K_M"])
def test_a_checkpoint_comes_back(checkpoint: Path, tmp_path: Path, file_type: str) -> None:
    export_gguf(checkpoint, tmp_path / "a.gguf", file_type)
    back, source = open_gguf(tmp_path / "a.gguf"), load_model(checkpoint)
    assert back.config == exported_config(checkpoint) and back.notes == ()
    assert back.generation == source.generation != GenerationConfig()
    tokenizer, theirs = back.tokenizer(), Engine.load(checkpoint).tokenizer
    assert tokenizer.control_ids == theirs.control_ids
    for text in ("the thought,\n\n  call: 中中 é\U0001f600 ▁", "<|turn>user"):
        assert tokenizer.encode_control(text) == theirs.encode_control(text)
    for name, weight in load_model(tmp_path / "a.gguf").model.state_dict().items():
        exact = source.model.state_dict()[name]
        scale = exact.abs().max().item()
        near = {"F32": 0.0, "BF16": 2**-8, "Q8_0": 0.01, "Q4_K_M": 0.1}[file_type]
        assert (weight - exact).abs().max().item() <= near * scale, name


@pytest.mark.parametrize("file_type", ["F32", "BF16", "Q8_0"])
def test_exported_answers_are_the_same(checkpoint: Path, tmp_path: Path, file_type: str) -> None:
    export_gguf(checkpoint, tmp_path / "a.gguf", file_type)
    engines = (
        Engine.load(checkpoint, dtype="float32"),
        Engine.load(tmp_path / "a.gguf", dtype="float32"),
    )
    for question in (SHORT, LONG):
        first, second = (
            engine.generate(ask(question), SamplingParams(seed=1)) for engine in engines
        )
        assert first.text == second.text and first.finish == second.finish


def test_nano_comes_back_with_the_same_answer(tmp_path: Path) -> None:
    path = tmp_path / "nano.gguf"
    export_gguf(NANO_DIRECTORY, path, "F32")
    assert open_gguf(path).config == exported_config(NANO_DIRECTORY)
    params = SamplingParams(seed=3, max_tokens=24, canvas_length=32)
    answers = [
        Engine.load(model, dtype="float32", quant="none").generate("What is 2 + 3?", params)
        for model in (NANO_DIRECTORY, path)
    ]
    assert answers[0].text == answers[1].text and answers[0].steps == answers[1].steps


def test_a_file_becomes_another(tmp_path: Path) -> None:
    """As llama-quantize does: from a file of floats to a quantized one."""
    tensors = tiny_tensors(TINY_GGUF, "BF16")
    source = write_tiny(tmp_path / "tiny-bf16.gguf", tiny_keys(), tensors)
    seen: list[tuple[int, int]] = []
    path = tmp_path / "tiny-q4.gguf"
    export_gguf(source, path, "Q4_K_M", on_tensor=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (75, 75)
    back = open_gguf(path)
    assert back.config == TINY_GGUF
    assert back.type_counts() == {"Q4_K": 21, "Q5_0": 5, "Q6_K": 2, "Q8_0": 2, "F32": 45}
    assert not list(tmp_path.glob(".saving-*"))


# --- refusals


def test_weights_that_a_type_cannot_hold_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for value, message in ((float("nan"), "holds NaN or infinity"), (1e6, "and F16 reaches to")):
        copy = shutil.copytree(checkpoint, tmp_path / f"copy-{value}")
        weights = load_file(copy / "model.safetensors")
        weights["model.decoder.embed_tokens.weight"][3, 5] = value
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=f"token_embd.weight.* {message}"):
            export_gguf(copy, tmp_path / "a.gguf", "F16")
        assert not (tmp_path / "a.gguf").exists() and not list(tmp_path.glob(".saving-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out.gguf"], "say its type with --gguf: F32, F16"),
        (["out.gguf", "--gguf", "Q3_K_M"], "--gguf Q3_K_M is not known; use F32"),
        (["out", "--gguf", "BF16"], r"out should end in \.gguf"),
        (["out.gguf", "--gguf", "BF16", "--dtype", "float16"], "--gguf BF16 says the type"),
        (["there.gguf", "--gguf", "BF16"], r"there\.gguf exists; overwrite it"),
    ],
)
def test_wrong_calls_are_refused(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    from dgemma.cli import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.gguf").write_bytes(b"x")
    with pytest.raises(UsageError, match=message):
        app(["export", str(checkpoint), *arguments], standalone_mode=False)


def test_the_command_writes_a_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dgemma.cli import app
    from dgemma.cli.app import GGUF_TYPES

    assert tuple(FILE_TYPES) == GGUF_TYPES
    path = tmp_path / "new" / "a.gguf"
    app(["export", str(checkpoint), str(path), "--gguf", "Q8_0"], standalone_mode=False)
    assert capsys.readouterr().out.strip() == str(path)
    assert open_gguf(path).file.metadata["general.file_type"] == 7


def damaged(change: Callable[[dict[str, object]], None], source: Path, directory: Path) -> Path:
    """Copy a checkpoint with another tokenizer.json."""
    copy = shutil.copytree(source, directory / "copy")
    raw = json.loads((copy / "tokenizer.json").read_text("utf-8"))
    change(raw)
    (copy / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(normalizer=None), "its normalizer is another"),
        (lambda raw: raw["model"].update(byte_fallback=False), "no BPE with byte fallback"),
        (lambda raw: raw["added_tokens"][5].update(special=False), "that are not special"),
        (lambda raw: raw["model"]["vocab"].update(zzzz=5000), "its ids have gaps"),
        (lambda raw: raw.pop("model"), "cannot read"),
    ],
)
def test_tokenizers_that_the_format_cannot_hold_are_refused(
    checkpoint: Path,
    tmp_path: Path,
    change: Callable[[dict[str, object]], None],
    message: str,
) -> None:
    with pytest.raises(CheckpointError, match=message):
        export_gguf(damaged(change, checkpoint, tmp_path), tmp_path / "a.gguf", "BF16")
