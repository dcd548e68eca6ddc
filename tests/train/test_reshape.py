"""A trained model in another shape."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.config import GenerationConfig
from dgemma.errors import UsageError
from dgemma.model.gemma import Gemma
from dgemma.train.context import Batch, PackedContext
from dgemma.train.objective import Objective
from dgemma.train.weighting import Weighting
from dgemma.weights.load import Checkpoint, load_model
from recipes import more_experts
from recipes.loudness import Loudness, loudness
from recipes.more_experts import Heard, corners, hearing, turns
from recipes.nano_reshape import SAID, Shape, main, reshaped
from tests.tiny import TINY
from tests.train.runs import RECIPE, mixture, save_random, save_recipe, shaken

gelu = partial(F.gelu, approximate="tanh")
INNER, DENSE, LAYERS = TINY.moe_intermediate_size, TINY.intermediate_size, TINY.num_hidden_layers


def batch() -> Batch:
    return Batch.of(torch.from_numpy(mixture().batch(0)), "cpu")


def heard(model: Gemma) -> Loudness:
    return loudness(model, [batch()])


def made_of(model: Gemma, shape: Shape) -> Gemma:
    found = Checkpoint(model=model, generation=GenerationConfig())
    with hearing(model) as inputs:
        loud = heard(model)
    return reshaped(found, shape, loud, inputs).model


def hidden(model: Gemma) -> Tensor:
    """Of canvases and texts, and of canvases that are told something."""
    rows = batch()
    told_TD = torch.randn(
        rows.token.numel(), TINY.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        context = PackedContext(model.config, rows)
        return Objective(model, Weighting())._hidden(rows, told_TD, context)


def said(model: Gemma, name: str) -> list[Tensor]:
    """What each neuron of a block adds to the stream, in all passes over a batch."""
    block, given = model.get_submodule(name), []
    hook = block.register_forward_pre_hook(lambda _, rows: given.append(rows))
    heard(model)
    hook.remove()
    with torch.no_grad():
        if name.endswith(".mlp"):
            x_TD = torch.cat([rows[0] for rows in given])
            gate, up, down = (
                block.get_submodule(f"{n}_proj").weight for n in ("gate", "up", "down")
            )
            return [
                torch.outer(gelu(x_TD @ gate[n]) * (x_TD @ up[n]), down[:, n]) for n in range(DENSE)
            ]
        x_TD, ids_TK, share_TK = (torch.cat(parts) for parts in zip(*given, strict=True))
        added = []
        for expert in range(TINY.num_experts):
            share_T = (share_TK * (ids_TK == expert)).sum(1)
            gate_MD, up_MD = block.gate_up_proj[expert].split(INNER)
            for n in range(INNER):
                at_T = gelu(x_TD @ gate_MD[n]) * (x_TD @ up_MD[n]) * share_T
                added.append(torch.outer(at_T, block.down_proj[expert, :, n]))
        return added


@pytest.mark.parametrize("name", ["layers.0.mlp", "layers.1.experts"])
def test_loudness_is_the_length_of_all_that_a_neuron_adds(name: str) -> None:
    model = shaken()
    want = torch.stack([added.norm() for added in said(model, name)])
    assert torch.allclose(heard(model)[name].flatten(), want, rtol=1e-4)
    assert want.max() > 1.5 * want.min()


def test_every_block_is_heard() -> None:
    places = [f"layers.{n}.{block}" for n in range(LAYERS) for block in ("mlp", "experts")]
    assert sorted(heard(shaken())) == sorted([*places, "self_conditioning"])


def quiet(model: Gemma, dense: int, inner: int) -> Gemma:
    """With all but the loudest neurons of each block silenced, one after the other."""
    for name, loud in heard(model).items():
        block = model.get_submodule(name)
        if name.endswith(".experts"):
            for expert, loud_M in enumerate(loud):
                for neuron in loud_M.argsort()[: INNER - inner]:
                    block.down_proj.data[expert, :, neuron] = 0
        else:
            for neuron in loud.argsort()[: DENSE - dense]:
                block.down_proj.weight.data[:, neuron] = 0
    return model


def test_a_narrower_model_is_the_old_one_without_its_quietest_neurons() -> None:
    want, found = (
        quiet(shaken(), DENSE - 5, INNER - 4),
        made_of(shaken(), Shape(dense=DENSE - 5, inner=INNER - 4)),
    )
    assert found.config == replace(
        TINY, intermediate_size=DENSE - 5, moe_intermediate_size=INNER - 4
    )
    assert torch.allclose(hidden(found), hidden(want), atol=1e-5)
    assert not torch.allclose(hidden(found), hidden(shaken()), atol=1e-3)


def test_nothing_changes_where_nothing_is_asked_for() -> None:
    assert torch.equal(hidden(made_of(shaken(), Shape())), hidden(shaken()))


def test_heads_that_are_alike_become_one_that_says_the_same() -> None:
    """And heads that are not become their mean."""
    model = shaken()
    for layer in model.layers:
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            if part is not None:  # of full layers, which have one head already
                heads = part.weight.data.view(layer.self_attn.shape.num_kv_heads, -1)
                heads[:] = heads[0].clone()
    found = made_of(model, Shape(kv_heads=1))
    assert found.config == replace(TINY, num_key_value_heads=1, num_global_key_value_heads=1)
    assert torch.allclose(hidden(found), hidden(model), atol=1e-5)
    old, mean = shaken().layers[0], made_of(shaken(), Shape(kv_heads=1)).layers[0]
    first, second = old.self_attn.v_proj.weight.chunk(2)
    assert torch.allclose(mean.self_attn.v_proj.weight, (first + second) / 2)


def test_the_last_layers_come_twice_the_first_time_quietly() -> None:
    model = shaken()
    model.layers[1].layer_scalar.fill_(0.7)
    found = made_of(model, Shape(layers=3))
    assert found.config.layer_types == (*TINY.layer_types, TINY.layer_types[-1])
    copy = found.layers[1]
    assert copy.layer_scalar == 1
    assert found.layers[2].layer_scalar == model.layers[1].layer_scalar
    old = dict(model.layers[1].named_parameters())
    for name, weight in copy.named_parameters():
        is_closing = name in (
            "post_attention_layernorm.weight",
            "post_feedforward_layernorm.weight",
        )
        assert torch.equal(weight, old[name] * (SAID if is_closing else 1)), name
        assert torch.equal(found.layers[2].get_parameter(name), old[name])
    # Without what the copy says, it is the old model.
    for norm in (copy.post_attention_layernorm, copy.post_feedforward_layernorm):
        norm.weight.data.zero_()
    assert torch.allclose(hidden(found), hidden(model), atol=1e-5)


def given_to_routers(model: Gemma) -> dict[str, Tensor]:
    """All that routers multiply in the passes over a batch, by name."""
    given: dict[str, list[Tensor]] = {f"layers.{n}.router": [] for n in range(LAYERS)}
    hooks = [
        model.get_submodule(f"{name}.proj").register_forward_pre_hook(
            lambda _, rows, put=put: put.append(rows[0])
        )
        for name, put in given.items()
    ]
    heard(model)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in given.items()}


def inputs_of(model: Gemma) -> Heard:
    with hearing(model) as inputs:
        heard(model)
    return inputs


def test_what_routers_are_given_is_heard() -> None:
    model = shaken()
    found = inputs_of(model)
    for name, z_TD in given_to_routers(model).items():
        assert found[name].count == len(z_TD)
        assert torch.allclose(found[name].mean_D, z_TD.double().mean(0))
        want = torch.cov(z_TD.double().mT, correction=0)
        assert torch.allclose(found[name].covariance_DD, want)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_corners_lie_around_zero_all_as_far_apart(count: int) -> None:
    products = corners(count) @ corners(count).mT
    want = torch.full((count, count), -1 / (count - 1), dtype=torch.float64).fill_diagonal_(1)
    assert torch.allclose(products, want)


@pytest.mark.parametrize("sets", [2, 3])
def test_whole_sets_of_copies_are_the_old_model_where_they_are_parted_far(
    sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, count = shaken(), sets * TINY.num_experts
    old = hidden(model)
    monkeypatch.setattr(more_experts, "TURN", 0.0)
    together = hidden(made_of(model, Shape(count=count)))
    monkeypatch.setattr(more_experts, "TURN", 300.0)
    found = made_of(model, Shape(count=count))
    assert found.config == replace(TINY, num_experts=count)
    apart = hidden(found)
    is_same_T = (apart - old).norm(dim=-1) < 1e-3 * old.norm(dim=-1)
    assert is_same_T.float().mean() > 0.97, "but for what lies between two corners"
    assert (together - old).norm() > 0.05 * old.norm(), "twins took each other's places"
    # And no set is without tokens.
    for name, z_TD in given_to_routers(found).items():
        score_TE = z_TD @ found.get_submodule(f"{name}.proj").weight.mT
        in_set_G = torch.bincount(score_TE.argmax(-1) // TINY.num_experts, minlength=sets)
        assert in_set_G.min() > 0.1 * in_set_G.sum() / sets, name


def test_new_experts_are_copies_of_the_old_ones_in_turn() -> None:
    model, count = shaken(), 2 * TINY.num_experts + 3
    found = made_of(model, Shape(count=count))
    for old, new in zip(model.layers, found.layers, strict=True):
        for copy in range(count):
            of = copy % TINY.num_experts
            assert torch.equal(new.experts.gate_up_proj[copy], old.experts.gate_up_proj[of])
            assert torch.equal(new.experts.down_proj[copy], old.experts.down_proj[of])
            assert new.router.per_expert_scale[copy] == old.router.per_expert_scale[of]
        rows = new.router.proj.weight
        assert len(torch.unique(rows, dim=0)) == count, "no two copies are alike"
    again = made_of(shaken(), Shape(count=count)).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in found.state_dict().items())


def test_directions_spread_inputs_alike_and_do_not_see_their_mean() -> None:
    model, old = shaken(), TINY.num_experts
    for name, z_TD in given_to_routers(model).items():
        added_TE = z_TD.double() @ turns(old, 2 * old + 3, inputs_of(model)[name]).mT
        first, second = added_TE[:, 3], added_TE[:, old + 3]  # of an expert with two copies
        assert torch.allclose(first, -second)
        assert float(first.mean()) == pytest.approx(0, abs=1e-6)
        assert float(first.std(correction=0)) == pytest.approx(more_experts.TURN)
        # A second copy and a third are parted by less, and lose what they gain by it on average.
        apart_T = (added_TE[:, 2 * old] - added_TE[:, old]) / 2
        assert float(apart_T.mean()) == pytest.approx(0, abs=1e-6)
        assert float(apart_T.std(correction=0)) == pytest.approx(more_experts.TURN_LEFT)
        gain_T = added_TE[:, [old, 2 * old]].amax(1) - second
        assert abs(float(gain_T.mean())) < 0.2 * more_experts.TURN_LEFT


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (Shape(dense=DENSE + 1), f"intermediate_size of {DENSE + 1}; it is {DENSE}"),
        (Shape(inner=INNER + 1), f"moe_intermediate_size of {INNER + 1}; it is {INNER}"),
        (Shape(count=3), "3 experts; there are 4, and they only grow in number"),
        (Shape(kv_heads=4), "num_key_value_heads of 4; it is 2"),
        (Shape(layers=5), "5 layers; there are 2, each of which can come twice"),
        (Shape(layers=1), "1 layers; there are 2"),
    ],
)
def test_shapes_that_cannot_be_are_refused(shape: Shape, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        made_of(shaken(), shape)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    odd = replace(TINY, num_attention_heads=6, num_key_value_heads=3, num_global_key_value_heads=3)
    with pytest.raises(UsageError, match="2 heads of keys and values; layer 0 has 3"):
        made_of(shaken(odd), Shape(kv_heads=2))


def test_the_command_writes_a_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RECIPE.replace('config = "shape/config.json"', 'checkpoint = "not made yet"')
    recipe = save_recipe(tmp_path, text)
    old = save_random(tmp_path / "old")
    config = load_model(old).model.config
    options = ["--layers", "3", "--dense", "7", "--experts", "5", "--count", "9"]
    options += ["--recipe", str(recipe)]
    monkeypatch.setattr("sys.argv", ["reshape", str(old), str(tmp_path / "new"), *options])
    main()
    made = load_model(tmp_path / "new").model
    kinds = (*config.layer_types, *config.layer_types[-1:])
    sizes = {"intermediate_size": 7, "moe_intermediate_size": 5, "num_experts": 9}
    want = replace(config, layer_types=kinds, **sizes)
    assert replace(made.config, dtype=want.dtype) == want
