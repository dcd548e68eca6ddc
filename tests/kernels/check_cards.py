"""Configs by card: those of an H200 where none is present, and matrices read without TMA."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda import configs, device
from dgemma.backends.cuda.kernels import gemm_fp8, soft_embed_fp8
from dgemma.quant.fp8 import quantize
from dgemma.quant.head import SoftTable

A100, ADA, HOPPER, B200, GEFORCE_50 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_without_a_gpu_configs_are_those_of_an_h200() -> None:
    assert device.capability() == HOPPER
    assert device.num_sms() == 132
    assert configs.moe_table(16) is configs.MOE_16
    assert configs.for_device(configs.SOFT_EMBED) is configs.SOFT_EMBED


def test_a_card_without_tma_or_much_shared_memory_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for card, is_hopper_like in ((A100, False), (ADA, False), (B200, True), (GEFORCE_50, False)):
        monkeypatch.setattr(device, "capability", lambda card=card: card)
        assert device.has_tma() == (card >= HOPPER)
        assert (configs.moe_table(8) is configs.MOE_8) == is_hopper_like
        entries = [entry for bits in (16, 8, 4) for entry in configs.moe_table(bits)]
        tiles = [tile for entry in entries for tile in (entry.gate_up, entry.down)]
        assert is_hopper_like or not any(tile.tma for tile in tiles)
        assert (configs.for_device(configs.SOFT_EMBED) == configs.SOFT_EMBED) == is_hopper_like
        # What is asked for by a bench is what runs.
        assert configs.for_device(configs.GemmConfig(rows=16)) == configs.GemmConfig(rows=16)


def test_products_are_the_same_without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs.GemmConfig(rows=16, outputs=16, depth=32, splits=2)
    weight, x = quantize(normal(1, 40, 80)), quantize(normal(2, 18, 80))
    p_TV, of_VD = normal(3, 5, 96).softmax(1), normal(4, 96, 24)
    table = SoftTable.transpose(*quantize(of_VD))._replace(split=64)
    values = quantize(p_TV).values
    probs = soft_embed_fp8.QuantizedProbs(values, normal(5, 2, 5), *(torch.empty(0),) * 2)

    def products() -> tuple[Tensor, Tensor]:
        whole = configs.GemmConfig(rows=16, outputs=16, depth=32)
        soft_STD = soft_embed_fp8.split_sums(probs, table, torch.float32, whole)
        return gemm_fp8.gemm(x, weight, torch.float32, config), soft_STD

    want = products()
    monkeypatch.setattr(device, "capability", lambda: ADA)
    got = products()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got[0].any() and got[1].any()
