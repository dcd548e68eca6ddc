"""`dgemma train` without the terminal libraries, and the module that torchrun starts.

python -m dgemma.train RECIPE --out DIR
torchrun --nproc-per-node 8 -m dgemma.train RECIPE --out DIR
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dgemma.errors import DgemmaError, UsageError
from dgemma.train.command import TrainArgs, finish, log_line, opening_messages, prepare, reports
from dgemma.train.distributed import destroy_distributed
from dgemma.train.loop import TrainingInterrupted

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130


def parse_args(arguments: Sequence[str] | None) -> TrainArgs:
    parser = argparse.ArgumentParser(description="Train a model by a recipe.")
    parser.add_argument("recipe", type=Path, help="a TOML file, or the name of a built-in recipe")
    parser.add_argument("--data", type=Path, help="file to train on, instead of the recipe's")
    parser.add_argument("--heldout", type=Path, help="file to compute the held-out loss on")
    parser.add_argument("--out", type=Path, help="directory of the run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, help="fit the number of steps to this time")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--fresh", action="store_true", help="delete the run's saved states")
    parser.add_argument("--export", action="store_true", help="only write the newest weights")
    parser.add_argument("--workers", type=int, help="processes that make batches")
    options = vars(parser.parse_args(arguments))
    return TrainArgs(
        changes=tuple(options.pop("changes")),
        is_fresh=options.pop("fresh"),
        is_export=options.pop("export"),
        **options,
    )


def run(args: TrainArgs) -> None:
    job = prepare(args)
    group = job.environment.group
    for message in opening_messages(args, job) if group.is_main else ():
        print(message, file=sys.stderr, flush=True)
    for report in reports(args, job):
        if group.is_main:
            print(log_line(report), flush=True)
    for message in finish(job):
        print(message, file=sys.stderr, flush=True)
    destroy_distributed(group)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(parse_args(arguments))
    except TrainingInterrupted as error:
        print(error, file=sys.stderr)
        return INTERRUPTED
    except DgemmaError as error:
        print(error, file=sys.stderr)
        return WRONG_CALL if isinstance(error, UsageError) else FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
