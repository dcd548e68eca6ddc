"""`dgemma batch`: a file of requests, answered line by line."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgemma.cli.app import AsJson, app, load_engine, with_options
from dgemma.cli.serve import require_extra
from dgemma.errors import DgemmaError, UsageError
from dgemma.options import option
from dgemma.server.limits import Limits
from dgemma.weights.hub import ModelOptions

if TYPE_CHECKING:
    from dgemma.server.batch import BatchCounts, BatchLine, Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of `dgemma batch`."""

    url: str | None = option(None, "URL of a running server to use instead of loading a model.")
    api_key_file: Path | None = option(None, "The server's key; DGEMMA_API_KEYS works too.")
    parallel: int | None = option(None, "Concurrent requests; default: two batches.", min=1)
    max_batch_size: int = option(Limits().max_batch_size, "Most requests in one pass.")


@app.command()
@with_options
def batch(
    file: Annotated[Path, typer.Argument(help="Requests, one JSON object a line.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Replies; lines that are there are kept.")
    ],
    options: BatchOptions,
    model: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format; run it again to continue."""
    require_extra()
    from dgemma.server.auth import read_key
    from dgemma.server.batch import read_batch, url_sender

    lines = read_batch(file)
    if file.resolve() == output.resolve():
        raise UsageError("the output is the batch file itself; choose another --output")
    num_parallel = options.parallel or 2 * options.max_batch_size
    if options.url is not None:
        sender = url_sender(options.url, read_key(options.api_key_file, os.environ))
        counts = _run(lines, output, sender, num_parallel)
    else:
        from dgemma.device import bound_kernel_cache
        from dgemma.server.app import make_routes
        from dgemma.server.batch import engine_sender
        from dgemma.server.service import Settings

        bound_kernel_cache(os.environ)
        limits = Limits(
            max_batch_size=options.max_batch_size, max_queue=8 * num_parallel, max_seconds=1e9
        )
        engine = load_engine(model)
        routes = make_routes(engine, Settings(names=_names(lines, model.model), limits=limits))
        worker = routes.state.service.worker
        worker.start()
        try:
            counts = _run(lines, output, engine_sender(routes), num_parallel)
        finally:
            worker.stop()
    _report(counts, as_json=as_json)


def _names(lines: "list[BatchLine]", model: str) -> tuple[str, ...]:
    """Return the model names in the file; all of them mean the one model."""
    named = (str(line.body["model"]) for line in lines if isinstance(line.body.get("model"), str))
    return tuple(dict.fromkeys([*named, model]))


def _run(lines: "list[BatchLine]", output: Path, sender: "Sender", parallel: int) -> "BatchCounts":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from dgemma.server.batch import run_batch

    console = Console(file=sys.stderr)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("batch", total=len(lines))

        def show(counts: "BatchCounts") -> None:
            progress.update(task, completed=counts.skipped + counts.done)

        return asyncio.run(run_batch(lines, output, sender, parallel, show))


def _report(counts: "BatchCounts", *, as_json: bool) -> None:
    fields = {"total": counts.total, "skipped": counts.skipped, "done": counts.done}
    fields |= {"failed": counts.failed, "tokens": counts.tokens}
    if as_json:
        print(json.dumps(fields))
    else:
        sentence = ", ".join(f"{value} {name}" for name, value in fields.items())
        print(f"dgemma: {sentence}", file=sys.stderr)
    if counts.failed:
        raise DgemmaError(f"{counts.failed} requests were refused or failed; see their error")
