"""Training and fine-tuning by a recipe. Here: options of both command lines; imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from dgemma.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of a run. None: as the recipe says."""

    data: Path | None = option(None, "File to train on, of chats or texts (.jsonl, .json).")
    heldout: Path | None = option(
        None, "File to compute the held-out loss on; default: a part of the data."
    )
    out: Path | None = option(None, "Directory of the run; default: out/train/NAME.")
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps.")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16.")
    seconds: float | None = option(None, "Fit the number of steps to this time.")
    steps: int | None = option(None, "Instead of the recipe's.")
    changes: list[str] | None = option(
        None, "Change the recipe: optim.adam_lr=1e-4.", "--set", metavar="KEY=VALUE"
    )
    fresh: bool = option(False, "Delete the run's saved states.")
    export: bool = option(False, "Write the weights of the newest saved state; train no further.")
    workers: int | None = option(None, "Processes that make batches.")
