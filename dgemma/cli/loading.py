"""Loading a checkpoint with progress on stderr, when a person is watching and it takes a while."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dgemma.engine import Engine

WORTH_SHOWING = 1 << 30  # bytes


def load_engine(model: str, device: str, dtype: str) -> "Engine":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dgemma.engine import Engine

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("loading", visible=False)

        def on_tensor(done: int, total: int) -> None:
            visible = total > WORTH_SHOWING and progress.console.is_terminal
            progress.update(task, completed=done, total=total, visible=visible)

        return Engine.load(model, device=device, dtype=dtype, progress=on_tensor)
