"""What was found of the kernels, kept in a file of the user's cache: a check runs once.

An entry holds for one device, torch, triton, version of this package with the very text of its
kernels and of the check, and model: its config, number type and the form of its weights.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from dgemma import __version__
from dgemma.config import ModelConfig, config_to_json
from dgemma.graph.check import Verdicts
from dgemma.ops.fast import FAMILIES, Family, has_triton, reason_against

MAX_ENTRIES = 32
UNCHECKED = "kernel, once a check has passed when the model is first loaded"
FORM = "form"  # the one fact that a config does not tell
OF = "of"  # the fact that an entry is about a part of a family, which is then judged by itself
SOFT = "soft embeddings"  # in 8 bits; without them row statistics are kernels all the same


def facts(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """What a verdict depends on, but for the form of the weights."""
    return {
        "device": _device(device),
        "torch": torch.__version__,
        "triton": _triton(),
        "dgemma": f"{__version__} {_sources()}",
        "model": _digest(json.dumps(config_to_json(config), sort_keys=True).encode()),
        "dtype": str(dtype).removeprefix("torch."),
    }


def recall(of: Mapping[str, str]) -> Verdicts | None:
    """The verdicts under exactly these facts."""
    found = [entry for entry in _entries() if entry["facts"] == of]
    return found[-1]["verdicts"] if found else None


def remember(of: Mapping[str, str], verdicts: Verdicts) -> None:
    """Keep verdicts; where nothing can be written the check runs again next time."""
    kept = [entry for entry in _entries() if entry["facts"] != of]
    kept.append({"facts": dict(of), "verdicts": verdicts})
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


def report(config: ModelConfig | None, dtype: torch.dtype, device: torch.device) -> Verdicts:
    """For a person: which families run as kernels here, and why the others do not."""
    reason = reason_against(device, dtype)
    if reason is not None:
        return dict.fromkeys(FAMILIES, f"plain: {reason}")
    if config is None:
        return dict.fromkeys(FAMILIES, UNCHECKED)
    of = facts(config, dtype, device)
    told = {family: _told(family, _in_any_form(of)) for family in FAMILIES}
    softs = _in_any_form({**of, OF: SOFT})
    if failed := {entry["verdicts"].get("row_stats", "") for entry in softs} - {""}:
        told["row_stats"] += f"; {SOFT} in 16 bits: {'; '.join(sorted(failed))}"
    return told


def _in_any_form(of: Mapping[str, str]) -> list[dict[str, Any]]:
    """The entries under these facts, whatever form the weights had."""
    return [e for e in _entries() if {**e["facts"], FORM: ""} == {**of, FORM: ""}]


def _told(family: Family, entries: list[dict[str, Any]]) -> str:
    if not entries:
        return UNCHECKED
    known = {entry["verdicts"].get(family, UNCHECKED) for entry in entries}
    if reasons := known - {"", UNCHECKED}:
        return f"plain: {'; '.join(sorted(reasons))}"
    return "kernel" if "" in known else UNCHECKED


def _entries() -> list[dict[str, Any]]:
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
        return [entry for entry in found if {"facts", "verdicts"} <= entry.keys()]
    except (OSError, ValueError, TypeError, AttributeError):
        return []  # none yet, or damaged: the check runs again


def _path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "dgemma" / "kernels.json"


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
    """A version alone does not change while kernels are worked on, or what checks them."""
    return _digest(b"".join(path.read_bytes() for path in _texts()))


def _texts() -> list[Path]:
    """The kernels, and who launches and judges them."""
    package = Path(__file__).parents[1]
    judges = sorted(package.glob("graph/check*.py"))
    launchers = [package / name for name in ("stack.py", "graph/reading.py", "weights/head.py")]
    return [*sorted((package / "ops").rglob("*.py")), *launchers, *judges]


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()
