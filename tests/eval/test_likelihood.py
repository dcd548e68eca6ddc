"""Losses of padded rows are those of the engine's own passes, whatever the batch."""

import pytest
import torch

from dgemma.backends.base import ForwardInput
from dgemma.backends.reference import ReferenceBackend, commit
from dgemma.eval import likelihood
from dgemma.eval.likelihood import causal_losses, denoising_losses
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.load import random_model
from tests.taught import CANVAS, taught_config
from tests.tiny import CPU

BOS, FILL = 2, 1


@pytest.fixture(scope="module")
def model() -> Gemma:
    """Canvases of 16 and windows of 12, so that windows end inside, at and before canvases."""
    return random_model(taught_config(), seed=3)


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(30, 300, (length - 1,), generator=generator) for length in lengths]
    return [[BOS, *ids.tolist()] for ids in drawn]


def test_causal_losses_are_the_engines_scores(model: Gemma) -> None:
    given = texts(40, 3, 17, 2)
    for ids, losses in zip(given, causal_losses(model, given), strict=True):
        cache = KVCache(model.config, Capacity(tokens=len(ids)), torch.float32, CPU)
        given_ids = ForwardInput(cache=cache, tokens=tuple(ids[:-1]), targets=tuple(ids[1:]))
        (output,) = ReferenceBackend(model).run([given_ids])
        assert losses == pytest.approx([-x for x in output.logprobs], abs=2e-4)


def test_groups_do_not_change_losses(model: Gemma, monkeypatch: pytest.MonkeyPatch) -> None:
    given = texts(30, 8, 21, 8, 5)
    together = causal_losses(model, given)
    noised = denoising_losses(model, given, 0.5, FILL, seed=1)
    monkeypatch.setitem(likelihood.PASS_POSITIONS, "cpu", 1)
    for alone, one in zip(causal_losses(model, given), together, strict=True):
        assert alone == pytest.approx(one, abs=2e-4)
    for alone, one in zip(denoising_losses(model, given, 0.5, FILL, seed=1), noised, strict=True):
        assert alone.is_noised == one.is_noised
        assert alone.self_conditioned == pytest.approx(one.self_conditioned, abs=2e-4)


@torch.inference_mode()
def through_the_cache(
    model: Gemma, past: list[int], canvas: torch.Tensor, soft: torch.Tensor | None
) -> torch.Tensor:
    """Logits of a canvas behind committed tokens, by the passes that generate."""
    cache = KVCache(model.config, Capacity(tokens=len(past) + CANVAS), torch.float32, CPU)
    commit(model, cache, torch.tensor(past), chunk=512)
    context = ForwardBatch([Segment(cache, CANVAS, commit=False)])
    return model.logits(model.denoise(canvas, soft, context))


def test_denoising_losses_are_those_of_the_passes_that_generate(model: Gemma) -> None:
    given = texts(40, 12)  # three canvases, the last one filled; and one
    level, seed = 0.6, 4
    for number, (ids, found) in enumerate(
        zip(given, denoising_losses(model, given, level, FILL, seed), strict=True)
    ):
        blocks = -(-(len(ids) - 1) // CANVAS)
        filled = torch.tensor([*ids, *[FILL] * (1 + blocks * CANVAS - len(ids))])
        noised, mask = likelihood._noised(filled[1:], level, model, (seed, number))
        plain, told = [], []
        for block in range(blocks):
            begin = block * CANVAS
            canvas, past = noised[begin : begin + CANVAS], filled[: 1 + begin].tolist()
            target = filled[1 + begin : 1 + begin + CANVAS, None]
            logits = through_the_cache(model, past, canvas, None)
            plain += (-logits.log_softmax(-1).gather(1, target)[:, 0]).tolist()
            soft = model.soft_embed(logits.softmax(-1))
            logits = through_the_cache(model, past, canvas, soft)
            told += (-logits.log_softmax(-1).gather(1, target)[:, 0]).tolist()
        count = len(ids) - 1  # what only fills the canvas is left out
        assert found.plain == pytest.approx(plain[:count], abs=5e-4)
        assert found.self_conditioned == pytest.approx(told[:count], abs=5e-4)
        assert found.is_noised == mask[:count].tolist()


def test_noise_follows_seed_level_and_text(model: Gemma) -> None:
    target = torch.full((400,), 50)
    _, low = likelihood._noised(target, 0.1, model, (0, 0))
    high, mask = likelihood._noised(target, 0.9, model, (0, 0))
    assert 20 <= int(low.sum()) <= 60 and 340 <= int(mask.sum()) <= 380
    assert bool((high[~mask] == 50).all())
    again, _ = likelihood._noised(target, 0.9, model, (0, 0))
    assert torch.equal(high, again)
    for key in ((1, 0), (0, 1)):
        other, _ = likelihood._noised(target, 0.9, model, key)
        assert not torch.equal(high, other)
