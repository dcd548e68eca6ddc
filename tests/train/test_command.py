"""`dgemma train` and `python -m dgemma.train`: what they say, keep and go on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dgemma.cli.before_after import BeforeAfter
from dgemma.cli.train import MinuteLines
from dgemma.errors import UsageError
from dgemma.train import command
from dgemma.train.__main__ import main as plain
from dgemma.train.__main__ import parse_args
from dgemma.train.batches import DeviceBatch
from dgemma.train.checkpoint import HELDOUT, MetricsFile, Report, saved_states
from dgemma.train.command import TrainArgs, record_recipe
from dgemma.train.loop import Trainer
from dgemma.train.recipe import RECIPES, find_recipe, load_recipe
from dgemma.train.tokens import TokenStore
from tests.command import Call, caller
from tests.taught import SHORT
from tests.train.runs import save_random, save_recipe

ROOT = Path(__file__).resolve().parents[2]
HERE = ("--device", "cpu", "--dtype", "float32")
TIMELESS = ("step", "steps", "total", "denoise", "causal", "balance", "grad_norm", "lr_scale")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return save_recipe(tmp_path)


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing has its own tests; its first use on a machine takes long and speaks on stderr."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model ends no reply before its limit."""
    monkeypatch.setattr("dgemma.cli.before_after.SAMPLE_TOKENS", 8)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capsys, ["train"], HERE)


def test_the_plain_command_has_the_defaults_of_dgemma_train() -> None:
    assert parse_args(["sft"]) == TrainArgs(recipe=Path("sft"), changes=[])


def course(directory: Path) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in TIMELESS) for line in MetricsFile(directory).read()]


# --- a run from end to end


