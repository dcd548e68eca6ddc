"""The functions that docs/how-it-works.md lists are those a prompt goes through, in their order."""

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.command import caller
from tests.taught import LONG

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dgemma"
MAX_HOPS, MAX_DEPTH = 19, 12


def listed() -> list[str]:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \d+ \| `([\w.]+)` \|", page, flags=re.MULTILINE)


def name_of(frame: FrameType) -> str:
    """Module and function of a frame of the package; empty for any other."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return ""
    return f"{'.'.join(path.relative_to(PACKAGE).with_suffix('').parts)}.{frame.f_code.co_qualname}"


def test_a_prompt_goes_through_the_functions_of_the_page(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, int] = {}  # function: its depth below the command when it was first called

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := name_of(frame)) and name not in seen:
            stack, above = [name], frame.f_back
            while above is not None and stack[-1] != hops[0]:
                stack += filter(None, [name_of(above)])
                above = above.f_back
            seen[name] = len(stack)

    hops = listed()
    assert 0 < len(hops) <= MAX_HOPS
    call = caller(monkeypatch, capsys, ["generate"])
    args = (LONG, "--model", checkpoint, "--device", "cpu", "--dtype", "float32", "--seed", "1")
    sys.setprofile(note)
    try:
        result = call(*args)
    finally:
        sys.setprofile(None)
    assert result.code == 0, result.err
    called = [name for name in seen if name in hops]
    assert called == hops
    assert seen["diffusion.sampler.EntropyBound.decide"] <= MAX_DEPTH + 1
