"""Limits of a server: per request, on connections and bodies, and on the queue."""

from dataclasses import dataclass

from dgemma.errors import UsageError
from dgemma.options import option

# Per request, enforced by the schemas.
MAX_MESSAGES = 1024
MAX_TOOLS = 128
MAX_STOPS = 64
MAX_STOP_LENGTH = 256  # characters
MAX_ANSWERS = 8
MAX_PROMPTS = 16
MAX_CONSTRAINT = 1 << 16  # characters of a schema, regex or grammar
MAX_HOLES = 64
MAX_STEPS = 512  # per canvas; noise is generated for all steps at once
IMAGE_BODY = 32 << 20  # bytes; a photograph of 12 megapixels has 8 million in base64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits set by the operator; fields with a `help` are command-line options."""

    max_batch_size: int = option(8, "Most requests in one pass.")
    max_queue: int = option(64, "Most waiting requests of a key.")
    max_context: int = option(1 << 18, "Most tokens of all running requests together.")
    max_body: int = 4 << 20  # bytes
    max_connections: int = option(512, "Most open connections.")
    max_seconds: float = option(600.0, "Deadline of a request in seconds.")
    max_pass_seconds: float = option(
        120.0, "Time after which a pass counts as hung, and /health is a 503."
    )
    drain_seconds: float = option(120.0, "Time for running requests to finish after a signal.")
    body_seconds: float = 30.0  # for a body to arrive
    header_seconds: float = 15.0  # for the head of a request to arrive
    stall_seconds: float = 60.0  # how long a client may leave a reply unread

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, option = getattr(self, name), name.replace("_", "-")
            if not value > 0:  # also refuses NaN
                raise UsageError(f"{name} (--{option}) is {value}; it must be above 0")


def default_max_body(model: str, vision: str = "auto") -> int:
    """Default body limit for a model in bytes, larger if it reads pictures."""
    from dgemma.weights.files import has_image_tower
    from dgemma.weights.gguf_vision import find_tower
    from dgemma.weights.hub import find_checkpoint

    path = find_checkpoint(model)
    has_tower = has_image_tower(path) if path.is_dir() else find_tower(path, vision) is not None
    return IMAGE_BODY if has_tower else Limits().max_body
