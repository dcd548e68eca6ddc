"""The objective: masks, and losses and gradients against inference and transformers."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from dgemma.backends.reference import commit
from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.model import moe as routed
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.train.corruption import NONE, Corruption, RowArray
from dgemma.train.masks import BLOCK_LISTS, AttnVisibility, PackedContext, dense_mask, make_contexts
from dgemma.train.objective import LossSettings, Objective, interleave_self_cond
from dgemma.train.onpolicy import PackedStepStats, rollout_draws, rollout_step
from dgemma.train.packing import (
    CANVAS,
    EXAMPLE,
    FIELDS,
    PADDING,
    PINNED,
    POSITION,
    RNG_KEY,
    START,
    TARGET,
    TOKEN,
    WEIGHT,
    Batch,
    Example,
    PackingLayout,
    pack_example,
)
from tests.test_parity import row_cache
from tests.tiny import TINY, configs, ours, shake, twin
from tests.train.runs import counts_of, gradients, losses_of, mixture, shaken

TOLERANCE = 1e-4
REPEATABLE = settings(deadline=None, derandomize=True, database=None)
CAUSAL_ONLY = LossSettings(causal_weight=1.0, balance_weight=0.0)


def packed(config: ModelConfig, seed: int, sequences: int = 2, rows: int = 110) -> RowArray:
    """Sequences of several random examples each, some rows left over."""
    rng = np.random.default_rng(seed)
    batch = np.empty((len(FIELDS), sequences, rows), np.int32)
    batch[:] = PADDING[:, None, None]
    corruption = Corruption(vocab_size=config.vocab_size, hole_fraction=0.4, hole_loss_weight=3)
    for sequence in range(sequences):
        used = 0
        for number in range(3):
            sizes = rng.integers(1, 18, 2)
            texts = [rng.integers(2, config.vocab_size, n, dtype=np.int32) for n in sizes]
            length = int(rng.integers(2, config.canvas_length + 1))
            layout = PackingLayout(
                canvas_length=length,
                max_rows=rows,
                copies=int(rng.integers(1, 3)),
                train_on_prompt=bool(number % 2),
            )
            made = pack_example(Example(*texts), layout, corruption, rng)
            if made is None or used + made.shape[1] > rows:
                continue
            batch[:, sequence, used : used + made.shape[1]] = made
            batch[EXAMPLE, sequence, used : used + made.shape[1]] = number
            used += made.shape[1]
    return batch


def is_visible(rows: RowArray, query: int, key: int, window: int | None) -> bool:
    """The visibility rule in words, for two rows of one sequence."""
    q, k = rows[:, query], rows[:, key]
    reach = 1 << 30 if window is None else window
    if q[EXAMPLE] != k[EXAMPLE]:
        return False
    if q[CANVAS] == NONE:
        return bool(k[CANVAS] == NONE and 0 <= q[POSITION] - k[POSITION] < reach)
    if k[CANVAS] == NONE:
        # As from the canvas's first position, which would count itself.
        return bool(0 < q[START] - k[POSITION] < reach)
    return bool(q[CANVAS] == k[CANVAS])


@settings(REPEATABLE, max_examples=8)
@given(seed=st.integers(0, 1000), window=st.sampled_from([None, 2, 5, 12, 40]))
def test_the_mask_is_the_rule_in_words(seed: int, window: int | None) -> None:
    rows = packed(TINY, seed, rows=70)
    mask = dense_mask(Batch.of(torch.from_numpy(rows), "cpu"), window)[:, 0]
    for sequence in range(rows.shape[1]):
        one = rows[:, sequence]
        expected = [[is_visible(one, q, k, window) for k in range(70)] for q in range(70)]
        assert torch.equal(mask[sequence], torch.tensor(expected))


# --- against inference


def hidden_of(
    objective: Objective, batch: Batch, self_cond_TD: Tensor | None, context: PackedContext
) -> Tensor:
    return objective.run_layers(objective.embed(batch, self_cond_TD), context)[0]


def packed_logits(objective: Objective, rows: RowArray, soft_TD: Tensor | None = None) -> Tensor:
    batch = Batch.of(torch.from_numpy(rows), "cpu")
    context = PackedContext(objective.model.config, batch)
    with torch.no_grad():
        logits_TV = objective.model.logits(hidden_of(objective, batch, soft_TD, context))
    return logits_TV.view(*rows.shape[1:], -1)


def examples(rows: RowArray) -> list[tuple[int, np.ndarray]]:
    """Each example: its sequence and the indices of its rows there."""
    return [
        (sequence, np.flatnonzero(one[EXAMPLE] == number))
        for sequence, one in enumerate(rows.swapaxes(0, 1))
        for number in sorted(set(one[EXAMPLE]) - {NONE})
    ]


@settings(REPEATABLE, max_examples=12)
@given(config=configs(), seed=st.integers(0, 1000))
def test_a_packed_pass_sees_what_inference_sees(config: ModelConfig, seed: int) -> None:
    model = shaken(config, seed).requires_grad_(False)
    rows = packed(config, seed)
    generator = torch.Generator().manual_seed(seed)
    soft_TD = torch.randn(rows[0].size, config.hidden_size, generator=generator)
    logits = packed_logits(Objective(model, LossSettings()), rows, soft_TD)
    soft = soft_TD.view(*rows.shape[1:], -1)
    for sequence, indices in examples(rows):
        one, mine, self_cond = (
            rows[:, sequence, indices],
            logits[sequence, indices],
            soft[sequence, indices],
        )
        clean = np.flatnonzero(one[CANVAS] == NONE)
        text = torch.from_numpy(one[TOKEN, clean]).long()
        with torch.inference_mode():
            cache = row_cache(config, len(text))
            reading = ForwardBatch([Segment(cache, len(text), commit=True)])
            theirs = model.logits(model.encode(text, reading))
        assert (mine[clean] - theirs).abs().max() < TOLERANCE
        for canvas in range(one[CANVAS].max() + 1):
            own = np.flatnonzero(one[CANVAS] == canvas)
            theirs = inference_logits(model, one[:, own], text, self_cond[own])
            assert (mine[own] - theirs).abs().max() < TOLERANCE


@torch.inference_mode()
def inference_logits(model: Gemma, canvas: RowArray, text: Tensor, soft_LD: Tensor) -> Tensor:
    """A canvas denoised after the text before it, which is committed in small pieces."""
    start = int(canvas[START, 0])
    cache = row_cache(model.config, start)
    commit(model, cache, text[:start], chunk=7)
    reading = ForwardBatch([Segment(cache, canvas.shape[1], commit=False)])
    tokens_L = torch.from_numpy(canvas[TOKEN]).long()
    return model.logits(model.denoise(tokens_L, soft_LD, reading))


# --- against transformers


@pytest.mark.parametrize("window", [3, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_and_gradients_are_those_of_transformers(seed: int, window: int) -> None:
    """Every example and canvas alone through the reference; tied weights add up there.

    The reference has a gradient through the soft embedding into the token table, which is stopped.
    """
    config = replace(TINY, sliding_window=window, layer_types=(SLIDING, FULL, SLIDING, FULL))
    reference = twin(config).requires_grad_(True)
    shake(reference, seed, size=0.2)
    # There the padding token's vector learns nothing where it is read; here noise may draw it.
    for part in reference.modules():
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None
    reference.model.decoder.self_conditioning.register_forward_pre_hook(
        lambda module, given: (given[0], given[1].detach())
    )
    model = ours(config, reference).requires_grad_(True)
    rows = packed(config, seed)
    settings = LossSettings(causal_weight=0.7, balance_weight=0.0)
    losses = losses_of(Objective(model, settings), rows)
    denoise, causal = reference_losses(reference, rows)
    (denoise + 0.7 * causal).backward()
    assert abs(losses.denoise - denoise).item() < TOLERANCE
    assert abs(losses.causal - causal).item() < TOLERANCE
    theirs, mine = gradients(reference), gradients(model)
    assert mine.keys() == dict(model.named_parameters()).keys()
    for name, gradient in mine.items():
        difference = (gradient - theirs["model.decoder." + name]).abs().max()
        assert difference < TOLERANCE, f"{name} differs by {difference}"


def reference_losses(
    reference: DiffusionGemmaForBlockDiffusion, rows: RowArray
) -> tuple[Tensor, Tensor]:
    """Means over all rows with a target: of canvases, weighted, and of texts."""
    canvases, weights, texts = [], [], []
    for sequence, indices in examples(rows):
        one = torch.from_numpy(rows[:, sequence, indices]).long()
        clean = one[:, one[CANVAS] == NONE]
        hidden = encode(reference, clean[TOKEN])[0]
        cap = reference.final_logit_softcapping
        logits = cap * torch.tanh(reference.lm_head(hidden) / cap)
        texts.append(F.cross_entropy(logits, clean[TARGET], reduction="none", ignore_index=-1))
        for canvas in range(int(one[CANVAS].max()) + 1):
            own = one[:, one[CANVAS] == canvas]
            cache = encode(reference, clean[TOKEN, : int(own[START, 0])])[1]
            logits = denoise_twice(reference, own, cache, is_self_conditioned=sequence % 2 == 0)
            own_loss = F.cross_entropy(logits, own[TARGET], reduction="none", ignore_index=-1)
            canvases.append(own_loss[own[TARGET] >= 0])
            weights.append(own[WEIGHT, own[TARGET] >= 0])
    loss, weight = torch.cat(texts), torch.cat(weights)
    return (torch.cat(canvases) * weight).sum() / weight.sum(), loss.sum() / (loss > 0).sum()


def encode(
    reference: DiffusionGemmaForBlockDiffusion, tokens_S: Tensor
) -> tuple[Tensor, DynamicCache]:
    """The causal pass over a text, with its keys and values."""
    cache = DynamicCache(config=reference.config.get_text_config())
    positions = torch.arange(len(tokens_S))[None]
    masks = reference.model.encoder.create_masks_for_generate(
        config=reference.config,
        inputs_embeds=torch.empty(1, len(tokens_S), 0),
        attention_mask=torch.ones(1, len(tokens_S), dtype=torch.bool),
        past_key_values=cache,
        position_ids=positions,
    )
    hidden = reference.model.encoder(
        input_ids=tokens_S[None],
        attention_mask=masks,
        past_key_values=cache,
        position_ids=positions,
    ).last_hidden_state[0]
    return hidden, cache


def denoise_twice(
    reference: DiffusionGemmaForBlockDiffusion,
    own: Tensor,
    cache: DynamicCache,
    *,
    is_self_conditioned: bool,
) -> Tensor:
    """Logits of a canvas conditioned on a first pass, with pinned tokens certain."""
    canvas: Any = partial(reference, decoder_input_ids=own[TOKEN][None], past_key_values=cache)
    if not is_self_conditioned:
        return canvas().logits[0]
    with torch.no_grad():
        first = canvas().logits
        certain = F.one_hot(own[TOKEN], first.shape[-1]) * 1e6
        first = torch.where(own[PINNED][None, :, None] > 0, certain[None].float(), first)
    return canvas(self_conditioning_logits=first).logits[0]


def test_the_reference_comparison_sees_all_kinds_of_rows() -> None:
    rows = np.concatenate([packed(TINY, seed) for seed in range(4)], axis=1)
    copied = [rows[:, s, p] for s, p in examples(rows)]
    assert any(len(set(one[START, one[CANVAS] >= 0])) > 1 for one in copied)  # several canvases
    assert any(one[CANVAS].max() + 1 > len(set(one[START, one[CANVAS] >= 0])) for one in copied)
    assert (rows[PINNED] > 0).any() and (rows[EXAMPLE] == NONE).any()
    assert rows[EXAMPLE].max() > 0 and rows[POSITION].max() > 12
    assert set(rows[WEIGHT, rows[CANVAS] > NONE].ravel()) == {1, 3}


# --- rows that must not meet


def test_examples_and_canvases_do_not_influence_each_other() -> None:
    model = shaken().requires_grad_(False)
    objective, rows = Objective(model, LossSettings()), packed(TINY, seed=5)
    before = packed_logits(objective, rows)
    for sequence, indices in examples(rows):
        one = rows[:, sequence, indices]
        for canvas in range(one[CANVAS].max() + 1):
            # Another text on this canvas: only its own rows may notice.
            changed = rows.copy()
            own = indices[one[CANVAS] == canvas]
            changed[TOKEN, sequence, own] = (changed[TOKEN, sequence, own] + 7) % TINY.vocab_size
            after = packed_logits(objective, changed)
            is_own = torch.zeros(rows.shape[1:], dtype=torch.bool)
            is_own[sequence, own] = True
            assert (after - before)[~is_own].abs().max() < 1e-5
            assert (after - before)[is_own].abs().max() > 1e-2


def test_an_example_gives_the_same_losses_and_gradients_wherever_it_stands() -> None:
    """Alone, or between others without targets, with padding after it."""
    rows, model = packed(TINY, seed=2), shaken()
    sequence, indices = next((s, p) for s, p in examples(rows) if s == 1 and p[0] > 0)
    alone = np.empty((len(FIELDS), 2, 110), np.int32)
    alone[:] = PADDING[:, None, None]
    alone[:, 1, : len(indices)] = rows[:, sequence, indices]
    among = rows.copy()
    is_other = np.ones(rows.shape[1:], bool)
    is_other[sequence, indices] = False
    among[TARGET, is_other] = NONE
    found = []
    for batch in (alone, among):
        model.zero_grad()
        losses = losses_of(Objective(model, CAUSAL_ONLY), batch)
        found.append((losses, gradients(model)))
    (a, of_a), (b, of_b) = found
    assert torch.allclose(a.total, b.total, atol=1e-5)
    assert all(torch.allclose(of_a[name], of_b[name], atol=1e-5) for name in of_a)


def self_cond_of(objective: Objective, batch: Batch, depth: int = 1) -> PackedStepStats:
    even, context, _ = make_contexts(objective.model.config, batch, is_flex=False)
    return objective.self_cond_pass(even, context, depth)


def test_every_second_sequence_is_self_conditioned_and_the_others_are_not() -> None:
    rows = torch.from_numpy(packed(TINY, seed=1, sequences=4))
    batch = Batch.of(rows, "cpu")
    self_cond_TD = self_cond_of(Objective(shaken(), LossSettings()), batch).self_cond_TD
    soft = interleave_self_cond(self_cond_TD, 4).view(4, rows.shape[2], -1)
    assert not soft[1::2].any() and not soft.requires_grad
    assert (soft[::2].abs().sum(-1) > 0).all()
    model = shaken()
    given = (batch.pinned[::2] > 0).nonzero()
    assert len(given)
    for sequence, row in given.tolist():
        own = model.embed(batch.token[2 * sequence, row])
        assert torch.allclose(soft[2 * sequence, row], own, atol=1e-5)


# --- canvases as the sampler leaves them


def test_a_rolled_out_canvas_is_one_step_of_the_sampler() -> None:
    """Its rows hold a draw at its temperature where the entropy is below a bound, or new noise."""
    rows = torch.from_numpy(packed(TINY, seed=1, sequences=4))
    batch, model = Batch.of(rows, "cpu"), shaken()
    objective = Objective(model, LossSettings(rollout_fraction=0.6))
    stats, even = self_cond_of(objective, batch), batch.even()
    assert stats.token is not None
    draws = rollout_draws(even, 0.6, TINY.vocab_size, torch.tensor(0))
    with torch.no_grad():
        context = PackedContext(TINY, even)
        logits_TV = model.logits(hidden_of(objective, even, None, context))
        distribution = torch.distributions.Categorical(
            logits=logits_TV / draws.temperature_T[:, None]
        )
    rolled = draws.is_rolled_T.nonzero().flatten().tolist()
    free = (even.is_canvas & (even.pinned == 0)).sum()
    assert 0 < len(rolled) < free and not (draws.is_rolled_T & (even.pinned.flatten() > 0)).any()
    tokens, num_accepted = stats.token.flatten(), 0
    assert torch.equal(tokens[~draws.is_rolled_T], even.token.flatten()[~draws.is_rolled_T])
    for row in rolled:
        before = distribution.probs[row].double().cumsum(0)
        if distribution.entropy()[row] < draws.entropy_bound_T[row]:
            token, num_accepted = int(tokens[row]), num_accepted + 1
            low = before[token - 1] if token else 0.0
            assert low - 1e-5 <= draws.uniform_T[row] <= before[token] + 1e-5
        else:
            assert tokens[row] == draws.noise_T[row]
    assert 0 < num_accepted < len(rolled)
    soft_TD = model.soft_embed(distribution.probs)
    assert torch.allclose(stats.self_cond_TD[rolled], soft_TD[rolled], atol=1e-5)


def test_canvases_without_an_rng_key_are_left_as_they_are() -> None:
    rows = torch.from_numpy(packed(TINY, seed=1, sequences=4))
    batch, objective = (
        Batch.of(rows, "cpu"),
        Objective(shaken(), LossSettings(rollout_fraction=1.0)),
    )
    rolled, even = self_cond_of(objective, batch).token, batch.even()
    assert rolled is not None and not torch.equal(rolled, even.token)
    is_first = even.example == 0
    spared = replace(batch, rng_key=torch.where(batch.example == 0, NONE, batch.rng_key))
    found = self_cond_of(objective, spared).token
    assert found is not None and torch.equal(found[is_first], even.token[is_first])
    assert torch.equal(found[~is_first], rolled[~is_first])


def test_deeper_passes_are_conditioned_on_the_ones_before_and_draw_anew() -> None:
    rows = torch.from_numpy(packed(TINY, seed=1, sequences=4))
    batch, model = Batch.of(rows, "cpu"), shaken()
    objective = Objective(model, LossSettings(rollout_fraction=0.6))
    even, once = batch.even(), self_cond_of(objective, batch)
    assert once.token is not None
    with torch.no_grad():
        later = replace(even, token=once.token)
        hidden_TD = hidden_of(objective, later, once.self_cond_TD, PackedContext(TINY, even))
        want = objective.read(later, hidden_TD, torch.tensor(1), 0.6)
    found = self_cond_of(objective, batch, depth=2)
    assert found.token is not None and want.token is not None
    assert torch.equal(found.token, want.token)
    assert torch.allclose(found.self_cond_TD, want.self_cond_TD, atol=1e-5)
    first, second = (rollout_draws(even, 0.6, TINY.vocab_size, torch.tensor(n)) for n in (0, 1))
    assert torch.equal(first.is_rolled_T, second.is_rolled_T)
    assert torch.equal(first.entropy_bound_T, second.entropy_bound_T)
    assert not torch.equal(first.uniform_T, second.uniform_T)
    assert not torch.equal(first.noise_T, second.noise_T)


def test_depths_come_in_turn_and_change_what_is_learned() -> None:
    settings = LossSettings(rollout_fraction=0.6, max_rollout_steps=3)
    assert [settings.rollout_steps(step) for step in range(4)] == [1, 2, 3, 1]
    rows = torch.from_numpy(packed(TINY, seed=1, sequences=4))
    batch, counts = Batch.of(rows, "cpu"), counts_of(rows)
    objective = Objective(shaken(), LossSettings(rollout_fraction=0.6))
    shallow, deep = objective(batch, counts), objective(batch, counts, 3)
    # Clean rows do not see canvases: only what canvases lose can differ.
    assert torch.equal(shallow.causal, deep.causal) and not torch.equal(
        shallow.denoise, deep.denoise
    )


def test_chunks_and_a_second_look_roll_the_same_canvases() -> None:
    rows = torch.from_numpy(packed(TINY, seed=1, sequences=4))
    batch = Batch.of(rows, "cpu")
    found = [
        self_cond_of(
            Objective(shaken(), LossSettings(rollout_fraction=0.6), chunk=chunk), batch
        ).token
        for chunk in (None, 7)
    ]
    assert found[0] is not None and found[1] is not None
    assert torch.equal(found[0], found[1])


def test_draws_follow_their_probabilities_and_temperatures_and_bounds_spread() -> None:
    count = 20_000
    rows = torch.zeros(len(FIELDS), 1, count, dtype=torch.int32)
    rows[RNG_KEY] = torch.randint(1 << 31, (count,), generator=torch.Generator().manual_seed(0))
    draws = rollout_draws(Batch.of(rows, "cpu"), 1.0, 64, torch.tensor(0))
    p_TV = torch.tensor([0.7, 0.2, 0.0, 0.1]).expand(count, 4)
    drawn = rollout_step(p_TV, draws._replace(entropy_bound_T=torch.full((count,), 9.0)))
    frequencies = torch.bincount(drawn, minlength=4) / count
    assert (frequencies - p_TV[0]).abs().max() < 0.01 and frequencies[2] == 0
    assert 0.4 <= draws.temperature_T.min() < 0.41 < 0.99 < draws.temperature_T.max() <= 1.0
    assert (
        0.005 <= draws.entropy_bound_T.min() < 0.006 and 0.69 < draws.entropy_bound_T.max() <= 0.7
    )
    assert (torch.bincount(draws.noise_T, minlength=64) / count - 1 / 64).abs().max() < 0.006


# --- the balance of the experts


def test_the_balance_is_that_of_real_rows_and_one_when_even() -> None:
    rows = packed(TINY, seed=3)
    model = shaken()
    objective = Objective(model, LossSettings())
    balance, routers = objective.balance, []
    objective.balance = lambda batch, own: routers.extend(own) or balance(batch, own)  # type: ignore
    losses = losses_of(objective, rows)
    is_real = torch.from_numpy(rows[EXAMPLE].ravel() > NONE)
    parts = []
    assert len(routers) == TINY.num_hidden_layers
    for p_TE, ids_TK in routers:
        chosen = torch.bincount(ids_TK[is_real].flatten(), minlength=4) / ids_TK[is_real].numel()
        parts.append(4 * (chosen * p_TE[is_real].mean(0)).sum())
    assert losses.balance.item() == pytest.approx(torch.stack(parts).mean().item(), rel=1e-5)
    assert losses.total.item() == pytest.approx(
        (losses.denoise + losses.causal + 0.01 * losses.balance).item(), rel=1e-6
    )
    with torch.no_grad():
        for layer in model.layers:
            layer.router.proj.weight.zero_()  # all experts are equally likely
    assert losses_of(objective, rows).balance.item() == pytest.approx(1.0, rel=1e-5)


# --- in parts, and recomputed


def test_a_batch_in_parts_gives_the_gradients_of_the_whole() -> None:
    rows, found = mixture(sequences=8).batch(0), []
    for parts in (1, 2, 4):
        model = shaken()
        losses = losses_of(Objective(model, CAUSAL_ONLY), rows, parts)
        found.append((losses, gradients(model)))
    (whole, of_whole), *others = found
    for losses, of_parts in others:
        assert torch.allclose(torch.stack(losses[:3]), torch.stack(whole[:3]), atol=1e-5)
        assert all(torch.allclose(of_parts[n], of_whole[n], atol=1e-5) for n in of_whole)


def test_the_balance_of_a_batch_in_parts_is_the_mean_of_theirs() -> None:
    rows, model = mixture(sequences=8).batch(0), shaken()
    objective = Objective(model, LossSettings(causal_weight=0.0, balance_weight=1.0))
    halves = [losses_of(objective, half) for half in np.split(rows, 2, axis=1)]
    both = losses_of(objective, rows, parts=2)
    assert both.balance.item() == pytest.approx(sum(h.balance.item() for h in halves) / 2, rel=1e-6)


def test_recomputed_activations_give_the_same_losses_and_gradients() -> None:
    rows, found = mixture().batch(0), []
    for recompute in (False, True):
        model = shaken()
        # Chunks that do not divide the rows.
        chunk = 50 if recompute else None
        settings = LossSettings(balance_weight=0.5)
        objective = Objective(model, settings, recompute=recompute, chunk=chunk)
        found.append((losses_of(objective, rows), gradients(model)))
    (kept, of_kept), (again, of_again) = found
    assert torch.allclose(torch.stack(kept), torch.stack(again), atol=1e-6)
    assert of_kept.keys() == of_again.keys()
    assert all(torch.allclose(of_kept[name], of_again[name], atol=1e-5) for name in of_kept)


def test_recomputing_keeps_less() -> None:
    kept = []
    for recompute in (False, True):
        model = shaken(replace(TINY, layer_types=(SLIDING, FULL) * 3))
        chunk, sizes = 32 if recompute else None, []
        objective = Objective(model, LossSettings(), recompute=recompute, chunk=chunk)

        def record(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        rows = torch.from_numpy(mixture().batch(0))
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            objective(Batch.of(rows, "cpu"), counts_of(rows))
        kept.append(sum(sizes))
    assert kept[1] < 0.5 * kept[0]


# --- by blocks


@pytest.mark.parametrize("rows", [384, 300])
def test_blocks_and_rope_tables_of_both_passes_are_those_of_each(rows: int) -> None:
    """Against FlexAttention's own way to make a mask, one pass and one layer type at a time."""
    config = replace(TINY, sliding_window=150)
    batch = Batch.of(torch.from_numpy(packed(config, seed=5, sequences=4, rows=rows)), "cpu")
    even, first, second = make_contexts(config, batch, is_flex=True)
    windows = {SLIDING: 150, FULL: None}
    for own, context in ((even, first), (batch, second)):
        plain = PackedContext(config, own)
        for kind, window in windows.items():
            mask, size = context.masks[kind], (len(own.token), None, rows, rows)
            other = create_block_mask(
                AttnVisibility.of(own, window).mask_mod(), *size, device="cpu"
            )
            for name in (f"{a}_{b}" for a in BLOCK_LISTS for b in ("num_blocks", "indices")):
                mine, theirs = getattr(mask, name), getattr(other, name)
                assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype, name
                assert mine.is_contiguous()
            b, t = (torch.arange(n) for n in own.token.shape)
            seen = mask.mask_mod(b[:, None, None, None], t, t[:, None], t[None, :])
            assert torch.equal(seen, plain.masks[kind])
            for a, b in zip(context.cos_sin[kind], plain.cos_sin[kind], strict=True):
                assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_by_blocks_has_the_losses_of_the_dense_mask() -> None:
    """Forward alone: FlexAttention has no backward on a CPU."""
    config = replace(TINY, sliding_window=20)
    rows = torch.from_numpy(packed(config, seed=6, sequences=2, rows=150))
    batch, counts, found = Batch.of(rows, "cpu"), counts_of(rows), []
    for is_flex in (False, True):
        objective = Objective(shaken(config), LossSettings(rollout_fraction=0.5), is_flex=is_flex)
        with torch.no_grad():
            found.append(torch.stack(objective(batch, counts)))
    assert torch.allclose(*found, atol=1e-5)


