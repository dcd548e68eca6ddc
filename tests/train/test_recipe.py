"""Recipes: read strictly, changed by hand, and built into runs that do what they say."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dgemma.config import load_generation_config
from dgemma.diffusion.sampler import EntropyBound
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.train import packing, tokens
from dgemma.train.batches import Mixture
from dgemma.train.build import (
    MixtureBuilder,
    RunEnvironment,
    TrainingJob,
    build,
    open_recipe,
    recipe_checkpoint,
)
from dgemma.train.corruption import NONE, Corruption
from dgemma.train.recipe import RECIPES, LoRASettings, load_recipe
from dgemma.train.tokens import TokenStore
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import load_model
from dgemma.weights.lora import detach, merge, read_back
from dgemma.weights.lora_files import load_adapter, save_adapter
from tests.taught import ANSWERS, SHORT, ask, taught_config
from tests.text.small import CONTROL
from tests.train.runs import RECIPE, save_recipe

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return save_recipe(tmp_path)


def built(path: Path, *changes: str, out: str = "out", **place: Any) -> TrainingJob:
    where = {"device": CPU, "dtype": torch.float32, **place}
    return build(
        load_recipe(path, changes), RunEnvironment(recipe=path, out=path.parent / out, **where)
    )


def trained(job: TrainingJob) -> list[float]:
    return [report.total for report in job.trainer.reports()]


# --- reading


def test_the_recipes_of_the_repository_can_be_read() -> None:
    directory = ROOT / "recipes"
    paths = [*RECIPES.glob("*.toml"), *directory.glob("*.toml"), *directory.glob("nano/*.toml")]
    names = {load_recipe(path).name for path in paths}
    assert names == {"sudoku", "sft", "text", "nano", "nano-scratch"}


FILE = 'file = "chats.jsonl"'  # of RECIPE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[batch]", "[batches]", "batches not known; use name, seed, model"),
        (
            "rows = 164",
            "rwos = 164",
            "batch: rwos not known; use sequences, rows, grad_accum",
        ),
        ("rows = 164", 'rows = "164"', "batch: rows is '164'; it must be a whole number"),
        ("rows = 164", "rows = 0", "[batch] rows is 0; it must be 1"),
        ("copies = 2", "copies = 2.5", "canvas: copies is 2.5; it must be a whole number"),
        ("steps = 8", 'steps = 8\nshape = "step"', "shape is 'step'; it must be 'linear' or 'cos"),
        ("steps = 8\n", "", "schedule lacks steps"),
        ('name = "small"\n', "", "lacks name"),
        (FILE, "weight = 1.0", "needs either file, or puzzle with its bank"),
        ('tokenizer = "shape"', "", "needs a tokenizer"),
        ("[model]", '[model]\ncheckpoint = "x"', "either config (a new model) or checkpoint"),
        ("[run]", "[lora]\nrank = 4\n[run]", "[lora] needs [model] checkpoint"),
        ("copies = 2", "copies = 0", "[canvas] copies is 0; it must be 1 or more"),
        (FILE, 'file = "x"\ncopies = -1', "[[data]] copies is -1; it must be 0"),
        ("[model]", "seed = -1\n[model]", "seed is -1; it must be 0 or more"),
        ("[run]", "[run]\nworkers = -1", "workers is -1; it must be 0 or more"),
        ("[run]", "[run]\nkeep = 0", "[run] keep is 0; it must be 1 or more"),
        ("[run]", "[optim]\nbetas = [0.9]\n[run]", "betas has 1 values, not 2"),
        ("[run]", "[optim]\nbetas = [0.9, 1]\n[run]", "betas is 0.9, 1.0; it must be 0 or more"),
        ("[run]", "[optim]\nadam_lr = -1\n[run]", "[optim] adam_lr is -1.0; it must be 0 or more"),
        ("[run]", "[optim]\nadam_lr = nan\n[run]", "adam_lr is nan; it must be a number"),
        ("[run]", "[optim]\nbetas = [0.9, nan]\n[run]", "betas[1] is nan; it must be a number"),
        (
            "[run]",
            "[loss]\ncausal_weight = -1\n[run]",
            "causal_weight is -1.0; it must be 0",
        ),
        (
            'config = "shape/config.json"\ntokenizer = "shape"',
            'checkpoint = "x"\nfrozen = ["q_proj"]\n[lora]',
            "[model] frozen is ['q_proj'] with [lora]",
        ),
        ("[run]", "[optim]\nclip = 0\n[run]", "[optim] clip is 0.0; it must be above 0"),
        ("[run]", "[loss]\nmax_rollout_steps = 0\n[run]", "max_rollout_steps is 0"),
        ("[run]", "[loss]\nmax_rollout_steps = 2\n[run]", "is 2, but rollout_fraction is 0"),
        (FILE, 'file = "x"\npadding_loss_fraction = 1.5', "[[data]] padding_loss_fraction is 1.5"),
        (
            FILE,
            'file = "x"\nrepeat_noise_fraction = -1.0',
            "repeat_noise_fraction is -1.0",
        ),
        (FILE, 'file = "x"\ncausal_fraction = 2', "[[data]] causal_fraction is 2"),
        (FILE, 'file = "x"\nhole_fraction = -0.1', "[[data]] hole_fraction is -0.1"),
        (FILE, 'file = "x.npz"\nmax_tokens = 9', "it is for a .jsonl or .json file"),
        (
            FILE,
            'puzzle = "sudoku"\nbank = "x"\nmax_tokens = 9',
            "max_tokens is 9; it is for a",
        ),
        ("[[data]]", "[data]", "data is {'file': 'chats.jsonl'}; it must be a list"),
        ("[model]", "[model", "is not TOML"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(RECIPE.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert message in str(caught.value)


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*none.toml"):
        load_recipe(tmp_path / "none.toml")


def test_a_recipe_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(RECIPE.replace("small", "caf\xe9").encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin.toml is not TOML: 'utf-8' codec can't decode"):
        load_recipe(path)


def test_values_can_be_set_by_hand(recipe: Path) -> None:
    changes = [
        "schedule.steps=50",
        "optim.adam_lr=1e-4",
        "data.0.weight = 2",
        "canvas.lengths={8=1.0, 16=2.0}",
        "model.tokenizer=./some/where",
        "lora.rank=8",
        'model.checkpoint="nano"',
    ]
    with pytest.raises(ConfigError, match="either config"):
        load_recipe(recipe, changes)
    raw = RECIPE.replace('config = "shape/config.json"\n', "")
    recipe.write_text(raw, encoding="utf-8")
    changed = load_recipe(recipe, changes)
    assert (changed.schedule.steps, changed.optim.adam_lr, changed.data[0].weight) == (50, 1e-4, 2)
    assert changed.canvas.lengths == {"8": 1.0, "16": 2.0}
    assert changed.model.tokenizer == "./some/where"
    assert changed.lora is not None and changed.lora.rank == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("schedule.steps", "sets nothing; write key=value"),
        ("=3", "sets nothing"),
        ("data.3.weight=1", "'3' must be a number from 0 to 0"),
        ("data.first.weight=1", "'first' must be a number"),
        ("name.first=1", "the key before first is not a table"),
        ("schedule.steps.more=1", "the key before more is not a table"),
    ],
)
def test_a_change_that_changes_nothing_is_refused(change: str, message: str, recipe: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(recipe, [change])
    assert message in str(caught.value)


def test_a_change_is_read_as_strictly_as_the_file(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="rwos not known"):
        load_recipe(recipe, ["batch.rwos=3"])


def test_the_whole_recipe_can_be_written_down(recipe: Path) -> None:
    raw = json.loads(load_recipe(recipe).to_json())
    assert raw["optim"]["muon_lr"] == 0.02 and raw["data"][0]["file"] == "chats.jsonl"


# --- building


def test_canvases_longer_than_the_models_are_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="canvas lengths of 1 to 16 tokens"):
        built(recipe, "canvas.lengths={32=1.0}")
    with pytest.raises(ConfigError, match="canvas lengths of 1 to 16 tokens"):
        built(recipe, "canvas.lengths={long=1.0}")


@pytest.mark.parametrize("content", [b"{", b'{"model_type": "\xe9"}', b"[]"])
def test_a_shape_that_cannot_be_read_is_named(content: bytes, recipe: Path) -> None:
    (recipe.parent / "shape" / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config.json (is not valid JSON|must hold a JSON)"):
        built(recipe)


def test_a_source_is_noised_as_the_canvas_settings_say_or_as_it_says_itself(recipe: Path) -> None:
    defaults = ("canvas.hole_fraction=0.3", "canvas.padding_loss_fraction=0.5")
    own = ("data.0.hole_fraction=0.0", "data.0.noise_level_power=0.5", "data.0.on_policy=false")
    own = (*own, "data.0.repeat_noise_fraction=0.2")
    vocab = taught_config().vocab_size
    for changes, expected in (
        (defaults, Corruption(vocab_size=vocab, hole_fraction=0.3, padding_loss_fraction=0.5)),
        (
            (*defaults, *own),
            Corruption(
                vocab_size=vocab,
                hole_fraction=0.0,
                padding_loss_fraction=0.5,
                noise_level_power=0.5,
                repeat_noise_fraction=0.2,
                on_policy=False,
            ),
        ),
    ):
        (component,) = built(recipe, *changes).trainer.mixture.components
        assert component.corruption == expected


def test_canvases_are_padded_with_the_end_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is 1 for the tokenizers of Gemma, and 0 here."""
    monkeypatch.setattr("tests.text.small.CONTROL", ["<eos>", "<pad>", *CONTROL[2:]])
    mixture = built(save_recipe(tmp_path)).trainer.mixture
    (component,) = mixture.components
    assert component.corruption.eos_id == 0
    rows = mixture.batch(0)
    last = rows[packing.TARGET][rows[packing.CANVAS] > NONE].tolist()
    assert 0 in last and 1 not in last


