"""`python -m dgemma.train RECIPE --out DIR`: `dgemma train` where only PyTorch is installed.

Also what `torchrun` starts: torchrun --nproc-per-node 8 -m dgemma.train RECIPE --out DIR
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dgemma.errors import DgemmaError, UsageError
from dgemma.train.command import Wanted, beginning, finish, line, prepare, reports
from dgemma.train.distributed import leave
from dgemma.train.loop import TrainingInterrupted

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130


def read(arguments: Sequence[str] | None) -> Wanted:
    parser = argparse.ArgumentParser(description="Train a model by a recipe.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, help="directory of the run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, help="fit the schedule to this time")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--fresh", action="store_true", help="forget the run's saved states")
    parser.add_argument("--export", action="store_true", help="only write the newest weights")
    parser.add_argument("--workers", type=int, help="processes that make batches")
    given = vars(parser.parse_args(arguments))
    changes, is_fresh = tuple(given.pop("changes")), given.pop("fresh")
    is_export = given.pop("export")
    return Wanted(**given, changes=changes, is_fresh=is_fresh, is_export=is_export)


def run(wanted: Wanted) -> None:
    job = prepare(wanted)
    writes = job.place.group.is_first
    for words in beginning(wanted, job) if writes else ():
        print(words, file=sys.stderr, flush=True)
    for report in reports(wanted, job):
        if writes:
            print(line(report), flush=True)
    for words in finish(job):
        print(words, file=sys.stderr, flush=True)
    leave(job.place.group)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(read(arguments))
    except TrainingInterrupted as error:
        print(error, file=sys.stderr)
        return INTERRUPTED
    except DgemmaError as error:
        print(error, file=sys.stderr)
        return WRONG_CALL if isinstance(error, UsageError) else FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
