"""Requests in, typed events out: the only place where text and tensors meet."""

from dgemma.engine.edit import Edited, EditOptions
from dgemma.engine.engine import Engine
from dgemma.engine.events import Done, Draft, Event, Retry, Text
from dgemma.engine.fill import Filled, FillOptions
from dgemma.engine.options import MODES, Mode, Options

__all__ = [
    "MODES",
    "Done",
    "Draft",
    "EditOptions",
    "Edited",
    "Engine",
    "Event",
    "FillOptions",
    "Filled",
    "Mode",
    "Options",
    "Retry",
    "Text",
]
