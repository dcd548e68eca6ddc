"""Config files are read strictly: every key is used, checked, or ignored for a stated reason."""

import json
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DiffusionGemmaConfig, Gemma4Config

from dgemma.config import (
    FULL,
    SLIDING,
    GenerationConfig,
    LongReply,
    ModelConfig,
    config_to_json,
    generation_config_to_json,
    load_config,
    load_generation_config,
    read_config,
    read_generation_config,
)
from dgemma.config import RELEASED as RELEASED_SHAPE
from dgemma.config.json_files import (
    IGNORED_GENERATION,
    IGNORED_TEXT,
    IGNORED_TOP,
    MUST_BE_STATED,
    REQUIRED_TEXT,
    TEXT_KEYS,
    TOP_KEYS,
)
from dgemma.config.vision_config import RELEASED_TOWER
from dgemma.errors import CheckpointError, ConfigError
from tests.tiny import GENERATION, TINY, configs, gemma4_twin, twin

RELEASED = Path(__file__).resolve().parents[2] / "shared" / "checkpoint"
SIBLING = replace(TINY, family="gemma4", canvas_length=256)
PEERS = {"diffusion_gemma": DiffusionGemmaConfig, "gemma4": Gemma4Config}
# One value this build does not run, for each key that has only one it does.
UNSUPPORTED = {
    "attention_bias": True,
    "hidden_activation": "silu",
    "tie_word_embeddings": False,
    "use_bidirectional_attention": "all",
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
Raw = dict[str, Any]


@pytest.fixture
def released() -> Path:
    if not (RELEASED / "config.json").is_file():
        pytest.skip("the released config files do not lie beside this checkout")
    return RELEASED


@pytest.fixture
def raw() -> Raw:
    return deepcopy(config_to_json(TINY))


def test_the_released_config_reads_to_its_known_values(released: Path) -> None:
    config = load_config(released)
    assert config == replace(
        RELEASED_SHAPE,
        sliding_rope_theta=1e4,
        full_rope_theta=1e6,
        full_rotary_fraction=0.25,
        rms_norm_eps=1e-6,
        final_logit_softcapping=30.0,
        max_position_embeddings=262_144,
        canvas_length=256,
        pad_token_id=0,
        bos_token_id=2,
        dtype="bfloat16",
        vision=config.vision,
        media_ids={"boi_token_id": 255999, "eoi_token_id": 258882, "image_token_id": 258880},
    )
    assert config.vision == RELEASED_TOWER
    assert (config.vision.cell, config.vision.patch_width) == (48, 768)
    assert config.image_attention == "sliding"
    assert config.num_hidden_layers == 30 and config.can_denoise
    sliding, full = config.attention(0), config.attention(5)
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.window) == (8, 256, 1024)
    assert (full.num_kv_heads, full.head_dim, full.window) == (2, 512, None)
    assert (sliding.rope_theta, sliding.rotary_fraction, sliding.has_value) == (1e4, 1.0, True)
    assert (full.rope_theta, full.rotary_fraction, full.has_value) == (1e6, 0.25, False)


def test_the_released_generation_config_reads_to_its_known_values(released: Path) -> None:
    assert load_generation_config(released) == GenerationConfig(
        max_denoising_steps=48,
        t_max=0.8,
        t_min=0.4,
        entropy_bound=0.1,
        stability_threshold=1,
        confidence_threshold=0.005,
        max_new_tokens=256,
        stop_ids=(1, 106, 50),
        pad_token_id=0,
    )


def test_we_write_the_released_config_key_for_key(released: Path) -> None:
    """Other programs read what we save; the version differs, and stop ids are those that count."""
    stop_ids = load_generation_config(released).stop_ids
    ours = config_to_json(load_config(released), stop_ids)
    theirs = json.loads((released / "config.json").read_text(encoding="utf-8"))
    assert ours.pop("transformers_version") != theirs.pop("transformers_version")
    assert set(ours.pop("eos_token_id")) >= set(theirs.pop("eos_token_id"))
    assert ours == theirs


