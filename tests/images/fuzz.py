"""Spoilt pictures: decoded, or refused by a sentence, in flat memory.

python -m tests.images.fuzz [COUNT]
"""

import resource
import sys
from typing import Any

import numpy as np

from dgemma.errors import UsageError
from dgemma.images import Image
from tests.images.tiny_tower import TOWER, encoded, photo

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
]


def spoilt(data: bytes, generator: np.random.Generator) -> bytes:
    """Cut, flip, repeat or insert bytes."""
    values = bytearray(data)
    for _ in range(int(generator.integers(1, 6))):
        at, kind = int(generator.integers(len(values))), int(generator.integers(4))
        if kind == 0:
            values = values[: max(at, 8)]
        elif kind == 1:
            values[at] ^= 1 << int(generator.integers(8))
        elif kind == 2:
            values[at:at] = values[at : at + 20]
        else:
            values[at : at + 4] = generator.integers(0, 256, 4, dtype=np.uint8).tobytes()
    return bytes(values)


def num_refused(count: int, seed: int = 0) -> int:
    """Prepare spoilt pictures; anything but a refusal by a sentence is raised."""
    generator = np.random.default_rng(seed)
    sound = [encoded(photo(60, 40), form, **options) for form, options in FORMS]
    refused = 0
    for index in range(count):
        try:
            Image(spoilt(sound[index % len(sound)], generator), tokens=70).prepare(TOWER)
        except UsageError:
            refused += 1
    return refused


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    num_refused(count // 10)  # what a process allocates once
    before = peak_megabytes()
    refused = num_refused(count, seed=1)
    grown = peak_megabytes() - before
    print(f"{count} spoilt pictures: {refused} refused, {count - refused} decoded; +{grown:.1f} MB")
