"""The program of each of two processes in the tests: the named runs, one after the other.

torchrun --nproc-per-node 2 -m tests.train.two RUNS.json
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from dgemma.train.command import TrainArgs, prepare
from dgemma.train.distributed import destroy_distributed
from dgemma.train.loop import TrainingInterrupted


def train_args(run: dict[str, Any]) -> TrainArgs:
    return TrainArgs(
        recipe=Path(run["recipe"]),
        out=Path(run["out"]),
        device="cpu",
        dtype=run.get("dtype", "float32"),
        changes=tuple(run["changes"]),
    )


def train(run: dict[str, Any]) -> Any:
    """Train to the end, or until this process alone is interrupted."""
    job = prepare(train_args(run))
    try:
        for report in job.trainer.reports():
            if run.get("interrupted") == [job.environment.group.rank, report.step]:
                os.kill(os.getpid(), signal.SIGINT)
    except TrainingInterrupted:
        return job
    job.save()
    return job


def main() -> None:
    torch.set_num_threads(1)
    for run in json.loads(Path(sys.argv[1]).read_text()):
        job = train(run)
    destroy_distributed(job.environment.group)


if __name__ == "__main__":
    main()