def test_what_we_write_of_the_released_files_reads_back_the_same(released: Path) -> None:
    config, generation = load_config(released), load_generation_config(released)
    assert read_config(json.loads(json.dumps(config_to_json(config)))) == config
    assert read_generation_config(generation_config_to_json(generation)) == generation


@settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(config=configs(), family=st.sampled_from(["diffusion_gemma", "gemma4"]))
def test_the_spelling_of_transformers_gives_the_same_config(
    config: ModelConfig, family: Any
) -> None:
    """It names the odd layers in per_layer_config, where the released file has two global keys."""
    if family == "gemma4":
        config = replace(config, family=family, canvas_length=256)
    raw = config_to_json(config)
    with tempfile.TemporaryDirectory() as directory:
        PEERS[family](**raw).save_pretrained(directory)
        text = json.loads((Path(directory) / "config.json").read_text())["text_config"]
        theirs = load_config(Path(directory))
    assert "per_layer_config" in text and "global_head_dim" not in text
    assert "per_layer_config" not in raw["text_config"]
    # Their files spell out every default of the media ids.
    assert replace(theirs, media_ids=config.media_ids) == config


@settings(deadline=None, derandomize=True, database=None, max_examples=50)
@given(config=configs(), family=st.sampled_from(["diffusion_gemma", "gemma4"]))
def test_a_config_survives_being_written_and_read(config: ModelConfig, family: Any) -> None:
    # A sibling has no canvas, so its file names no length either.
    length = config.canvas_length if family == "diffusion_gemma" else 256
    config = replace(config, family=family, canvas_length=length, media_ids={"boi_token_id": 5})
    assert read_config(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(("config", "softcap"), [(TINY, 30.0), (SIBLING, None)])
def test_an_absent_soft_cap_means_what_the_family_means(
    config: ModelConfig, softcap: float | None
) -> None:
    raw = config_to_json(config)
    del raw["text_config"]["final_logit_softcapping"]
    assert read_config(raw).final_logit_softcapping == softcap
    raw["text_config"]["final_logit_softcapping"] = None
    assert read_config(raw).final_logit_softcapping is None
    raw["text_config"]["final_logit_softcapping"] = 12.5
    assert read_config(raw).final_logit_softcapping == 12.5


def test_only_the_diffusion_model_can_denoise() -> None:
    assert read_config(config_to_json(TINY)).can_denoise
    assert not read_config(config_to_json(SIBLING)).can_denoise


PLACES: dict[str, Callable[[Raw], Raw]] = {
    "top": lambda raw: raw,
    "text_config": lambda raw: raw["text_config"],
    "vision_config": lambda raw: raw["vision_config"],
    "rope_parameters": lambda raw: raw["text_config"]["rope_parameters"],
    "sliding rope": lambda raw: raw["text_config"]["rope_parameters"][SLIDING],
    "full rope": lambda raw: raw["text_config"]["rope_parameters"][FULL],
    "per_layer_config": lambda raw: raw["text_config"].setdefault(
        "per_layer_config", {"1": {"head_dim": 16}}
    )["1"],
}


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_key_is_refused_by_name_wherever_it_stands(place: str, raw: Raw) -> None:
    PLACES[place](raw)["brand_new_flag"] = 1
    with pytest.raises(ConfigError, match="this build does not know brand_new_flag"):
        read_config(raw, "here")


@pytest.mark.parametrize("key", REQUIRED_TEXT)
@pytest.mark.parametrize("config", [TINY, SIBLING], ids=["diffusion", "sibling"])
def test_an_unsupported_value_is_refused_by_name(key: str, config: ModelConfig) -> None:
    raw = config_to_json(config)
    for allowed in REQUIRED_TEXT[key]:
        if allowed is not None or key not in MUST_BE_STATED[config.family]:
            raw["text_config"][key] = allowed
            is_causal = key == "use_bidirectional_attention" and allowed is None
            assert read_config(raw) == (
                replace(config, image_attention="causal") if is_causal else config
            )
    raw["text_config"][key] = UNSUPPORTED[key]
    with pytest.raises(ConfigError, match=f"{key} is {UNSUPPORTED[key]!r}; this build needs"):
        read_config(raw)


@pytest.mark.parametrize("key", MUST_BE_STATED["gemma4"])
def test_what_the_sibling_would_take_for_another_model_must_be_stated(key: str) -> None:
    raw = config_to_json(SIBLING)
    del raw["text_config"][key]
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read_config(raw)


@pytest.mark.parametrize(
    "key",
    """vocab_size hidden_size intermediate_size moe_intermediate_size num_experts top_k_experts
    num_attention_heads num_key_value_heads head_dim global_head_dim sliding_window
    layer_types""".split(),
)
def test_a_missing_size_is_refused_by_name(key: str, raw: Raw) -> None:
    del raw["text_config"][key]
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read_config(raw)


@pytest.mark.parametrize("key", ["vocab_size", "head_dim", "top_k_experts", "sliding_window"])
@pytest.mark.parametrize("value", [0, -8, "32", 32.0, True, [32]])
def test_a_size_that_is_no_positive_number_is_refused_by_name(
    key: str, value: Any, raw: Raw
) -> None:
    raw["text_config"][key] = value
    with pytest.raises(ConfigError, match=key):
        read_config(raw)


@pytest.mark.parametrize(
    "key",
    """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim patch_size""".split(),
)
def test_a_tower_without_a_size_is_refused_by_name(key: str, raw: Raw) -> None:
    del raw["vision_config"][key]
    with pytest.raises(ConfigError, match=f"vision_config: {key} is missing"):
        read_config(raw)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("hidden_size", 0, "hidden_size must be a positive whole number"),
        ("patch_size", 2.0, "patch_size must be a positive whole number"),
        ("num_key_value_heads", 3, "2 attention heads cannot share 3"),
        ("head_dim", 6, "multiple of 4"),
        ("default_output_length", 100, "one of 70, 140, 280, 560, 1120"),
        ("standardize", 1, "true or false"),
        ("use_clipped_linears", True, "use_clipped_linears is True; this build needs False"),
        ("hidden_activation", "silu", "this build needs 'gelu_pytorch_tanh'"),
        ("model_type", "siglip", "this build needs 'gemma4_vision'"),
        ("attention_bias", True, "attention_bias is True"),
        ("rope_parameters", {"rope_type": "yarn"}, "this build needs 'default'"),
        ("rope_parameters", {"factor": 2}, "unknown factor"),
    ],
)
def test_a_tower_that_this_build_cannot_run_is_refused_by_name(
    key: str, value: Any, complaint: str, raw: Raw
) -> None:
    raw["vision_config"][key] = value
    with pytest.raises(ConfigError, match=complaint):
        read_config(raw)


