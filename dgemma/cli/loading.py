"""Loading a checkpoint with progress on stderr, when a person is watching and it takes a while."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgemma.engine import Engine

WORTH_SHOWING = 1 << 30  # bytes


def load_engine(
    model: str, device: str, dtype: str, adapter: Path | None = None, quant: str = "auto"
) -> "Engine":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dgemma.engine import Engine

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    is_quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_quiet) as progress:
        task = progress.add_task("loading", visible=False)

        def on_tensor(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=total > WORTH_SHOWING)

        return Engine.load(
            model,
            device=device,
            dtype=dtype,
            quant=quant,
            adapter=adapter,
            progress=on_tensor,
        )