def test_it_says_where_everything_is_and_goes_on_when_called_again(
    call: Call, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    code, said, erred = call(recipe, "--out", out, "--set", "schedule.warmup=3")
    assert (code, erred) == (0, "")
    assert said.splitlines()[0] == f"checkpoint: {out / 'checkpoint'}"
    assert said.splitlines()[1:] == [f"losses: {out / 'loss.svg'}"]  # nothing is held out
    assert len(course(out)) == 8 and [step for step, _ in saved_states(out)] == [4, 8]
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= {
        path.name for path in (out / "checkpoint").iterdir()
    }
    # Longer, by the same command: nothing is done twice.
    code, _, erred = call(recipe, "--out", out, "--set", "schedule.warmup=3", "--steps", "10")
    assert code == 0 and f"dgemma: resuming from step 8 of 10 in {out}; --fresh" in erred
    assert [line[0] for line in course(out)] == list(range(1, 11))
    code, _, erred = call(recipe, "--out", out, "--steps", "2", "--fresh")
    assert (code, erred, len(course(out))) == (0, "", 2)


def test_the_course_of_a_run_that_went_wrong_is_drawn(
    call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(command, "plot_losses", drawn.append)
    code, _, said = call(recipe, "--out", recipe.parent / "run", "--set", "optim.adam_lr=1e30")
    assert code == 1 and "training stopped after" in said
    assert drawn == [recipe.parent / "run"]


def test_a_run_is_not_forgotten_for_one_that_cannot_begin(
    call: Call, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    call(recipe, "--out", out, "--steps", "4")
    before = course(out)
    code, _, erred = call(recipe, "--out", out, "--fresh", "--set", "data.0.file=none.jsonl")
    assert code == 2 and "none.jsonl" in erred
    assert [step for step, _ in saved_states(out)] == [4] and course(out) == before
    assert call(recipe, "--out", out, "--steps", "5")[0] == 0, "it can be gone on with"


def test_another_recipe_is_not_taken_for_the_same_run(
    call: Call, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    call(recipe, "--out", out, "--steps", "4")
    changed = ("--set", "optim.adam_lr=0.5", "--set", "seed=3")
    code, _, erred = call(recipe, "--out", out, *changed)
    assert code == 2 and erred.count("\n") == 1
    assert "holds a run of another recipe (optim.adam_lr, seed differ)" in erred
    # How often it is saved, or for how long it runs, is free to change.
    assert call(recipe, "--out", out, "--steps", "5", "--set", "run.save_every=1")[0] == 0


def test_what_may_change_in_the_middle_of_a_run(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "state-00000001.pt").touch()
    record_recipe(tmp_path, load_recipe(recipe))
    record_recipe(
        tmp_path, load_recipe(recipe, ["name=other", "schedule.hold=0.1", "eval.limit=3"])
    )
    for change in ("batch.rows=96", 'data=[{file="chats.jsonl", weight=2.0}]'):
        with pytest.raises(UsageError, match="another recipe"):
            record_recipe(tmp_path, load_recipe(recipe, [change]))


def test_a_run_is_gone_on_with_when_recipes_have_learned_a_new_word(
    recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "state-00000001.pt").touch()
    record_recipe(tmp_path, load_recipe(recipe))
    path = tmp_path / "recipe.json"
    older = json.loads(path.read_text())
    assert (
        older["data"][0].pop("causal_fraction") == 1.0
        and older["batch"].pop("persistent_sequences") == 0
    )
    path.write_text(json.dumps(older))
    record_recipe(tmp_path, load_recipe(recipe))
    assert "causal_fraction" in path.read_text()
    path.write_text(json.dumps(older))
    with pytest.raises(UsageError, match=r"another recipe \(data differ\)"):
        record_recipe(tmp_path, load_recipe(recipe, ["data.0.causal_fraction=0.5"]))


@pytest.mark.parametrize(
    ("arguments", "code", "phrase"),
    [
        (("--set", "batch.rwos=1"), 1, "rwos not known"),
        (("--set", "batch"), 2, "sets nothing"),
        (("--seconds", "0"), 2, "seconds is 0.0; it must be above 0"),
        (("--seconds", "9", "--steps", "8"), 2, "steps is 8 and seconds 9.0; give one of them"),
        (("--export",), 2, "holds no saved state to write the weights of"),
        (("--export", "--fresh"), 2, "--export and --fresh"),
        (("--eval", "chess"), 2, "tasks: chess is not known"),
        (("--set", "batch.grad_accum_steps=4"), 2, "must be a multiple of 8"),
        (("--set", "batch.sequences=3"), 2, "3 sequences in a batch"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    arguments: tuple[str, ...], code: int, phrase: str, call: Call, recipe: Path, tmp_path: Path
) -> None:
    found, said, erred = call(recipe, "--out", tmp_path / "run", *arguments)
    assert (found, said) == (code, "")
    assert erred.startswith("dgemma: ") and erred.count("\n") == 1 and phrase in erred


def test_the_default_directory_bears_the_recipes_name(recipe: Path) -> None:
    args = TrainArgs(recipe=recipe)
    assert args.directory(args.load_recipe()) == Path("out/train/small")


# --- interrupted and killed


def test_ctrl_c_saves_a_state_and_says_how_to_go_on(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, train_step = tmp_path / "run", Trainer.train_step
    recipe.write_text(recipe.read_text().replace("[schedule]", "[schedule]\nhold = 1.0"))
    call(recipe, "--out", tmp_path / "through")

    def interrupted(self: Trainer, batch: DeviceBatch) -> Any:
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        code, said, erred = call(recipe, "--out", out)
    assert (code, said) == (130, "")
    state = out / "state-00000003.pt"
    assert erred == (
        f"dgemma: interrupted after 3 steps; the state is saved in {state}. The same command "
        "resumes the run; with --export it writes the model as it is\n"
    )
    code, said, erred = call(recipe, "--out", out, "--export")
    assert (code, erred) == (0, "dgemma: weights of step 3 of 8\n")
    assert said.splitlines()[0] == f"checkpoint: {out / 'checkpoint'}"
    exported = load_file(out / "checkpoint" / "model.safetensors")
    # Nothing is trained for it, nor lost by it.
    assert call(recipe, "--out", tmp_path / "three", "--steps", "3")[0] == 0
    three = load_file(tmp_path / "three" / "checkpoint" / "model.safetensors")
    assert exported.keys() == three.keys()
    assert all(torch.equal(exported[name], three[name]) for name in three)
    assert call(recipe, "--out", out)[0] == 0
    assert course(out) == course(tmp_path / "through")


def test_a_killed_process_goes_on_to_the_last_bit(recipe: Path, tmp_path: Path) -> None:
    """Not by an exception: the process is gone, as when a machine is."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "dgemma.train", str(recipe), "--steps", "2000"]
    arguments = ["--set", "schedule.warmup=2", "--set", "schedule.hold=1.0", *HERE]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--out", str(out), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )
        deadline = time.monotonic() + 120
        while not saved_states(out) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    reached = saved_states(out)[-1][0]
    changes = ["--set", "schedule.warmup=2", "--set", "schedule.hold=1.0"]
    for directory in (out, tmp_path / "through"):
        steps = ["--steps", str(reached + 4)]
        assert plain([str(recipe), "--out", str(directory), *changes, *steps, *HERE]) == 0
    expected = [line[2:] for line in course(tmp_path / "through")]  # the number of steps differs
    assert [line[2:] for line in course(out)] == expected


# --- without a terminal library


def test_the_plain_command_reports_on_stdout(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert plain([str(recipe), "--out", str(out), *HERE]) == 0
    said, erred = capsys.readouterr()
    assert said.count("\n") == 8 and said.startswith("step 1/8  loss ")
    assert f"checkpoint: {out / 'checkpoint'}" in erred
    assert plain([str(recipe), "--out", str(out), "--set", "seed=9", *HERE]) == 2
    assert plain([str(tmp_path / "none.toml"), *HERE]) == 2
    assert "no recipe " in capsys.readouterr().err


# --- before and after


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be measured: that takes long, and what is wrong can be seen before."""

    def measured(*args: Any) -> None:
        raise AssertionError("measured first")

    monkeypatch.setattr(BeforeAfter, "before", measured)


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ('file="none.jsonl"', "a recipe's paths are relative to it"),
        ('puzzle="sudoku", bank="none.npz"', "python -m recipes.nano.bank makes one"),
    ],
)
def test_data_that_is_not_there_is_named_before_anything_is_measured(
    source: str, how: str, call: Call, recipe: Path, unmeasured: None
) -> None:
    code, _, said = call(recipe, "--eval", "sudoku", "--set", f"data=[{{{source}}}]")
    assert code == 2 and f"{recipe.parent / 'none'}" in said and how in said


def test_a_run_without_a_state_is_named_before_anything_is_measured(
    call: Call, recipe: Path, unmeasured: None
) -> None:
    code, _, said = call(recipe, "--eval", "sudoku", "--export", "--out", recipe.parent / "run")
    assert code == 2 and "holds no saved state" in said


def test_tasks_are_run_before_and_after(call: Call, recipe: Path, tmp_path: Path) -> None:
    """On what the model is taught, so that there is something to see."""
    checkpoint, heldout = save_random(tmp_path / "checkpoint"), tmp_path / "heldout"
    heldout.mkdir()
    case = {"prompt": SHORT, "reply": '{"name": "f"}'}
    (heldout / "json_calls.jsonl").write_text(json.dumps(case) + "\n")
    (tmp_path / "chats.jsonl").write_text(json.dumps(case) + "\n")
    shape = 'config = "shape/config.json"\ntokenizer = "shape"'
    text = recipe.read_text().replace(shape, f'checkpoint = "{checkpoint}"')
    recipe.write_text(text + '[eval]\ntasks = ["json_calls"]\n')
    teach = ["optim.adam_lr=0.01", "run.report_every=20", "run.save_every=1000"]
    teach += ["batch.sequences=2", "batch.rows=72", "data.0.train_on_prompt=false"]
    changes = [part for change in teach for part in ("--set", change)]
    arguments = (recipe, "--out", tmp_path / "run", "--eval-heldout", heldout, *changes)
    code, said, erred = call(*arguments, "--steps", "60")
    assert (code, erred) == (0, "")
    *_, heading, row, _, _ = said.splitlines()
    assert heading.split() == "task measure diffusion before after ar before after".split()
    assert row.rindex("0.0 % [0.0") < row.index("100.0 %")  # by AR mode, which learns first
    kept = json.loads((tmp_path / "run" / "eval_before.json").read_text())
    assert kept["measures"][0]["task"] == "json_calls"
    # Going on with the run, the beginning is not measured again.
    (tmp_path / "run" / "eval_before.json").write_text(json.dumps({"measures": []}))
    code, said, _ = call(*arguments, "--steps", "61")
    assert code == 0 and said.splitlines()[-1].split("  ")[2].strip() == ""
    assert "json_calls" not in call(*arguments, "--steps", "62", "--eval", "none")[1]


# --- recipes by name, one's own data, progress in a log


def test_a_recipe_of_the_package_is_found_by_its_name_in_any_directory(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_random(tmp_path / "random")
    monkeypatch.chdir(tmp_path)
    Path("my.json").write_text(json.dumps([{"instruction": SHORT, "output": "one, two."}] * 2))
    small = ("batch.rows=164", "batch.sequences=2")
    changes = [part for change in small for part in ("--set", change)]
    model = ("--set", f"model.checkpoint={checkpoint}", "--out", "run", "--steps", "2")
    code, said, _ = call("sft", "--data", "my.json", *model, *changes)
    assert code == 0 and said.startswith("adapter: run/adapter")
    recipe = json.loads(Path("run/recipe.json").read_text(encoding="utf-8"))
    assert recipe["data"][0]["file"] == "./my.json"


def test_recipes_that_are_not_there_are_refused_with_those_that_are(
    call: Call, recipe: Path
) -> None:
    assert find_recipe(Path("sft")) == RECIPES / "sft.toml" and find_recipe(recipe) == recipe
    for name in ("sfft", "recipes/sft.toml"):
        code, _, erred = call(name)
        assert code == 2 and f"no recipe {name}" in erred and "sft, sudoku" in erred


def test_one_file_does_not_replace_several(call: Call, recipe: Path) -> None:
    recipe.write_text(recipe.read_text() + '[[data]]\nfile = "chats.jsonl"\n')
    code, _, erred = call(recipe, "--data", "my.jsonl")
    assert code == 2 and "2 [[data]]" in erred and "--set data.0.file=my.jsonl" in erred


def test_where_there_is_no_terminal_a_line_a_minute_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    lines = MinuteLines(clock=lambda: now[0])
    zero = dict.fromkeys(("total", "balance", "grad_norm", "lr_scale", "seconds"), 0.0)
    for step in range(10, 101, 10):
        now[0] += 25.0
        report = Report(step=step, steps=100, denoise=1, causal=2, rows_per_second=9, **zero)
        lines.add(report)
    erred = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in erred] == ["30", "60", "90"]
    assert erred[0] == "dgemma: step 30 of 100  loss 1.000 + 2.000  9 rows/s  about 3 min left"


def own_run(tmp_path: Path, num_chats: int) -> tuple[str | Path, ...]:
    """Arguments of a short run of the recipe `sft` on a random model and as many chats."""
    checkpoint = save_random(tmp_path / "random")
    lines = [json.dumps({"prompt": SHORT, "reply": str(number)}) for number in range(num_chats)]
    (tmp_path / "my.jsonl").write_text("\n".join(lines), encoding="utf-8")
    changes = (f"model.checkpoint={checkpoint}", "batch.rows=164", "run.save_every=2")
    options = [part for change in changes for part in ("--set", change)]
    return ("sft", "--data", tmp_path / "my.jsonl", "--steps", "4", *options)


@pytest.mark.usefixtures("short_samples")
def test_a_part_of_ones_own_file_is_held_out_and_answered_before_and_after(
    call: Call, tmp_path: Path
) -> None:
    run = own_run(tmp_path, 30)
    code, said, _ = call(*run, "--out", tmp_path / "run")
    heldout = MetricsFile(tmp_path / "run", HELDOUT).read()
    assert code == 0 and [line["step"] for line in heldout] == [0, 2, 4]
    assert f"before, {heldout[-1]['denoise']:.3f} + {heldout[-1]['causal']:.3f} after" in said
    samples = json.loads((tmp_path / "run" / "samples.json").read_text(encoding="utf-8"))
    assert len(samples["before"]) == len(samples["after"]) == 3
    assert said.count("held-out prompt ") == 3 and said.count("  diffusion, before: ") == 3
    assert said.count("  ar, after: ") == 3
    # Continued, it measures no step twice and keeps its first replies.
    code, again, _ = call(*run, "--out", tmp_path / "run", "--steps", "6")
    assert [s["step"] for s in MetricsFile(tmp_path / "run", HELDOUT).read()] == [0, 2, 4, 6]
    first = f"  diffusion, before: {samples['before'][0]['diffusion']!r}"
    assert code == 0 and first in said and first in again


@pytest.mark.usefixtures("short_samples")
def test_a_held_out_file_is_taken_and_a_small_one_not_split(call: Call, tmp_path: Path) -> None:
    run = own_run(tmp_path, 4)
    code, said, erred = call(*run, "--out", tmp_path / "small")
    assert code == 0 and "4 examples are too few to hold some out" in erred
    assert "held-out" not in said
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "completion": "b"}')
    given = ("--heldout", tmp_path / "other.jsonl", "--out", tmp_path / "given")
    code, said, erred = call(*run, *given)
    assert code == 0 and "too few" not in erred and said.count("held-out prompt ") == 1


def test_a_held_out_example_is_not_trained_on() -> None:
    store = TokenStore.build([([i], [i, i]) for i in range(50)], vocab_size=64)
    trained, heldout = store.split(0.1, seed=0)
    firsts = [{int(part[i][0][0]) for i in range(len(part))} for part in (trained, heldout)]
    assert (len(trained), len(heldout)) == (45, 5) and firsts[0] | firsts[1] == set(range(50))
    assert all(
        list(part[i][1]) == 2 * list(part[i][0])
        for part in (trained, heldout)
        for i in range(len(part))
    )
