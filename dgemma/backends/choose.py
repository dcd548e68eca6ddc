"""Chooses the backend for a model: CUDA kernels if they run and pass the self-test.

Self-test results are cached on disk, keyed by GPU, torch, triton, kernel source, model config,
dtype and weight format.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import cast

import torch

from dgemma import __version__
from dgemma.backends.base import Backend
from dgemma.backends.cuda.device import (
    SELFTEST,
    current_device,
    has_triton,
    ignores_selftest,
    unsupported_reason,
)
from dgemma.backends.cuda.merge import layers_of
from dgemma.backends.reference import ReferenceBackend
from dgemma.config import ModelConfig, config_to_json
from dgemma.device import load_result, store_result, stored_results
from dgemma.model.gemma import Gemma
from dgemma.quant.head import Fp8HeadTable

CACHE = "selftest"
UNTESTED = "cuda, once the self-test has passed when the model is first loaded"
WEIGHTS = "weights"  # key of the weight format, which a config does not tell

logger = logging.getLogger("dgemma")


def choose_backend(model: Gemma) -> Backend:
    """Return the fastest backend for this model on its device."""
    weight = model.embed_tokens.weight
    reason = unsupported_reason(weight.device, weight.dtype)
    if reason is not None:
        return _reference(model, reason)
    from dgemma.backends.cuda.backend import can_hold
    from dgemma.backends.cuda.fused import can_fuse

    if not (can_fuse(model) and can_hold(model)):
        return _reference(model, "an adapter is not merged, or a shape has no kernels")
    with current_device(weight.device):
        return _cuda_backend(model)


def _reference(model: Gemma, reason: str) -> Backend:
    if model.embed_tokens.weight.device.type == "cuda":
        logger.warning("the reference backend is used: %s", reason)
    return ReferenceBackend(model)


def _cuda_backend(model: Gemma) -> Backend:
    from dgemma.backends.cuda.backend import CudaBackend
    from dgemma.backends.cuda.selftest import DeviceFault, selftest

    weight = model.embed_tokens.weight
    key = {**cache_key(model.config, weight.dtype, weight.device), WEIGHTS: _weight_format(model)}
    wrong: str | None = load_result(CACHE, key)
    if wrong is None:
        _precompile(model)
        try:
            wrong = selftest(model)
        except torch.cuda.OutOfMemoryError:  # says nothing about the kernels: not cached
            wrong = "no memory for the self-test"
        except DeviceFault as fault:
            store_result(CACHE, key, str(fault))
            raise
        else:
            store_result(CACHE, key, wrong)
    if wrong and not ignores_selftest():
        logger.warning(
            "the reference backend is used, which is slower, since the self-test failed: %s; "
            "%s=warn uses the kernels nevertheless (docs/gpu.md)",
            wrong,
            SELFTEST,
        )
        return ReferenceBackend(model)
    if wrong:
        logger.warning("the kernels are used although the self-test failed: %s", wrong)
    return CudaBackend(model)


def _precompile(model: Gemma) -> None:
    if model.embed_tokens.weight.device.type != "cuda":
        return
    from dgemma.backends.cuda.precompile import precompile

    try:
        precompile(model)
        torch.cuda.empty_cache()
    except Exception as error:
        logger.debug("kernels are not compiled beforehand: %s", error)


def _weight_format(model: Gemma) -> str:
    """Name the weight format by the modules of layers and token table."""
    from dgemma.backends.cuda.selftest import experts_format

    modules = [*next(iter(model.layers)).modules(), model.embed_tokens]
    names = {type(module).__name__ for module in modules}
    names |= {experts_format(layer) for layer in layers_of(model)}
    table = model.embed_tokens
    if isinstance(table, Fp8HeadTable) and table.soft is not None:
        names.add("soft")
    return " ".join(sorted(names))


# --- cached results


def report(config: ModelConfig | None, dtype: torch.dtype, device: torch.device) -> str:
    """Name the backend a model would get and, for the reference, the reason."""
    reason = unsupported_reason(device, dtype)
    if reason is not None:
        return f"reference: {reason}"
    if config is None:
        return UNTESTED
    key = {**cache_key(config, dtype, device), WEIGHTS: ""}
    entries = stored_results(CACHE)
    results = {entry["value"] for entry in entries if {**entry["key"], WEIGHTS: ""} == key}
    if wrong := results - {""}:
        backend = "cuda, although the self-test failed" if ignores_selftest() else "reference"
        return f"{backend}: {'; '.join(sorted(wrong))}"
    return "cuda" if results else UNTESTED


def cache_key(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """Everything that a result depends on, except the weight format."""
    return {
        "device": _device_name(device),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "dgemma": f"{__version__} {_source_digest()}",
        "model": _digest(json.dumps(config_to_json(config), sort_keys=True).encode()),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} {capability}"


def _triton_version() -> str:
    if not has_triton():
        return "none"
    import triton

    return cast(str, triton.__version__)


def _source_digest() -> str:
    """Digest the CUDA backend's source: its version does not change during development."""
    package = Path(__file__).parent / "cuda"
    return _digest(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py"))))


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=8).hexdigest()
