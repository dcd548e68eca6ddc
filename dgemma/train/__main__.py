"""`python -m dgemma.train RECIPE --out DIR`: `dgemma train` where only PyTorch is installed."""

import argparse
import sys
from pathlib import Path

from dgemma.device import choose_device, choose_dtype
from dgemma.errors import DgemmaError
from dgemma.train.build import Place, build
from dgemma.train.loop import Report
from dgemma.train.recipe import load_recipe


def line(report: Report) -> str:
    return (
        f"step {report.step}/{report.steps}  loss {report.total:.4f}  "
        f"denoise {report.denoise:.4f}  causal {report.causal:.4f}  "
        f"balance {report.balance:.3f}  norm {report.norm:.2f}  rate {report.rate:.3f}  "
        f"{report.rows_per_second:,.0f} rows/s  {report.seconds:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a model by a recipe.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, help="fit the schedule to this time")
    parser.add_argument("--workers", type=int)
    given = parser.parse_args()
    device = choose_device(given.device)
    place = Place(
        recipe=given.recipe,
        out=given.out,
        device=device,
        dtype=choose_dtype(given.dtype, device),
        seconds=given.seconds,
        workers=given.workers,
    )
    try:
        job = build(load_recipe(given.recipe), place)
        job.trainer.resume()
        for report in job.trainer.reports():
            print(line(report), flush=True)
        job.save(given.out / "checkpoint")
    except DgemmaError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
