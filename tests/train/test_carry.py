"""Sequences that stay from step to step: their course, who leaves, and runs that have them."""

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
from dgemma.model import moe_train as routed
from dgemma.train import speed
from dgemma.train.build import build_mixture
from dgemma.train.carry import Beside, Carry, all_right, carried_losses
from dgemma.train.context import Batch, PackedContext
from dgemma.train.feed import Loaded
from dgemma.train.fresh import fresh_model
from dgemma.train.loop import RunSettings, Trainer
from dgemma.train.objective import Counts, Guess, Objective, to_every_second
from dgemma.train.optim import Masters, OptimSettings, Schedule
from dgemma.train.recipe import load_recipe
from dgemma.train.rollout import fresh_noise, lots
from dgemma.train.rows import FIELDS, LOT, NOTHING, Corruption, Tally, real_rows
from dgemma.train.weighting import Weighting
from tests.tiny import TINY
from tests.train.runs import (
    RECIPE,
    RandomTexts,
    counts_of,
    gradients,
    ingredient,
    mixture,
    save_recipe,
    shaken,
)
from tests.train.test_loop import break_after, run, weights
from tests.train.test_objective import compilable_grouped
from tests.train.test_recipe import ROOT, built

STEPS = 3


def beside(**changes: Any) -> Beside:
    """Two sequences of new texts, and two newcomers a step, who stay for three."""
    still = Corruption(vocab_size=TINY.vocab_size, rolls=False)
    fresh = mixture(sequences=2, ingredients=[ingredient(RandomTexts(), corruption=still)])
    newcomers = mixture(sequences=2, ingredients=[ingredient(RandomTexts(), copies=2)])
    return replace(Beside(fresh, newcomers, STEPS), **changes)


def loaded(made: Beside, step: int) -> Loaded:
    rows = made.batch(step)
    counts = counts_of(torch.from_numpy(rows))
    return Loaded([Batch.of(torch.from_numpy(rows), "cpu")], counts, real_rows(rows))


def carry_of(made: Beside, objective: Objective) -> Carry:
    return Carry(made.first(), made.newcomers.sequences, objective.model.embed_tokens.weight)


def trainer(directory: Path, **changes: Any) -> Trainer:
    model = fresh_model(TINY, 0)
    settings = RunSettings(directory=directory, report_every=1, save_every=5, **changes)
    masters = Masters(model, OptimSettings())
    objective = Objective(model, Weighting())
    return Trainer(objective, masters, beside(), Schedule(steps=12, warmup=2), settings)


# --- one step


def test_a_pass_is_told_what_stays_and_takes_it_a_step_further() -> None:
    """Against the same written out: what it loses, and what its own guess makes of the canvases."""
    made, objective = beside(), Objective(shaken(), Weighting())
    carry = carry_of(made, objective)
    for step in range(2):
        carried_losses(objective, loaded(made, step), carry, step)
    arrived = loaded(made, 2)
    fresh, newcomers = arrived.parts[0].parted(2)
    before = Carry(made.first(), 2, carry.told_TD)
    before.restore(carry.state())
    before.take_in(newcomers, arrived.real[2:])
    start = before.batch
    whole = fresh.beside(start)
    with torch.no_grad():
        half = fresh.every_second()
        guess = objective.guess(half, None, PackedContext(TINY, half), torch.tensor(0))
        told_TD = torch.cat([to_every_second(guess.told, 2), before.told_TD])
        hidden_TD = objective._hidden(whole, told_TD, PackedContext(TINY, whole))
        want = objective.score(whole, hidden_TD, objective._routes(), Counts.counted(whole))
        step = torch.tensor(2)
        own = objective.read(start, hidden_TD[-len(before.told_TD) :], step, 1.0)
        noise_T = fresh_noise(start, TINY.vocab_size, step)
        before.go_on(own, noise_T)
    found = carried_losses(objective, arrived, carry, 2)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, want, strict=True))
    assert torch.equal(carry.batch.token, before.batch.token)
    assert torch.allclose(carry.told_TD, before.told_TD, atol=1e-6)
    assert not carry.told_TD.requires_grad
    # Free rows of all canvases have moved, and nothing else has.
    moved = carry.batch.token != start.token
    is_rolled = lots(start, 1.0, TINY.vocab_size, step).is_rolled.view_as(moved)
    assert moved[is_rolled].float().mean() > 0.5 and not moved[~is_rolled].any()


