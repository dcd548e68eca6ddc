"""Two processes train as one does: the same losses, weights and files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgemma.errors import UsageError
from dgemma.train.checkpoint import MetricsFile, load_state, saved_states
from dgemma.train.distributed import (
    SINGLE_PROCESS,
    ProcessGroup,
    check_batch_split,
    init_distributed,
)
from dgemma.weights.load import load_model
from dgemma.weights.lora_files import load_adapter
from tests.train.runs import save_random, save_recipe
from tests.train.two import train

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
PLAIN = ["batch.sequences=8", "batch.grad_accum_steps=2", "loss.balance_weight=0.5"]
LORA = ['lora.targets=["q_proj", "mlp.up_proj"]', "lora.rank=3", "optim.adam_lr=3e-4"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs by one process, in `one`, and by two, in `two`."""
    directory = tmp_path_factory.mktemp("distributed")
    checkpoint = save_random(directory / "checkpoint")
    path = str(save_recipe(directory))
    tune = Path(path).with_name("tune.toml")
    text = Path(path).read_text()
    shape = 'config = "shape/config.json"\ntokenizer = "shape"'
    tune.write_text(text.replace(shape, f'checkpoint = "{checkpoint}"'))
    runs: list[dict[str, Any]] = [
        {"name": "plain", "recipe": path, "changes": PLAIN},
        {
            "name": "more",
            "recipe": path,
            "changes": ["run.activation_checkpointing=true", 'model.frozen=["router"]'],
        },
        {"name": "lora", "recipe": str(tune), "changes": LORA},
        {"name": "rounded", "recipe": path, "changes": [], "dtype": "bfloat16"},
    ]
    one = [{**run, "out": str(directory / "one" / run["name"])} for run in runs]
    two = [{**run, "out": str(directory / "two" / run["name"])} for run in runs]
    for run in one:
        train(run)
    # What one process began, two go on with; and one goes on with what two were stopped in.
    begun = directory / "two" / "begun"
    shutil.copytree(directory / "one" / "plain", begun)
    saved_states(begun)[-1][1].unlink()
    two.append({**two[0], "out": str(begun)})
    stopped = {**two[0], "out": str(directory / "two" / "stopped"), "interrupted": [1, 3]}
    two.append(stopped)
    run_twice(two, directory)
    train({**stopped, "interrupted": None})
    return directory


def run_twice(runs: list[dict[str, Any]], directory: Path) -> None:
    (directory / "runs.json").write_text(json.dumps(runs))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "tests.train.two", directory / "runs.json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def losses(directory: Path) -> Tensor:
    names = ("total", "denoise", "causal", "balance", "grad_norm")
    return torch.tensor([[line[name] for name in names] for line in MetricsFile(directory).read()])


def last_state(directory: Path) -> dict[str, Any]:
    step, path = saved_states(directory)[-1]
    assert step == 8
    return load_state(path)


def numbers(tree: Any) -> list[Tensor]:
    """All tensors of a state, in order."""
    if isinstance(tree, Tensor):
        return [tree.double()]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tensor for item in items for tensor in numbers(item)]


@pytest.mark.parametrize("name", ["plain", "more", "lora", "begun", "stopped"])
def test_two_processes_have_the_losses_and_states_of_one(name: str, ran: Path) -> None:
    alone = ran / "one" / (name if name in ("more", "lora") else "plain")
    mine, theirs = losses(alone), losses(ran / "two" / name)
    assert mine.shape == theirs.shape == (8, 5)
    assert (mine - theirs).abs().max() < TOLERANCE
    a, b = last_state(alone), last_state(ran / "two" / name)
    pairs = list(zip(numbers(a["optimizer"]), numbers(b["optimizer"]), strict=True))
    assert len(pairs) > 8
    for one, two in pairs:
        assert one.shape == two.shape and (one - two).abs().max() < TOLERANCE


def test_they_save_the_same_checkpoint_and_adapter(ran: Path) -> None:
    for name in ("plain", "more"):
        models = [load_model(ran / how / name / "checkpoint").model for how in ("one", "two")]
        one, two = (model.state_dict() for model in models)
        assert one.keys() == two.keys()
        assert all((one[key] - two[key]).abs().max() < TOLERANCE for key in one)
    one, two = (load_adapter(ran / how / "lora" / "adapter").pairs for how in ("one", "two"))
    assert one.keys() == two.keys()
    for key in one:
        assert all((a - b).abs().max() < TOLERANCE for a, b in zip(one[key], two[key], strict=True))
        assert two[key].b_OR.abs().max() > 0


def test_passes_in_bfloat16_have_float32_master_weights(ran: Path) -> None:
    weights = last_state(ran / "two" / "rounded")["optimizer"]["weights"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert (losses(ran / "one" / "rounded") - losses(ran / "two" / "rounded")).abs().max() < 0.05


def test_an_interrupt_of_one_process_stops_both_at_the_same_step(ran: Path) -> None:
    """The rest was then trained by one process alone."""
    steps = [line["step"] for line in MetricsFile(ran / "two" / "stopped").read()]
    assert steps == list(range(1, 9))
    kept = [step for step, _ in saved_states(ran / "two" / "stopped")]
    assert kept == [4, 8]  # two are kept; that of step 3 made place


def test_a_batch_is_split_evenly() -> None:
    check_batch_split(8, 2, ProcessGroup(0, 2))
    with pytest.raises(
        UsageError, match=r"8 sequences .* 2 micro-batches and 4 processes; .* of 16"
    ):
        check_batch_split(8, 2, ProcessGroup(0, 4))
    rows = torch.arange(7 * 8 * 3).view(7, 8, 3)
    parts = [ProcessGroup(rank, 4).slice_batch(rows) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim=1), rows)


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    device = torch.device("cpu")
    assert init_distributed(device) == (SINGLE_PROCESS, device)
    assert SINGLE_PROCESS.any(True, device) and SINGLE_PROCESS.broadcast(3, device) == 3
