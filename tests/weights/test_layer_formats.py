"""Models that are loaded in fewer bits: the file's own numbers, or those of its plain weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dgemma.errors import CheckpointError, UsageError
from dgemma.model.gemma import Experts, Gemma, Layer
from dgemma.quant.fp8 import Fp8Experts, Fp8Linear, quantize
from dgemma.quant.nvfp4 import Nvfp4Experts, quantize_tiled
from dgemma.weights import load
from dgemma.weights.layer_formats import (
    LAYER_FORMATS,
    STORED_FORMATS,
    Quant,
    layer_format,
    quantize_model,
)
from dgemma.weights.load import load_model
from dgemma.weights.names import skeleton
from tests.weights.packed import SMALL, Writer
from tests.weights.sample import our_logits, some_ids
from tests.weights.test_quantize import make

# What the order of 4-bit weights takes; outputs and inputs still differ.
WIDE = replace(SMALL, hidden_size=128, moe_intermediate_size=64)
LAYOUTS = ["nvfp4", "fp8"]
DECODER = "model.decoder."


def whole_experts(layer: Layer) -> dict[str, Tensor]:
    """What a layer's packed experts stand for, in float32."""
    found = layer.experts
    if isinstance(found, Fp8Experts):
        return {
            name: getattr(found, f"{name}_proj").float()
            * getattr(found, f"{name}_scale")[..., None]
            for name in ("gate_up", "down")
        }
    assert isinstance(found, Nvfp4Experts)
    laid = {"gate_up": found.gate_up, "down": found.down}
    count = range(WIDE.num_experts)
    return {name: torch.stack([each.dequantize(e) for e in count]) for name, each in laid.items()}


def bits(*tensors: Tensor) -> list[Tensor]:
    """For types that know no comparison."""
    return [tensor.view(torch.uint8) for tensor in tensors]


def layers(model: Gemma) -> list[Layer]:
    return list(model.layers)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["stored", "named"])
def test_a_released_layout_keeps_its_very_numbers(tmp_path: Path, layout: str, form: str) -> None:
    writer = Writer(layout, WIDE)
    quant: Quant = "stored" if form == "stored" else layout  # type: ignore[assignment]
    model = load_model(writer.save(tmp_path), quant=quant).model
    for number, layer in enumerate(layers(model)):
        for name, have in whole_experts(layer).items():
            want = writer.values[f"{DECODER}layers.{number}.experts.{name}_proj"]
            # Rounded once to float32, as everywhere.
            assert np.array_equal(have.numpy(), want.astype(np.float32)), name
        product = layer.self_attn.q_proj
        want = writer.values[f"{DECODER}layers.{number}.self_attn.q_proj.weight"]
        if layout == "fp8":
            assert isinstance(product, Fp8Linear)
            have = product.weight.float() * product.weight_scale
            assert np.array_equal(have.numpy(), want.astype(np.float32))
        else:
            # The file has it in 16 bits: so it stays, unless all is to be small.
            assert isinstance(product, Fp8Linear) == (form == "named")
        assert layer.router.proj.weight.dtype == torch.bfloat16
    table = torch.from_numpy(writer.values[DECODER + "embed_tokens.weight"])
    assert torch.equal(model.embed_tokens.weight.double(), table)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_and_multiplied_out_answer_alike(tmp_path: Path, layout: str) -> None:
    directory = Writer(layout, WIDE).save(tmp_path)
    ids, canvas = some_ids(9), some_ids(8, 1)
    plain = our_logits(load_model(directory, dtype=torch.float32).model, ids, canvas)
    small = load_model(directory, dtype=torch.float32, quant="stored").model
    difference = (our_logits(small, ids, canvas) - plain).abs().max().item()
    # Activations stay exact beside 4-bit weights, and are rounded beside 8-bit ones.
    assert difference < (1e-3 if layout == "nvfp4" else 1.5)
    assert difference > 0 or layout == "nvfp4"


