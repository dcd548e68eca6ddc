"""Hostile checkpoints are refused in one sentence: no hang, no traceback, no abort."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgemma.cli.info import _verified
from dgemma.config import load_config, load_generation_config, read_config, read_generation_config
from dgemma.config.strict_json import MAX_DEPTH, MAX_JSON_BYTES, read_json
from dgemma.errors import DgemmaError
from dgemma.text.chat import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.files import MAX_HEADER_BYTES, read_header, read_headers, verify_digests
from dgemma.weights.gguf import GGUFFile
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import load_model
from dgemma.weights.safetensors_io import MappedTensors
from tests.text.small import make_backend, small_tokenizer
from tests.weights.sample import write

LARGE = 100_000  # keys
FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
]


def refusal(call: Callable[..., object], *arguments: Any) -> str:
    """Return the sentence of a refusal."""
    with pytest.raises(DgemmaError) as caught:
        call(*arguments)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence) < 2100
    return sentence


def load_all(directory: Path) -> None:
    """Read every kind of file of a checkpoint."""
    load_model(directory)
    tokenizer = Tokenizer.load(directory)
    ChatTemplate.load(directory, tokenizer)


@pytest.fixture
def whole(mine: Path) -> Path:
    """A checkpoint with a tokenizer and a template."""
    make_backend().save(str(mine / "tokenizer.json"))
    (mine / "chat_template.jinja").write_text("{{ messages[0].content }}")
    load_all(mine)
    return mine


@pytest.mark.parametrize("name", FILES)
def test_a_fifo_in_the_place_of_a_file_is_refused_without_waiting(name: str, whole: Path) -> None:
    (whole / name).unlink()
    os.mkfifo(whole / name)
    assert f"{name} is a FIFO" in refusal(load_all, whole)


@pytest.mark.parametrize("name", FILES)
def test_a_device_in_the_place_of_a_file_is_refused(name: str, whole: Path) -> None:
    (whole / name).unlink()
    (whole / name).symlink_to("/dev/zero")
    assert f"{name} is a device" in refusal(load_all, whole)


def test_a_shard_and_a_gguf_file_must_be_regular_files(my_shards: Path, tmp_path: Path) -> None:
    shard = sorted(my_shards.glob("model-*"))[0]
    shard.unlink()
    os.mkfifo(shard)
    assert "is a FIFO" in refusal(load_model, my_shards)
    (tmp_path / "model.gguf").symlink_to("/dev/zero")
    assert "is a device" in refusal(GGUFFile, tmp_path / "model.gguf")


def test_a_file_that_becomes_a_fifo_after_its_header_was_read_is_refused(mine: Path) -> None:
    stored = read_headers(mine)
    (mine / "model.safetensors").unlink()
    os.mkfifo(mine / "model.safetensors")
    assert "is a FIFO" in refusal(MappedTensors, stored)


def test_keys_that_are_given_twice_are_refused_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    keys = ",".join(f'"key {number}":0' for number in range(LARGE))
    path.write_text(f'{{{keys},"key 7":1}}')
    begun = time.process_time()
    assert "lists 'key 7' more than once" in refusal(read_json, path)
    assert time.process_time() - begun < 10  # comparing all pairs would take an hour


def test_deep_and_huge_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * (MAX_DEPTH + 1) + "0" + "}" * (MAX_DEPTH + 1))
    assert "nests deeper than" in refusal(read_json, path)
    path.write_text('{"a":' + "[" * 1_000_000)
    assert "is not valid JSON" in refusal(read_json, path)
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    assert "is larger than" in refusal(read_json, path)
    path.write_text('{"a": ' + "9" * 10_000 + "}")
    assert "is not valid JSON" in refusal(read_json, path)
    path.write_text('{"a": NaN}')
    assert "holds NaN" in refusal(read_json, path)


def test_a_header_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    assert "is not a safetensors file" in refusal(read_header, path)


@pytest.mark.parametrize("shape", [[10**30], [2] * 9, [1 << 62, 1 << 62, 1 << 62]])
def test_shapes_that_no_file_can_hold_are_refused(shape: list[int], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}, b"1234")
    assert "a " in refusal(read_header, path)


def test_names_from_a_file_reach_no_terminal_unescaped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"\x1b]0;title\x07\n" + "x" * 9000: 1}, b"")
    assert "\\x1b]0;title\\x07\\n" in refusal(read_header, path)


HOSTILE_TEXT = {
    "rms_norm_eps": [0, -1e-6, 1e30, "1e-6", True],
    "sliding_window": [10**30, 1e30, 0, -1, True],
    "final_logit_softcapping": [0, -30.0, 1e300, "30"],
    "vocab_size": [10**18, 0, 61.0],
    "hidden_size": [10**12],
    "max_position_embeddings": [10**15],
    "pad_token_id": [61, -1, 10**30, 1.5, "0"],
    "bos_token_id": [61, -1],
    "head_dim": [10**9],
    "num_experts": [10**9],
    "layer_types": [["full_attention"] * 5000, [], "full", [[]]],
    "dtype": [[], 3, "float8"],
    "rope_parameters": [[], "x", {"sliding_attention": 3, "full_attention": 4}],
    "num_hidden_layers": ["x", 10**30],
}
HOSTILE_TOP = {
    "canvas_length": [10**9, 0, 1e30, "8"],
    "dtype": ["int64", 7, {}],
    "text_config": [[], "x", 3],
    "vision_config": [[], "x", 3],
    "long_reply": [[], {"canvas_length": 10**30}],
    "image_token_id": ["x", -1, 10**30, [1]],
    "model_type": [[], {}, 3],
}
HOSTILE_GENERATION = {
    "max_denoising_steps": [10**9, 0, -1, 1.5, True],
    "stability_threshold": [-1, 10**9],
    "max_new_tokens": [0, 10**18],
    "t_max": [float("inf"), float("nan"), -1, "1", True],
    "t_min": [float("nan")],
    "confidence_threshold": [float("nan"), 1e300],
    "sampler_config": [[], "x", {"entropy_bound": float("nan")}, {"entropy_bound": -1}],
    "eos_token_id": [[], "x", [1.5], list(range(10_000)), [[1]]],
    "pad_token_id": ["x", 1.5],
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(key, value) for key, values in table.items() for value in values]


@pytest.fixture(scope="module")
def raw(single: Path) -> str:
    return (single / "config.json").read_text()


@pytest.mark.parametrize(("key", "value"), pairs(HOSTILE_TEXT))
def test_numbers_of_a_config_that_no_model_has_are_refused(key: str, value: Any, raw: str) -> None:
    config = json.loads(raw)
    config["text_config"][key] = value
    if key == "dtype":
        config.pop("dtype")
    refusal(read_config, config)


def test_nan_in_place_of_a_number_is_refused(raw: str) -> None:
    for key in ("rms_norm_eps", "final_logit_softcapping"):
        config = json.loads(raw)
        config["text_config"][key] = float("nan")
        assert f"{key} is nan" in refusal(read_config, config)


@pytest.mark.parametrize(("key", "value"), pairs(HOSTILE_TOP))
def test_values_at_the_top_of_a_config_are_checked(key: str, value: Any, raw: str) -> None:
    refusal(read_config, {**json.loads(raw), key: value})


@pytest.mark.parametrize(("key", "value"), pairs(HOSTILE_GENERATION))
def test_generation_defaults_out_of_range_are_refused(key: str, value: Any) -> None:
    refusal(read_generation_config, {key: value})


@pytest.mark.parametrize("theta", ["x", [], 0, -1, 10**400, True])
def test_rotary_bases_are_checked(theta: Any, raw: str) -> None:
    config = json.loads(raw)
    config["text_config"]["rope_parameters"]["full_attention"]["rope_theta"] = theta
    assert "full_rope_theta is" in refusal(read_config, config)


@pytest.mark.parametrize("overrides", [[], 3, {"x": {}}, {"1": 3}, {"0": {"head_dim": "x"}}])
def test_overrides_of_layers_are_checked(overrides: Any, raw: str) -> None:
    config = json.loads(raw)
    config["text_config"]["per_layer_config"] = overrides
    refusal(read_config, config)


def test_a_stop_id_equal_to_the_vocabulary_size_is_refused(mine: Path) -> None:
    vocab_size = load_config(mine).vocab_size
    for stops in (vocab_size, [1, vocab_size], -1):
        generation = {"eos_token_id": stops}
        (mine / "generation_config.json").write_text(json.dumps(generation))
        assert f"the vocabulary has the ids 0 to {vocab_size - 1}" in refusal(load_model, mine)
    (mine / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))
    assert load_model(mine).generation.stop_ids == (vocab_size - 1,)


def grown(stages: int) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(make_backend().to_str())
    doubling = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    raw["normalizer"] = {"type": "Sequence", "normalizers": [doubling] * stages}
    return raw


def test_a_tokenizer_that_grows_text_is_refused_before_it_runs(tmp_path: Path) -> None:
    raw = grown(60)  # 2^60 letters for one, already for an added token while the file is loaded
    token = {"id": 900, "content": "a", "special": False, "normalized": True, "single_word": False}
    raw["added_tokens"].append({**token, "lstrip": False, "rstrip": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert "its normalizer is" in refusal(Tokenizer.load, tmp_path)
    spelled = json.dumps(raw).replace('"normalizer"', '"norm\\u0061lizer"')
    (tmp_path / "tokenizer.json").write_text(spelled)
    assert "by escapes" in refusal(Tokenizer.load, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}}),
        ("pre_tokenizer", {"type": "ByteLevel"}),
        ("normalizer", {"type": "Prepend", "prepend": "x" * 5000}),
        ("normalizer", {"type": "NFKC"}),
    ],
)
def test_other_stages_of_a_tokenizer_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    raw = {**json.loads(make_backend().to_str()), key: value}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert f"its {key} is" in refusal(Tokenizer.load, tmp_path)


def test_a_tokenizer_that_drops_merges_at_random_is_refused(tmp_path: Path) -> None:
    raw = json.loads(make_backend().to_str())
    raw["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert "its dropout is" in refusal(Tokenizer.load, tmp_path)


def test_pieces_that_are_spelled_like_a_stage_are_no_stage(tmp_path: Path) -> None:
    raw = json.loads(make_backend().to_str())
    for number, piece in enumerate(("normalizer", "dropout")):
        raw["model"]["vocab"][piece] = len(raw["model"]["vocab"]) + number
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert Tokenizer.load(tmp_path).encode("the") == small_tokenizer().encode("the")


def test_generation_defaults_of_a_directory_are_read_strictly(mine: Path) -> None:
    (mine / "generation_config.json").write_text('{"t_max": 1, "t_max": 2}')
    assert "lists 't_max' more than once" in refusal(load_generation_config, mine)


def test_a_file_that_is_cut_short_while_it_is_read_ends_in_a_sentence(tmp_path: Path) -> None:
    """Not in SIGBUS: by the command's main thread, and by a thread of the tensor library."""
    path = tmp_path / "model.safetensors"
    size = 4 << 20
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    script = (
        "import os, sys, threading; from pathlib import Path\n"
        "from dgemma.errors import explain_bus_errors\n"
        "from dgemma.weights.files import read_header\n"
        "from dgemma.weights.safetensors_io import MappedTensors\n"
        "path = Path(sys.argv[1]); explain_bus_errors()\n"
        "tensor = MappedTensors(read_header(path))['a']; os.truncate(path, 4096)\n"
        "read = lambda: tensor.sum().item()\n"
        "thread = threading.Thread(target=read)\n"
        "read() if sys.argv[2] == 'main' else (thread.start(), thread.join())\n"
    )
    for where in ("main", "thread"):
        padding = -len(json.dumps({"a": entry})) % 8  # a tensor that is not aligned would be copied
        write(path, {"a": entry}, bytes(size), padding)
        command = [sys.executable, "-c", script, str(path), where]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert ended.returncode == 1, ended
        assert ended.stderr.startswith("dgemma: a file of weights was cut short")


def test_the_built_in_model_has_the_digests_of_its_index() -> None:
    assert len(verify_digests(NANO_DIRECTORY)) == 5
    assert _verified("nano").startswith("5 files have the recorded SHA-256: int8-00001-of")


def test_a_checkpoint_without_digests_says_so(mine: Path) -> None:
    assert _verified(str(mine)) == "nothing: no SHA-256 is recorded for these files"
