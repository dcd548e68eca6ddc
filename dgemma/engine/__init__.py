"""The engine: requests in, typed events out."""

from dgemma.config import MODES, Mode
from dgemma.engine.engine import Engine
from dgemma.engine.events import Committed, Done, Draft, Event, Retry
from dgemma.engine.params import SamplingParams
from dgemma.text.reply import Text

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
