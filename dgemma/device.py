"""The machine: choice of device and dtype, and a disk cache of what was measured on it."""

import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from dgemma.errors import UsageError

DEVICES = "auto, cpu, cuda, cuda:N or mps"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_ENTRIES = 32  # stored per name; the oldest is dropped
MAX_KERNELS = 128  # of different shapes, in the CPU matrix library's cache


def choose_device(name: str) -> torch.device:
    """Return a device by name; `auto` takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {name!r} is not known; use {DEVICES}") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device {name!r} is not supported; use {DEVICES}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device 'mps' does not exist: torch sees no Apple GPU; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(
            f"device {name!r} does not exist: torch sees {count} CUDA devices; use cpu or auto"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return a dtype by name; `auto` takes bfloat16 where it is native, else float32."""
    if name == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not known; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def has_bfloat16(device: torch.device) -> bool:
    """True if bfloat16 is native; a CPU emulates it four to five times slower than float32."""
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "mps":
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB"
    if device.type == "mps":
        return "Apple GPU (mps)"
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'' if threads == 1 else 's'}"


def usable_memory(device: torch.device) -> float:
    """Return the bytes of a GPU that torch may take: its memory, or this process's fraction."""
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    return float(total * torch.cuda.get_per_process_memory_fraction(index))


def empty_cache(device: torch.device | str) -> None:
    """Release cached GPU memory that nothing uses: it is fragmented, and larger blocks need it."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def bound_kernel_cache(environment: MutableMapping[str, str]) -> None:
    """Bound the CPU matrix library's kernel cache, which holds 1024 kernels by default.

    It compiles one for each shape, and a server meets many: they come to half a GiB and save
    nothing. Works until the library's first use, after torch is imported too.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        environment.setdefault(name, str(MAX_KERNELS))


# --- stored results


def load_result(name: str, key: Mapping[str, str]) -> Any:
    """Load the value stored under a name for exactly this key; None if there is none."""
    values = [entry["value"] for entry in stored_results(name) if entry["key"] == key]
    return values[-1] if values else None


def store_result(name: str, key: Mapping[str, str], value: Any) -> None:
    """Store a JSON value in the user's cache; do nothing if the cache cannot be written."""
    entries = [entry for entry in stored_results(name) if entry["key"] != key]
    entries.append({"key": dict(key), "value": value})
    path = _cache_path(name)
    if not path.is_absolute():
        return  # a user without a home directory
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(entries[-MAX_ENTRIES:], indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return


def stored_results(name: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(_cache_path(name).read_text(encoding="utf-8"))
        return [entry for entry in entries if {"key", "value"} <= entry.keys()]
    except (OSError, ValueError, TypeError, AttributeError):
        return []  # none yet, or damaged: it is measured again


def _cache_path(name: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "dgemma" / f"{name}.json"