def test_what_is_lost_depends_on_what_is_told_and_has_gradients() -> None:
    made, objective = beside(), Objective(shaken(), Weighting())
    batch = Batch.of(torch.from_numpy(made.first()), "cpu")
    whole = Batch.of(torch.from_numpy(made.fresh.batch(0)), "cpu").beside(batch)
    found = []
    for scale in (0.0, 1.0):
        told_TD = scale * torch.randn(batch.token.numel(), TINY.hidden_size)
        losses, hidden_TD = objective.carried(whole, told_TD, Counts.counted(whole))
        losses.total.backward()
        found.append(losses)
        assert len(hidden_TD) == len(told_TD) and not hidden_TD.requires_grad
    assert torch.equal(found[0].causal, found[1].causal), "clean rows are told nothing"
    assert not torch.equal(found[0].denoise, found[1].denoise)
    assert gradients(objective.model)


def test_a_batch_is_counted_on_the_device_as_on_the_host() -> None:
    rows = beside().batch(1)
    want = Counts.of(Tally.of(rows), torch.device("cpu"))
    assert Counts.counted(Batch.of(torch.from_numpy(rows), "cpu")) == want


# --- canvases that are done


def right_by_hand(batch: Batch, token: Tensor) -> list[bool]:
    """Canvas by canvas."""
    wrong = set()
    columns = [getattr(batch, name).flatten().tolist() for name in ("lot", "target", "canvas")]
    rows = list(zip(*columns, token.flatten().tolist(), strict=True))
    for lot, target, canvas, held in rows:
        if canvas > NOTHING and target not in (NOTHING, held):
            wrong.add(lot)
    return [canvas > NOTHING and lot not in wrong for lot, _, canvas, _ in rows]


def batch_with_answers() -> tuple[Batch, Tensor]:
    """A batch, and tokens of which about half of the canvases are all right."""
    rows = beside().first()
    batch = Batch.of(torch.from_numpy(rows), "cpu")
    is_asked = batch.target > NOTHING
    right = torch.where(is_asked & batch.is_canvas, batch.target, batch.token)
    wrong = torch.where(batch.lot % 2 == 0, right, batch.token)
    return batch, wrong


def test_a_canvas_is_right_when_all_that_it_is_asked_for_is() -> None:
    batch, token = batch_with_answers()
    want = right_by_hand(batch, token)
    assert all_right(batch, token).tolist() == want and 0 < sum(want) < len(want)


def test_what_is_right_twice_in_a_row_begins_again() -> None:
    batch, token = batch_with_answers()
    carry = Carry(beside().first(), 2, torch.zeros(1, 4))
    is_right = all_right(batch, token)
    is_free = (batch.pinned == 0).flatten()
    assert (is_right & is_free).any() and (is_right & ~is_free).any()
    noise_T = torch.full((token.numel(),), 5)
    # What the step draws is no matter: the likeliest are what is right.
    guess = Guess(torch.ones(token.numel(), 4), batch.token, token)
    for told_nothing in (torch.zeros_like(is_right), is_right) * 2:
        carry.go_on(guess, noise_T)
        assert torch.equal(carry.told_TD[:, 0] == 0, told_nothing)
        want = torch.where(told_nothing & is_free, 5, batch.token.flatten())
        assert torch.equal(carry.batch.token.flatten(), want)


def test_noise_is_that_of_a_canvas_and_a_step() -> None:
    batch = Batch.of(torch.from_numpy(beside().first()), "cpu")
    first, again, next_ = (
        fresh_noise(batch, TINY.vocab_size, torch.tensor(step)) for step in (0, 0, 1)
    )
    assert torch.equal(first, again) and (first != next_).float().mean() > 0.9
    assert first.min() >= 0 and first.max() < TINY.vocab_size


# --- who leaves


def test_each_sequence_stays_for_its_steps_and_the_oldest_leave() -> None:
    made, objective = beside(), Objective(shaken(), Weighting())
    carry = carry_of(made, objective)
    for step in range(STEPS):
        arrived = loaded(made, step)
        carry.told_TD, carry.right_T = (torch.ones_like(x) for x in (carry.told_TD, carry.right_T))
        carry.take_in(arrived.parts[0].parted(2)[1], arrived.real[2:])
        for kept in (carry.told_TD, carry.right_T):
            assert (kept == 0).float().mean() == pytest.approx(1 / STEPS)
    want = np.concatenate([made.newcomers.batch(step) for step in range(STEPS)], axis=1)
    assert torch.equal(carry.batch.lot, torch.from_numpy(want[LOT]).long())
    assert carry.real == real_rows(want) and carry.oldest == 0


def test_batches_are_new_texts_and_newcomers_behind_them() -> None:
    made = beside()
    rows = made.batch(4)
    assert np.array_equal(rows[:, :2], made.fresh.batch(4))
    assert np.array_equal(rows[:, 2:], made.newcomers.batch(4))
    assert made.first().shape == (len(FIELDS), 2 * STEPS, 96) and made.sequences == 2


