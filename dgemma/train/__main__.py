"""`dgemma train` without the terminal libraries, and the module that torchrun starts.

python -m dgemma.train RECIPE --out DIR
torchrun --nproc-per-node 8 -m dgemma.train RECIPE --out DIR
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dgemma.errors import FAILED, INTERRUPTED, WRONG_CALL, DgemmaError, UsageError
from dgemma.train import TrainOptions
from dgemma.train.command import TrainArgs, finish, log_line, opening_messages, prepare, reports
from dgemma.train.distributed import destroy_distributed
from dgemma.train.loop import TrainingInterrupted


def parse_args(arguments: Sequence[str] | None) -> TrainArgs:
    """Read the options of `dgemma train`, without the libraries of its command line."""
    parser = argparse.ArgumentParser(description="Train a model by a recipe.")
    parser.add_argument("recipe", type=Path, help="a TOML file, or the name of a built-in recipe")
    for name, hint in get_type_hints(TrainOptions).items():
        field = TrainOptions.__dataclass_fields__[name]
        data = field.metadata
        kind, *_ = get_args(hint) or (hint,)
        if kind is bool:
            how: dict[str, Any] = {"action": "store_true"}
        elif get_origin(kind) is list:
            how = {"action": "append", "default": [], **data["settings"]}
        else:
            how = {"type": kind, "default": field.default}
        flags = data["flags"] or (f"--{name}",)
        parser.add_argument(*flags, dest=name, help=data["help"], **how)
    return TrainArgs(**vars(parser.parse_args(arguments)))


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
