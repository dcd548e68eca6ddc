"""The tasks: each is `(engine, data, limit, seed) -> measures`, one file a task."""

from collections.abc import Callable

from dgemma.engine import Engine
from dgemma.eval.data import Data
from dgemma.eval.measure import Measure
from dgemma.eval.tasks.blimp import blimp
from dgemma.eval.tasks.colouring import colouring
from dgemma.eval.tasks.cross_entropy import cross_entropy
from dgemma.eval.tasks.fix import fix
from dgemma.eval.tasks.humaneval_infill import humaneval_infill
from dgemma.eval.tasks.infill import infill
from dgemma.eval.tasks.json_calls import json_calls
from dgemma.eval.tasks.samples import samples
from dgemma.eval.tasks.stories import stories
from dgemma.eval.tasks.sudoku import sudoku

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
