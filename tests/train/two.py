"""What each of two processes does in the tests: the runs that are named, one after the other.

torchrun --nproc-per-node 2 -m tests.train.two RUNS.json
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from dgemma.train.command import Wanted, prepare
from dgemma.train.distributed import leave
from dgemma.train.loop import TrainingInterrupted


def wanted(run: dict[str, Any]) -> Wanted:
    return Wanted(
        recipe=Path(run["recipe"]),
        out=Path(run["out"]),
        device="cpu",
        dtype=run.get("dtype", "float32"),
        changes=tuple(run["changes"]),
    )


def work(run: dict[str, Any]) -> Any:
    """Train to the end, or till this process alone is interrupted."""
    job = prepare(wanted(run))
    try:
        for report in job.trainer.reports():
            if run.get("interrupted") == [job.place.group.rank, report.step]:
                os.kill(os.getpid(), signal.SIGINT)
    except TrainingInterrupted:
        return job
    job.save()
    return job


def main() -> None:
    torch.set_num_threads(1)
    for run in json.loads(Path(sys.argv[1]).read_text()):
        job = work(run)
    leave(job.place.group)


if __name__ == "__main__":
    main()
