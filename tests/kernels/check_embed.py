"""Inputs of a pass by kernel: embeddings, RoPE tables, and per-token inputs of a step."""

import pytest
import torch
from torch import Tensor

from dgemma.backends.cuda.kernels.embed import EmbedTokens, StepInputs, Table, add_and_norm, embed
from dgemma.backends.cuda.passes import Rope
from dgemma.model.gemma import Gemma
from dgemma.model.norm_rope import rms_norm, rope_cos_sin
from tests.kernels import small

EPS, LENGTH, STEPS, ENTRIES = 1e-6, 4, 3, 6
START = [0, 300, 7, 41, 0, 5]


@pytest.fixture(scope="module")
def model() -> Gemma:
    return small.model()


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(entries: list[int], num_canvases: int) -> EmbedTokens:
    """Name entries, whose tokens and starts are strided."""
    of = torch.Generator().manual_seed(1)
    canvas_EL, commit_EL = torch.randint(96, (2, ENTRIES, LENGTH + 3), generator=of)
    start_E2 = torch.tensor([[start, 99] for start in START])
    return EmbedTokens(
        entry_I=torch.tensor(entries, dtype=torch.int32),
        canvas_EL=canvas_EL[:, :LENGTH],
        commit_EL=commit_EL[:, 1 : 1 + LENGTH],
        start_E=start_E2[:, 0],
        length=LENGTH,
        num_canvases=num_canvases,
    )


def step_inputs(width: int, positions: int) -> StepInputs:
    return StepInputs(
        soft_ELD=normal(2, ENTRIES, LENGTH, width),
        step_E=torch.tensor([0, 2, 1, 0, 1000, 0]),  # padding has taken many
        temperature_EN=normal(3, ENTRIES, STEPS).abs(),
        uniform_ENL=normal(4, ENTRIES, STEPS + 1, LENGTH).double(),
        draw_temperature_E=normal(5, ENTRIES).abs(),
        temperature_T=torch.zeros(positions),
        uniform_T=torch.zeros(positions, dtype=torch.float64),
        draw_temperature_T=torch.zeros(positions),
        current_T=torch.zeros(positions, dtype=torch.long),
    )


def check_rope(model: Gemma, tokens: EmbedTokens, found: dict[str, tuple[Tensor, Tensor]]) -> None:
    starts = [START[entry] for entry in tokens.entry_I.tolist()]
    positions_T = torch.cat([torch.arange(start, start + LENGTH) for start in starts])
    want = rope_cos_sin(model.config, positions_T)
    assert list(found) == list(want)
    for kind, pair in want.items():
        for got, wanted in zip(found[kind], pair, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_canvases_bring_self_conditioning_and_their_step_s_numbers(model: Gemma) -> None:
    """Other segments of the same pass bring tokens alone."""
    entries, canvases = [2, 1, 4, 5, 3], 3
    tokens, part = tokens_of(entries, canvases), model.self_conditioning
    assert part is not None
    count, rows = len(entries) * LENGTH, canvases * LENGTH
    tables, cos_sin = Rope(model).tables(count)
    step = step_inputs(model.config.hidden_size, rows + 3)
    table = Table(model.embed_tokens.weight, model.embed_tokens.scale)
    norm = (part.pre_norm.weight, part.pre_norm.eps)
    vector_TD, normed_TD = embed(tokens, table, tables, norm, step)
    named = [*tokens.canvas_EL[entries[:3]], *tokens.commit_EL[entries[3:]]]
    assert torch.equal(vector_TD, model.embed(torch.cat(named)))
    soft_TD = step.soft_ELD[entries[:3]].flatten(0, 1)
    torch.testing.assert_close(normed_TD[:rows], part.pre_norm(soft_TD), atol=2e-6, rtol=1e-5)
    steps = step.step_E.clamp(max=STEPS - 1)
    for index, entry in enumerate(entries[:3]):
        own, at = slice(index * LENGTH, (index + 1) * LENGTH), int(steps[entry])
        assert torch.equal(step.current_T[own], tokens.canvas_EL[entry])
        assert torch.equal(step.uniform_T[own], step.uniform_ENL[entry, at + 1])
        assert (step.temperature_T[own] == step.temperature_EN[entry, at]).all()
        assert (step.draw_temperature_T[own] == step.draw_temperature_E[entry]).all()
    assert not any(x[rows:].any() for x in (step.current_T, step.uniform_T, step.temperature_T))
    check_rope(model, tokens, cos_sin)


def test_without_canvases_tokens_come_normalized_for_the_first_layer(model: Gemma) -> None:
    tokens = tokens_of([5, 0, 1], 0)
    tables, cos_sin = Rope(model).tables(3 * LENGTH)
    weight_D = 1 + 0.1 * normal(6, model.config.hidden_size)
    table = Table(model.embed_tokens.weight, model.embed_tokens.scale)
    vector_TD, normed_TD = embed(tokens, table, tables, (weight_D, EPS))
    want_TD = model.embed(tokens.commit_EL[[5, 0, 1]].flatten())
    assert torch.equal(vector_TD, want_TD)
    torch.testing.assert_close(normed_TD, rms_norm(want_TD, weight_D, EPS), atol=2e-6, rtol=1e-5)
    check_rope(model, tokens, cos_sin)


def test_embeddings_in_16_bits_are_rounded_as_by_definition() -> None:
    table_VD, scale = normal(1, 96, 40).half(), 6.32
    tables, _ = Rope(small.model()).tables(2 * LENGTH)
    tokens = tokens_of([3, 2], 0)
    vector_TD, _ = embed(tokens, Table(table_VD, scale), tables, (torch.ones(40).half(), EPS))
    assert torch.equal(vector_TD, table_VD[tokens.commit_EL[[3, 2]].flatten()] * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_self_conditioning_is_added_and_normalized_for_canvases_alone(dtype: torch.dtype) -> None:
    x_TD, part_CD = normal(1, 5, 40).to(dtype), normal(2, 3, 40).to(dtype)
    got_TD = add_and_norm(x_TD, part_CD, EPS)
    want_CD = rms_norm(x_TD[:3] + part_CD, None, EPS)
    tolerance = {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(got_TD[:3], want_CD, **tolerance)
    assert torch.equal(got_TD[3:], x_TD[3:])
