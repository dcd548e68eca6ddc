"""The router by kernels: split-K logits, top-k, and the assignments of each expert."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import RouterConfig, router_config
from dgemma.backends.cuda.kernels import router as kernels
from dgemma.backends.cuda.kernels.moe import sort_by_expert
from dgemma.model.moe import topk


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routed(logits_TE: Tensor, scale_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return experts and weights as the model's router does."""
    weights_TK, ids_TK = topk(logits_TE.softmax(-1), top_k)
    return ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True) * scale_E[ids_TK]


@pytest.mark.parametrize(
    ("rows", "width", "num_experts", "top_k", "config"),
    [
        (6, 40, 5, 3, RouterConfig(rows=16, columns=16, k_split=16, depth=16)),
        (18, 64, 20, 8, RouterConfig(rows=16, columns=16, k_split=32, depth=16)),
        (3, 48, 4, 2, RouterConfig(rows=16, columns=16, k_split=64, depth=32, topk_warps=2)),
        (1, 32, 1, 1, RouterConfig(rows=16, columns=16, k_split=16, depth=16)),
    ],
)
def test_both_launches_agree_with_the_definition(
    rows: int, width: int, num_experts: int, top_k: int, config: RouterConfig
) -> None:
    x_TD, weight_ED = normal(1, rows, width), normal(2, num_experts, width) * width**-0.5
    scale_E, scores_TE = 1 + 0.1 * normal(3, num_experts), x_TD @ weight_ED.T
    want_ids, want = routed(scores_TE, scale_E, top_k)
    logits = kernels.router_logits(x_TD, weight_ED, config)
    torch.testing.assert_close(logits.logits_STE.sum(0), scores_TE, atol=2e-6, rtol=1e-5)
    ids, weights, buckets = kernels.topk(logits, scale_E, top_k, config.topk_warps)
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want, atol=1e-6, rtol=1e-5)
    assert buckets is not None
    sorted_ = sort_by_expert(ids, num_experts)
    assert buckets.count_E.tolist() == sorted_.count_E.tolist()
    for expert, count in enumerate(buckets.count_E.tolist()):
        own, other = (b.assignment_ES[expert, :count].tolist() for b in (buckets, sorted_))
        assert sorted(own) == other


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (5, 3), (128, 8), (1, 1)])
def test_topk_agrees_with_the_definition(experts: int, top_k: int) -> None:
    """Without counts there are no buckets."""
    logits, scale = 2 * normal(1, 6, experts), 1 + 0.1 * normal(2, experts)
    ids, weights, buckets = kernels.topk(kernels.RouterLogits(logits[None]), scale, top_k)
    want_ids, want = routed(logits, scale, top_k)
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want, atol=1e-6, rtol=1e-5)
    assert buckets is None


@pytest.mark.parametrize("num_experts", [8, 6])
def test_one_token_chooses_the_experts_that_it_chooses_among_others(num_experts: int) -> None:
    scale = 1 + 0.1 * normal(1, num_experts)
    for seed in range(4):
        logits = normal(seed, 1, 1, num_experts)
        logits[0, 0, 2] = logits[0, 0, 4] if seed else float("nan")
        twice = kernels.RouterLogits(logits.expand(1, 2, num_experts).contiguous())
        ids, weights, _ = kernels.topk(twice, scale, 3)  # one after the other
        ranked, ranked_weights, _ = kernels.topk(kernels.RouterLogits(logits), scale, 3)
        assert torch.equal(ids[:1], ranked)
        torch.testing.assert_close(ranked_weights, weights[:1])


def test_scores_that_are_no_numbers_still_choose_each_expert_once() -> None:
    logits_1TE = normal(1, 1, 3, 6)
    logits_1TE[0, 1] = float("nan")
    logits_1TE[0, 2, :4] = float("-inf")
    counts = torch.zeros(6, dtype=torch.int32)
    ids, _, buckets = kernels.topk(kernels.RouterLogits(logits_1TE, counts), torch.ones(6), 4)
    assert buckets is not None
    assert all(len(set(row)) == 4 and max(row) < 6 for row in ids.tolist())
    assert int(buckets.count_E.sum()) == 12


def test_equal_scores_are_taken_from_the_first_on_and_signs_are_in_order() -> None:
    """Scores are compared as whole numbers, of which there are two for zero."""
    rows = [[-0.0, 0.0, -0.0, 1e-38, -1e-38], [-3.0, -1.0, -2.0, -1.0, -1e30], [2.0] * 5]
    rows += [[-0.5, 3.0, -2e38, 0.25, 3.0]]
    logits_1TE, counts = torch.tensor([rows]), torch.zeros(5, dtype=torch.int32)
    scale_E = torch.tensor([1.0, -2.0, 0.5, 3.0, 7.0])
    ids, weights, _ = kernels.topk(kernels.RouterLogits(logits_1TE, counts), scale_E, 4)
    assert ids.tolist() == [[3, 0, 1, 2], [1, 3, 2, 0], [0, 1, 2, 3], [1, 4, 3, 0]]
    chosen_TK = logits_1TE[0].gather(1, ids.long())
    want_TK = chosen_TK.softmax(-1) * scale_E[ids.long()]
    torch.testing.assert_close(weights, want_TK, atol=1e-7, rtol=1e-6)


def test_the_depth_is_split_less_the_more_rows_there_are() -> None:
    splits = [router_config(rows, 128, 2816).k_split for rows in (1, 256, 1024, 4096, 1 << 14)]
    assert splits == sorted(splits)
    assert splits[1] == router_config(256, 128, 2816).depth == 128
    assert router_config(4096, 128, 2816).depth == 64
    assert splits[-1] >= 2816
