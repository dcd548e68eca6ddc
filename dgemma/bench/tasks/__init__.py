"""The tasks: each is `(engine, data, limit, seed) -> measures`, one file a task."""

from collections.abc import Callable

from dgemma.bench.data import Data
from dgemma.bench.measure import Measure
from dgemma.bench.tasks.blimp import blimp
from dgemma.bench.tasks.colouring import colouring
from dgemma.bench.tasks.cross_entropy import cross_entropy
from dgemma.bench.tasks.fix import fix
from dgemma.bench.tasks.humaneval_infill import humaneval_infill
from dgemma.bench.tasks.infill import infill
from dgemma.bench.tasks.json_calls import json_calls
from dgemma.bench.tasks.samples import samples
from dgemma.bench.tasks.stories import stories
from dgemma.bench.tasks.sudoku import sudoku
from dgemma.engine import Engine

Task = Callable[[Engine, Data, int | None, int], list[Measure]]
TASKS: dict[str, Task] = {
    "sudoku": sudoku,
    "colouring": colouring,
    "cross_entropy": cross_entropy,
    "blimp": blimp,
    "humaneval_infill": humaneval_infill,
    "infill": infill,
    "json_calls": json_calls,
    "fix": fix,
    "stories": stories,
    "samples": samples,
}
