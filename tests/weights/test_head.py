"""A head in 8 bits beside the token table: what it computes, who takes it, and that it is no weight
of a checkpoint."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.cache import KVCache, Room
from dgemma.canvas import NO_PINS, Noise
from dgemma.cli.info import _weights
from dgemma.cost.table import RELEASED
from dgemma.denoise import Row, commit, denoise, start
from dgemma.graph.memory import Shape
from dgemma.graph.step import Stepper
from dgemma.graph.steppers import _form
from dgemma.graph.token import Teller
from dgemma.model import Gemma
from dgemma.ops import dense
from dgemma.ops.fp8 import quantize
from dgemma.sampler import EntropyBound, Sampler
from dgemma.stack import Stack
from dgemma.weights import choose, head, served
from dgemma.weights.choose import choose_quant
from dgemma.weights.head import shrink_head
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.packed import Quant
from dgemma.weights.random import random_model
from dgemma.weights.save import save_checkpoint
from tests.taught import CANVAS, taught_config
from tests.weights.packed import Writer
from tests.weights.test_packed import WIDE
from tests.weights.test_quantize import make

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CONFIG = taught_config()
STEPS = 4
SAMPLER = Sampler(max_steps=STEPS, rule=EntropyBound(bound=2.0))


def made(*, eight: bool) -> Gemma:
    """Sharp enough that some positions are decided."""
    model = random_model(CONFIG, seed=3).requires_grad_(False)
    model.embed_tokens.weight.mul_(6.0)
    return shrink_head(model) if eight else model


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def defined(model: Gemma, hidden_TD: Tensor) -> Tensor:
    """What an 8-bit head says, multiplied out at once."""
    rows, weight = quantize(hidden_TD), quantize(model.embed_tokens.weight)
    return F.linear(rows.whole(), weight.whole())


@pytest.mark.parametrize("rows", [1, 7])
def test_scores_are_the_definition_s(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dense, head):  # the last piece is smaller than the others
        monkeypatch.setattr(module, "PIECE", CONFIG.vocab_size // 3)
    model, hidden_TD = made(eight=True), drawn(rows, CONFIG.hidden_size)
    want_TV = defined(model, hidden_TD)
    torch.testing.assert_close(model.head(hidden_TD), want_TV, atol=1e-4, rtol=1e-5)
    out_TV = torch.empty_like(want_TV)
    assert dense.scores(hidden_TD, model.embed_tokens.head, out_TV) is out_TV
    torch.testing.assert_close(out_TV, want_TV, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(made(eight=False).head(hidden_TD), want_TV, atol=1e-2)


def test_tokens_are_looked_up_and_meant_in_the_table_itself() -> None:
    plain, model = made(eight=False), made(eight=True)
    ids_T, p_TV = torch.arange(300, 309), drawn(3, CONFIG.vocab_size).softmax(-1)
    assert torch.equal(model.embed(ids_T), plain.embed(ids_T))
    assert torch.equal(model.embed_soft(p_TV), plain.embed_soft(p_TV))


def cache_of(model: Gemma) -> KVCache:
    cache = KVCache(CONFIG, Room(tokens=64, span=2 * CANVAS), torch.float32, CPU)
    commit(model, cache, torch.arange(300, 309), chunk=8)
    return cache


def row() -> Row:
    noise = Noise(seed=3).block(0, STEPS, CANVAS, CONFIG.vocab_size, CPU)
    return start(SAMPLER, noise, NO_PINS)


def test_a_captured_step_and_a_single_token_take_it() -> None:
    entropies = []
    for eight in (False, True):
        model = made(eight=eight)
        *_, (want,) = denoise(model, [cache_of(model)], [row()])
        stepper = Stepper(model, Stack(model), Shape(CANVAS, STEPS, SAMPLER.rule))
        cache, got = cache_of(model), row()
        while not got.is_done:
            after = stepper.step(got, cache)
            assert after is not None
            got = after
        assert torch.equal(got.canvas.guess_L, want.canvas.guess_L)
        torch.testing.assert_close(got.canvas.entropy_L, want.canvas.entropy_L)
        entropies.append(got.canvas.entropy_L)
        told_V = Teller(model, Stack(model)).tell(7, cache)
        assert told_V is not None
        other = cache_of(model)
        want_1D = commit(model, other, torch.tensor([7]), chunk=8)
        torch.testing.assert_close(told_V, model.logits(want_1D)[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(*entropies, atol=1e-3)


def test_a_check_of_kernels_is_not_that_of_another_head() -> None:
    assert _form(made(eight=True)) != _form(made(eight=False))


def test_a_checkpoint_does_not_hold_it(tmp_path: Path) -> None:
    plain, model = made(eight=False), made(eight=True)
    assert plain.state_dict().keys() == model.state_dict().keys()
    save_checkpoint(Checkpoint(model=model), tmp_path / "saved")
    again = load_model(tmp_path / "saved").model
    assert torch.equal(again.embed_tokens.weight, plain.embed_tokens.weight)
    assert again.embed_tokens.head.factor_O is None


def test_it_moves_with_its_model() -> None:
    model = made(eight=True).to("meta")
    weight = model.embed_tokens.head
    assert weight.numbers_OI.is_meta and weight.factor_O is not None and weight.factor_O.is_meta


@pytest.mark.parametrize(
    ("quant", "total", "want"),
    [
        ("fp8", 141e9, True),
        ("fp8", 34.2e9, True),  # a card of 32 GB
        ("fp8", 31e9, False),
        ("nvfp4", 25.7e9, True),  # of 24 GB
        ("nvfp4", 17.2e9, False),  # of 16 GB, on which it does not fit anyway
    ],
)
def test_a_gpu_needs_room_for_it(
    quant: Quant, total: float, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_total", lambda device: total)
    assert choose.has_room_for_head(RELEASED, quant, GPU) == want


def test_only_asked_for_rounding_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(tmp_path / "plain", WIDE)
    packed = Writer("fp8", WIDE).save(tmp_path / "packed")
    half = torch.bfloat16
    assert not choose_quant("fp8", plain, CPU, half).head_8
    monkeypatch.setattr(choose, "reason_against", lambda *_: None)
    monkeypatch.setattr(choose, "_free", lambda device: 1e9)
    monkeypatch.setattr(choose, "_total", lambda device: 24e9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_quant("fp8", plain, GPU, half).head_8
    assert choose_quant("nvfp4", plain, GPU, half).head_8
    monkeypatch.setattr(served, "choose_device", lambda name: GPU)
    assert _weights(str(plain), "auto", "bfloat16", "fp8") == "fp8, head in 8 bits (asked for)"
    for quant, directory in (("none", plain), ("auto", plain), ("auto", packed), ("fp8", packed)):
        assert not choose_quant(quant, directory, GPU, half).head_8
    monkeypatch.setattr(choose, "reason_against", lambda *_: "there are none")
    assert not choose_quant("fp8", plain, GPU, half).head_8
