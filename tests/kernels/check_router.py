"""The router by kernels: scores in parts, choices, and what each expert is handed."""

import pytest
import torch
from torch import Tensor

from dgemma.ops import fused
from dgemma.ops.fast import switched
from dgemma.ops.kernels import router as kernels
from dgemma.ops.kernels.buckets import buckets


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(num_experts: int, width: int, top_k: int) -> fused.RouterWeights:
    weight_ED = normal(2, num_experts, width) * width**-0.5
    return fused.RouterWeights(weight_ED, 1 + 0.1 * normal(3, num_experts), top_k)


@pytest.mark.parametrize(
    ("rows", "width", "num_experts", "top_k", "form"),
    [
        (6, 40, 5, 3, kernels.Cut(rows=16, columns=16, share=16, depth=16)),
        (18, 64, 20, 8, kernels.Cut(rows=16, columns=16, share=32, depth=16)),
        (3, 48, 4, 2, kernels.Cut(rows=16, columns=16, share=64, depth=32, choosers=2)),
        (1, 32, 1, 1, kernels.Cut(rows=16, columns=16, share=16, depth=16)),
    ],
)
def test_both_launches_agree_with_the_definition(
    rows: int, width: int, num_experts: int, top_k: int, form: kernels.Cut
) -> None:
    x_TD, router = normal(1, rows, width), weights(num_experts, width, top_k)
    with torch.inference_mode(), switched(False):
        want = fused.routed(x_TD, router)
    parts = kernels.parts(x_TD, router.weight_ED, form)
    scores_TE = x_TD @ router.weight_ED.T
    torch.testing.assert_close(parts.part_STE.sum(0), scores_TE, atol=2e-6, rtol=1e-5)
    ids, share, into = kernels.choose(parts, router.scale_E, top_k, form.choosers)
    assert ids.tolist() == want.ids_TK.tolist()
    torch.testing.assert_close(share, want.share_TK, atol=1e-6, rtol=1e-5)
    assert into is not None
    sorted_ = buckets(ids, num_experts)
    assert into.count_E.tolist() == sorted_.count_E.tolist()
    for expert, count in enumerate(into.count_E.tolist()):
        own, other = (b.choice_ES[expert, :count].tolist() for b in (into, sorted_))
        assert sorted(own) == other


def test_the_op_hands_out_buckets_where_it_runs_by_kernels() -> None:
    x_TD, router = normal(1, 7, 32), weights(4, 32, 2)
    with torch.inference_mode():
        want = fused.routed(x_TD, router)
        with switched(True):
            got = fused.routed(x_TD, router)
    assert want.into is None
    assert got.into is not None
    assert got.ids_TK.tolist() == want.ids_TK.tolist()
    assert int(got.into.count_E.sum()) == 14


def test_scores_that_are_no_numbers_still_choose_each_expert_once() -> None:
    part_1TE = normal(1, 1, 3, 6)
    part_1TE[0, 1] = float("nan")
    part_1TE[0, 2, :4] = float("-inf")
    counts = torch.zeros(6, dtype=torch.int32)
    ids, _, into = kernels.choose(kernels.Parts(part_1TE, counts), torch.ones(6), 4)
    assert into is not None
    assert all(len(set(row)) == 4 and max(row) < 6 for row in ids.tolist())
    assert int(into.count_E.sum()) == 12


def test_equal_scores_are_taken_from_the_first_on_and_signs_are_in_order() -> None:
    """Scores are compared as whole numbers, of which there are two for zero."""
    rows = [[-0.0, 0.0, -0.0, 1e-38, -1e-38], [-3.0, -1.0, -2.0, -1.0, -1e30], [2.0] * 5]
    rows += [[-0.5, 3.0, -2e38, 0.25, 3.0]]
    part_1TE, counts = torch.tensor([rows]), torch.zeros(5, dtype=torch.int32)
    scale_E = torch.tensor([1.0, -2.0, 0.5, 3.0, 7.0])
    ids, share, _ = kernels.choose(kernels.Parts(part_1TE, counts), scale_E, 4)
    assert ids.tolist() == [[3, 0, 1, 2], [1, 3, 2, 0], [0, 1, 2, 3], [1, 4, 3, 0]]
    chosen_TK = part_1TE[0].gather(1, ids.long())
    want_TK = chosen_TK.softmax(-1) * scale_E[ids.long()]
    torch.testing.assert_close(share, want_TK, atol=1e-7, rtol=1e-6)


def test_the_depth_is_cut_less_the_more_rows_there_are() -> None:
    shares = [kernels.cut(rows, 128, 2816).share for rows in (1, 256, 1024, 4096, 1 << 14)]
    assert shares == sorted(shares)
    assert shares[1] == kernels.cut(256, 128, 2816).depth == 128
    assert kernels.cut(4096, 128, 2816).depth == 64
    assert shares[-1] >= 2816
