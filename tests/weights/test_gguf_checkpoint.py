"""GGUF files as models: logits, names, configs, tokenizer, template and splits."""

import json
import struct
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dgemma.config import ModelConfig, load_config, load_generation_config
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import CheckpointError, UsageError
from dgemma.quant.gguf import BlockExperts, BlockLinear
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.template import make_environment
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights import gguf_checkpoint
from dgemma.weights.gguf import GGUFFile
from dgemma.weights.gguf_checkpoint import open_gguf
from dgemma.weights.gguf_tokenizer import (
    RELEASED_TEMPLATE,
    TokenizerKeys,
    digest,
    is_released,
    tokenizer_json,
    tokenizer_keys,
)
from dgemma.weights.gguf_write import (
    MetadataValue,
    gguf_metadata,
    gguf_shapes,
    header_bytes,
    tensor_types,
)
from dgemma.weights.hub import ModelOptions, download, find_checkpoint
from dgemma.weights.inference import plan_load
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.names import gguf_name, skeleton, text_specs
from dgemma.weights.save import export, save_checkpoint
from tests.text.small import TEMPLATE, small_tokenizer
from tests.weights.gguf_tiny import (
    TINY_GGUF,
    Keys,
    Tensors,
    tiny_keys,
    tiny_tensors,
    unpack,
    write_tiny,
)
from tests.weights.sample import SHARED, our_logits

