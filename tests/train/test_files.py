"""States of a run: whole or absent, as they were written, and of one process at a time."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma.errors import CheckpointError
from dgemma.train import checkpoint
from dgemma.train.checkpoint import delete_run, load_state, save_state, saved_states

STATE = {"weights": torch.arange(5000.0)}


class Evil:
    """A pickle that runs a command when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_state_executes_nothing_that_it_contains(tmp_path: Path) -> None:
    path, target = tmp_path / "state-00000001.pt", tmp_path / "executed"
    torch.save({"step": 1, "weights": Evil(target)}, path)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_state(path)
    assert not target.exists() and str(caught.value).isprintable()


def test_a_state_with_a_changed_bit_is_refused(tmp_path: Path) -> None:
    path = save_state(tmp_path, 7, STATE, keep=1)
    assert torch.equal(load_state(path)["weights"], STATE["weights"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not have the SHA-256"):
        load_state(path)


def test_a_write_that_fails_leaves_the_state_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step again, as after a resume: the old file must not be written into."""
    path = save_state(tmp_path, 7, STATE, keep=1)
    save = torch.save

    def half(state: Any, file: Any) -> None:
        save(state, file)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", half)
    with pytest.raises(OSError, match="No space"):
        save_state(tmp_path, 7, {"weights": torch.zeros(5000)}, keep=1)
    assert torch.equal(load_state(path)["weights"], STATE["weights"])
    assert [step for step, _ in saved_states(tmp_path)] == [7]


def test_a_crash_at_any_rename_leaves_a_state_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename
    for allowed in range(2):
        directory = tmp_path / str(allowed)
        save_state(directory, 1, STATE, keep=1)
        left = [allowed]

        def interrupted(path: Path, target: Path, left: list[int] = left) -> Path:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_state(directory, 2, STATE, keep=1)
        monkeypatch.undo()
        ((step, path),) = saved_states(directory)
        assert step == 1 and load_state(path)["step"] == 1
        save_state(directory, 2, STATE, keep=1)
        assert load_state(saved_states(directory)[-1][1])["step"] == 2


def test_only_the_newest_states_and_their_digests_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_state(tmp_path, step, STATE, keep=2)
    kept = ["state-00000002.pt", "state-00000002.sha256", "state-00000003.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*kept, "state-00000003.sha256"]
    delete_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_belongs_to_one_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from dgemma.train.checkpoint import lock_run\n"
        "lock_run(Path(sys.argv[1])); lock_run(Path(sys.argv[1]))\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdin is not None and first.stdout is not None
    with first:
        assert first.stdout.readline() == "locked\n"
        second = subprocess.run(command, capture_output=True, text=True, input="", check=False)
        assert f"the run of another process ({first.pid})" in second.stderr
        first.kill()
    third = subprocess.run(command, capture_output=True, text=True, input="", check=True)
    assert third.stdout == "locked\n"
