"""dgemma: DiffusionGemma on your own machine.

The public names are resolved on first use, so that importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgemma.diffusion.canvas import Noise, Pins
    from dgemma.diffusion.sampler import Apart, Confidence, EntropyBound, Sampler
    from dgemma.engine import (
        Done,
        Draft,
        Edited,
        EditOptions,
        Engine,
        Filled,
        FillOptions,
        Options,
        Retry,
        Text,
    )
    from dgemma.errors import DgemmaError
    from dgemma.text.chat import Message, Tool

__version__ = "0.1.0"

HOMES = {
    "Apart": "dgemma.diffusion.sampler",
    "Confidence": "dgemma.diffusion.sampler",
    "DgemmaError": "dgemma.errors",
    "Done": "dgemma.engine",
    "Draft": "dgemma.engine",
    "EditOptions": "dgemma.engine",
    "Edited": "dgemma.engine",
    "Engine": "dgemma.engine",
    "EntropyBound": "dgemma.diffusion.sampler",
    "FillOptions": "dgemma.engine",
    "Filled": "dgemma.engine",
    "Message": "dgemma.text.chat",
    "Noise": "dgemma.diffusion.canvas",
    "Options": "dgemma.engine",
    "Pins": "dgemma.diffusion.canvas",
    "Retry": "dgemma.engine",
    "Sampler": "dgemma.diffusion.sampler",
    "Text": "dgemma.engine",
    "Tool": "dgemma.text.chat",
}
__all__ = [
    "Apart",
    "Confidence",
    "DgemmaError",
    "Done",
    "Draft",
    "EditOptions",
    "Edited",
    "Engine",
    "EntropyBound",
    "FillOptions",
    "Filled",
    "Message",
    "Noise",
    "Options",
    "Pins",
    "Retry",
    "Sampler",
    "Text",
    "Tool",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'dgemma' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
