"""Adapters add exactly their low-rank term, leave the base alone, and travel in PEFT's files."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dgemma.backends.cpu import MergedLinear, can_pack, pack
from dgemma.config import ModelConfig
from dgemma.errors import CheckpointError, ConfigError, DgemmaError, UsageError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.load import load_model, random_model
from dgemma.weights.lora import (
    Adapter,
    LoRALinear,
    LoRAPair,
    attach,
    detach,
    merge,
    new_adapter,
    read_back,
)
from dgemma.weights.lora_files import load_adapter, save_adapter
from dgemma.weights.names import skeleton
from tests.weights.sample import CONFIG, SIBLING, header, our_logits, some_ids, their_logits

ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj router.proj".split()
FILE, JSON = "adapter_model.safetensors", "adapter_config.json"
DECODER = "base_model.model.model.decoder."
ENCODER = "base_model.model.model.encoder.language_model."
SIBLING_PREFIX = "base_model.model.model.language_model."
# As PEFT 0.21 writes them.
PEFT_DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "google/diffusiongemma-26B-A4B-it",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 6,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 3,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


def trained(adapter: Adapter, seed: int = 5) -> Adapter:
    """The adapter with a B that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        name: LoRAPair(a, 0.1 * torch.randn(b.shape, generator=generator))
        for name, (a, b) in adapter.pairs.items()
    }
    return replace(adapter, pairs=pairs)


def some_adapter(model: Gemma, targets: list[str] = ALL, seed: int = 4) -> Adapter:
    return trained(new_adapter(model, targets, rank=3, alpha=6, seed=seed))


def exact_model() -> Gemma:
    """In float64: a tiny random model enlarges float32's rounding past what is to be shown."""
    return random_model(CONFIG, 7, dtype=torch.float64)


def soft_logits(model: Gemma, ids_T: Tensor, canvas_T: Tensor) -> Tensor:
    """Logits of a second step, so that the self-conditioning block takes part too."""
    table = model.embed_tokens.weight
    cache = KVCache(model.config, Capacity(tokens=128), table.dtype, table.device)
    with torch.inference_mode():
        prompt = ForwardBatch([Segment(cache, len(ids_T), commit=True)])
        model.encode(ids_T, prompt)
        prompt.close()
        soft_TD = None
        for _ in range(2):
            canvas = ForwardBatch([Segment(cache, len(canvas_T), commit=False)])
            logits_TV = model.logits(model.denoise(canvas_T, soft_TD, canvas))
            soft_TD = model.soft_embed(logits_TV.softmax(-1))
        return logits_TV


def all_logits(model: Gemma) -> list[Tensor]:
    """Causal logits and, where the model has them, those of a canvas behind a prompt."""
    ids_T, canvas_T = some_ids(29), some_ids(8, seed=1)
    logits = [our_logits(model, ids_T, None)]
    return [*logits, soft_logits(model, ids_T, canvas_T)] if model.config.can_denoise else logits