LONG: Raw = {
    "canvas_length": TINY.canvas_length,
    "entropy_bound": 4.0,
    "t_max": 0.9,
    "t_min": 0.3,
    "max_denoising_steps": 32,
}


def test_how_long_replies_are_written_is_read_and_written(raw: Raw) -> None:
    assert "long_reply" not in raw
    raw["long_reply"] = LONG
    config = read_config(raw)
    assert config == replace(TINY, long_reply=LongReply(**LONG))
    assert config.long_reply is not None and config.long_reply.reach == 0
    raw["long_reply"] = {**LONG, "reach": 2, "num_speculative_tokens": 3}
    assert read_config(raw) == replace(
        TINY, long_reply=LongReply(**LONG, reach=2, num_speculative_tokens=3)
    )
    assert config_to_json(read_config(raw)) == raw


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        *[("canvas_length", value, "a whole number") for value in (2.0, True, "8")],
        *[("canvas_length", value, "from 1 to") for value in (0, -1, TINY.canvas_length + 1)],
        ("max_denoising_steps", 2.5, "a whole number"),
        ("max_denoising_steps", 0, "from 1 to 65536"),
        ("reach", 2.0, "a whole number"),
        ("reach", -1, "from 0 to 8"),
        ("num_speculative_tokens", "3", "a whole number"),
        ("num_speculative_tokens", LONG["canvas_length"] + 1, f"from 0 to {LONG['canvas_length']}"),
        *[("entropy_bound", value, "a number above 0") for value in (0, -1.0, float("inf"))],
        *[("t_max", value, "a number above 0") for value in ("hot", float("nan"), True)],
        ("t_min", 0.0, "a number above 0"),
        ("t_max", 0.2, "t_min, 0.3, or more"),
    ],
)
def test_a_way_to_write_long_replies_that_is_none_is_refused(
    name: str, value: Any, allowed: str, raw: Raw
) -> None:
    raw["long_reply"] = {**LONG, name: value}
    with pytest.raises(ConfigError, match=f"long_reply: {name} is {value!r}; it must be {allowed}"):
        read_config(raw)


