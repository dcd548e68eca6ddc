"""Command lines, run in this process."""

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from dgemma.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Result]


def caller(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Call:
    """Return a function that runs `dgemma BEFORE ... ARGUMENTS ... AFTER ...`."""

    def run(*args: str | Path, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["dgemma", *before, *map(str, args), *after])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as caught:
            main()
        code = caught.value.code
        return Result(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run
