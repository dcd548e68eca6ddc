"""The file of a puzzle bank: a few arrays by name, or a sentence that says what is wrong."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.errors import UsageError

MAKE = "make one with recipes/puzzle_bank.py"


def read_arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """The arrays of these names, in their order."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        raise UsageError(f"{path} is no puzzle bank; {MAKE}")
    try:
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in names]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no bank of this puzzle or damaged ({error}); {MAKE}") from None