@pytest.mark.parametrize("quant", LAYOUTS)
def test_plain_weights_become_what_a_whole_model_would(tmp_path: Path, quant: Quant) -> None:
    directory = make(tmp_path / "plain", WIDE)
    loaded = load_model(directory, dtype=torch.bfloat16, quant=quant).model
    whole = load_model(directory, dtype=torch.bfloat16).model
    plain = layers(whole)[0]
    gate_up, product = plain.experts.gate_up_proj, plain.self_attn.k_proj.weight
    want = quantize_model(whole, LAYER_FORMATS[quant])
    first = layers(want)[0]
    assert torch.equal(*bits(first.self_attn.k_proj.weight, quantize(product).values))
    if quant == "fp8":
        assert torch.equal(*bits(first.experts.gate_up_proj, quantize(gate_up).values))
    else:
        assert torch.equal(first.experts.gate_up_words, quantize_tiled(gate_up, 2).words_EW)
    have, wanted = loaded.state_dict(), want.state_dict()
    assert have.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(*bits(weight, have[name])), name
    assert not any(weight.requires_grad for weight in loaded.parameters())


@pytest.mark.parametrize("quant", ["fp8", "nvfp4", "int8"])
def test_never_more_than_one_layer_is_whole(
    tmp_path: Path, quant: Quant, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(tmp_path / "plain", WIDE)
    made: list[Gemma] = []
    monkeypatch.setattr(load, "skeleton", lambda config: made.append(skeleton(config)) or made[-1])
    counts = []

    def look(done: int, total: int) -> None:
        plain = [layer.experts for layer in layers(made[-1]) if isinstance(layer.experts, Experts)]
        counts.append(sum(not experts.gate_up_proj.is_meta for experts in plain))
        assert done <= total

    model = load_model(directory, quant=quant, on_tensor=look).model
    assert model is made[-1]
    assert len(counts) > 40
    assert max(counts) <= 1
    assert not any(isinstance(layer.experts, Experts) for layer in layers(model))


def test_the_token_table_comes_last(tmp_path: Path) -> None:
    directory = make(tmp_path / "plain", WIDE)
    steps: list[int] = []
    load_model(directory, on_tensor=lambda done, _: steps.append(done))
    table = 4 * WIDE.vocab_size * WIDE.hidden_size
    sizes = np.diff([0, *steps])
    assert np.flatnonzero(sizes == table).min() > len(sizes) - 8


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    stored = Writer("fp8", WIDE).save(tmp_path / "fp8")
    with pytest.raises(UsageError, match="stored as fp8, and rounding it again to nvfp4"):
        load_model(stored, quant="nvfp4")
    with pytest.raises(UsageError, match="multiples of 64, which are not hidden_size 48 and moe"):
        load_model(make(tmp_path / "odd", SMALL), quant="nvfp4")
    with pytest.raises(UsageError, match="int8 is for CPUs, not for cuda"):
        load_model(stored, quant="int8", device="cuda")
    with pytest.raises(UsageError, match="quant 'int4' is not known"):
        load_model(stored, quant="int4")  # type: ignore[arg-type]
    assert layer_format("stored", None) == LAYER_FORMATS["none"]
    assert layer_format("stored", "nvfp4") == STORED_FORMATS["nvfp4"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_found_in_packed_numbers_too(tmp_path: Path, layout: str) -> None:
    writer = Writer(layout, WIDE)
    scale = writer.stored["model.decoder.layers.1.experts.2.up_proj.weight_scale"]
    scale[3] = float("nan")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.experts\..*weight_scale should hold pos"
    ):
        load_model(writer.save(tmp_path / "scale"), quant="stored")
    if layout == "fp8":
        again = Writer(layout, WIDE)
        for name in ("experts.2.up_proj", "mlp.up_proj"):
            damaged = again.stored[f"model.decoder.layers.1.{name}.weight"].clone()
            damaged.view(torch.uint8)[3, 3] = 0x7F
            stored = {**again.stored, f"model.decoder.layers.1.{name}.weight": damaged}
            broken = Writer(layout, WIDE)
            broken.stored = stored
            with pytest.raises(CheckpointError, match="holds NaN"):
                load_model(broken.save(tmp_path / name), quant="stored")
