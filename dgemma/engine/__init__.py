"""Requests in, typed events out."""

from dgemma.config import MODES, Mode
from dgemma.engine.engine import Engine
from dgemma.engine.events import Committed, Done, Draft, Event, Retry, Text
from dgemma.engine.params import SamplingParams

__all__ = [
    "MODES",
    "Committed",
    "Done",
    "Draft",
    "Engine",
    "Event",
    "Mode",
    "Retry",
    "SamplingParams",
    "Text",
]