@pytest.mark.parametrize("value", [64, [], {}, {**LONG, "heat": 1}])
def test_a_way_to_write_long_replies_is_whole(value: Any, raw: Raw) -> None:
    raw["long_reply"] = value
    with pytest.raises(ConfigError, match="long_reply"):
        read_config(raw)


@pytest.mark.parametrize("value", [0, -1, None, "8"])
def test_a_canvas_length_that_is_no_positive_number_is_refused(value: Any, raw: Raw) -> None:
    raw["canvas_length"] = value
    with pytest.raises(ConfigError, match="canvas_length"):
        read_config(raw)


@pytest.mark.parametrize("key", ["text_config", "vision_config"])
def test_a_section_that_is_no_object_is_refused_by_name(key: str, raw: Raw) -> None:
    raw[key] = [1, 2]
    with pytest.raises(ConfigError, match=f"{key}.*list"):
        read_config(raw, "here")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_global_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 7}, "must be even"),
        ({"global_head_dim": 7}, "must be even"),
        ({"top_k_experts": 5}, "top_k_experts 5 exceeds 4"),
        ({"layer_types": [FULL, SLIDING]}, "last layer must be full_attention"),
        ({"layer_types": ["linear_attention", FULL]}, "linear_attention"),
        ({"layer_types": [], "num_hidden_layers": 0}, "layer_types"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, layer_types has 2"),
        ({"model_type": "gemma3_text"}, "'gemma3_text', not 'diffusion_gemma_text'"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, r"only describe.*\[1\]"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: Raw, complaint: str, raw: Raw) -> None:
    raw["text_config"] |= changes
    with pytest.raises(ConfigError, match=complaint):
        read_config(raw)


def test_full_layers_that_differ_from_each_other_are_refused(raw: Raw) -> None:
    raw["text_config"]["layer_types"] = [FULL, FULL]
    raw["text_config"]["per_layer_config"] = {"0": {"head_dim": 16}, "1": {"head_dim": 32}}
    with pytest.raises(ConfigError, match="all alike"):
        read_config(raw)


@pytest.mark.parametrize(
    ("kind", "key", "value", "complaint"),
    [
        (SLIDING, "rope_type", "proportional", "rope types are"),
        (FULL, "rope_type", "default", "rope types are"),
        (FULL, "rope_type", "yarn", "rope types are"),
        (SLIDING, "rope_theta", None, "rope_theta is missing"),
        (SLIDING, "partial_rotary_factor", 0.5, "does not know partial_rotary_factor"),
    ],
)
def test_other_rotary_positions_are_refused(
    kind: str, key: str, value: Any, complaint: str, raw: Raw
) -> None:
    raw["text_config"]["rope_parameters"][kind][key] = value
    with pytest.raises(ConfigError, match=complaint):
        read_config(raw)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("model_type", "llama", "'llama'; this build runs diffusion_gemma and gemma4"),
        ("model_type", None, "model_type is None"),
        ("tie_word_embeddings", False, "tie_word_embeddings must be true"),
        ("audio_config", {"hidden_size": 8}, "no audio"),
    ],
)
def test_another_kind_of_model_is_refused(key: str, value: Any, complaint: str, raw: Raw) -> None:
    raw[key] = value
    with pytest.raises(ConfigError, match=complaint):
        read_config(raw)


