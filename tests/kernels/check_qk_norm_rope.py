"""QK norm, RoPE and the KV cache write by kernel."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.configs import HeadsConfig, heads_config
from dgemma.backends.cuda.kernels import qk_norm_rope as kernels
from dgemma.backends.cuda.kernels.attention import MIXED, Segments
from dgemma.model.norm_rope import apply_rope, rms_norm

EPS = 1e-6
QUERIES, KEYS, WIDTH, SLOTS = 8, 4, 16, 9


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shape_of(*, has_value: bool) -> kernels.Heads:
    return kernels.Heads(
        queries=QUERIES,
        keys=KEYS,
        width=WIDTH,
        q_weight=1 + 0.1 * normal(4, WIDTH),
        k_weight=1 + 0.1 * normal(5, WIDTH),
        has_value=has_value,
    )


def segments(counts: list[int], stride: int) -> Segments:
    """Segments of these counts, whose entries are in the opposite order, with others between."""
    count_E2 = torch.tensor([[count, 99] for count in reversed(counts)])
    return Segments(
        entry_I=torch.arange(len(counts) - 1, -1, -1, dtype=torch.int32),
        count_E=count_E2[:, 0],
        causal_E=torch.zeros(len(counts), dtype=torch.int32),
        stride=stride,
        kind=MIXED,
    )


@pytest.mark.parametrize("has_value", [True, False])
@pytest.mark.parametrize("together", [None, HeadsConfig(1, 1)])
def test_heads_are_normalized_rotated_and_written_to_their_slots(
    has_value: bool, together: HeadsConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens beyond a segment's count are not written, nor those of an entry without any."""
    if together is not None:
        monkeypatch.setattr(kernels, "heads_config", lambda *_: together)
    counts, stride = [3, 1, 0, 2], 3
    tokens, count = len(counts) * stride, QUERIES + KEYS * (1 + has_value)
    qkv, shape = normal(1, tokens, count * WIDTH), shape_of(has_value=has_value)
    buffers = normal(2, len(counts), 2, SLOTS, KEYS, WIDTH)
    before = buffers.clone()
    angles = normal(3, tokens, WIDTH // 2)
    cos_sin = angles.cos(), angles.sin()
    # Five keys from slot 2 on, of which the last ones are new; padding has none, and no memory.
    table_EX6 = torch.zeros(len(counts), 2, 6, dtype=torch.long)
    for entry, index in enumerate(reversed(range(len(counts)))):
        if counts[index]:
            keys, values = buffers[index, 0, 2].data_ptr(), buffers[index, 1, 2].data_ptr()
            table_EX6[entry, 1] = torch.tensor([0, 0, 0, keys, values, 5])
    given = (table_EX6[:, 1], segments(counts, stride))
    q = kernels.qk_norm_rope(qkv, shape, cos_sin, *given, EPS)
    parts = qkv.view(tokens, count, WIDTH)
    want_q = apply_rope(rms_norm(parts[:, :QUERIES], shape.q_weight, EPS), *cos_sin)
    torch.testing.assert_close(q, want_q, atol=2e-6, rtol=1e-5)
    k = parts[:, QUERIES : QUERIES + KEYS]
    v = parts[:, QUERIES + KEYS :] if has_value else k
    new_k = apply_rope(rms_norm(k, shape.k_weight, EPS), *cos_sin)
    new_v = rms_norm(v, None, EPS)
    for index, number in enumerate(counts):
        own = slice(index * stride, index * stride + number)
        before[index, 0, 7 - number : 7] = new_k[own]
        before[index, 1, 7 - number : 7] = new_v[own]
    torch.testing.assert_close(buffers, before, atol=2e-6, rtol=1e-5)


def test_heads_are_taken_together_as_far_as_their_kinds_allow() -> None:
    for queries, keys, want in ((16, 8, (8, 4)), (16, 2, (2, 1)), (4, 1, (1, 1)), (12, 4, (4, 2))):
        assert heads_config(queries, keys) == HeadsConfig(*want)
