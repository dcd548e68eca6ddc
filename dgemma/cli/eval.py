"""`dgemma eval`: measure a checkpoint by diffusion and by AR mode of the same weights."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dgemma.cli.app import (
    AsJson,
    HeldOut,
    PresetOption,
    SamplerRule,
    Shared,
    app,
    load_engine,
    load_rule,
    with_options,
)
from dgemma.errors import DgemmaError
from dgemma.weights.hub import ModelOptions


@app.command("eval")
@with_options
def evaluate(
    options: ModelOptions,
    tasks: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "all",
    heldout: HeldOut = None,
    data: Shared = None,
    limit: Annotated[int | None, typer.Option(help="Most cases of each set.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same answers.")] = 0,
    rule: SamplerRule = None,
    preset: PresetOption = None,
    batch_size: Annotated[int | None, typer.Option(help="Requests in one pass.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write JSON here after each task.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a markdown table here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint on held-out tasks, with 95 % intervals.

    Tasks: sudoku, cross_entropy, blimp, humaneval_infill, infill, json_calls, fix,
    stories, samples. humaneval_infill runs the code that the model writes, in a process with
    limits, which is not a security boundary. The stories of samples need no files; tasks that do
    are skipped without them, and docs/evaluation.md tells how to get them.
    """
    from dgemma.eval.data import Data
    from dgemma.eval.evaluate import EvalParams, parse_tasks
    from dgemma.eval.evaluate import evaluate as run
    from dgemma.eval.measure import table

    params = EvalParams(
        data=Data.find(heldout, data),
        tasks=parse_tasks(tasks),
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        out=out,
        markdown=markdown,
    )
    own_rule = load_rule(rule)  # before a long load
    engine = load_engine(options, preset)
    if own_rule is not None:
        engine.set_rule(own_rule)
    report = run(engine, options.model, params)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        print(report.heading)
        print(table(report.measures))
    if report.fault:
        raise DgemmaError(report.fault)
