"""A short comparison of the CUDA backend with the reference on the model at hand.

A model of one layer of each type commits a prompt longer than the window, commits a block together
with the first step of the canvas after it, steps two canvases, and decodes single tokens; hidden
states, entropies, soft embeddings and the sampler's updates are compared. This finds kernels that
are broken on a device or for a shape, not the last digit: that is what the tests are for.

T tokens of a pass, L of a canvas, D width.
"""

import logging
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dgemma.backends.base import Backend, ForwardInput, ForwardOutput, TokenDraw
from dgemma.backends.cuda.backend import CudaBackend, on_host
from dgemma.backends.cuda.merge import layers_of
from dgemma.backends.reference import ReferenceBackend
from dgemma.config import FULL
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.denoise import Row, start
from dgemma.diffusion.logit_stats import RowStats
from dgemma.diffusion.sampler import Sampler, advance
from dgemma.errors import DgemmaError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma, Layer
from dgemma.model.kv_cache import Capacity, KVCache

MAX_STEPS = 8
QUANTILE = 0.8  # of rows: near-ties of the router send some to other experts by rounding alone
logger = logging.getLogger("dgemma")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Relative errors that rounding may cause in most rows."""

    hidden: float
    soft: float
    entropy: float  # nats


BOUNDS_16, BOUNDS_FP8 = Bounds(0.06, 0.06, 0.1), Bounds(0.25, 0.25, 0.4)


class DeviceFault(DgemmaError):
    """The device no longer answers."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the GPU failed in the self-test of the kernels ({reason}); start again: the "
            "reference backend is used then"
        )


def selftest(model: Gemma) -> str:
    """Compare both backends on a few passes; returns what is wrong, or nothing."""
    probe = shallow(model)
    try:
        with torch.inference_mode():
            wrong = next((wrong for wrong in _checks(probe) if wrong), "")
    except torch.cuda.OutOfMemoryError:
        raise  # says nothing about the kernels
    except Exception as error:
        wrong = f"the self-test raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        _require_device(model, wrong)
    return wrong[:300]


def _require_device(model: Gemma, reason: str) -> None:
    """Refuse to go on if a kernel has taken the process's device with it."""
    try:
        model.embed_tokens.weight[:1].float().sum().item()
    except RuntimeError as error:
        raise DeviceFault(reason) from error


def shallow(model: Gemma) -> Gemma:
    """A model of one layer of each type, which shares its weights with the whole one."""
    types = model.config.layer_types
    kinds = tuple(sorted(dict.fromkeys(types), key=lambda kind: kind == FULL))  # the last is full
    probe = copy(model)
    probe._modules = dict(model._modules)
    layers = [layers_of(model)[types.index(kind)] for kind in kinds]
    probe._modules["layers"] = nn.ModuleList(
        _renumbered(layer, index) for index, layer in enumerate(layers)
    )
    probe.config = replace(model.config, layer_types=kinds)
    return probe


def _renumbered(layer: Layer, index: int) -> nn.Module:
    twin = copy(layer)
    twin._modules = dict(layer._modules)
    attention = copy(layer.self_attn)
    attention.layer = index
    twin._modules["self_attn"] = attention
    return twin


def _checks(probe: Gemma) -> Iterator[str]:
    mine_backend = CudaBackend(probe)
    backends: tuple[Backend, Backend] = (mine_backend, ReferenceBackend(probe))
    bounds = _bounds(probe)
    length, window = probe.config.canvas_length, probe.config.sliding_window
    prompt = tuple((7919 * i) % probe.config.vocab_size for i in range(window + length + 3))
    mine, want = (_cache(probe, len(prompt)) for _ in backends)
    for backend, cache in zip(backends, (mine, want), strict=True):
        backend.run([ForwardInput(cache=cache, tokens=prompt)])
    yield _prompt_wrong(backends, (mine, want), bounds)
    if probe.self_conditioning is not None:
        rows = [_row(probe, seed) for seed in range(2)]
        block = prompt[:length]
        both = [
            _steps(backend, cache, rows, block)
            for backend, cache in zip(backends, (mine, want), strict=True)
        ]
        yield _rows_wrong(both[0], both[1], bounds)
        yield _dense_wrong(mine_backend, both[1][-1], bounds)
        first, again, second = both[0]
        for before, after in ((rows[0], first), (first, again), (rows[1], second)):
            yield _update_wrong(before, after)
        yield _replay_wrong(mine_backend, mine, rows[1], second, bounds)
    for token in prompt[:3]:
        draws = [
            backend.run([_single(cache, token)])[0]
            for backend, cache in zip(backends, (mine, want), strict=True)
        ]
        yield _draw_wrong(draws[0], draws[1], bounds)


def _single(cache: KVCache, token: int) -> ForwardInput:
    return ForwardInput(cache=cache, tokens=(token,), draw=TokenDraw(), needs_logits=True)


def _prompt_wrong(
    backends: tuple[Backend, Backend], caches: tuple[KVCache, KVCache], bounds: Bounds
) -> str:
    """Compare hidden states of a chunk after the prompt that each backend has committed."""
    hidden = []
    for backend, cache in zip(backends, caches, strict=True):
        tokens_T = torch.arange(backend.model.config.canvas_length, device=cache.device)
        batch = ForwardBatch([Segment(cache, len(tokens_T), commit=True)])
        hidden.append(backend.encode(tokens_T, batch).float())
    return _wrong("hidden states of a prompt", _errors(*hidden), bounds.hidden)


