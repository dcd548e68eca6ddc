"""The self-test under the interpreter: right kernels pass it, wrong ones do not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda import fused, passes
from dgemma.backends.cuda.gemm import HalfMoe
from dgemma.backends.cuda.kernels import (
    attention,
    gemv,
    logit_stats,
    router,
    sampler_update,
    soft_embed_fp8,
    soft_embed_topk,
)
from dgemma.backends.cuda.selftest import selftest
from dgemma.config import FULL, ModelConfig
from dgemma.model.gemma import Gemma
from dgemma.quant.head import quantize_head
from dgemma.weights.layer_formats import LAYER_FORMATS, quantize_model
from dgemma.weights.load import random_model
from tests.kernels import small
from tests.kernels.small import SMALL

pytestmark = pytest.mark.usefixtures("small_configs")
WIDE = replace(SMALL, hidden_size=64, moe_intermediate_size=64, intermediate_size=32)
# One layer: wrong kernels are as wrong in it.
SINGLE = replace(SMALL, layer_types=(FULL,), num_attention_heads=2)


def single() -> Gemma:
    return random_model(SINGLE, seed=0).requires_grad_(False)


def with_fp8_head(config: ModelConfig = SINGLE) -> Gemma:
    return quantize_head(random_model(config, seed=0), soft=True)


def fp8() -> Gemma:
    return quantize_model(with_fp8_head(WIDE), LAYER_FORMATS["fp8"])


@pytest.mark.parametrize("make", [small.model, fp8])
def test_right_kernels_pass(make: Callable[[], Gemma]) -> None:
    assert selftest(make()) == ""


def test_an_autoregressive_model_passes() -> None:
    model = single()
    model.self_conditioning = None
    assert selftest(model) == ""


def spoilt(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *given, **named: change(function(*given, **named))


def flipped(found: Tensor) -> Tensor:
    return found.flip(-1)


def entropy_added(found: Any) -> Any:
    return replace(found, entropy_T=found.entropy_T + 0.5)


# What is wrong, and what the self-test calls it.
WRONG: list[tuple[Any, str, Callable[[Any], Any], str]] = [
    (attention, "reduce_splits", flipped, "hidden states"),
    (HalfMoe, "outputs", lambda out_AD: out_AD.flip(0), "hidden states"),
    (fused, "qk_norm_rope", flipped, "hidden states"),
    (router, "router_logits", lambda p: replace(p, logits_STE=-p.logits_STE), "hidden states"),
    (passes, "add_and_norm", flipped, "entropies"),
    (logit_stats, "merge_chunks", entropy_added, "entropies"),
    (gemv, "gemv_gelu_mul", flipped, "logits of a single token"),
    (gemv, "logits", lambda out_TV: out_TV.mul_(0.5), "logits of a single token"),
]


@pytest.mark.parametrize(
    ("module", "name", "change", "said"), WRONG, ids=[f"{w[0].__name__}.{w[1]}" for w in WRONG]
)
def test_a_wrong_kernel_is_found(
    module: Any,
    name: str,
    change: Callable[[Any], Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, spoilt(getattr(module, name), change))
    wrong = selftest(single())
    assert wrong.startswith(said) and "off by" in wrong and "is allowed (kernels: " in wrong


# One row alone, of the hidden states of a prompt and of what a step reads and writes.
SINGLE_ROWS: list[tuple[Any, str, Callable[[Any], Any], str]] = [
    (attention, "reduce_splits", flipped, "hidden states"),
    (fused, "qk_norm_rope", flipped, "hidden states"),
    (passes, "add_and_norm", flipped, "entropies"),
]


@pytest.mark.parametrize("row", [-1])
@pytest.mark.parametrize(
    ("module", "name", "change", "said"), SINGLE_ROWS, ids=[case[1] for case in SINGLE_ROWS]
)
def test_a_fault_in_one_row_is_found(
    module: Any,
    name: str,
    change: Callable[[Any], Any],
    said: str,
    row: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a long canvas, so that most rows are right."""

    def change_row(out: Tensor) -> Tensor:
        out = out.clone()
        out[row] = change(out[row])
        return out

    monkeypatch.setattr(module, name, spoilt(getattr(module, name), change_row))
    config = replace(SINGLE, canvas_length=16)
    wrong = selftest(random_model(config, seed=0).requires_grad_(False))
    assert wrong.startswith(said) and "off by" in wrong
    if said == "hidden states":  # of a causal pass; a canvas spreads it to all rows
        assert f"in row {row % 16}," in wrong


def test_nan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(out_TNH: Tensor) -> Tensor:
        return out_TNH.index_fill(0, torch.tensor([0]), torch.nan)

    monkeypatch.setattr(attention, "reduce_splits", spoilt(attention.reduce_splits, change))
    assert selftest(single()).startswith("hidden states of a prompt contain NaN or inf")


@pytest.mark.parametrize("field", ["tokens_EL", "accepted_EL", "stable_E"])
def test_a_wrong_update_of_a_canvas_is_found(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler_update.update

    def wrong(states: sampler_update.CanvasStates, *given: Any) -> None:
        real(states, *given)
        found = getattr(states, field)[0]
        found[...] = found == 0 if field == "accepted_EL" else found + 1

    monkeypatch.setattr(sampler_update, "update", wrong)
    assert selftest(single()).startswith("the sampler's update is wrong: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mean_of_candidates", "soft embeddings are off by"),
        ("store_mean", "soft embeddings of the whole vocabulary are off by"),
    ],
)
def test_wrong_soft_embeddings_are_found(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of candidates, and of the whole vocabulary, which no step has used."""
    real = getattr(soft_embed_topk, name)

    def wrong(table_VD: Tensor, *given: Any) -> None:
        real(table_VD, *given)
        soft_ELD = given[-1].soft_ELD
        soft_ELD.copy_(soft_ELD.flip(-1))

    monkeypatch.setattr(soft_embed_topk, name, wrong)
    assert selftest(single()).startswith(said)


@pytest.mark.parametrize("max_candidates", [sampler_update.MAX_CANDIDATES, -1])
def test_wrong_soft_embeddings_in_fp8_are_found(
    max_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps have taken them."""
    monkeypatch.setattr(sampler_update, "MAX_CANDIDATES", max_candidates)
    split_sums = spoilt(soft_embed_fp8.split_sums, lambda sums: sums * 1.5)
    monkeypatch.setattr(soft_embed_fp8, "split_sums", split_sums)
    wrong = selftest(with_fp8_head())
    assert wrong.startswith("soft embeddings ") and "off by" in wrong
