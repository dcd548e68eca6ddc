"""Kernels run here under Triton's interpreter, which has to be chosen before Triton is imported.

`test_interpreted.py` starts a process of its own for the `check_*.py` files. What the interpreter
cannot do: products of bfloat16 are wrong without a word, and rounding to 8-bit floats has no carry
(both 3.9); loops to a bound that is only known at run time fail with numpy 2.4 (3.6). Types are
therefore float32 and float16 here.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_INTERPRETED else ["check_*.py"]


def interpret_for_good() -> None:
    """Let the interpreter swap Triton's language once for each module that has kernels.

    It would do so for every launch and for every call of one function by another, a third of all
    the time, and undo it after launches. In this process nothing else reads that language. Nor
    does it look for sums beyond their 32 bits, another quarter: it throws the finding away (3.9).
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    usual: Callable[[Any], Any] = interpreter._patch_lang
    swapped: set[str] = set()

    def swap(function: Any) -> Any:
        if function.__module__ not in swapped:
            swapped.add(function.__module__)
            usual(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = swap


if IS_INTERPRETED:
    interpret_for_good()


@pytest.fixture
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts for whole small models, where the interpreter pays for programs and for what is masked.

    Attention has two parts, and the deepest products take two turns.
    """
    from dgemma.ops.kernels import attention, experts, experts_1, router, vector
    from dgemma.ops.kernels.tiles import Tile, Tiles

    form = attention.Cut(queries=16, keys=16, warps=4, stages=2, parts=2)
    monkeypatch.setattr(attention, "cut", lambda *_: form)
    tile = Tile(rows=16, columns=16, depth=32)
    monkeypatch.setattr(experts, "tiles", lambda *_: Tiles(tile, tile))
    few = experts_1.Cut(columns=16, depth=64)
    monkeypatch.setattr(experts_1, "TABLE", dict.fromkeys((16, 8, 4), experts_1.Cuts(few, few)))
    narrow = router.Cut(rows=16, columns=16, share=32, depth=32)
    monkeypatch.setattr(router, "cut", lambda *_: narrow)
    monkeypatch.setattr(vector, "cut", lambda *_, **__: vector.Cut(outputs=32, chunk=64))
