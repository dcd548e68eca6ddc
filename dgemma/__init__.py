"""dgemma: DiffusionGemma on your own machine.

The public names are resolved on first use, so that importing the package costs nothing. It only
tells OpenMP how CPU threads wait for each other, which must be known before torch is loaded. After
each parallel loop they spin until the next one, by default for milliseconds (libgomp, in torch's
wheels for Linux) or 200 ms (libomp and libiomp5). Where another program wants the core, the
spinning thread holds it and the thread that it waits for does not run: a busy machine becomes many
times slower. There, threads that sleep at once are fastest. On a quiet machine each sleep costs a
wake-up, a quarter of the time of a small model, which a short spin avoids (`bench/threads.py`).
`cpu_threads.SpinControl` chooses between the two as the load changes.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgemma.diffusion.canvas import Canvas, Noise, Pins
    from dgemma.diffusion.logit_stats import PositionStats
    from dgemma.diffusion.rules import Confidence
    from dgemma.diffusion.sampler import Decision, EntropyBound, Rule, Sampler
    from dgemma.engine import Done, Draft, Engine, Retry, SamplingParams, Text
    from dgemma.errors import DgemmaError
    from dgemma.images import Image
    from dgemma.programs.edit.edit import EditParams, EditResult, edit, rewrite
    from dgemma.programs.infill.infill import FillParams, FillResult, fill
    from dgemma.programs.sudoku.solve import SudokuParams, SudokuResult, solve
    from dgemma.text.chat import Message, Tool
    from dgemma.video import Video

__version__ = "0.1.0"

SHORT_SPIN = "1000"  # rounds, about 20 microseconds: as long as the pause between two loops
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")  # a user's choice
# libgomp: a short spin, and none (that is the policy) while it has more threads than cores.
SHORT_SPINNING = {"GOMP_SPINCOUNT": SHORT_SPIN, "OMP_WAIT_POLICY": "passive"}

HOMES = {
    "Canvas": "dgemma.diffusion.canvas",
    "Confidence": "dgemma.diffusion.rules",
    "Decision": "dgemma.diffusion.sampler",
    "DgemmaError": "dgemma.errors",
    "Done": "dgemma.engine",
    "Draft": "dgemma.engine",
    "EditParams": "dgemma.programs.edit.edit",
    "EditResult": "dgemma.programs.edit.edit",
    "Engine": "dgemma.engine",
    "EntropyBound": "dgemma.diffusion.sampler",
    "FillParams": "dgemma.programs.infill.infill",
    "FillResult": "dgemma.programs.infill.infill",
    "Image": "dgemma.images",
    "Message": "dgemma.text.chat",
    "Noise": "dgemma.diffusion.canvas",
    "Pins": "dgemma.diffusion.canvas",
    "PositionStats": "dgemma.diffusion.logit_stats",
    "Retry": "dgemma.engine",
    "Rule": "dgemma.diffusion.sampler",
    "Sampler": "dgemma.diffusion.sampler",
    "SamplingParams": "dgemma.engine",
    "SudokuParams": "dgemma.programs.sudoku.solve",
    "SudokuResult": "dgemma.programs.sudoku.solve",
    "Text": "dgemma.engine",
    "Tool": "dgemma.text.chat",
    "Video": "dgemma.video",
    "edit": "dgemma.programs.edit.edit",
    "fill": "dgemma.programs.infill.infill",
    "rewrite": "dgemma.programs.edit.edit",
    "solve": "dgemma.programs.sudoku.solve",
}
__all__ = [
    "Canvas",
    "Confidence",
    "Decision",
    "DgemmaError",
    "Done",
    "Draft",
    "EditParams",
    "EditResult",
    "Engine",
    "EntropyBound",
    "FillParams",
    "FillResult",
    "Image",
    "Message",
    "Noise",
    "Pins",
    "PositionStats",
    "Retry",
    "Rule",
    "Sampler",
    "SamplingParams",
    "SudokuParams",
    "SudokuResult",
    "Text",
    "Tool",
    "Video",
    "__version__",
    "edit",
    "fill",
    "rewrite",
    "solve",
]


def limit_spinning() -> None:
    """Limit the spinning of threads, unless the user has chosen or torch is loaded already."""
    if "torch" in sys.modules or any(name in os.environ for name in WAITING):
        return
    os.environ["KMP_BLOCKTIME"] = "0"  # milliseconds; libomp and libiomp5 know no short spin
    os.environ.update(SHORT_SPINNING)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'dgemma' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


limit_spinning()
