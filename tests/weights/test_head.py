"""A head in 8 bits beside the token table: what it computes, who takes it, and that it is no weight
of a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.backends.base import ForwardInput, TokenDraw
from dgemma.backends.choose import _weight_format
from dgemma.backends.reference import ReferenceBackend, commit
from dgemma.cli.info import _weights
from dgemma.config import RELEASED
from dgemma.diffusion.canvas import NO_PINS, Noise
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.reference_step import denoise
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.model.gemma import Gemma, TokenTable
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.quant import fp8, head
from dgemma.quant.fp8 import quantize
from dgemma.quant.head import CHUNK, quantize_head, soft_embed_reference
from dgemma.weights import inference
from dgemma.weights.hub import ModelOptions
from dgemma.weights.inference import choose_quant
from dgemma.weights.layer_formats import Quant
from dgemma.weights.load import Checkpoint, load_model, random_model
from dgemma.weights.save import save_checkpoint
from tests.taught import CANVAS, taught_config
from tests.weights.packed import Writer
from tests.weights.test_layer_formats import WIDE
from tests.weights.test_quantize import make

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TAUGHT = taught_config()
CONFIG = replace(TAUGHT, vocab_size=TAUGHT.vocab_size // 16 * 16)  # a multiple of 16
STEPS = 4
SAMPLER = Sampler(max_denoising_steps=STEPS, rule=EntropyBound(entropy_bound=2.0))


def made(*, fp8_head: bool, soft: bool = False) -> Gemma:
    """Sharp enough that some positions are decided."""
    model = random_model(CONFIG, seed=3).requires_grad_(False)
    model.embed_tokens.weight.mul_(6.0)
    return quantize_head(model, soft=soft) if fp8_head else model


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def defined(model: Gemma, hidden_TD: Tensor) -> Tensor:
    """What an 8-bit head says, dequantized at once."""
    rows, weight = quantize(hidden_TD), quantize(model.embed_tokens.weight)
    return F.linear(rows.dequantize(), weight.dequantize())


@pytest.mark.parametrize("rows", [1, 7])
def test_scores_are_the_definition_s(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fp8, head):  # the last piece is smaller than the others
        monkeypatch.setattr(module, "VOCAB_PIECE", CONFIG.vocab_size // 3)
    model, hidden_TD = made(fp8_head=True), drawn(rows, CONFIG.hidden_size)
    want_TV = defined(model, hidden_TD)
    torch.testing.assert_close(model.raw_logits(hidden_TD), want_TV, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(made(fp8_head=False).raw_logits(hidden_TD), want_TV, atol=1e-2)


def test_tokens_are_looked_up_and_meant_in_the_table_itself() -> None:
    plain, model = made(fp8_head=False), made(fp8_head=True)
    ids_T, p_TV = torch.arange(300, 309), drawn(3, CONFIG.vocab_size).softmax(-1)
    assert torch.equal(model.embed(ids_T), plain.embed(ids_T))
    assert torch.equal(model.soft_embed(p_TV), plain.soft_embed(p_TV))


def test_means_in_8_bits_are_near_and_without_them_exact() -> None:
    plain, model = made(fp8_head=False), made(fp8_head=True, soft=True)
    p_TV = (4 * drawn(5, CONFIG.vocab_size)).softmax(-1)
    exact_TD, got_TD = plain.soft_embed(p_TV), model.soft_embed(p_TV)
    off_T = (got_TD - exact_TD).norm(dim=-1) / exact_TD.norm(dim=-1)
    assert 1e-3 < off_T.max() < 0.05
    assert torch.equal(made(fp8_head=True).soft_embed(p_TV), exact_TD)


def test_a_mean_in_8_bits_keeps_the_likeliest_token_and_rounds_the_others_by_parts() -> None:
    """A token alone in its part is exact but for its vector, however unlikely it is."""
    plain = TokenTable(2 * CHUNK, 16)
    plain.weight = torch.nn.Parameter(drawn(2 * CHUNK, 16), requires_grad=False)
    table = head.Fp8HeadTable(plain, soft=True)
    assert table.soft is not None
    soft = table.soft._replace(split=CHUNK)
    low, high, last = 3, 5, len(table.weight) - 1
    for small in (1e-2, 1e-12):
        p_1V = torch.zeros(1, len(table.weight))
        p_1V[0, low], p_1V[0, last] = 1.0, small
        want_D = table.weight[low] + small * soft.values_DV[:, last].float() * (
            rounded(soft.rel_scale_V[last]) * soft.unit_scale_1
        )
        got_1D = soft_embed_reference(p_1V, table.weight, soft)
        torch.testing.assert_close(got_1D[0], want_D, atol=1e-7, rtol=1e-6)
    p_1V[0, high] = 1e-3  # in the part of the most likely, which is not in its way
    p_1V[0, low + 1] = 1e-10  # but this one is lost beside it
    got_1D = soft_embed_reference(p_1V, table.weight, soft)
    p_1V[0, low + 1] = 0.0
    assert torch.equal(got_1D, soft_embed_reference(p_1V, table.weight, soft))
    # So it is beside one of the next part whose chunk reaches into its own.
    uneven = soft._replace(split=CHUNK - 16)
    p_1V[0, high], p_1V[0, CHUNK - 1] = 0.0, 1e-3
    without_1D = soft_embed_reference(p_1V, table.weight, uneven)
    p_1V[0, low + 1] = 1e-10
    assert torch.equal(soft_embed_reference(p_1V, table.weight, uneven), without_1D)
    p_1V[0, CHUNK - 1] = 1e-5
    assert not torch.equal(soft_embed_reference(p_1V, table.weight, uneven), without_1D)


def rounded(number: Tensor) -> Tensor:
    return number.to(torch.float8_e4m3fn).float()


def test_a_vocabulary_that_cannot_be_turned_keeps_its_means() -> None:
    table = TokenTable(24, 16)
    assert head.Fp8HeadTable(table, soft=True).soft is None


def cache_of(model: Gemma) -> KVCache:
    cache = KVCache(CONFIG, Capacity(tokens=64, segment=2 * CANVAS), torch.float32, CPU)
    commit(model, cache, torch.arange(300, 309), chunk=8)
    return cache


def new_state() -> CanvasState:
    noise = Noise(seed=3).block(0, STEPS, CANVAS, CONFIG.vocab_size, CPU)
    return start(SAMPLER, noise, NO_PINS)


def test_a_step_and_a_single_token_take_it() -> None:
    """Those of the CUDA backend are compared with these in `tests/kernels`."""
    entropies, logits = [], []
    for bits in ({"fp8_head": False}, {"fp8_head": True}, {"fp8_head": True, "soft": True}):
        model = made(**bits)
        *_, (last,) = denoise(model, [cache_of(model)], [new_state()])
        entropies.append(last.canvas.entropy_L)
        given = ForwardInput(
            cache=cache_of(model), tokens=(7,), draw=TokenDraw(), needs_logits=True
        )
        (output,) = ReferenceBackend(model).run([given])
        assert output.logits_V is not None
        want_1D = commit(model, cache_of(model), torch.tensor([7]), chunk=8)
        raw_1V = (
            defined(model, want_1D) if bits["fp8_head"] else want_1D @ model.embed_tokens.weight.T
        )
        cap = CONFIG.final_logit_softcapping
        assert cap is not None
        want_V = cap * torch.tanh(raw_1V[0] / cap)
        torch.testing.assert_close(output.logits_V, want_V, atol=1e-4, rtol=1e-4)
        logits.append(output.logits_V)
    assert not torch.allclose(*entropies[:2], atol=1e-3)
    assert not torch.allclose(*entropies[1:], atol=1e-6)
    assert not torch.allclose(*logits[:2], atol=1e-3)


def test_a_check_of_kernels_is_not_that_of_another_head() -> None:
    models = (made(fp8_head=False), made(fp8_head=True), made(fp8_head=True, soft=True))
    assert len({_weight_format(model) for model in models}) == 3


def test_a_checkpoint_does_not_hold_it(tmp_path: Path) -> None:
    plain, model = made(fp8_head=False), made(fp8_head=True, soft=True)
    assert plain.state_dict().keys() == model.state_dict().keys()
    save_checkpoint(Checkpoint(model=model), tmp_path / "saved")
    again = load_model(tmp_path / "saved").model
    assert torch.equal(again.embed_tokens.weight, plain.embed_tokens.weight)
    assert type(again.embed_tokens) is TokenTable


def test_it_moves_with_its_model() -> None:
    model = made(fp8_head=True, soft=True).to("meta")
    weight, soft = model.embed_tokens.head, model.embed_tokens.soft
    assert soft is not None and all(part.is_meta for part in soft[:3])
    assert weight.values_OI.is_meta and weight.scale_O is not None and weight.scale_O.is_meta


@pytest.mark.parametrize(
    ("quant", "total", "want"),
    [
        ("fp8", 141e9, 2),
        ("fp8", 34.2e9, 2),  # a card of 32 GB
        ("fp8", 31e9, 0),
        ("nvfp4", 25.7e9, 2),  # of 24 GB
        ("nvfp4", 21.8e9, 1),
        ("nvfp4", 17.2e9, 0),  # of 16 GB, on which it does not fit anyway
    ],
)
def test_a_gpu_needs_room_for_it(
    quant: Quant, total: float, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "usable_memory", lambda device: total)
    assert inference.num_fp8_tables(RELEASED, quant, GPU) == want
    uneven = replace(RELEASED, vocab_size=RELEASED.vocab_size + 8)  # means cannot be made of it
    assert inference.num_fp8_tables(uneven, quant, GPU) == min(want, 1)


def test_only_asked_for_rounding_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(tmp_path / "plain", replace(WIDE, vocab_size=64))
    packed = Writer("fp8", WIDE).save(tmp_path / "packed")
    half = torch.bfloat16
    assert not choose_quant("fp8", plain, CPU, half).fp8_head
    monkeypatch.setattr(inference, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(inference, "_free", lambda device: 1e9)
    monkeypatch.setattr(inference, "usable_memory", lambda device: 24e9)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for quant in ("fp8", "nvfp4"):
        found = choose_quant(quant, plain, GPU, half)
        assert found.fp8_head and found.fp8_soft_embed
    monkeypatch.setattr(inference, "choose_device", lambda name: GPU)
    said = "fp8, head and soft embeddings in 8 bits (asked for)"
    assert _weights(ModelOptions(model=str(plain), dtype="bfloat16", quant="fp8")) == said
    uneven = make(tmp_path / "uneven", replace(WIDE, vocab_size=72))
    said = "fp8, head in 8 bits (asked for)"
    assert _weights(ModelOptions(model=str(uneven), dtype="bfloat16", quant="fp8")) == said
    for quant, directory in (("none", plain), ("auto", plain), ("auto", packed), ("fp8", packed)):
        assert not choose_quant(quant, directory, GPU, half).fp8_head
    monkeypatch.setattr(inference, "unsupported_reason", lambda *_: "there are none")
    assert not choose_quant("fp8", plain, GPU, half).fp8_head
