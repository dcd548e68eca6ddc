"""Parameters and results that all programs with canvases have."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from dgemma.diffusion.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasParams:
    """Parameters of the canvases of a program."""

    seed: int | None = None  # None draws one, reported with the result
    sampler: Sampler | None = None  # None: the model's
    drafts: bool = False  # report a canvas after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasResult:
    """Cost of a program."""

    prompt_tokens: int  # shown to the model
    steps: int  # of all canvases together
    canvases: int
    seconds: float
    seed: int


@dataclass(slots=True, kw_only=True)
class Cost:
    """Counters of a program that runs."""

    seed: int
    prompt_tokens: int = 0
    steps: int = 0
    canvases: int = 0
    seconds: float = field(default_factory=lambda: -time.perf_counter())

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `CanvasResult` that ends now."""
        return {**asdict(self), "seconds": self.seconds + time.perf_counter()}