def test_files_are_sought_beside_the_recipe_or_where_the_command_runs(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "chats.jsonl").rename(elsewhere / "chats.jsonl")
    with pytest.raises(UsageError, match=r"no file .*chats.jsonl; a recipe's paths are relative"):
        built(recipe)
    monkeypatch.chdir(elsewhere)
    built(recipe, "data.0.file=./chats.jsonl")


def test_the_built_in_model_is_not_a_directory_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "nano").mkdir()
    (tmp_path / "mine").mkdir()
    assert recipe_checkpoint(tmp_path / "any.toml", "mine") == tmp_path / "mine"
    if NANO_DIRECTORY.is_dir():
        assert recipe_checkpoint(tmp_path / "any.toml", "nano") == NANO_DIRECTORY


def test_frozen_weights_stay_and_a_part_that_is_nowhere_is_named(recipe: Path) -> None:
    job = built(recipe, 'model.frozen=["router", "embed_tokens"]')
    before = {name: w.clone() for name, w in job.base.model.state_dict().items()}
    trained(job)
    for name, weight in job.base.model.named_parameters():
        is_frozen = "router" in name or "embed_tokens" in name
        assert torch.equal(weight, before[name]) == is_frozen, name
    with pytest.raises(ConfigError, match="no weight has 'ruoter' in its name"):
        built(recipe, 'model.frozen=["ruoter"]')