def assert_close(model: Gemma, other: list[Tensor], atol: float = 1e-5) -> None:
    for ours, theirs in zip(all_logits(model), other, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


def assert_equal(model: Gemma, other: list[Tensor]) -> None:
    for ours, theirs in zip(all_logits(model), other, strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def model() -> Gemma:
    return random_model(CONFIG, 7)


@pytest.fixture
def adapter(model: Gemma) -> Adapter:
    return some_adapter(model)


# What it computes


def test_an_attached_adapter_computes_what_the_merged_weights_do() -> None:
    model = exact_model()
    adapter, plain = some_adapter(model), all_logits(model)
    merged = all_logits(merge(exact_model(), adapter))
    assert_close(attach(model, adapter), merged)
    for before, after in zip(plain, merged, strict=True):
        assert (after - before).abs().max() > 0.1


@pytest.mark.parametrize("target", [*ALL, "self_conditioning.down_proj", "layers.1.mlp.up_proj"])
def test_every_kind_of_target_takes_part(target: str) -> None:
    model = exact_model()
    adapter, (_, plain) = some_adapter(model, [target]), all_logits(model)
    assert_close(attach(model, adapter), all_logits(merge(exact_model(), adapter)))
    _, canvas = all_logits(model)
    assert (canvas - plain).abs().max() > 1e-2


def test_the_change_of_a_module_is_its_low_rank_term() -> None:
    torch.manual_seed(0)
    base, x = nn.Linear(5, 4, bias=False), torch.randn(2, 6, 5)
    a_RI, b_OR = torch.randn(3, 5), torch.randn(4, 3)
    expected = x @ base.weight.T + 0.7 * (x @ a_RI.T) @ b_OR.T
    torch.testing.assert_close(LoRALinear(base, a_RI, b_OR, 0.7)(x), expected)


def test_the_scale_is_alpha_over_rank_or_over_its_root(adapter: Adapter) -> None:
    assert adapter.scale == 2.0
    assert replace(adapter, use_rslora=True).scale == pytest.approx(6 / 3**0.5)


def test_a_new_adapter_changes_nothing(model: Gemma) -> None:
    plain = all_logits(model)
    assert_equal(attach(model, new_adapter(model, ALL, rank=3, alpha=6, seed=4)), plain)


def test_detaching_brings_back_every_bit_and_every_module(model: Gemma, adapter: Adapter) -> None:
    plain, modules = all_logits(model), dict(model.named_modules())
    detach(attach(model, adapter))
    assert_equal(model, plain)
    assert dict(model.named_modules()) == modules
    assert_equal(detach(model), plain)


def test_attaching_leaves_the_base_weights_where_and_as_they_are(
    model: Gemma, adapter: Adapter
) -> None:
    weights = {name: (w.data_ptr(), w.clone()) for name, w in model.state_dict().items()}
    all_logits(attach(model, adapter))
    attached = {
        name.replace(".base.", "."): w
        for name, w in model.state_dict().items()
        if not name.endswith(("a_RI", "b_OR"))
    }
    assert attached.keys() == weights.keys()
    for name, (pointer, value) in weights.items():
        assert attached[name].data_ptr() == pointer and torch.equal(attached[name], value), name


def test_merging_makes_new_weights_and_leaves_the_old_tensors_alone(
    model: Gemma, adapter: Adapter
) -> None:
    old = dict(model.state_dict())
    values = {name: weight.clone() for name, weight in old.items()}
    merge(model, adapter)
    for name, weight in old.items():
        assert torch.equal(weight, values[name])
        is_target = name.removesuffix(".weight") in adapter.targets
        assert is_target == (not torch.equal(model.state_dict()[name], weight)), name
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("config", [CONFIG, SIBLING])
def test_a_packed_model_with_an_adapter_computes_the_same(config: ModelConfig) -> None:
    model = random_model(config, 7)
    if not can_pack(model.embed_tokens.weight):
        pytest.skip("this CPU has no packed path")
    attached = all_logits(attach(model, some_adapter(model)))
    pack(model)
    lora = model.get_submodule("layers.0.self_attn.q_proj")
    assert isinstance(lora, LoRALinear) and isinstance(lora.base, MergedLinear)
    assert_close(model, attached, atol=1e-4)
    assert_close(detach(model), all_logits(pack(random_model(config, 7))), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_adapter_takes_the_type_of_the_model(dtype: torch.dtype) -> None:
    model = random_model(CONFIG, 7, dtype=dtype)
    adapter = some_adapter(model)
    merged = merge(random_model(CONFIG, 7, dtype=dtype), adapter)
    plain = random_model(CONFIG, 7, dtype=dtype).state_dict()
    name = "layers.2.self_attn.o_proj"
    a_RI, b_OR = adapter.pairs[name]
    exact = plain[f"{name}.weight"].float() + adapter.scale * b_OR @ a_RI
    torch.testing.assert_close(merged.state_dict()[f"{name}.weight"], exact.to(dtype))
    assert {w.dtype for w in attach(model, adapter).state_dict().values()} == {dtype}
    assert all(logits.isfinite().all() for logits in all_logits(model))
    assert {half.dtype for pair in adapter.pairs.values() for half in pair} == {torch.float32}


def test_an_adapter_goes_to_the_device_of_the_model(adapter: Adapter) -> None:
    model = attach(skeleton(CONFIG), adapter)
    assert {weight.device.type for weight in model.state_dict().values()} == {"meta"}


def test_what_training_changes_is_read_back_and_the_adapter_stays(
    model: Gemma, adapter: Adapter
) -> None:
    attach(model, adapter)
    name = "layers.1.mlp.up_proj"
    module = model.get_submodule(name)
    assert isinstance(module, LoRALinear)
    before = adapter.pairs[name].b_OR.clone()
    module.b_OR.add_(1)
    after = read_back(model, adapter)
    assert torch.equal(adapter.pairs[name].b_OR, before)
    assert torch.equal(after.pairs[name].b_OR, before + 1)
    assert after.targets == adapter.targets and after.scale == adapter.scale
    with pytest.raises(UsageError, match=r"no adapter on layers\.0.*attach"):
        read_back(detach(model), adapter)


def test_gradients_reach_both_matrices_and_nothing_else(model: Gemma, adapter: Adapter) -> None:
    attach(model, adapter)
    loras = [module for module in model.modules() if isinstance(module, LoRALinear)]
    for lora in loras:
        lora.requires_grad_(True).base.requires_grad_(False)
    cache = KVCache(CONFIG, Capacity(tokens=128), torch.float32, torch.device("cpu"))
    context = ForwardBatch([Segment(cache, 8, commit=False)])
    model.logits(model.denoise(some_ids(8), torch.randn(8, 32), context)).square().mean().backward()
    has_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert has_gradient == {
        f"{name}.{half}" for name in adapter.targets for half in ("a_RI", "b_OR")
    }


# Which modules


def test_targets_are_the_ends_of_module_names(model: Gemma) -> None:
    def targets(*names: str) -> tuple[str, ...]:
        return new_adapter(model, names, rank=2, alpha=2, seed=0).targets

    assert targets("v_proj") == ("layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj")
    assert targets("self_conditioning.up_proj") == ("self_conditioning.up_proj",)
    assert targets("proj") == tuple(f"layers.{i}.router.proj" for i in range(3))
    assert targets("layers.2.mlp.up_proj", "mlp.up_proj") == targets("mlp.up_proj")
    assert len(targets("up_proj")) == 4


def test_the_seed_decides_the_values(model: Gemma) -> None:
    first, same, other = (new_adapter(model, ["q_proj"], 2, 2, seed) for seed in (1, 1, 2))
    name = first.targets[0]
    assert torch.equal(first.pairs[name].a_RI, same.pairs[name].a_RI)
    assert not torch.equal(first.pairs[name].a_RI, other.pairs[name].a_RI)
    assert first.pairs[name].a_RI.abs().max() <= CONFIG.hidden_size**-0.5
    assert not first.pairs[name].b_OR.any()


@pytest.mark.parametrize("target", ["proj_q", "", "roj", "layers.3.mlp.up_proj", "norm"])
def test_an_unknown_target_is_refused_with_those_allowed(target: str, model: Gemma) -> None:
    allowed = r"self_attn\.q_proj, .*mlp\.down_proj, .*router\.proj, .*self_conditioning\.up_proj"
    with pytest.raises(UsageError, match=rf"'{target}' is not a target; .*{allowed}"):
        new_adapter(model, ["q_proj", target], rank=2, alpha=2, seed=0)


@pytest.mark.parametrize(
    "target", ["experts", "experts.down_proj", "gate_up_proj", "embed_tokens", "lm_head"]
)
def test_experts_and_the_embedding_are_no_targets(target: str, model: Gemma) -> None:
    with pytest.raises(UsageError, match=rf"'{target}' is not a target: the experts' .* take no"):
        new_adapter(model, [target], rank=2, alpha=2, seed=0)


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, "4"])
def test_a_rank_that_is_no_size_is_refused(rank: Any, model: Gemma) -> None:
    with pytest.raises(ConfigError, match=r"rank \(r\) must be a positive whole number"):
        new_adapter(model, ["q_proj"], rank=rank, alpha=2, seed=0)


@pytest.mark.parametrize("alpha", [0, -1.0, float("nan"), float("inf"), None])
def test_an_alpha_that_is_no_factor_is_refused(alpha: Any, model: Gemma) -> None:
    with pytest.raises(ConfigError, match=r"lora_alpha\) must be a positive number"):
        new_adapter(model, ["q_proj"], rank=2, alpha=alpha, seed=0)


def test_an_adapter_of_nothing_is_refused(model: Gemma) -> None:
    with pytest.raises(CheckpointError, match="at least one module"):
        new_adapter(model, [], rank=2, alpha=2, seed=0)


# What does not fit


def refuse_to_attach(model: Gemma, adapter: Adapter, kind: type[DgemmaError]) -> str:
    """The sentence, after making sure that nothing has been changed."""
    before = dict(model.named_modules())
    for put in (attach, merge):
        with pytest.raises(kind) as caught:
            put(model, adapter)
    assert dict(model.named_modules()) == before
    return str(caught.value)


def with_pair(adapter: Adapter, name: str, pair: LoRAPair) -> Adapter:
    return replace(adapter, pairs={**adapter.pairs, name: pair})


def test_a_second_adapter_is_refused(model: Gemma, adapter: Adapter) -> None:
    attach(model, adapter)
    other = some_adapter(model, ["self_conditioning.up_proj"])
    assert "already has an adapter; detach it" in refuse_to_attach(model, other, UsageError)


def test_a_packed_model_takes_no_adapter(model: Gemma, adapter: Adapter) -> None:
    if not can_pack(model.embed_tokens.weight):
        pytest.skip("this CPU has no packed path")
    message = refuse_to_attach(pack(model), adapter, UsageError)
    assert "layers.0.mlp.down_proj" in message and "before they are packed" in message


@pytest.mark.parametrize("name", ["layers.2.self_attn.v_proj", "layers.3.mlp.up_proj"])
def test_a_module_the_model_lacks_is_named(name: str, model: Gemma, adapter: Adapter) -> None:
    wider = with_pair(adapter, name, adapter.pairs["layers.0.self_attn.v_proj"])
    assert f"for {name}, which" in refuse_to_attach(model, wider, CheckpointError)


@pytest.mark.parametrize("name", ["layers.0.experts", "embed_tokens", "layers.0.input_layernorm"])
def test_a_module_that_is_not_linear_is_named(name: str, model: Gemma, adapter: Adapter) -> None:
    wider = with_pair(adapter, name, adapter.pairs["layers.0.mlp.up_proj"])
    message = refuse_to_attach(model, wider, UsageError)
    assert f"{name} cannot be adapted" in message and "embedding table" in message


def test_another_shape_is_named_with_both(model: Gemma, adapter: Adapter) -> None:
    name = "layers.1.mlp.up_proj"
    other = with_pair(adapter, name, adapter.pairs["layers.1.mlp.down_proj"])
    message = refuse_to_attach(model, other, CheckpointError)
    assert f"{name} ([32, 24], not [24, 32])" in message


def test_the_sibling_takes_no_adapter_of_the_diffusion_model(adapter: Adapter) -> None:
    message = refuse_to_attach(random_model(SIBLING, 7), adapter, CheckpointError)
    assert message == "the adapter is for a diffusion_gemma, but the model is a gemma4"


def test_a_pair_of_other_ranks_is_refused(adapter: Adapter) -> None:
    name, (a_RI, b_OR) = next(iter(adapter.pairs.items()))
    for pair in (LoRAPair(a_RI[:2], b_OR), LoRAPair(a_RI, b_OR[:, :2]), LoRAPair(a_RI[0], b_OR)):
        with pytest.raises(CheckpointError, match=rf"\[3, inputs\].*not in {name}"):
            with_pair(adapter, name, pair)


def test_tensors_of_several_types_are_refused(adapter: Adapter) -> None:
    name, (a_RI, b_OR) = next(iter(adapter.pairs.items()))
    with pytest.raises(CheckpointError, match=r"torch\.float16, torch\.float32"):
        with_pair(adapter, name, LoRAPair(a_RI.half(), b_OR))
    with pytest.raises(CheckpointError, match=r"are torch\.float64; .*torch\.bfloat16"):
        replace(adapter, pairs={name: LoRAPair(a_RI.double(), b_OR.double())})


# Files


def assert_same(first: Adapter, second: Adapter) -> None:
    for field in ("family", "rank", "alpha", "use_rslora", "base_model", "scale"):
        assert getattr(first, field) == getattr(second, field), field
    assert first.pairs.keys() == second.pairs.keys()
    for name, pair in first.pairs.items():
        for half, other in zip(pair, second.pairs[name], strict=True):
            assert half.dtype == other.dtype and torch.equal(half, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [CONFIG, SIBLING])
def test_what_is_saved_is_read_back(
    dtype: torch.dtype, config: ModelConfig, tmp_path: Path
) -> None:
    adapter = some_adapter(random_model(config, 7))
    pairs = {name: LoRAPair(*(half.to(dtype) for half in p)) for name, p in adapter.pairs.items()}
    for change in ({}, {"use_rslora": True, "alpha": 2.5, "base_model": "owner/name"}):
        adapter = replace(adapter, pairs=pairs, **change)
        save_adapter(adapter, tmp_path, overwrite=True)
        assert_same(load_adapter(tmp_path), adapter)
    assert {path.name for path in tmp_path.iterdir()} == {FILE, JSON}


def test_either_file_stands_for_the_adapter(adapter: Adapter, tmp_path: Path) -> None:
    save_adapter(adapter, tmp_path / "new" / "directory")
    for name in ("", FILE, JSON):
        assert_same(load_adapter(tmp_path / "new" / "directory" / name), adapter)


def test_the_saved_names_are_those_of_the_reference_in_both_of_its_stacks(
    model: Gemma, tmp_path: Path
) -> None:
    targets = ["layers.1.self_attn.q_proj", "self_conditioning.up_proj"]
    save_adapter(some_adapter(model, targets), tmp_path)
    modules = [
        "model.decoder.layers.1.self_attn.q_proj",
        "model.encoder.language_model.layers.1.self_attn.q_proj",
        "model.decoder.self_conditioning.up_proj",
    ]
    raw, _ = header(tmp_path / FILE)
    assert raw.pop("__metadata__") == {"format": "pt"}
    assert raw.keys() == {
        f"base_model.model.{module}.lora_{half}.weight" for module in modules for half in "AB"
    }
    assert raw[f"{DECODER}layers.1.self_attn.q_proj.lora_A.weight"]["shape"] == [3, 32]
    assert raw[f"{ENCODER}layers.1.self_attn.q_proj.lora_B.weight"]["shape"] == [32, 3]
    config = json.loads((tmp_path / JSON).read_text())
    assert config["target_modules"] == modules
    expected = {"peft_type": "LORA", "task_type": None, "r": 3, "lora_alpha": 6, "bias": "none"}
    expected |= {"lora_dropout": 0.0, "use_rslora": False, "base_model_name_or_path": None}
    assert config.items() >= expected.items()
    assert config.keys() <= PEFT_DEFAULTS.keys()


def test_a_siblings_names_have_one_stack(tmp_path: Path) -> None:
    save_adapter(some_adapter(random_model(SIBLING, 7)), tmp_path)
    assert all(name.startswith(SIBLING_PREFIX) for name in load_file(tmp_path / FILE))


def apply_as_peft(reference: nn.Module, directory: Path) -> list[Any]:
    """Hooks that add an adapter's terms to the modules PEFT would choose, by its rule for names."""
    config = json.loads((directory / JSON).read_text())
    tensors, handles = load_file(directory / FILE), []
    scale = config["lora_alpha"] / config["r"]
    for name, module in reference.named_modules():
        targets = config["target_modules"]
        if name not in targets and not any(name.endswith(f".{target}") for target in targets):
            continue
        assert isinstance(module, nn.Linear), name
        a, b = (tensors.pop(f"base_model.model.{name}.lora_{half}.weight") for half in "AB")

        def add(_: Any, inputs: Any, out: Tensor, a_RI: Tensor = a, b_OR: Tensor = b) -> Tensor:
            return out + scale * inputs[0] @ a_RI.T @ b_OR.T

        handles.append(module.register_forward_hook(add))
    assert not tensors
    return handles


def test_transformers_with_the_saved_adapter_computes_what_we_do(
    theirs: Any, single: Path, tmp_path: Path
) -> None:
    model = load_model(single).model
    adapter = some_adapter(model)
    save_adapter(adapter, tmp_path)
    ids_T, canvas_T = some_ids(29), some_ids(8, seed=1)
    plain = our_logits(model, ids_T, canvas_T)
    attached = our_logits(attach(model, load_adapter(tmp_path)), ids_T, canvas_T)
    handles = apply_as_peft(theirs, tmp_path)
    try:
        expected = their_logits(theirs, ids_T, canvas_T)
    finally:
        for handle in handles:
            handle.remove()
    assert (attached - plain).abs().max() > 0.1
    torch.testing.assert_close(attached, expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not a dependency of the tests")
def test_peft_loads_what_is_saved_here(theirs: Any, single: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    model = load_model(single).model
    save_adapter(some_adapter(model), tmp_path)
    ids_T, canvas_T = some_ids(29), some_ids(8, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(theirs, tmp_path)
    expected = their_logits(loaded.base_model.model, ids_T, canvas_T)
    loaded.unload()
    attached = our_logits(attach(model, load_adapter(tmp_path)), ids_T, canvas_T)
    torch.testing.assert_close(attached, expected, atol=1e-4, rtol=0)


def test_an_adapter_is_kept_unless_told(adapter: Adapter, tmp_path: Path) -> None:
    save_adapter(adapter, tmp_path)
    with pytest.raises(UsageError, match=f"already holds an adapter.*{JSON}, {FILE}"):
        save_adapter(trained(adapter, seed=6), tmp_path)
    assert_same(load_adapter(tmp_path), adapter)


def test_an_interrupted_save_never_looks_whole(
    adapter: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(adapter, tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dgemma.weights.lora_files.write_safetensors", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_adapter(trained(adapter, seed=6), tmp_path, overwrite=True)
    assert_same(load_adapter(tmp_path), adapter)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(CheckpointError, match="No space left"):
            save_adapter(trained(adapter, seed=6), tmp_path, overwrite=True)
    assert f"lacks {JSON}" in refused(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE}


# Files of others, and what is refused in them


@pytest.fixture
def theirs_on_disk(model: Gemma, tmp_path: Path) -> Path:
    """An adapter as PEFT writes it: names of the decoder alone, all of its config's keys."""
    pairs = some_adapter(model, ["q_proj", "o_proj"]).pairs
    tensors = {
        f"{DECODER}{name}.lora_{half}.weight": tensor
        for name, pair in pairs.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    (tmp_path / JSON).write_text(json.dumps(PEFT_DEFAULTS))
    return tmp_path


def change_config(directory: Path, **changes: Any) -> Path:
    raw = json.loads((directory / JSON).read_text())
    (directory / JSON).write_text(json.dumps(raw | changes))
    return directory


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE)
    return directory


def refused(path: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load_adapter(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def encoder_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(DECODER, ENCODER): tensor.clone() for name, tensor in tensors.items()}


def test_an_adapter_as_peft_writes_it_is_read(theirs_on_disk: Path, model: Gemma) -> None:
    adapter = load_adapter(theirs_on_disk)
    expected = some_adapter(model, ["q_proj", "o_proj"])
    assert_same(adapter, replace(expected, base_model="google/diffusiongemma-26B-A4B-it"))


def test_targets_may_be_a_pattern_or_full_names(theirs_on_disk: Path) -> None:
    adapter = load_adapter(theirs_on_disk)
    full = [f"model.decoder.{name}" for name in adapter.targets]
    for targets in (r".*decoder.*\.(q|o)_proj", "all-linear", full):
        change_config(theirs_on_disk, target_modules=targets)
        assert_same(load_adapter(theirs_on_disk), adapter)


def test_an_encoder_equal_to_the_decoder_is_read_as_one(theirs_on_disk: Path) -> None:
    alone = load_adapter(theirs_on_disk)
    change_tensors(theirs_on_disk, lambda tensors: tensors.update(encoder_copies(tensors)))
    assert_same(load_adapter(theirs_on_disk), alone)


def test_an_encoder_that_differs_by_one_bit_is_refused(theirs_on_disk: Path) -> None:
    name = "layers.1.self_attn.o_proj"

    def differ(tensors: dict[str, Tensor]) -> None:
        tensors |= encoder_copies(tensors)
        tensors[f"{ENCODER}{name}.lora_B.weight"].view(torch.int32)[3, 1] ^= 1

    message = refused(change_tensors(theirs_on_disk, differ))
    assert f"adapts encoder and decoder differently in {name};" in message
    assert "one stack serves as both" in message


def test_an_encoder_of_another_type_is_refused(theirs_on_disk: Path) -> None:
    def round_off(tensors: dict[str, Tensor]) -> None:
        rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        tensors |= {name: tensor.float() for name, tensor in rounded.items()}
        tensors |= encoder_copies(rounded)

    message = refused(change_tensors(theirs_on_disk, round_off))
    assert "differently in layers.0.self_attn.o_proj, " in message


def test_an_encoder_that_is_there_in_part_is_refused(theirs_on_disk: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        copies = encoder_copies(tensors)
        tensors |= {name: t for name, t in copies.items() if "layers.2.self_attn.q" not in name}

    message = refused(change_tensors(theirs_on_disk, drop))
    assert "differently in layers.2.self_attn.q_proj;" in message


def test_an_encoder_without_a_decoder_is_refused(theirs_on_disk: Path) -> None:
    def move(tensors: dict[str, Tensor]) -> None:
        copies = encoder_copies(tensors)
        tensors.clear()
        tensors |= copies

    assert "differently in layers.0.self_attn.o_proj" in refused(
        change_tensors(theirs_on_disk, move)
    )


@pytest.mark.parametrize("prefix", [DECODER, ENCODER])
def test_two_models_in_one_file_are_refused(prefix: str, theirs_on_disk: Path) -> None:
    def move(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            new = SIBLING_PREFIX if ".layers.0." in name else prefix
            tensors[name.replace(DECODER, new)] = tensors.pop(name)

    message = refused(change_tensors(theirs_on_disk, move))
    assert "mixes two models" in message and "model.language_model." in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; this build reads 'LORA'"),
        ({"bias": "all"}, "bias is 'all'; this build reads 'none'"),
        ({"use_dora": True}, "use_dora is True, that is, magnitudes"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, that is, transposed"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is {'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is {'q_proj': 4}"),
        ({"target_parameters": ["experts.down_proj"]}, "experts, which take no adapter"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is [3]"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]]"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is [5]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; this build reads True or"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"target_modules": None}, "target_modules must be a list of names or a pattern, not None"),
        ({"target_modules": [1]}, "target_modules must be a list"),
        ({"target_modules": ["q_proj"]}, "layers.0.self_attn.o_proj, model.decoder.layers.1"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path must be a name, not 3"),
        ({"r": 4}, "A and B must be [4, inputs] and [outputs, 4]"),
        ({"r": "3"}, "rank (r) must be a positive whole number, not '3'"),
        ({"lora_alpha": None}, "alpha (lora_alpha) must be a positive number, not None"),
        ({"use_new_trick": False}, "does not know use_new_trick; the adapter may need a newer"),
    ],
)
def test_a_config_this_build_cannot_honour_is_refused_by_name(
    change: dict[str, Any], expected: str, theirs_on_disk: Path
) -> None:
    assert expected in refused(change_config(theirs_on_disk, **change))


@pytest.mark.parametrize("key", ["peft_type", "r", "lora_alpha", "target_modules"])
def test_a_key_that_must_be_stated_is_named(key: str, theirs_on_disk: Path) -> None:
    raw = json.loads((theirs_on_disk / JSON).read_text())
    raw.pop(key)
    (theirs_on_disk / JSON).write_text(json.dumps(raw))
    assert key in refused(theirs_on_disk)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"", b"[" * 100_000])
def test_a_damaged_config_is_refused(content: bytes, theirs_on_disk: Path) -> None:
    (theirs_on_disk / JSON).write_bytes(content)
    assert f"{JSON} is not valid JSON" in refused(theirs_on_disk)


def test_a_config_that_is_no_object_is_refused(theirs_on_disk: Path) -> None:
    (theirs_on_disk / JSON).write_text("[]")
    assert f"{JSON} must hold a JSON object, not list" in refused(theirs_on_disk)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{DECODER}embed_tokens.lora_embedding_A", "the embedding table take no adapter"),
        ("base_model.model.lm_head.lora_A.weight", "the embedding table take no adapter"),
        (f"{DECODER}layers.0.experts.lora_A.weight", "experts' stacked weights and"),
        (f"{DECODER}layers.0.experts.base_layer.lora_B.weight", "experts' stacked weights and"),
        (f"{DECODER}layers.0.mlp.up_proj.lora_B.bias", "the unknown"),
        (f"{DECODER}layers.0.mlp.up_proj.lora_magnitude_vector", "the unknown"),
        (f"{DECODER}layers.0.mlp.up_proj.lora_A.default.weight", "the unknown"),
        ("model.decoder.layers.0.mlp.up_proj.lora_A.weight", "the unknown"),
        (f"{DECODER}layers.0.self_attn.k_proj.lora_A.weight", "only lora_A of model.decoder"),
    ],
)
def test_a_tensor_that_is_no_half_of_a_pair_is_named(
    name: str, expected: str, theirs_on_disk: Path
) -> None:
    message = refused(change_tensors(theirs_on_disk, lambda t: t.update({name: torch.ones(3, 32)})))
    assert expected in message
    assert name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") in message


def test_a_pair_outside_the_text_stack_is_named(theirs_on_disk: Path) -> None:
    place = "model.encoder.vision_tower.encoder.layers.0.self_attn.q_proj"
    halves = {f"base_model.model.{place}.lora_{half}.weight": torch.ones(3, 3) for half in "AB"}
    message = refused(change_tensors(theirs_on_disk, lambda tensors: tensors.update(halves)))
    assert f"adapts {place}; only what begins with model.decoder." in message


def test_a_value_that_is_no_number_is_refused(theirs_on_disk: Path) -> None:
    name = f"{DECODER}layers.0.self_attn.q_proj.lora_B.weight"
    message = refused(change_tensors(theirs_on_disk, lambda t: t[name][1].fill_(torch.nan)))
    assert f"{name} holds NaN or infinity" in message


def test_scalars_in_place_of_matrices_are_refused(theirs_on_disk: Path) -> None:
    def shrink(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: torch.tensor(1.0) for name in tensors}
        tensors |= encoder_copies(tensors)

    assert "A and B must be" in refused(change_tensors(theirs_on_disk, shrink))


def test_an_empty_file_of_tensors_is_refused(theirs_on_disk: Path) -> None:
    message = refused(change_tensors(theirs_on_disk, lambda tensors: tensors.clear()))
    assert "at least one module" in message


def test_a_file_cut_short_is_refused(theirs_on_disk: Path) -> None:
    content = (theirs_on_disk / FILE).read_bytes()
    (theirs_on_disk / FILE).write_bytes(content[:-4])
    assert f"{FILE} is cut short" in refused(theirs_on_disk)


@pytest.mark.parametrize("name", [FILE, JSON])
def test_a_missing_file_is_named(name: str, theirs_on_disk: Path) -> None:
    (theirs_on_disk / name).unlink()
    assert refused(theirs_on_disk).endswith(f"it lacks {name}")
    assert refused(theirs_on_disk / JSON).endswith(f"it lacks {name}")


def test_a_pickled_adapter_is_refused_as_such(theirs_on_disk: Path) -> None:
    (theirs_on_disk / FILE).rename(theirs_on_disk / "adapter_model.bin")
    assert "adapter_model.bin is not read" in refused(theirs_on_disk)


def test_a_path_to_nothing_is_refused_with_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere does not exist; give the directory of an adap"):
        load_adapter(tmp_path / "nowhere")
    message = refused(tmp_path)
    assert f"is not an adapter, that is, a directory with {JSON} and {FILE}" in message
