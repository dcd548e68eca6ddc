"""Random weights: repeatable, independent of each other, of a size that a model can run with."""

from dataclasses import replace

import pytest
import torch

from dgemma.config import FULL, SLIDING, load_config
from dgemma.model.gemma import Layer
from dgemma.weights import load
from dgemma.weights.load import count_parameters, random_model, short_count
from tests.weights.sample import CONFIG, SHARED, SIBLING, our_logits, some_ids


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = random_model(CONFIG, 5), random_model(CONFIG, 5)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])


def test_the_token_table_comes_last() -> None:
    made = []

    def look(layer: Layer) -> None:
        made.append(layer)
        assert not any(weight.is_meta for weight in layer.parameters())

    with pytest.MonkeyPatch.context() as patch:
        names: list[str] = []
        patch.setattr(load, "name_seed", lambda seed, name: names.append(name) or seed)
        random_model(CONFIG, 5, on_layer=look)
    assert len(made) == CONFIG.num_hidden_layers
    assert names.index("embed_tokens.weight") > max(
        place for place, name in enumerate(names) if name.startswith("layers.")
    )


def test_every_seed_and_every_name_draws_its_own_weights() -> None:
    first, second = random_model(CONFIG, 5).state_dict(), random_model(CONFIG, 6).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]) == name.endswith("layer_scalar"), name
    layers = [first[f"layers.{layer}.router.proj.weight"] for layer in range(3)]
    assert not torch.equal(layers[0], layers[1])


def test_a_weight_does_not_depend_on_the_layers_around_it() -> None:
    deeper = replace(CONFIG, layer_types=(SLIDING, SLIDING, FULL, SLIDING, FULL))
    weights = random_model(deeper, 5).state_dict()
    for name, weight in random_model(CONFIG, 5).state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_wanted_type_and_are_finite(dtype: torch.dtype) -> None:
    model = random_model(CONFIG, 0, dtype=dtype)
    for weight in model.state_dict().values():
        assert weight.dtype == dtype and torch.isfinite(weight).all()
    assert not any(weight.requires_grad for weight in model.parameters())


def test_norms_are_near_one_and_layer_scalars_are_one() -> None:
    weights = random_model(CONFIG, 0).state_dict()
    assert (weights["norm.weight"] - 1).abs().max() < 0.6
    assert weights["layers.1.layer_scalar"].item() == 1.0


@pytest.mark.parametrize("depth", [1, 12])
def test_logits_have_spread_and_stay_below_the_cap(depth: int) -> None:
    config = replace(
        CONFIG, hidden_size=128, vocab_size=512, layer_types=(*[SLIDING] * (depth - 1), FULL)
    )
    logits = our_logits(random_model(config, 0), some_ids(32), some_ids(8, seed=1))
    assert 1 < logits.std() < 6
    assert logits.abs().max() < 29


def test_a_random_sibling_runs() -> None:
    assert torch.isfinite(our_logits(random_model(SIBLING, 0), some_ids(9), None)).all()


def test_parameters_are_counted_by_hand_for_a_tiny_model() -> None:
    model = random_model(CONFIG, 0)
    total, active = count_parameters(CONFIG)
    assert total == sum(weight.numel() for weight in model.state_dict().values())
    experts = 3 * 4 * 3 * 12 * 32  # layers, experts, matrices, inner, width
    assert total - active == experts // 2


@pytest.mark.skipif(
    not SHARED.is_dir(), reason="the released config.json is not beside this checkout"
)
def test_the_released_model_has_its_published_counts() -> None:
    total, active = count_parameters(load_config(SHARED))
    # The published counts hold each layer scalar twice, once for the encoder.
    assert total + 30 == 25_250_986_812
    assert active + 30 == 3_840_375_612
    assert (short_count(total), short_count(active)) == ("25.2B", "3.8B")


def test_small_counts_are_told_in_millions() -> None:
    assert short_count(12_399_999) == "12.3M"
    assert short_count(999_999_999) == "999.9M"