# --- compiled


def compilable_grouped(x_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """The grouped kernel's function, without counts that leave the device."""
    rows = torch.arange(len(x_SD))
    expert_S = torch.searchsorted(ends_E.long(), rows, right=True).clamp(max=len(weight_EOD) - 1)
    return torch.einsum("sd,sod->so", x_SD, weight_EOD[expert_S])


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("recompute", [False, True])
def test_both_passes_are_one_graph_each(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No count of rows, choice of expert or mask may become part of the compiled code."""
    monkeypatch.setattr(routed, "grouped_slots", compilable_grouped)
    compile_whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile_whole)
    torch._dynamo.reset()
    config, found = replace(TINY, layer_types=(FULL,)), []
    for is_compiled in (False, True):
        chunk = 100 if recompute else None
        objective = Objective(shaken(config), LossSettings(), recompute=recompute, chunk=chunk)
        if is_compiled:
            objective.compile_passes("whole_pass")
        with torch._dynamo.config.patch(error_on_recompile=True):
            losses = [losses_of(objective, mixture().batch(step)) for step in range(3)]
        found.append((torch.tensor(losses), gradients(objective.model)))
    (plain, of_plain), (compiled, of_compiled) = found
    assert torch.allclose(plain, compiled, atol=1e-5)
    assert all(torch.allclose(of_plain[name], of_compiled[name], atol=1e-4) for name in of_plain)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_of_a_type_share_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "grouped_slots", compilable_grouped)
    config, found = replace(TINY, layer_types=(SLIDING, SLIDING, FULL) * 2), []
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(1)
        return graph.forward

    compile_whole = partial(torch.compile, backend=counting, fullgraph=True)
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compile_whole(f, dynamic=dynamic))
    torch._dynamo.reset()
    for is_compiled in (False, True):
        objective = Objective(shaken(config), LossSettings(rollout_fraction=0.5))
        if is_compiled:
            objective.compile_passes("layer_types")
        batches = [mixture().batch(step) for step in range(3)]
        losses = [losses_of(objective, rows, depth=1 + n) for n, rows in enumerate(batches)]
        found.append((torch.tensor(losses), gradients(objective.model)))
    # Two layer types in two passes, the final norm in two, `read` and `score`, and `embed`: without
    # self-conditioning, with it for the even sequences, and for all.
    assert len(graphs) == 4 + 2 + 2 + 3
    (plain, of_plain), (compiled, of_compiled) = found
    assert torch.allclose(plain, compiled, atol=1e-5)
    assert all(torch.allclose(of_plain[name], of_compiled[name], atol=1e-4) for name in of_plain)
