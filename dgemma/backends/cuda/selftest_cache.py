"""On-disk cache of self-test results, keyed by GPU, torch, triton, kernel source and model.

A result holds for one model config, dtype and form of weights.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from dgemma import __version__
from dgemma.backends.cuda.support import has_triton, unsupported_reason
from dgemma.config import ModelConfig, config_to_json

MAX_ENTRIES = 32
UNTESTED = "cuda, once the self-test has passed when the model is first loaded"
FORM = "form"  # of the weights: the one fact that a config does not tell


def facts(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """All that a result depends on, but for the form of the weights."""
    return {
        "device": _device(device),
        "torch": torch.__version__,
        "triton": _triton(),
        "dgemma": f"{__version__} {_sources()}",
        "model": _digest(json.dumps(config_to_json(config), sort_keys=True).encode()),
        "dtype": str(dtype).removeprefix("torch."),
    }


def load(key: Mapping[str, str]) -> str | None:
    """Return the result under exactly these facts; empty: all passed."""
    found = [entry for entry in _entries() if entry["facts"] == key]
    return found[-1]["wrong"] if found else None


def store(key: Mapping[str, str], wrong: str) -> None:
    """Keep a result; where nothing can be written the self-test runs again next time."""
    kept = [entry for entry in _entries() if entry["facts"] != key]
    kept.append({"facts": dict(key), "wrong": wrong})
    path = _path()
    if not path.is_absolute():
        return  # a user without a home
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(kept[-MAX_ENTRIES:], indent=1), encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return


def report(config: ModelConfig | None, dtype: torch.dtype, device: torch.device) -> str:
    """Name the backend for a person, and why it is not the faster one."""
    reason = unsupported_reason(device, dtype)
    if reason is not None:
        return f"reference: {reason}"
    if config is None:
        return UNTESTED
    key = {**facts(config, dtype, device), FORM: ""}
    found = {entry["wrong"] for entry in _entries() if {**entry["facts"], FORM: ""} == key}
    if wrong := found - {""}:
        return f"reference: {'; '.join(sorted(wrong))}"
    return "cuda" if found else UNTESTED


def _entries() -> list[dict[str, Any]]:
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
        return [entry for entry in found if {"facts", "wrong"} <= entry.keys()]
    except (OSError, ValueError, TypeError, AttributeError):
        return []  # none yet, or damaged: the self-test runs again


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "dgemma" / "selftest.json"


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} {capability}"


def _triton() -> str:
    if not has_triton():
        return "none"
    import triton

    return cast(str, triton.__version__)


def _sources() -> str:
    """Digest of the backend's code: a version does not change while kernels are worked on."""
    package = Path(__file__).parent
    return _digest(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py"))))


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()
