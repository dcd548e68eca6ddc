"""Chooses the backend for a model: fused CUDA kernels where they run, else the reference."""

import logging

import torch

from dgemma.backends.base import Backend
from dgemma.backends.cuda.support import current_device, unsupported_reason
from dgemma.backends.reference import ReferenceBackend
from dgemma.model.gemma import Gemma
from dgemma.quant.fp8_head import Fp8HeadTable

logger = logging.getLogger("dgemma")


def choose_backend(model: Gemma) -> Backend:
    """Return the fastest backend that this model and device have."""
    weight = model.embed_tokens.weight
    reason = unsupported_reason(weight.device, weight.dtype)
    if reason is not None:
        if weight.device.type == "cuda":
            logger.warning("the reference backend is used: %s", reason)
        return ReferenceBackend(model)
    from dgemma.backends.cuda.backend import can_hold
    from dgemma.backends.cuda.fused import can_fuse

    if not (can_fuse(model) and can_hold(model)):
        if weight.device.type == "cuda":
            what = "an adapter is not merged, or a shape has no kernels"
            logger.warning("the reference backend is used: %s", what)
        return ReferenceBackend(model)
    with current_device(weight.device):
        return _cuda_backend(model)


def _cuda_backend(model: Gemma) -> Backend:
    from dgemma.backends.cuda import selftest_cache
    from dgemma.backends.cuda.backend import CudaBackend
    from dgemma.backends.cuda.selftest import DeviceFault, selftest

    weight = model.embed_tokens.weight
    key = selftest_cache.facts(model.config, weight.dtype, weight.device)
    key[selftest_cache.FORM] = _form(model)
    wrong = selftest_cache.load(key)
    if wrong is None:
        _precompile(model)
        try:
            wrong = selftest(model)
        except torch.cuda.OutOfMemoryError:  # another time there may be memory
            logger.warning("the reference backend is used: no memory for the self-test")
            return ReferenceBackend(model)
        except DeviceFault as fault:
            selftest_cache.store(key, str(fault))
            raise
        selftest_cache.store(key, wrong)
    if wrong:
        logger.warning("the reference backend is used: %s", wrong)
        return ReferenceBackend(model)
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


def _form(model: Gemma) -> str:
    """Name the form of the weights by the first layer's modules and the token table."""
    modules = [*next(iter(model.layers)).modules(), model.embed_tokens]
    kinds = {type(module).__name__ for module in modules}
    table = model.embed_tokens
    if isinstance(table, Fp8HeadTable) and table.soft is not None:
        kinds.add("soft")
    return " ".join(sorted(kinds))