def _steps(backend: Backend, cache: KVCache, rows: list[Row], block: tuple[int, ...]) -> list[Row]:
    """Commit a block with a first step, then step two canvases together, on forks of one prefix."""
    room = 3 * len(block)
    first, second = cache.fork(room), cache.fork(room)
    (begun,) = backend.run([ForwardInput(cache=first, tokens=block, row=rows[0])])
    inputs = [ForwardInput(cache=first, row=begun.row), ForwardInput(cache=second, row=rows[1])]
    found = [begun, *backend.run(inputs)]
    cache.is_shared = False
    return [output.row for output in found if output.row is not None]


def _rows_wrong(mine: list[Row], want: list[Row], bounds: Bounds) -> str:
    for a, b in zip(mine, want, strict=True):
        assert a.canvas.soft_LD is not None
        assert b.canvas.soft_LD is not None
        if b.canvas.num_steps > 1:
            continue  # the first steps differ by rounding already
        gap_L = (a.canvas.entropy_L - b.canvas.entropy_L).abs()
        soft = _errors(a.canvas.soft_LD.float(), b.canvas.soft_LD.float())
        wrong = _wrong("entropies", gap_L, bounds.entropy) or _wrong(
            "soft embeddings", soft, bounds.soft
        )
        if wrong:
            return wrong
    return ""


def _dense_wrong(backend: CudaBackend, want: Row, bounds: Bounds) -> str:
    """Compare the mean over the whole vocabulary where the last step took likely tokens alone."""
    last = backend.denoises[2, 0]
    if last.is_sparse is False:
        return ""  # compared already; and logits may be no more
    last.soft_embed(sparse=False)
    soft_LD = backend.buffers.soft_ELD[int(last.entry_C[1])]
    assert want.canvas.soft_LD is not None
    error_L = _errors(soft_LD.float(), want.canvas.soft_LD.float())
    return _wrong("soft embeddings of the whole vocabulary", error_L, bounds.soft)


def _replay_wrong(
    backend: CudaBackend, cache: KVCache, row: Row, eager: Row, bounds: Bounds
) -> str:
    """Compare a step that is captured and replayed with the one that ran eagerly."""
    fork = cache.fork(row.canvas.length)
    for _ in range(3):  # eager, captured, replayed
        (output,) = backend.run([ForwardInput(cache=fork, row=row)])
    cache.is_shared = False
    assert output.row is not None
    return _rows_wrong([output.row], [eager], bounds)


def _update_wrong(before: Row, after: Row) -> str:
    """Compare the sampler's update with its rule, given the statistics that the step has left."""
    old, new = on_host(before.canvas), on_host(after.canvas)
    stats = RowStats(
        draw_T=new.tokens_L,
        top_T=new.guess_L,
        entropy_T=new.entropy_L,
        top_p_T=new.entropy_L,  # not read by this rule, nor is the next
        held_p_T=new.entropy_L,
    )
    noise_L = before.noise.on_host().tokens_NL[new.num_steps]
    want = advance(old, stats, noise_L, before.sampler.rule)
    names = ("tokens_L", "guess_L", "kept_L", "settled", "steady_steps")
    wrong = [name for name in names if not torch.equal(getattr(new, name), getattr(want, name))]
    return f"the sampler's update is wrong: {', '.join(wrong)}" if wrong else ""


def _draw_wrong(mine: ForwardOutput, want: ForwardOutput, bounds: Bounds) -> str:
    assert mine.logits_V is not None
    assert want.logits_V is not None
    error = _errors(mine.logits_V[None], want.logits_V[None])
    return _wrong("logits of a single token", error, 2 * bounds.hidden)


def _wrong(name: str, error_T: Tensor, bound: float) -> str:
    if not bool(error_T.isfinite().all()):
        return f"{name} contain NaN or inf"
    found = float(torch.quantile(error_T.float(), QUANTILE))
    logger.debug("%s: error %.2g in most rows, %.2g allowed", name, found, bound)
    return "" if found <= bound else f"{name} are off by {found:.2g}, {bound:.2g} is allowed"


def _errors(got_TD: Tensor, want_TD: Tensor) -> Tensor:
    error_T: Tensor = (got_TD - want_TD).norm(dim=-1) / want_TD.norm(dim=-1).clamp(min=1e-6)
    return error_T


def _bounds(model: Gemma) -> Bounds:
    stored = [
        tensor for layer in model.layers for tensor in (*layer.parameters(), *layer.buffers())
    ]
    return BOUNDS_FP8 if any(tensor.element_size() == 1 for tensor in stored) else BOUNDS_16


def _cache(model: Gemma, tokens: int) -> KVCache:
    weight, length = model.embed_tokens.weight, model.config.canvas_length
    capacity = Capacity(tokens=tokens + 4 * length + 8, segment=tokens + 2 * length)
    return KVCache(model.config, capacity, weight.dtype, weight.device)


def _row(model: Gemma, seed: int) -> Row:
    weight, config = model.embed_tokens.weight, model.config
    noise = Noise(seed=seed).block(
        0, MAX_STEPS, config.canvas_length, config.vocab_size, weight.device
    )
    return start(
        Sampler(max_denoising_steps=MAX_STEPS), noise, Pins((1,), (5,)) if seed else NO_PINS
    )