SIBLING_GGUF = replace(TINY_GGUF, family="gemma4", canvas_length=256)
ARCH = "diffusion-gemma."
NEAR = 1e-5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Q4_K_M file of gguf-py; not to be changed."""
    return write_tiny(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_keys(), tiny_tensors())


def released_weights(config: ModelConfig, tensors: Tensors) -> dict[str, Tensor]:
    """Return the dequantized weights by their names in the model, by gguf-py."""
    return {
        spec.target: torch.from_numpy(unpack(*tensors[gguf_name(name, config)])).view(spec.shape)
        for name, spec in text_specs(config).items()
        if spec.group == "text"
    }


def save_dequantized(config: ModelConfig, tensors: Tensors, directory: Path) -> Path:
    """Write the weights that a file stands for as safetensors."""
    model = skeleton(config)
    model.load_state_dict(released_weights(config, tensors), assign=True)
    save_checkpoint(Checkpoint(model=model), directory)
    return directory


def logits(path: Path, **options: Any) -> Tensor:
    model = load_model(path, **options).model
    ids_T = torch.arange(40) * 7 % model.config.vocab_size
    canvas_L = torch.arange(model.config.canvas_length) * 5 % model.config.vocab_size
    return our_logits(model, ids_T, canvas_L if model.config.can_denoise else None)


def difference(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().max().item()


# --- weights


@pytest.mark.parametrize("config", [TINY_GGUF, SIBLING_GGUF], ids=lambda config: config.family)
def test_a_file_gives_the_logits_of_its_dequantized_weights(
    config: ModelConfig, tmp_path: Path
) -> None:
    tensors = tiny_tensors(config)
    types = Counter(type_name for _, type_name in tensors.values())
    assert types.keys() == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}, "fallback types should occur"
    path = write_tiny(tmp_path / "a.gguf", tiny_keys(config), tensors)
    expected = logits(save_dequantized(config, tensors, tmp_path / "plain"))
    assert expected.std() > 0.3
    assert difference(logits(path), expected) < NEAR
    assert difference(logits(path, quant="stored"), expected) < NEAR


def test_blocks_stay_in_the_file_and_dense_weights_by_the_budget(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(tiny)
    model = load_model(tiny, quant="stored").model
    for layer in model.layers:
        assert isinstance(layer.experts, BlockExperts)
        assert type(layer.self_attn.q_proj) is torch.nn.Linear
    monkeypatch.setattr(gguf_checkpoint, "EXTRA_BYTES", 0)
    model = load_model(tiny, quant="stored").model
    assert model.embed_tokens.weight.shape == (TINY_GGUF.vocab_size, 256)
    linears = [module for module in model.modules() if isinstance(module, BlockLinear)]
    assert len(linears) == 7 * 2 + 6 + 3  # full layers have no value projection
    assert type(model.layers[0].router.proj) is torch.nn.Linear
    assert difference(logits(tiny, quant="stored"), expected) < NEAR
    extra = gguf_checkpoint.dequantized_layers(
        {name: s.target for name, s in text_specs(TINY_GGUF).items()},
        open_gguf(tiny).tensors,
        torch.float32,
    )
    assert extra == set()


def test_an_expert_without_tokens_is_not_read(tmp_path: Path) -> None:
    tensors = open_gguf(write_tiny(tmp_path / "a.gguf", tiny_keys(), tiny_tensors())).tensors
    prefix = "model.decoder.layers.0.experts."
    experts = BlockExperts(
        tensors.blocks(prefix + "gate_up_proj"), tensors.blocks(prefix + "down_proj")
    )
    x_TD, topk_weights_TK = torch.randn(3, 256), torch.full((3, 2), 0.5)
    topk_ids_TK = torch.tensor([[0, 2], [2, 0], [0, 2]])
    expected = experts(x_TD, topk_ids_TK, topk_weights_TK)
    for blocks in (experts.gate_up_blocks, experts.down_blocks):
        for index in (1, 3):
            blocks[index].tensors[0].packed.fill_(255)  # NaN scales, in private pages
    assert torch.equal(experts(x_TD, topk_ids_TK, topk_weights_TK), expected)
    topk_ids_TK[0, 0] = 1
    assert not experts(x_TD, topk_ids_TK, topk_weights_TK).isfinite().all()


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_a_file_is_quantized_like_the_weights_it_stands_for(
    tiny: Path, tmp_path: Path, quant: Any
) -> None:
    plain = save_dequantized(TINY_GGUF, tiny_tensors(), tmp_path / "plain")
    assert difference(logits(tiny, quant=quant), logits(plain, quant=quant)) < NEAR


def test_nvfp4_takes_a_file_of_its_widths(tmp_path: Path) -> None:
    config = replace(TINY_GGUF, moe_intermediate_size=128)
    tensors = tiny_tensors(config)
    path = write_tiny(tmp_path / "a.gguf", tiny_keys(config), tensors)
    plain = save_dequantized(config, tensors, tmp_path / "plain")
    assert difference(logits(path, quant="nvfp4"), logits(plain, quant="nvfp4")) < NEAR


def test_weights_take_the_dtype(tiny: Path) -> None:
    model = load_model(tiny, dtype=torch.bfloat16).model
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    checkpoint = open_gguf(tiny)
    name = "model.decoder.layers.1.experts.gate_up_proj"
    assert torch.equal(
        model.layers[1].experts.gate_up_proj, checkpoint.tensors[name].to(torch.bfloat16)
    )


@pytest.mark.parametrize("file_type", ["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_0", "Q4_0"])
def test_files_of_other_types_are_read(tmp_path: Path, file_type: str) -> None:
    tensors = tiny_tensors(TINY_GGUF, file_type)
    path = write_tiny(tmp_path / "a.gguf", tiny_keys(), tensors)
    weights = released_weights(TINY_GGUF, tensors)
    for name, weight in load_model(path).model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_other_spellings_of_the_same_model_are_read(tiny: Path, tmp_path: Path) -> None:
    tensors, keys = tiny_tensors(), tiny_keys()
    for name in [name for name in tensors if name.endswith("gate_up_exps.weight")]:
        packed, type_name = tensors.pop(name)
        gate, up = np.split(packed, 2, axis=1)
        block = name.removesuffix("gate_up_exps.weight")
        tensors[f"{block}gate_exps.weight"] = (np.ascontiguousarray(gate), type_name)
        tensors[f"{block}up_exps.weight"] = (np.ascontiguousarray(up), type_name)
    tensors["self_cond_norm.weight"] = tensors.pop("self_cond_pre_norm.weight")
    for layer in range(3):
        del tensors[f"blk.{layer}.enc_layer_output_scale.weight"]
    tensors["output.weight"] = tensors["token_embd.weight"]
    del keys["diffusion.canvas_length"]
    path = write_tiny(tmp_path / "a.gguf", keys, tensors)
    notes = " / ".join(open_gguf(path).notes)
    assert "no diffusion.canvas_length: canvases of 256 tokens" in notes
    assert "no layer scalars of the encoder" in notes
    assert open_gguf(path).config == replace(TINY_GGUF, canvas_length=256)
    expected = our_logits(load_model(tiny).model, torch.arange(20), torch.arange(16))
    for quant in ("none", "stored"):
        model = load_model(path, quant=quant).model  # type: ignore[arg-type]
        found = our_logits(model, torch.arange(20), torch.arange(16))
        assert difference(found, expected) < NEAR


# --- configs


def test_the_config_is_that_of_the_metadata(tiny: Path, tmp_path: Path) -> None:
    assert open_gguf(tiny).config == TINY_GGUF
    path = write_tiny(tmp_path / "a.gguf", tiny_keys(SIBLING_GGUF), tiny_tensors(SIBLING_GGUF))
    assert open_gguf(path).config == SIBLING_GGUF
    assert open_gguf(path).notes == ()


def test_stop_ids_are_found_by_their_text_and_defaults_are_said(tiny: Path) -> None:
    checkpoint = open_gguf(tiny)
    control = small_tokenizer().control_ids
    stops = [control[name] for name in ("<eos>", "<turn|>", "<|tool_response>")]
    assert checkpoint.generation.stop_ids == tuple(stops)
    assert checkpoint.generation.entropy_bound == 0.1
    (note,) = checkpoint.notes
    assert note == (
        "no sampler defaults (diffusion.eb_*): the released ones are used, 48 steps, temperature "
        "0.8 to 0.4, entropy bound 0.1"
    )


def test_sampler_keys_are_read_and_unknown_keys_named(tmp_path: Path) -> None:
    keys = tiny_keys() | {
        "diffusion.eb_max_steps": ("uint32", 24),
        "diffusion.eb_t_min": ("float32", 0.35),
        "diffusion.eb_t_max": ("float32", 0.7),
        "diffusion.eb_entropy_bound": ("float32", 0.2),
        "diffusion.eb_stability_threshold": ("uint32", 2),
        "somebody.else": ("uint32", 1),
        "quantize.imatrix.file": ("string", "texts"),
    }
    checkpoint = open_gguf(write_tiny(tmp_path / "a.gguf", keys, tiny_tensors()))
    generation = checkpoint.generation
    assert (generation.max_denoising_steps, generation.t_min, generation.t_max) == (24, 0.35, 0.7)
    assert (generation.entropy_bound, generation.stability_threshold) == (0.2, 2)
    first, second = checkpoint.notes
    assert "no sampler defaults (diffusion.eb_confidence_threshold)" in first
    assert second == "ignored keys: somebody.else"


# --- tokenizer and template


def test_the_tokenizer_is_rebuilt(tiny: Path) -> None:
    tokenizer, small = open_gguf(tiny).tokenizer(), small_tokenizer()
    assert tokenizer.vocab_size == small.vocab_size
    assert tokenizer.control_ids == small.control_ids
    for text in ("the thought,\n\n  call: 中中 é\U0001f600 ▁", "<|turn>user <s>", ""):
        assert tokenizer.encode(text) == small.encode(text)
        assert tokenizer.encode_control(text) == small.encode_control(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_marks_on_plain_pieces_are_ignored(tmp_path: Path) -> None:
    keys = tiny_keys()
    tokens, types = keys["tokenizer.ggml.tokens"][1], keys["tokenizer.ggml.token_type"][1]
    index = tokens.index("Ж")
    tokens = [*tokens[:index], "<s>", *tokens[index + 1 :]]
    merges = [m for m in keys["tokenizer.ggml.merges"][1] if "Ж" not in m]
    keys |= {
        "tokenizer.ggml.tokens": ("array", tokens),
        "tokenizer.ggml.merges": ("array", merges),
        "tokenizer.ggml.token_type": ("array", [*types[:index], 3, *types[index + 1 :]]),
    }
    tokenizer = open_gguf(write_tiny(tmp_path / "a.gguf", keys, tiny_tensors())).tokenizer()
    assert "<s>" not in tokenizer.control_ids


@pytest.mark.skipif(
    not (SHARED / "tokenizer.json").is_file(), reason="the released tokenizer is not here"
)
def test_the_released_tokenizer_is_rebuilt_byte_for_byte() -> None:
    stored = tokenizer_keys(SHARED)
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": stored.tokens,
        "tokenizer.ggml.token_type": stored.types,
        "tokenizer.ggml.merges": stored.merges,
    }
    assert Counter(stored.types) == {1: 262144 - 24 - 256, 3: 17, 4: 7, 6: 256}
    assert is_released(metadata) and not is_released({})
    assert tokenizer_json(metadata, SHARED).encode() == (SHARED / "tokenizer.json").read_bytes()


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "minimum": 1, "nullable": True},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "names": {"type": "array", "items": {"type": "string"}},
        "kinds": {"type": "array", "items": {"type": ["string", "null"], "x": {"k": 1}}},
        "rows": {
            "type": "array",
            "items": {"type": "object", "properties": {"z": {"type": "string"}}, "required": ["z"]},
        },
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}},
            "required": ["lat"],
        },
        "free": {"type": "object", "additionalProperties": False, "description": "any"},
        "bare": {"description": "no type"},
    },
    "required": ["city"],
}
CALL = {
    "id": "1",
    "type": "function",
    "function": {
        "name": "weather",
        "arguments": {"city": "Rome", "x": [1, True, None, {"a": "b"}]},
    },
}
ANSWER = {"role": "tool", "tool_call_id": "1", "content": "sun"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hi \n"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": [{"type": "text", "text": " a "}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}],
        },
        {
            "role": "assistant",
            "content": "<|channel>thought\nx<channel|>d",
            "reasoning_content": "y",
        },
        {"role": "user", "content": "e"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [CALL], "reasoning_content": "t"},
        ANSWER,
    ],
    [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [CALL, {**CALL, "id": "2"}]},
        ANSWER,
        {**ANSWER, "tool_call_id": "9", "name": "other"},
        {"role": "assistant", "content": "c", "reasoning_content": "t"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
]


@pytest.mark.skipif(
    not (SHARED / "chat_template.jinja").is_file(), reason="the released template is not here"
)
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("has_tools", [False, True])
def test_our_template_writes_what_the_released_one_does(thinking: bool, has_tools: bool) -> None:
    described = {"name": "weather", "description": "Get it", "parameters": WEATHER}
    plain = {"name": "f", "description": "", "parameters": {}}
    tools = [{"type": "function", "function": each} for each in (described, plain)]
    paths = (RELEASED_TEMPLATE, SHARED / "chat_template.jinja")
    ours, theirs = (make_environment().from_string(path.read_text("utf-8")) for path in paths)
    for messages in CONVERSATIONS:
        for is_open in (False, True):
            variables = {
                "messages": messages,
                "tools": tools if has_tools else None,
                "enable_thinking": thinking,
                "preserve_thinking": not is_open,
                "add_generation_prompt": is_open,
                "bos_token": "<bos>",
            }
            assert ours.render(variables) == theirs.render(variables)


def test_our_template_is_for_the_released_tokenizer_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = ChatTemplate(TEMPLATE, small_tokenizer())
    assert Engine.load(tiny).user_prompt("hi") == plain.prompt([_user("hi")])
    assert "tiny.gguf: chat template: the file's own" in caplog.text
    assert "tiny.gguf: 75 tensors: 21 Q4_K, 5 Q5_0, 2 Q6_K, 2 Q8_0, 45 F32" in caplog.text
    stored = open_gguf(tiny).file.metadata
    known = digest(stored["tokenizer.ggml.tokens"], stored["tokenizer.ggml.merges"])
    monkeypatch.setattr("dgemma.weights.gguf_tokenizer.RELEASED_DIGEST", known)
    ours = ChatTemplate(RELEASED_TEMPLATE.read_text("utf-8"), small_tokenizer())
    caplog.clear()
    assert Engine.load(tiny).user_prompt("hi") == ours.prompt([_user("hi")])
    assert "dgemma's current template, not the file's" in caplog.text
    caplog.clear()
    Engine.load(tiny, template="file")
    assert "chat template: the file's own" in caplog.text
    with pytest.raises(UsageError, match="template 'x' is not known; use auto or file"):
        Engine.load(tiny, template="x")
    with pytest.raises(UsageError, match="--template file is for GGUF models; leave it out"):
        Engine.load("nano", template="file")


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def test_a_file_without_a_template_takes_plain_prompts(tmp_path: Path) -> None:
    keys = tiny_keys()
    del keys["tokenizer.chat_template"]
    engine = Engine.load(write_tiny(tmp_path / "a.gguf", keys, tiny_tensors()))
    assert engine.template is None
    done = engine.generate("the", SamplingParams(max_tokens=8, seed=1))
    assert done.tokens >= 0


# --- loading


def test_small_models_are_dequantized_and_large_ones_stay_blocks(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ModelOptions(device="cpu", dtype="float32")
    choice = plan_load(tiny, options).choice
    assert (choice.quant, "small enough" in choice.reason) == ("none", True)
    monkeypatch.setattr("dgemma.weights.inference.MAX_DEQUANTIZED_BYTES", 1)
    choice = plan_load(tiny, options).choice
    assert (choice.quant, "memory-mapped" in choice.reason) == ("stored", True)
    seen: list[tuple[int, int]] = []
    engine = Engine.load(tiny, progress=lambda done, total: seen.append((done, total)))
    assert isinstance(engine.model.layers[0].experts, BlockExperts)
    done, total = seen[-1]
    assert (
        done
        == total
        == sum(
            tensor.num_bytes
            for name, tensor in open_gguf(tiny).file.tensors.items()
            if name != "rope_freqs.weight" and "enc_layer" not in name
        )
    )
    assert engine.generate("the", SamplingParams(max_tokens=8, seed=1)).tokens >= 0


def test_commands_take_a_file(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dgemma.cli import app

    app(["info", "--model", str(tiny), "--json"], standalone_mode=False)
    facts = json.loads(capsys.readouterr().out)
    assert facts["family"] == "diffusion_gemma" and facts["layers"] == 3
    assert facts["file"].startswith("75 tensors: 21 Q4_K")
    assert "chat template: the file's own" in facts["notes"]
    call = ["fit", "--model", str(tiny), "--device", "h200", "--context", "256", "--json"]
    app(call, standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["kind"] == "predicted"
    call = ["generate", "hi", "--model", str(tiny), "--max-tokens", "8", "--seed", "1", "--json"]
    app(call, standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["tokens"] >= 0


def test_a_file_becomes_a_directory(tiny: Path, tmp_path: Path) -> None:
    export(tiny, tmp_path / "out")
    assert load_config(tmp_path / "out") == replace(TINY_GGUF, dtype="float32")
    assert Tokenizer.load(tmp_path / "out").encode("the") == small_tokenizer().encode("the")
    assert (tmp_path / "out" / "chat_template.jinja").read_text("utf-8") == TEMPLATE
    assert difference(logits(tmp_path / "out"), logits(tiny)) == 0.0


def test_what_names_no_file_is_refused(tmp_path: Path, tiny: Path) -> None:
    assert find_checkpoint(str(tiny)) == tiny
    with pytest.raises(UsageError, match=r"none\.gguf does not exist; check the path"):
        find_checkpoint(str(tmp_path / "none.gguf"))
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match=r"holds GGUF files and no config\.json; name one"):
        find_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot read"):
        load_model(tmp_path / "none.gguf")
    for resolve in (find_checkpoint, download):
        with pytest.raises(UsageError, match="holds GGUF files of several types; fetch one with"):
            resolve("unsloth/diffusiongemma-26B-A4B-it-GGUF")


# --- split files


def write_split(directory: Path, keys: Keys, tensors: Tensors, count: int = 3) -> list[Path]:
    """Write a model over files; the first has the metadata and no tensor."""
    names = list(tensors)
    step = -(-len(names) // (count - 1))
    groups = [[], *(names[i * step : (i + 1) * step] for i in range(count - 1))]
    paths = []
    for number, group in enumerate(groups):
        numbers: Keys = {
            "split.no": ("uint16", number),
            "split.count": ("uint16", count),
            "split.tensors.count": ("int32", len(names)),
        }
        arch = {"general.architecture": keys["general.architecture"]}
        shard_keys = {**(keys if number == 0 else arch), **numbers}
        path = directory / f"tiny-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(write_tiny(path, shard_keys, {name: tensors[name] for name in group}))
    return paths


def test_split_files_are_one_model(tiny: Path, tmp_path: Path) -> None:
    first, *_ = write_split(tmp_path, tiny_keys(), tiny_tensors())
    assert len(GGUFFile(first).tensors) == 75
    for quant in ("none", "stored"):
        assert difference(logits(first, quant=quant), logits(tiny, quant=quant)) == 0.0


def _set_key(key: str, value: bytes) -> Callable[[list[Path]], None]:
    def change(paths: list[Path]) -> None:
        data = bytearray(paths[1].read_bytes())
        start = data.index(key.encode()) + len(key) + 4
        data[start : start + len(value)] = value
        paths[1].write_bytes(data)

    return change


@pytest.mark.parametrize(
    ("change", "opened", "message"),
    [
        (lambda paths: None, 1, r"is not the first of the 3 files .*; give .*00001-of-00003\.gguf"),
        (lambda paths: paths[2].unlink(), 0, r"tiny-00003-of-00003\.gguf is not in its directory"),
        (lambda paths: paths[1].write_bytes(paths[2].read_bytes()), 0, "should be file 2 of 3"),
        (_set_key("split.count", struct.pack("<H", 4)), 0, "split.count are 1 and 4"),
        (lambda paths: paths[2].write_bytes(b"GGUF"), 0, "is cut short"),
    ],
)
def test_incomplete_splits_are_refused(
    tmp_path: Path, change: Callable[[list[Path]], Any], opened: int, message: str
) -> None:
    paths = write_split(tmp_path, tiny_keys(), tiny_tensors())
    change(paths)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(paths[opened])


def test_splits_that_share_or_lack_tensors_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    paths = write_split(tmp_path, tiny_keys(), tensors)
    keys: Keys = {"general.architecture": ("string", "diffusion-gemma")}
    keys |= {"split.no": ("uint16", 2), "split.count": ("uint16", 3)}
    half = list(tensors)[:40]
    write_tiny(paths[2], keys, {name: tensors[name] for name in half})
    with pytest.raises(CheckpointError, match=r"has the tensor .* of another file"):
        open_gguf(paths[0])
    write_tiny(paths[2], keys, {name: tensors[name] for name in list(tensors)[50:60]})
    with pytest.raises(CheckpointError, match="should have 75 tensors, and its 3 files have 48"):
        open_gguf(paths[0])


# --- the released size


@pytest.mark.skipif(not SHARED.is_dir(), reason="the released config.json is not here")
@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files")
def test_a_file_of_the_released_size_is_read(tmp_path: Path) -> None:
    """All 692 names, shapes and types of Q4_K_M in a file of holes."""
    config = replace(load_config(SHARED), vision=None, media_ids={}, dtype="float32")
    shapes = gguf_shapes(config)
    types = tensor_types(shapes, "Q4_K_M")
    generation = load_generation_config(SHARED)
    words = TokenizerKeys(["<pad>", "<eos>", "<bos>", "<unk>"], [3] * 4, [], None)
    metadata = gguf_metadata(config, generation, words, "released", 15)
    metadata["dgemma.stop_ids"] = MetadataValue("[i32]", [1, 106, 50])
    header = header_bytes(metadata, shapes, types)
    data = sum(types[name].row_bytes(prod(shape)) + 31 & ~31 for name, shape in shapes.items())
    path = tmp_path / "released.gguf"
    rope = [1.0] * 64 + [1e30] * 192
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + data)
        start = GGUFFile(path).tensors["rope_freqs.weight"].start
        file.seek(start)
        file.write(struct.pack("<256f", *rope))
    checkpoint = open_gguf(path)
    assert checkpoint.config == config and checkpoint.generation == generation
    assert checkpoint.type_counts() == {"Q4_K": 194, "Q5_0": 33, "Q8_0": 28, "Q6_K": 14, "F32": 423}
    assert len(checkpoint.file.tensors) == 692
    stored = checkpoint.tensors.stored
    assert len(stored) == 691  # but for the rotary divisors
    assert sum(prod(tensor.shape) for tensor in stored.values()) == 25_250_987_068 - 256
    # A published file has 16,806,810,336 bytes, and its data begin at byte 15,824,736.
    assert data == 16_806_810_336 - 15_824_736
    assert stored["model.decoder.layers.7.experts.gate_up_proj"].num_bytes == 128 * 1408 * 1584
