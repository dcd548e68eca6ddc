"""Kernels run here under Triton's interpreter, which has to be chosen before Triton is imported.

`test_interpreted.py` starts a process of its own for the `check_*.py` files. What the interpreter
cannot do: products of bfloat16 are wrong without a word (3.9); loops to a bound that is only known
at run time fail with numpy 2.4 (3.6). Types are therefore float32 and float16 here.
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


def round_to_fp8() -> None:
    """Let torch round to e4m3, as a GPU does: the interpreter's own rounding has no carry (3.9)."""
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    usual: Callable[..., Any] = interpreter._convert_float

    def convert(given: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return usual(given, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(given)).clamp(-448, 448)
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


if IS_INTERPRETED:
    interpret_for_good()
    round_to_fp8()


@pytest.fixture
def small_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use configs for small models: the interpreter's time is that of programs and masks.

    Attention has two splits, and the deepest GEMMs take two steps.
    """
    from dgemma.backends.cuda import configs
    from dgemma.backends.cuda.kernels import attention, gemv, moe, moe_decode, moe_packed, router

    def swap(module: object, config: object, other: object) -> None:
        """Replace a config, or a function that chooses one, in a kernel's module."""
        names = [name for name, value in vars(module).items() if value is config]
        assert names
        for name in names:
            monkeypatch.setattr(module, name, other)

    blocks = {"queries": 16, "keys": 16, "warps": 4, "stages": 2}
    split = configs.AttentionConfig(**blocks, splits=2)
    swap(attention, configs.attention_config, lambda *_: split)
    small = configs.MoeConfig(rows=16, columns=16, depth=32)
    swap(moe, configs.moe_config, lambda *_: configs.MoeConfigs(small, small))
    large = configs.MoeConfig(rows=16, columns=64, depth=64)
    swap(moe_packed, configs.moe_config, lambda *_: configs.MoeConfigs(large, large))
    few = configs.MoeDecodeConfig(columns=16, depth=64)
    by_bits = dict.fromkeys((16, 8, 4), configs.MoeDecodeConfigs(few, few))
    swap(moe_decode, configs.MOE_DECODE, by_bits)
    narrow = configs.RouterConfig(rows=16, columns=16, k_split=32, depth=32)
    swap(router, configs.router_config, lambda *_: narrow)
    streamed = configs.GemvConfig(outputs=32, chunk=64)
    swap(gemv, configs.gemv_config, lambda *_, **__: streamed)