def test_bfloat16_trains_with_float32_master_weights(recipe: Path) -> None:
    job = built(recipe, dtype=torch.bfloat16)
    losses = trained(job)
    assert losses[-1] < losses[0]
    assert {w.dtype for w in job.base.model.parameters()} == {torch.bfloat16}
    assert {w.dtype for w in job.trainer.optimizer.weights} == {torch.float32}
    saved = load_model(job.save())
    assert saved.config.dtype == "bfloat16"


def test_an_opened_recipe_is_what_a_run_begins_with_and_leaves_nothing_behind(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary, change = tmp_path / "temporary", "batch.sequences=2"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = set(tmp_path.rglob("*"))
    with open_recipe(recipe, [change]) as (read, base, mixture):
        assert list(temporary.rglob("tokens/*"))  # of the chats, which are not tokenized yet
        rows = mixture.batch(0)
    assert set(tmp_path.rglob("*")) == before
    job = built(recipe, change)
    assert read == job.recipe and base.tokenizer == job.base.tokenizer
    assert np.array_equal(rows, job.trainer.mixture.batch(0))
    weights = job.base.model.state_dict()
    assert base.model.state_dict().keys() == weights.keys()
    assert all(torch.equal(w, weights[name]) for name, w in base.model.state_dict().items())


# --- data files


def test_a_file_is_tokenized_once_for_its_content(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(recipe)
    kept = sorted((recipe.parent / "out" / "tokens").glob("*.npz"))
    assert len(kept) == 1 and kept[0].name.startswith("chats-")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tokenized again")

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "tokenize_file", fail)
        built(recipe)
        with pytest.raises(AssertionError, match="again"):
            built(recipe, "data.0.max_tokens=50")
    with (recipe.parent / "chats.jsonl").open("a") as file:
        file.write('{"text": "the the the"}\n')
    built(recipe)
    stores = [TokenStore.load(path) for path in (recipe.parent / "out" / "tokens").glob("*.npz")]
    assert sorted(map(len, stores)) == [3, 4]


def test_examples_that_are_too_long_are_counted_aloud_every_time(recipe: Path) -> None:
    for _ in range(2):
        job = built(recipe, "data.0.max_tokens=50")
        assert job.warnings == ("chats.jsonl: 1 examples over 50 tokens were dropped",)


def test_pairs_that_find_no_room_are_counted_aloud(recipe: Path) -> None:
    # A canvas of 16 tokens takes 48 of the 164 rows: itself, its copy, and the text it holds.
    pairs = [("the " * 8, "the " * 8), ("the " * 8, "the " * 60), ("the " * 120, "the")]
    lines = [json.dumps({"prompt": prompt, "reply": reply}) for prompt, reply in pairs]
    (recipe.parent / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    unused, cut = built(recipe).warnings
    assert "chats.jsonl: 1 of 3 examples are not used" in unused and "164 rows" in unused
    assert "chats.jsonl: 1 of 3 replies are learned without their ends" in cut
    assert built(recipe, "batch.rows=1024").warnings == ()


def test_a_file_without_examples_is_named(recipe: Path) -> None:
    file = recipe.parent / "chats.jsonl"
    with pytest.raises(UsageError, match=r"chats\.jsonl has no example: its 3 are all over 8 tok"):
        built(recipe, "data.0.max_tokens=8")
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"chats\.jsonl has no example: it has no lines"):
        built(recipe)


def test_a_kill_while_tokens_are_kept_loses_no_count(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def killed(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.suffix == ".dropped":
            raise KeyboardInterrupt
        return write(path, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", killed)
        built(recipe, "data.0.max_tokens=50")
    assert built(recipe, "data.0.max_tokens=50").warnings


def test_a_file_of_another_kind_is_refused(recipe: Path) -> None:
    with pytest.raises(UsageError, match=r"chats.csv is not training data; use .npz tokens"):
        built(recipe, "data.0.file=chats.csv")


def test_puzzles_are_drawn_as_they_are_needed(recipe: Path, tmp_path: Path) -> None:
    from dgemma.train.sudoku import SudokuBank

    row, shifts = np.arange(9), [0, 3, 6, 1, 4, 7, 2, 5, 8]
    grid = np.array([(row + shift) % 9 + 1 for shift in shifts], np.uint8).reshape(1, 81)
    SudokuBank(grid, np.ones((1, 81), bool)).save(tmp_path / "bank.npz")
    data = 'data=[{puzzle="sudoku", bank="bank.npz", train_on_prompt=false}]'
    job = built(recipe, data, "batch.rows=800", "schedule.steps=1")
    assert np.isfinite(trained(job)).all()


# --- by heart


MEMORIZE = (
    *("batch.sequences=2", "batch.rows=320", "canvas.copies=3", "data.0.train_on_prompt=false"),
    *("optim.adam_lr=0.01", "run.report_every=10", "run.save_every=500"),
)


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """A tiny model that was taught a few answers, from a file of chats."""
    path = save_recipe(tmp_path_factory.mktemp("by_heart"))
    job = built(path, *MEMORIZE, "schedule.steps=170")
    *_, last = job.trainer.reports()
    assert last.denoise < 0.05 and last.causal < 0.05
    job.save()
    return job


@pytest.mark.parametrize("mode", ["diffusion", "ar"])
@pytest.mark.parametrize("question", ANSWERS)
def test_a_small_set_is_learned_by_heart_in_both_modes(
    question: str, mode: Any, by_heart: TrainingJob
) -> None:
    checkpoint = str(by_heart.environment.out / "checkpoint")
    engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    done = engine.generate(question, SamplingParams(mode=mode, seed=3))
    assert (done.text, done.finish) == (ANSWERS[question], "stop")


def test_lines_are_looked_for_where_some_are_to_be_opened(by_heart: TrainingJob) -> None:
    data, *_ = by_heart.recipe.data
    for share in (0.0, 0.5):
        recipe = replace(by_heart.recipe, data=(replace(data, line_hole_fraction=share),))
        mixture = MixtureBuilder(recipe, by_heart.environment, by_heart.base).build()
        assert isinstance(mixture, Mixture)
        corruption = mixture.components[0].corruption
        assert corruption.line_hole_fraction == share and (corruption.lines is not None) == bool(
            share
        )


# --- fine-tuning


NEW = {"prompt": SHORT, "reply": "three!"}
TUNE = """\
name = "tune"
[model]
checkpoint = "{checkpoint}"
[batch]
sequences = 2
rows = 96
[canvas]
lengths = {{ 16 = 1.0 }}
copies = 3
hole_fraction = 0.0
[optim]
adam_lr = 0.01
[schedule]
steps = 120
warmup = 5
[run]
save_every = 30
report_every = 10
[[data]]
file = "new.jsonl"
train_on_prompt = false
"""
LORA = """\
[lora]
rank = 4
alpha = 8.0
targets = ["q_proj", "o_proj", "mlp.up_proj", "mlp.down_proj"]
"""


def tune_recipe(directory: Path, checkpoint: Path, more: str = "") -> Path:
    (directory / "new.jsonl").write_text(json.dumps(NEW) + "\n", encoding="utf-8")
    path = directory / "tune.toml"
    path.write_text(TUNE.format(checkpoint=checkpoint) + more, encoding="utf-8")
    return path


def logits_of(model: Any, text: str) -> torch.Tensor:
    from tests.dense import scratch_logits

    causal, canvas = scratch_logits(model, list(ask(text).ids), list(range(16)))
    return torch.cat([causal, canvas])


@pytest.fixture(scope="module")
def adapted(by_heart: TrainingJob, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    directory = tmp_path_factory.mktemp("adapted")
    job = built(tune_recipe(directory, by_heart.environment.out / "checkpoint", LORA))
    trained(job)
    job.save()
    return job


def test_an_adapter_is_all_that_is_trained(adapted: TrainingJob, by_heart: TrainingJob) -> None:
    names = adapted.trainer.optimizer.names
    assert {name.rpartition(".")[2] for name in names} == {"a_RI", "b_OR"}
    base = load_model(by_heart.environment.out / "checkpoint").model
    model = detach(adapted.base.model)
    assert model.state_dict().keys() == base.state_dict().keys()
    for name, weight in base.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


def test_a_saved_adapter_answers_anew_with_the_old_checkpoint(
    adapted: TrainingJob, by_heart: TrainingJob
) -> None:
    checkpoint, adapter = (
        by_heart.environment.out / "checkpoint",
        adapted.environment.out / "adapter",
    )
    assert not (adapted.environment.out / "checkpoint").exists()
    for given, expected in ((None, ANSWERS[SHORT]), (adapter, NEW["reply"])):
        engine = Engine.load(str(checkpoint), device="cpu", dtype="float32", adapter=given)
        for mode in ("diffusion", "ar"):
            done = engine.generate(SHORT, SamplingParams(mode=mode, seed=5))  # type: ignore[arg-type]
            assert done.text == expected


def test_an_adapter_may_bring_its_own_sampler(
    adapted: TrainingJob, by_heart: TrainingJob, tmp_path: Path
) -> None:
    checkpoint = by_heart.environment.out / "checkpoint"
    generation = replace(load_generation_config(checkpoint), entropy_bound=0.25)
    saved = load_adapter(adapted.environment.out / "adapter")
    save_adapter(saved, tmp_path, generation=generation)
    engine = Engine.load(str(checkpoint), device="cpu", dtype="float32", adapter=tmp_path)
    assert isinstance(engine.sampler.rule, EntropyBound)
    assert engine.sampler.rule.entropy_bound == 0.25
    save_adapter(saved, tmp_path, overwrite=True)
    engine = Engine.load(str(checkpoint), device="cpu", dtype="float32", adapter=tmp_path)
    assert engine.generation_config == load_generation_config(checkpoint)
    with pytest.raises(ConfigError, match=r"entropy_bound is 0\.0; it must be above 0"):
        LoRASettings(entropy_bound=0.0)


def test_a_merged_adapter_gives_the_same_logits(
    adapted: TrainingJob, by_heart: TrainingJob
) -> None:
    checkpoint = by_heart.environment.out / "checkpoint"
    saved = load_adapter(adapted.environment.out / "adapter")
    assert {half.dtype for pair in saved.pairs.values() for half in pair} == {torch.float32}
    assert saved.base_model == str(checkpoint)
    plain, merged = load_model(checkpoint).model, merge(load_model(checkpoint).model, saved)
    beside = built(tune_recipe(adapted.environment.recipe.parent, checkpoint, LORA), out="again")
    model = beside.base.model
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module, _, half = name.rpartition(".")
            if half in ("a_RI", "b_OR"):
                weight.copy_(getattr(saved.pairs[module], half))
    assert beside.adapter is not None
    assert torch.equal(
        read_back(model, beside.adapter).pairs["layers.0.mlp.up_proj"].b_OR,
        saved.pairs["layers.0.mlp.up_proj"].b_OR,
    )
    expected = logits_of(model, SHORT)
    assert (logits_of(merged, SHORT) - expected).abs().max() < 1e-4
    assert (logits_of(plain, SHORT) - expected).abs().max() > 0.1


def test_an_adapter_in_training_is_taken_up_to_the_last_bit(
    by_heart: TrainingJob, tmp_path: Path
) -> None:
    path = tune_recipe(tmp_path, by_heart.environment.out / "checkpoint", LORA)
    changes = ("schedule.steps=8", "run.save_every=4", "run.report_every=1")
    expected = trained(built(path, *changes, out="through"))
    killed = built(path, *changes, out="killed")
    for report in killed.trainer.reports():
        if report.step == 6:
            break
    again = built(path, *changes, out="killed")
    assert again.trainer.resume() == 4
    assert trained(again) == expected[4:]


def test_an_adapter_beside_bfloat16_weights_is_kept_in_float32(
    by_heart: TrainingJob, tmp_path: Path
) -> None:
    path = tune_recipe(tmp_path, by_heart.environment.out / "checkpoint", LORA)
    job = built(path, "schedule.steps=4", "run.report_every=1", dtype=torch.bfloat16)
    assert np.isfinite(trained(job)).all()
    assert {w.dtype for w in job.base.model.parameters()} == {torch.bfloat16}
    saved = load_adapter(job.save())
    halves = [half for pair in saved.pairs.values() for half in pair]
    assert {half.dtype for half in halves} == {torch.float32}
    assert any(not torch.equal(half, half.bfloat16().float()) for half in halves)


def test_a_target_that_cannot_be_adapted_is_refused(by_heart: TrainingJob, tmp_path: Path) -> None:
    path = tune_recipe(tmp_path, by_heart.environment.out / "checkpoint", LORA)
    with pytest.raises(UsageError, match="'experts' is not a target"):
        built(path, 'lora.targets=["experts"]')


def test_all_weights_of_a_checkpoint_can_be_trained_on(
    by_heart: TrainingJob, tmp_path: Path
) -> None:
    path = tune_recipe(tmp_path, by_heart.environment.out / "checkpoint")
    job = built(path, "optim.muon_lr=0.01", 'model.frozen=["router"]')
    trained(job)
    engine = Engine.load(str(job.save()), device="cpu", dtype="float32")
    assert engine.generate(SHORT, SamplingParams(seed=5)).text == NEW["reply"]


def test_what_is_not_trained_of_a_checkpoint_is_saved_with_it(tmp_path: Path) -> None:
    """The image tower."""
    from tests.weights.sample import CONFIG, reference

    reference(CONFIG).save_pretrained(tmp_path / "theirs")
    store = TokenStore.build([([2, 5], [7, 8, 9, 1])], CONFIG.vocab_size)
    store.save(tmp_path / "tokens.npz")
    path = tune_recipe(tmp_path, tmp_path / "theirs")
    changes = ("data.0.file=tokens.npz", "schedule.steps=1", "canvas.lengths={4=1.0}")
    job = built(path, *changes)
    trained(job)
    before, after = load_model(tmp_path / "theirs"), load_model(job.save())
    assert before.vision and before.vision.keys() == after.vision.keys()
    assert all(torch.equal(before.vision[name], after.vision[name]) for name in before.vision)
    name = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(before.model.get_parameter(name), after.model.get_parameter(name))
