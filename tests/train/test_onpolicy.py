"""Persistent canvases: a step of them, eviction, and runs that have them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dgemma.config import FULL
from dgemma.errors import ConfigError, UsageError
from dgemma.model import moe as routed
from dgemma.train.batches import DeviceBatch, MixedBatches
from dgemma.train.build import MixtureBuilder, initialize
from dgemma.train.corruption import NONE, Corruption
from dgemma.train.layers import CompileMode
from dgemma.train.loop import RunOptions, Trainer, persistent_losses
from dgemma.train.masks import PackedContext
from dgemma.train.objective import LossCounts, LossSettings, Objective, interleave_self_cond
from dgemma.train.onpolicy import (
    PackedStepStats,
    PersistentCanvases,
    is_solved,
    restart_noise,
    rollout_draws,
)
from dgemma.train.optim import MixedPrecisionOptimizer, OptimSettings, Schedule
from dgemma.train.packing import FIELDS, RNG_KEY, Batch, RowCounts, count_real_rows
from dgemma.train.recipe import load_recipe
from tests.tiny import TINY
from tests.train.runs import (
    RECIPE,
    RandomTexts,
    component,
    counts_of,
    gradients,
    mixture,
    run_options,
    save_recipe,
    shaken,
)
from tests.train.test_loop import break_after, run, weights
from tests.train.test_objective import compilable_grouped
from tests.train.test_recipe import ROOT, built

STEPS = 3


def mixed_batches(**changes: Any) -> MixedBatches:
    """Two fresh sequences, and two new persistent ones a step, for three steps each."""
    still = Corruption(vocab_size=TINY.vocab_size, on_policy=False)
    fresh = mixture(sequences=2, components=[component(RandomTexts(), corruption=still)])
    new_sequences = mixture(sequences=2, components=[component(RandomTexts(), copies=2)])
    return replace(MixedBatches(fresh, new_sequences, STEPS), **changes)


def device_batch(made: MixedBatches, step: int) -> DeviceBatch:
    rows = made.batch(step)
    counts = counts_of(torch.from_numpy(rows))
    return DeviceBatch([Batch.of(torch.from_numpy(rows), "cpu")], counts, count_real_rows(rows))


def persistent_of(made: MixedBatches, objective: Objective) -> PersistentCanvases:
    return PersistentCanvases(
        made.initial(), made.new_sequences.sequences, objective.model.embed_tokens.weight
    )


def trainer(directory: Path, **changes: Any) -> Trainer:
    model = initialize(TINY, 0)
    run = run_options(directory, report_every=1, save_every=5, **changes)
    optimizer = MixedPrecisionOptimizer(model, OptimSettings())
    objective = Objective(model, LossSettings())
    return Trainer(objective, optimizer, mixed_batches(), Schedule(steps=12, warmup=2), run)


# --- one step


def test_a_pass_uses_the_persistent_self_conditioning_and_advances_it() -> None:
    """Against the same written out: the losses, and the canvases after the sampler step."""
    made, objective = mixed_batches(), Objective(shaken(), LossSettings())
    persistent = persistent_of(made, objective)
    for step in range(2):
        persistent_losses(objective, device_batch(made, step), persistent, step)
    arrived = device_batch(made, 2)
    fresh, new_sequences = arrived.micro_batches[0].split(2)
    before = PersistentCanvases(made.initial(), 2, persistent.self_cond_TD)
    before.restore(persistent.state())
    before.replace_oldest(new_sequences, arrived.real_rows[2:])
    start = before.batch
    whole = fresh.concat(start)
    with torch.no_grad():
        even = fresh.even()
        stats = objective.self_cond_pass(even, PackedContext(TINY, even))
        self_cond_TD = interleave_self_cond(stats.self_cond_TD, 2)
        self_cond_TD = torch.cat([self_cond_TD, before.self_cond_TD])
        embeds_TD = objective.embed(whole, self_cond_TD)
        hidden_TD, routers = objective.run_layers(embeds_TD, PackedContext(TINY, whole))
        want = objective.score(whole, hidden_TD, routers, LossCounts.on_device(whole))
        step = torch.tensor(2)
        own = objective.read(start, hidden_TD[-len(before.self_cond_TD) :], step, 1.0)
        noise_T = restart_noise(start, TINY.vocab_size, step)
        before.advance(own, noise_T)
    found = persistent_losses(objective, arrived, persistent, 2)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, want, strict=True))
    assert torch.equal(persistent.batch.token, before.batch.token)
    assert torch.allclose(persistent.self_cond_TD, before.self_cond_TD, atol=1e-6)
    assert not persistent.self_cond_TD.requires_grad
    # Free rows of all canvases have moved, and nothing else has.
    moved = persistent.batch.token != start.token
    is_rolled = rollout_draws(start, 1.0, TINY.vocab_size, step).is_rolled_T.view_as(moved)
    assert moved[is_rolled].float().mean() > 0.5 and not moved[~is_rolled].any()


def test_losses_depend_on_the_self_conditioning_and_have_gradients() -> None:
    made, objective = mixed_batches(), Objective(shaken(), LossSettings())
    batch = Batch.of(torch.from_numpy(made.initial()), "cpu")
    whole = Batch.of(torch.from_numpy(made.fresh.batch(0)), "cpu").concat(batch)
    found = []
    for scale in (0.0, 1.0):
        self_cond_TD = scale * torch.randn(batch.token.numel(), TINY.hidden_size)
        losses, hidden_TD = objective.with_persistent(
            whole, self_cond_TD, LossCounts.on_device(whole)
        )
        losses.total.backward()
        found.append(losses)
        assert len(hidden_TD) == len(self_cond_TD) and not hidden_TD.requires_grad
    assert torch.equal(found[0].causal, found[1].causal), "clean rows are not self-conditioned"
    assert not torch.equal(found[0].denoise, found[1].denoise)
    assert gradients(objective.model)


def test_a_batch_is_counted_on_the_device_as_on_the_host() -> None:
    rows = mixed_batches().batch(1)
    want = LossCounts.of(RowCounts.of(rows), torch.device("cpu"))
    assert LossCounts.on_device(Batch.of(torch.from_numpy(rows), "cpu")) == want


# --- canvases that are done


def solved_by_hand(batch: Batch, token: Tensor) -> list[bool]:
    """Canvas by canvas."""
    wrong = set()
    columns = [getattr(batch, name).flatten().tolist() for name in ("rng_key", "target", "canvas")]
    rows = list(zip(*columns, token.flatten().tolist(), strict=True))
    for key, target, canvas, held in rows:
        if canvas > NONE and target not in (NONE, held):
            wrong.add(key)
    return [canvas > NONE and key not in wrong for key, _, canvas, _ in rows]


def batch_with_answers() -> tuple[Batch, Tensor]:
    """A batch, and tokens of which about half of the canvases are all right."""
    rows = mixed_batches().initial()
    batch = Batch.of(torch.from_numpy(rows), "cpu")
    has_target = batch.target > NONE
    right = torch.where(has_target & batch.is_canvas, batch.target, batch.token)
    wrong = torch.where(batch.rng_key % 2 == 0, right, batch.token)
    return batch, wrong


def test_a_canvas_is_solved_when_it_has_all_its_targets() -> None:
    batch, token = batch_with_answers()
    want = solved_by_hand(batch, token)
    assert is_solved(batch, token).tolist() == want and 0 < sum(want) < len(want)


def test_a_canvas_that_is_solved_twice_in_a_row_restarts() -> None:
    batch, token = batch_with_answers()
    persistent = PersistentCanvases(mixed_batches().initial(), 2, torch.zeros(1, 4))
    is_right = is_solved(batch, token)
    is_free = (batch.pinned == 0).flatten()
    assert (is_right & is_free).any() and (is_right & ~is_free).any()
    noise_T = torch.full((token.numel(),), 5)
    # Whether a canvas is solved is decided by the argmax, not by the drawn tokens.
    stats = PackedStepStats(torch.ones(token.numel(), 4), batch.token, token)
    for restarted in (torch.zeros_like(is_right), is_right) * 2:
        persistent.advance(stats, noise_T)
        assert torch.equal(persistent.self_cond_TD[:, 0] == 0, restarted)
        want = torch.where(restarted & is_free, 5, batch.token.flatten())
        assert torch.equal(persistent.batch.token.flatten(), want)


def test_noise_is_that_of_a_canvas_and_a_step() -> None:
    batch = Batch.of(torch.from_numpy(mixed_batches().initial()), "cpu")
    first, again, next_ = (
        restart_noise(batch, TINY.vocab_size, torch.tensor(step)) for step in (0, 0, 1)
    )
    assert torch.equal(first, again) and (first != next_).float().mean() > 0.9
    assert first.min() >= 0 and first.max() < TINY.vocab_size


# --- eviction


def test_each_sequence_persists_for_its_steps_and_the_oldest_are_replaced() -> None:
    made, objective = mixed_batches(), Objective(shaken(), LossSettings())
    persistent = persistent_of(made, objective)
    for step in range(STEPS):
        arrived = device_batch(made, step)
        persistent.self_cond_TD, persistent.solved_T = (
            torch.ones_like(x) for x in (persistent.self_cond_TD, persistent.solved_T)
        )
        persistent.replace_oldest(arrived.micro_batches[0].split(2)[1], arrived.real_rows[2:])
        for kept in (persistent.self_cond_TD, persistent.solved_T):
            assert (kept == 0).float().mean() == pytest.approx(1 / STEPS)
    want = np.concatenate([made.new_sequences.batch(step) for step in range(STEPS)], axis=1)
    assert torch.equal(persistent.batch.rng_key, torch.from_numpy(want[RNG_KEY]).long())
    assert persistent.real_rows == count_real_rows(want) and persistent.oldest == 0


def test_batches_are_fresh_sequences_and_new_persistent_ones() -> None:
    made = mixed_batches()
    rows = made.batch(4)
    assert np.array_equal(rows[:, :2], made.fresh.batch(4))
    assert np.array_equal(rows[:, 2:], made.new_sequences.batch(4))
    assert made.initial().shape == (len(FIELDS), 2 * STEPS, 96) and made.sequences == 2


# --- runs


@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_run_resumes_with_its_persistent_canvases(workers: int, tmp_path: Path) -> None:
    through = trainer(tmp_path / "through", workers=workers)
    expected = run(through)
    assert len(expected) == 12
    break_after(trainer(tmp_path / "killed", workers=workers), step=8)
    again = trainer(tmp_path / "killed", workers=workers)
    assert again.resume() == 5
    assert run(again) == expected[5:]
    assert all(map(torch.equal, weights(again), weights(through)))


def test_persistent_rows_are_counted_in_every_step(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    assert one.persistent is not None
    made = device_batch(mixed_batches(), 0)
    one.train_step(made)
    assert one._num_rows(made) == sum(made.real_rows[:2]) + sum(one.persistent.real_rows)


def test_persistent_sequences_need_whole_batches(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"persistent_sequences with 1 processes and 2 micro-batches"
    ):
        Trainer(
            Objective(initialize(TINY, 0), LossSettings()),
            MixedPrecisionOptimizer(initialize(TINY, 0), OptimSettings()),
            mixed_batches(fresh=mixture(sequences=4)),
            Schedule(steps=2, warmup=1),
            RunOptions(directory=tmp_path, grad_accum_steps=2),
        )


PERSISTENT = RECIPE.replace(
    "sequences = 4", "sequences = 6\npersistent_sequences = 4\npersistent_steps = 4"
) + ('on_policy = true\n[[data]]\nfile = "chats.jsonl"\non_policy = false\n')


def test_a_recipe_says_what_persists(tmp_path: Path) -> None:
    path = save_recipe(tmp_path, PERSISTENT)
    job = built(path)
    made = job.trainer.mixture
    assert isinstance(made, MixedBatches)
    assert (made.fresh.sequences, made.new_sequences.sequences, made.steps) == (2, 1, 4)
    assert [i.corruption.on_policy for i in made.fresh.components] == [False]
    assert [i.corruption.on_policy for i in made.new_sequences.components] == [True]
    builder = MixtureBuilder(job.recipe, job.environment, job.base)
    assert isinstance(builder.build(), MixedBatches)


def test_answers_are_learned_by_persistent_canvases(tmp_path: Path) -> None:
    path = save_recipe(tmp_path, PERSISTENT)
    teach = ["batch.rows=160", "optim.adam_lr=0.01", "schedule.steps=100", "run.report_every=10"]
    job = built(path, *teach)
    reports = list(job.trainer.reports())
    assert reports[-1].denoise < 0.3 < 1 < reports[0].denoise
    persistent = job.trainer.persistent
    assert persistent is not None
    # Some canvases are solved and begin again, others go on.
    restarted = (persistent.self_cond_TD == 0).all(1)[persistent.batch.is_canvas.flatten()]
    assert 0 < restarted.float().mean() < 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("_sequences = 4", "_sequences = 6", "persistent_sequences is 6 of 6 sequences"),
        ("_sequences = 4", "_sequences = 3", "a multiple of persistent_steps"),
        ("sequences = 6", "sequences = 7", "leave an even number of other sequences"),
        ("_sequences = 4", "_sequences = -4", "persistent_sequences is -4 of 6 sequences"),
        ("_steps = 4", "_steps = 0", "persistent_steps is 0; it must be 1 or more"),
        ("[run]", "[loss]\nrollout_fraction = 0.5\n[run]", "rollout_fraction exclude each other"),
        ("on_policy = false", "on_policy = true", "here all have true"),
    ],
)
def test_what_cannot_persist_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(PERSISTENT.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert message in str(caught.value)


def test_the_puzzles_of_a_recipe_of_the_repository_persist() -> None:
    recipe = load_recipe(ROOT / "recipes" / "nano" / "nano.toml")
    assert recipe.batch.persistent_sequences
    assert all(data.on_policy for data in recipe.data if data.puzzle)


# --- compiled


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", ["whole_pass", "layer_types"])
def test_compiled_passes_advance_to_the_same_canvases(
    mode: CompileMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, layer_types=(FULL,))
    monkeypatch.setattr(routed, "grouped_slots", compilable_grouped)
    compile_whole = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compile_whole)
    torch._dynamo.reset()
    made, found = mixed_batches(), []
    for is_compiled in (False, True):
        objective = Objective(shaken(config), LossSettings())
        if is_compiled:
            objective.compile_passes(mode)
        persistent = persistent_of(made, objective)
        losses = []
        for step in range(2):
            own = persistent_losses(objective, device_batch(made, step), persistent, step)
            own.total.backward()
            losses.append(torch.stack([loss.detach() for loss in own]))
        found.append((torch.stack(losses), persistent.batch.token))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.equal(found[0][1], found[1][1])