# --- runs


@pytest.mark.parametrize("workers", [0, 1])
def test_a_killed_run_goes_on_with_what_it_carried(workers: int, tmp_path: Path) -> None:
    through = trainer(tmp_path / "through", workers=workers)
    expected = run(through)
    assert len(expected) == 12
    break_after(trainer(tmp_path / "killed", workers=workers), step=8)
    again = trainer(tmp_path / "killed", workers=workers)
    assert again.resume() == 5
    assert run(again) == expected[5:]
    assert all(map(torch.equal, weights(again), weights(through)))


def test_rows_that_stay_are_counted_every_time(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    assert one.carry is not None
    made = loaded(beside(), 0)
    one._move(made)
    assert one._rows(made) == sum(made.real[:2]) + sum(one.carry.real)


def test_parts_of_a_batch_cannot_be_carried(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[batch\] carried with 1 processes and 2 parts"):
        Trainer(
            Objective(fresh_model(TINY, 0), Weighting()),
            Masters(fresh_model(TINY, 0), OptimSettings()),
            beside(fresh=mixture(sequences=4)),
            Schedule(steps=2, warmup=1),
            RunSettings(directory=tmp_path, accumulate=2),
        )


CARRIED = RECIPE.replace("sequences = 4", "sequences = 6\ncarried = 4\ncarried_steps = 4") + (
    'rollout = true\n[[data]]\nfile = "chats.jsonl"\nrollout = false\n'
)


def test_a_recipe_says_what_is_carried(tmp_path: Path) -> None:
    path = save_recipe(tmp_path, CARRIED)
    job = built(path)
    made = job.trainer.mixture
    assert isinstance(made, Beside)
    assert (made.fresh.sequences, made.newcomers.sequences, made.steps) == (2, 1, 4)
    assert [i.corruption.rolls for i in made.fresh.ingredients] == [False]
    assert [i.corruption.rolls for i in made.newcomers.ingredients] == [True]
    assert isinstance(build_mixture(job.recipe, job.place, job.base)[0], Beside)


def test_answers_are_learned_by_canvases_that_go_on(tmp_path: Path) -> None:
    path = save_recipe(tmp_path, CARRIED)
    teach = ["batch.rows=160", "optim.adam_lr=0.01", "schedule.steps=100", "run.report_every=10"]
    job = built(path, *teach)
    reports = list(job.trainer.reports())
    assert reports[-1].denoise < 0.3 < 1 < reports[0].denoise
    carry = job.trainer.carry
    assert carry is not None
    # Some canvases are solved and begin again, others go on.
    told_nothing = (carry.told_TD == 0).all(1)[carry.batch.is_canvas.flatten()]
    assert 0 < told_nothing.float().mean() < 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("carried = 4", "carried = 6", "carried is 6 of 6 sequences"),
        ("carried = 4", "carried = 3", "a multiple of carried_steps"),
        ("sequences = 6", "sequences = 7", "leave an even number of sequences"),
        ("carried = 4", "carried = -4", "carried is -4 of 6 sequences"),
        ("carried_steps = 4", "carried_steps = 0", "carried_steps must be 1 or more"),
        ("[run]", "[loss]\nrollout = 0.5\n[run]", "takes the place of [loss] rollout"),
        ("[run]", "[loss]\nguess_gradient = true\n[run]", "has no guess_gradient"),
        ("rollout = false", "rollout = true", "here all have true"),
    ],
)
def test_what_cannot_be_carried_is_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(CARRIED.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert message in str(caught.value)


def test_a_recipe_of_the_repository_carries_its_puzzles() -> None:
    recipe = load_recipe(ROOT / "recipes" / "nano_more.toml")
    assert recipe.batch.carried and all(d.rollout for d in recipe.data if d.puzzle)


# --- compiled


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["compiled", "compiled_by_kind"])
def test_compiled_passes_carry_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, layer_types=(FULL,))
    monkeypatch.setattr(routed, "grouped", compilable_grouped)
    compile_whole = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(speed.torch, "compile", compile_whole)
    torch._dynamo.reset()
    made, found = beside(), []
    for is_compiled in (False, True):
        objective = Objective(shaken(config), Weighting())
        if is_compiled:
            getattr(speed, kind)(objective)
        carry = carry_of(made, objective)
        losses = []
        for step in range(2):
            own = carried_losses(objective, loaded(made, step), carry, step)
            own.total.backward()
            losses.append(torch.stack([loss.detach() for loss in own]))
        found.append((torch.stack(losses), carry.batch.token))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.equal(found[0][1], found[1][1])
