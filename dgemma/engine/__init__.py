"""Requests in, typed events out: the only place where text and tensors meet."""

from dgemma.engine.engine import Engine
from dgemma.engine.events import Done, Draft, Event, Retry, Text
from dgemma.engine.options import MODES, Mode, Options

__all__ = ["MODES", "Done", "Draft", "Engine", "Event", "Mode", "Options", "Retry", "Text"]