def test_every_ignored_key_has_a_reason_and_is_not_used_as_well() -> None:
    generation = set(GenerationConfig.__slots__) | {"sampler_config", "eos_token_id"}
    for ignored, used in (
        (IGNORED_TOP, TOP_KEYS),
        (IGNORED_TEXT, TEXT_KEYS | REQUIRED_TEXT.keys()),
        (IGNORED_GENERATION, generation),
    ):
        assert not ignored.keys() & used
        for key, reason in ignored.items():
            assert len(reason.split()) >= 2, f"{key} is ignored without a reason"


def test_ignored_keys_change_nothing(raw: Raw) -> None:
    # audio_config is the exception: absent and null are alike, anything else is refused.
    raw |= {key: 12345 for key in IGNORED_TOP if key != "audio_config"}
    raw["text_config"] |= dict.fromkeys(IGNORED_TEXT, 12345)
    assert read_config(raw) == TINY
    raw = {**generation_config_to_json(GenerationConfig()), **dict.fromkeys(IGNORED_GENERATION, 7)}
    assert read_generation_config(raw) == GenerationConfig()


@pytest.mark.parametrize(
    "key",
    """max_denoising_steps t_max t_min stability_threshold confidence_threshold max_new_tokens
    eos_token_id pad_token_id sampler_config""".split(),
)
def test_a_null_in_the_generation_config_means_not_set(key: str) -> None:
    given = replace(GENERATION, max_new_tokens=77, stop_ids=(4, 5), pad_token_id=6)
    raw = generation_config_to_json(given)
    assert read_generation_config(raw) == given
    raw[key] = None
    field = {"eos_token_id": "stop_ids", "sampler_config": "entropy_bound"}.get(key, key)
    default = getattr(GenerationConfig(), field)
    assert read_generation_config(raw) == replace(given, **{field: default})


def test_a_single_stop_id_need_not_be_a_list() -> None:
    assert read_generation_config({"eos_token_id": 7}).stop_ids == (7,)
    assert read_generation_config({"eos_token_id": [7, 8]}).stop_ids == (7, 8)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"brand_new_knob": 1}, "does not know brand_new_knob"),
        ({"sampler_config": {"entropy_bound": 0.1, "knob": 1}}, "does not know knob"),
        ({"sampler_config": {}}, "entropy_bound is missing"),
        ({"sampler_config": {"_cls_name": "TopK", "entropy_bound": 0.1}}, "'TopK' is not known"),
    ],
)
def test_an_unknown_way_to_generate_is_refused_by_name(raw: Raw, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_generation_config(raw)


@pytest.mark.parametrize("build", [gemma4_twin, twin])
def test_generation_configs_of_freshly_built_models_are_read(
    build: Callable[[ModelConfig], Any], tmp_path: Path
) -> None:
    """The sibling's holds switches of another library, the diffusion model's holds nulls."""
    model = build(TINY)
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    switches = {"output_attentions", "output_hidden_states", "use_cache"}
    assert switches <= written.keys() if build is gemma4_twin else None in written.values()
    assert load_generation_config(tmp_path) == GenerationConfig()


def test_a_checkpoint_without_generation_config_gets_the_released_defaults(
    tmp_path: Path, raw: Raw
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_generation_config(tmp_path) == GenerationConfig()


def test_stop_ids_that_are_not_named_are_those_of_the_config(tmp_path: Path, raw: Raw) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**raw, "eos_token_id": [1, 106]}))
    assert load_generation_config(tmp_path).stop_ids == (1, 106)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert load_generation_config(tmp_path).stop_ids == (1, 106)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106, 50]}')
    assert load_generation_config(tmp_path).stop_ids == (1, 106, 50)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_denoising_steps", "48"),
        ("max_denoising_steps", 4.5),
        ("stability_threshold", 1.0),
        ("max_new_tokens", True),
        ("t_max", "0.8"),
        ("confidence_threshold", []),
        ("eos_token_id", []),
        ("eos_token_id", ["<eos>"]),
    ],
)
def test_a_generation_default_of_the_wrong_kind_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key} is"):
        read_generation_config({key: value})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, not list"),
        (None, "does not exist"),
    ],
)
def test_a_damaged_or_absent_config_file_is_named(
    content: bytes | None, complaint: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json {complaint}|{complaint}"):
        load_config(tmp_path)
