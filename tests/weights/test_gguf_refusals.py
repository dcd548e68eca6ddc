"""GGUF files that are no model this build runs: each is refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dgemma.engine import Engine
from dgemma.errors import DgemmaError
from tests.weights.gguf_tiny import Keys, Tensors, tiny_keys, tiny_tensors, write_tiny

ARCH = "diffusion-gemma."


def without(*names: str) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        for name in names:
            keys.pop(name, None)
            tensors.pop(name, None)

    return change


def with_key(key: str, kind: str, value: Any) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        keys[key] = (kind, value)

    return change


def with_tensor(name: str, *shape: int, value: float = 1.0) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        tensors[name] = (np.full(shape, value, np.float32), "F32")

    return change


def architecture(name: str, **more: Any) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        keys["general.architecture"] = ("string", name)
        keys |= {f"general.{key}": ("string", value) for key, value in more.items()}

    return change


def tokens(change_list: Callable[[list[Any]], Any], key: str) -> Callable[[Keys, Tensors], None]:
    def change(keys: Keys, tensors: Tensors) -> None:
        values = list(keys[f"tokenizer.ggml.{key}"][1])
        change_list(values)
        keys[f"tokenizer.ggml.{key}"] = ("array", values)

    return change


def scaled_layer(keys: Keys, tensors: Tensors) -> None:
    tensors["blk.1.enc_layer_output_scale.weight"] = (np.ones(1, np.float32), "F32")


def without_stops(keys: Keys, tensors: Tensors) -> None:
    del keys["tokenizer.ggml.eos_token_id"]
    names = {"<turn|>": "<turn>>", "<|tool_response>": "<response>"}
    pieces = [names.get(piece, piece) for piece in keys["tokenizer.ggml.tokens"][1]]
    keys["tokenizer.ggml.tokens"] = ("array", pieces)


REFUSALS: dict[str, tuple[Callable[[Keys, Tensors], None], str]] = {
    "another architecture": (architecture("llama"), "holds a 'llama' model; this build runs"),
    "an older Gemma": (architecture("gemma3"), r"holds another Gemma \('gemma3'\)"),
    "another diffusion model": (architecture("dream"), "another diffusion language model"),
    "an Ollama fork": (architecture("diffusiongemma"), "DiffusionGemma under names of its own"),
    "an image tower": (architecture("clip"), "an image tower .*give the text model's file"),
    "a draft model": (architecture("gemma4-assistant"), "a draft model for speculative decoding"),
    "an adapter": (architecture("gemma4", type="adapter"), "is a LoRA adapter, not a model"),
    "an mmproj": (architecture("diffusion-gemma", type="mmproj"), r"\(mmproj\), not a model"),
    "no experts": (without(ARCH + "expert_count"), "without experts"),
    "a missing size": (without(ARCH + "embedding_length"), "embedding_length should be a int"),
    "a missing pattern": (
        without(ARCH + "attention.sliding_window_pattern"),
        "sliding_window_pattern is missing; it should be a list of 3 bools",
    ),
    "a short pattern": (
        with_key(ARCH + "attention.sliding_window_pattern", "array", [True, False]),
        "it should be a list of 3 bools, one for each layer",
    ),
    "a size of another type": (
        with_key(ARCH + "embedding_length", "string", "256"),
        "embedding_length should be a int; there is a str",
    ),
    "a size of zero": (with_key(ARCH + "expert_used_count", "uint32", 0), "positive whole numbers"),
    "query heads that vary": (
        with_key(ARCH + "attention.head_count", "array", [4, 4, 8]),
        "head_count varies from layer to layer",
    ),
    "key heads that vary": (
        with_key(ARCH + "attention.head_count_kv", "array", [2, 1, 1]),
        r"gives the sliding_attention layers \[1, 2\] heads",
    ),
    "a value width of its own": (
        with_key(ARCH + "attention.value_length", "uint32", 64),
        "value_length is 64; this build needs it equal to",
    ),
    "shared keys and values": (
        with_key(ARCH + "attention.shared_kv_layers", "uint32", 2),
        "shared_kv_layers is 2 .*this build needs 0",
    ),
    "per-layer embeddings": (
        with_key(ARCH + "embedding_length_per_layer_input", "uint32", 256),
        "per-layer embeddings",
    ),
    "causal attention": (
        with_key(ARCH + "attention.causal", "bool", True),
        "causal is True .*needs False",
    ),
    "scaled positions": (
        with_key(ARCH + "rope.scaling.type", "string", "yarn"),
        "scaled rotary positions",
    ),
    "an unknown key of the architecture": (
        with_key(ARCH + "attention.new_thing", "uint32", 1),
        "does not know diffusion-gemma.attention.new_thing; the model may need a newer dgemma",
    ),
    "no canvas length": (without("diffusion.canvas_length"), "canvas_length is missing; convert"),
    "another vocabulary size": (
        with_key(ARCH + "vocab_size", "uint32", 7),
        "vocab_size is 7, and token_embd.weight has 403 rows",
    ),
    "no token table": (without("token_embd.weight"), "has no matrix token_embd.weight"),
    "a missing tensor": (without("blk.1.attn_q.weight"), r"it lacks blk\.1\.attn_q\.weight"),
    "a left-over tensor": (
        with_tensor("blk.0.attn_q.bias", 256),
        r"it has the unknown blk\.0\.attn_q\.bias",
    ),
    "a value projection too many": (
        with_tensor("blk.2.attn_v.weight", 128, 256),
        r"it has the unknown blk\.2\.attn_v\.weight",
    ),
    "a tensor of another shape": (
        with_tensor("output_norm.weight", 255),
        r"other shapes have output_norm\.weight \(\[255\], not \[256\]\)",
    ),
    "another head": (
        with_tensor("output.weight", 403, 256),
        r"output\.weight differs from token_embd\.weight",
    ),
    "some encoder scalars": (
        without("blk.1.enc_layer_output_scale.weight"),
        r"it lacks blk\.1\.enc_layer_output_scale\.weight",
    ),
    "unequal layer scalars": (scaled_layer, "layer_scalar differs from"),
    "no rotary divisors": (without("rope_freqs.weight"), r"has no rope_freqs\.weight"),
    "other rotary divisors": (
        with_tensor("rope_freqs.weight", 64, value=2.0),
        r"rope_freqs\.weight should hold 64 values, first 1 and then 1e30",
    ),
    "another kind of tokenizer": (
        with_key("tokenizer.ggml.model", "string", "llama"),
        "tokenizer.ggml.model is 'llama'; this build reads 'gemma4'",
    ),
    "no tokens": (without("tokenizer.ggml.tokens"), "tokens is missing; .*no tokenizer"),
    "no merges": (without("tokenizer.ggml.merges"), "merges is missing"),
    "types for some tokens": (
        tokens(lambda values: values.pop(), "token_type"),
        "token_type has 402 values for 403 tokens",
    ),
    "a piece twice": (
        tokens(lambda values: values.__setitem__(400, values[399]), "tokens"),
        "tokens holds a piece twice",
    ),
    "a merge of one piece": (
        tokens(lambda values: values.append("the"), "merges"),
        "merges holds 'the'; a merge is two pieces",
    ),
    "a merge of unknown pieces": (
        tokens(lambda values: values.append("zq qz"), "merges"),
        "its tokenizer cannot be built",
    ),
    "no byte pieces": (
        tokens(lambda values: values.__setitem__(30, "zzzz"), "tokens"),
        "byte-fallback vocabularies only",
    ),
    "an unknown id beyond": (
        with_key("tokenizer.ggml.unknown_token_id", "uint32", 9999),
        "unknown_token_id is 9999",
    ),
    "no end of a reply": (
        without_stops,
        "eos_token_id is missing: replies would not end",
    ),
    "a template that does not parse": (
        with_key("tokenizer.chat_template", "string", "{% if %}"),
        "chat template, line 1",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_files_are_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    change, message = REFUSALS[case]
    keys, tensors = tiny_keys(), tiny_tensors()
    change(keys, tensors)
    if keys["general.architecture"][1] == "gemma4":
        keys |= {k.replace(ARCH, "gemma4."): v for k, v in keys.items() if k.startswith(ARCH)}
    path = write_tiny(tmp_path / "bad.gguf", keys, tensors)
    with pytest.raises(DgemmaError, match=message) as caught:
        Engine.load(path, dtype="float32")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
