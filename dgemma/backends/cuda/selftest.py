"""A short comparison of the CUDA backend with the reference on the model at hand.

A model of one layer of each type and weight format commits a prompt longer than the window, commits
a block together with the first step of the canvas after it, steps two canvases, and decodes single
tokens; hidden states, entropies, soft embeddings and the sampler's updates are compared. This finds
kernels that are broken on a device or for a shape, not errors in the last digit: tests find those.

Most rows must be within a tight bound, and every row within a wider one: rounding alone sends a
token with nearly equal router probabilities to other experts, so rows with such a near-tie in the
reference are allowed the error of one swapped expert (after a softmax: any error), and all others a
few times the tight bound.

T tokens of a pass, L of a canvas, D width, E experts.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dgemma.backends.base import Backend, ForwardInput, TokenDraw
from dgemma.backends.cuda.backend import CudaBackend, canvas_to_cpu
from dgemma.backends.cuda.device import current_device
from dgemma.backends.cuda.merge import layers_of
from dgemma.backends.cuda.streaming import StreamedExperts
from dgemma.backends.reference import ReferenceBackend
from dgemma.config import FULL
from dgemma.diffusion.canvas import NO_PINS, Noise, Pins
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.logit_stats import PositionStats
from dgemma.diffusion.sampler import Sampler, advance
from dgemma.errors import DgemmaError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma, Layer, Router
from dgemma.model.kv_cache import Capacity, KVCache

MAX_STEPS, NUM_CANVASES = 8, 2
QUANTILE = 0.8  # fraction of rows that must be within the tight bounds
logger = logging.getLogger("dgemma")


class Quantity(NamedTuple):
    """A compared quantity: its name, and the kernels that compute it."""

    name: str
    kernels: str


HIDDEN = Quantity(
    "hidden states of a prompt", "embed, residual_norm, qk_norm_rope, attention, router, gemm, moe"
)
ENTROPIES = Quantity("entropies", "embed, attention of a canvas, logit_stats")
SOFT = Quantity("soft embeddings", "soft_embed_topk, soft_embed_fp8")
DENSE_SOFT = Quantity("soft embeddings of the whole vocabulary", SOFT.kernels)
LOGITS = Quantity("logits of a single token", "embed, gemv, attention, moe_decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Relative rounding errors allowed in most rows, and in any row."""

    hidden: float
    soft: float
    entropy: float  # nats
    max_factor: float  # factor for the worst row without a near-tie of the router
    router_gap: float  # log-probability difference below which rounding may swap experts


# Rounding a model to bfloat16 moves at most 0.04, 0.06 and 0.2 nats in rows without a near-tie of
# 0.05; with fp8 activations 0.2, 0.35 and 0.5 (two layers of nano and of random models on a CPU).
BOUNDS_16 = Bounds(hidden=0.06, soft=0.06, entropy=0.1, max_factor=4.0, router_gap=0.1)
BOUNDS_FP8 = Bounds(hidden=0.25, soft=0.25, entropy=0.4, max_factor=3.0, router_gap=0.2)


class RouterGaps:
    """Records how close the reference's router decisions are, while open.

    `passes`: per pass, the smallest gap over the layers, [T]: log-probability of the last selected
    expert minus that of the first one not selected.
    """

    def __init__(self, model: Gemma) -> None:
        self.passes: list[Tensor] = []
        self._hooks = ExitStack()
        for index, layer in enumerate(layers_of(model)):
            hook = layer.router.register_forward_hook(partial(self._record, index))
            self._hooks.callback(hook.remove)

    def _record(self, index: int, router: Router, inputs: tuple[Tensor], _: object) -> None:
        p_TE = router.probs(inputs[0])
        if p_TE.shape[1] == router.top_k:
            gap_T = torch.full_like(p_TE[:, 0], torch.inf)
        else:
            best_TK = p_TE.topk(router.top_k + 1).values.log()
            gap_T = best_TK[:, -2] - best_TK[:, -1]
        if index == 0:
            self.passes.append(gap_T)
        else:
            self.passes[-1] = torch.minimum(self.passes[-1], gap_T)

    def close(self) -> None:
        self._hooks.close()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares rows of one quantity between both backends."""

    bounds: Bounds
    swap_error: float  # relative error caused by one swapped expert

    @classmethod
    def of(cls, model: Gemma) -> "Comparison":
        stored = [t for layer in model.layers for t in (*layer.parameters(), *layer.buffers())]
        is_fp8 = any(tensor.element_size() == 1 for tensor in stored)
        # Observed: 0.75 of top-1, 0.5 of top-2, 0.35 of top-8 routers.
        swap_error = 0.3 + 0.65 / model.config.top_k_experts**0.5
        return cls(BOUNDS_FP8 if is_fp8 else BOUNDS_16, swap_error)

    def relative(
        self,
        what: Quantity,
        got_TD: Tensor,
        want_TD: Tensor,
        bound: float,
        gap_T: Tensor | None = None,
    ) -> str:
        """Return a description of wrong hidden states or logits, or an empty string."""
        return self._check(what, relative_error(got_TD, want_TD), bound, gap_T, self.swap_error)

    def soft(self, what: Quantity, got_TD: Tensor, want_TD: Tensor, gap_T: Tensor | None) -> str:
        """Return a description of wrong soft embeddings; a swapped expert excuses any error."""
        error_T = relative_error(got_TD, want_TD)
        return self._check(what, error_T, self.bounds.soft, gap_T, torch.inf)

    def absolute(self, what: Quantity, got_T: Tensor, want_T: Tensor, gap_T: Tensor | None) -> str:
        """Return a description of wrong entropies; a swapped expert excuses any error."""
        return self._check(what, (got_T - want_T).abs(), self.bounds.entropy, gap_T, torch.inf)

    def _check(
        self, what: Quantity, error_T: Tensor, bound: float, gap_T: Tensor | None, swap_error: float
    ) -> str:
        name, kernels = what.name, f"(kernels: {what.kernels})"
        if not bool(error_T.isfinite().all()):
            return f"{name} contain NaN or inf {kernels}"
        typical = float(torch.quantile(error_T.float(), QUANTILE))
        logger.debug("%s: error %.2g in most rows, %.2g allowed", name, typical, bound)
        if typical > bound:
            return f"{name} are off by {typical:.2g}, {bound:.2g} is allowed {kernels}"
        limit_T = torch.full_like(error_T, self.bounds.max_factor * bound)
        if gap_T is not None:
            is_near_tie_T = gap_T < self.bounds.router_gap
            limit_T = torch.where(is_near_tie_T, limit_T.clamp(min=swap_error), limit_T)
        row = int((error_T - limit_T).argmax())
        worst, limit = float(error_T[row]), float(limit_T[row])
        logger.debug("%s: error %.2g in row %d, %.2g allowed", name, worst, row, limit)
        if worst > limit:
            return f"{name} are off by {worst:.2g} in row {row}, {limit:.2g} is allowed {kernels}"
        return ""


def relative_error(got_TD: Tensor, want_TD: Tensor) -> Tensor:
    got_TD, want_TD = got_TD.float(), want_TD.float()
    error_T: Tensor = (got_TD - want_TD).norm(dim=-1) / want_TD.norm(dim=-1).clamp(min=1e-6)
    return error_T


class DeviceFault(DgemmaError):
    """The device no longer responds."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the GPU failed in the self-test of the kernels ({reason}); start again: the "
            "reference backend is used then"
        )


def selftest(model: Gemma) -> str:
    """Compare both backends on a few passes; return a description of what is wrong, or ""."""
    probe = shallow(model)
    try:
        with torch.inference_mode():
            wrong = next((wrong for wrong in _checks(probe) if wrong), "")
    except torch.cuda.OutOfMemoryError:
        raise  # not a fault of the kernels
    except Exception as error:
        wrong = f"the self-test raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        _require_device(model, wrong)
    return wrong[:300]


def _require_device(model: Gemma, reason: str) -> None:
    """Raise if a kernel has made the device unusable for this process."""
    try:
        model.embed_tokens.weight[:1].float().sum().item()
    except RuntimeError as error:
        raise DeviceFault(reason) from error


def shallow(model: Gemma) -> Gemma:
    """Return a model with one layer of each type and weight format, sharing the weights."""
    kinds = list(zip(model.config.layer_types, map(experts_format, layers_of(model)), strict=True))
    distinct = sorted(dict.fromkeys(kinds), key=lambda kind: kind[0] == FULL)  # the last is full
    probe = copy(model)
    probe._modules = dict(model._modules)
    layers = [layers_of(model)[kinds.index(kind)] for kind in distinct]
    probe._modules["layers"] = nn.ModuleList(
        _renumbered(layer, index) for index, layer in enumerate(layers)
    )
    probe.config = replace(model.config, layer_types=tuple(kind[0] for kind in distinct))
    return probe


def experts_format(layer: Layer) -> str:
    """Name the weight format of a layer's experts."""
    experts: nn.Module = layer.experts
    is_streamed = isinstance(experts, StreamedExperts)
    source = experts.host if isinstance(experts, StreamedExperts) else experts
    names = [type(source).__name__, *getattr(source, "formats", ())]
    return " ".join([*names, *(["streamed"] if is_streamed else [])])


def _renumbered(layer: Layer, index: int) -> nn.Module:
    twin = copy(layer)
    twin._modules = dict(layer._modules)
    attention = copy(layer.self_attn)
    attention.layer = index
    twin._modules["self_attn"] = attention
    return twin


def _checks(probe: Gemma) -> Iterator[str]:
    """Yield the finding of each comparison, empty if it passes."""
    gaps = RouterGaps(probe)
    try:
        yield from _compare(probe, gaps)
    finally:
        gaps.close()


def _compare(probe: Gemma, gaps: RouterGaps) -> Iterator[str]:
    # Two canvases only, so that logits fit next to the weights on a small card.
    mine, reference = CudaBackend(probe, NUM_CANVASES), ReferenceBackend(probe)
    backends: tuple[Backend, Backend] = (mine, reference)
    compare = Comparison.of(probe)
    length, window = probe.config.canvas_length, probe.config.sliding_window
    prompt = tuple((7919 * i) % probe.config.vocab_size for i in range(window + length + 3))
    caches = [_cache(probe, len(prompt)) for _ in backends]
    pairs = list(zip(backends, caches, strict=True))
    for backend, cache in pairs:
        backend.run([ForwardInput(cache=cache, tokens=prompt)])
    got_TD, want_TD = (_encode(backend, cache) for backend, cache in pairs)
    bound = compare.bounds.hidden
    yield compare.relative(HIDDEN, got_TD, want_TD, bound, gaps.passes[-1])
    if probe.self_conditioning is not None:
        states = [_new_state(probe, seed) for seed in range(NUM_CANVASES)]
        got, want = (_steps(backend, cache, states, prompt[:length]) for backend, cache in pairs)
        first, again, second = got.states
        # The first canvas already differs by the rounding of its first step.
        gap_L = gaps.passes[-1][-length:]
        yield _state_wrong(compare, first, want.states[0], gaps.passes[-2][-length:])
        yield _state_wrong(compare, second, want.states[2], gap_L)
        soft_LD = want.states[2].canvas.soft_LD
        assert soft_LD is not None
        dense_LD = _dense_soft(mine, got.inputs)
        yield compare.soft(DENSE_SOFT, dense_LD, soft_LD, gap_L)
        for before, after in ((states[0], first), (first, again), (states[1], second)):
            yield _update_wrong(before, after)
        yield _state_wrong(compare, _replayed(mine, caches[0], states[1]), second, None)
    for token in prompt[:3]:
        got_V, want_V = (_logits(backend, cache, token) for backend, cache in pairs)
        yield compare.relative(LOGITS, got_V[None], want_V[None], 2 * bound)


def _encode(backend: Backend, cache: KVCache) -> Tensor:
    """Return hidden states of a chunk after the prompt, without committing it."""
    tokens_T = torch.arange(backend.model.config.canvas_length, device=cache.device)
    batch = ForwardBatch([Segment(cache, len(tokens_T), commit=True)])
    return backend.encode(tokens_T, batch)


def _logits(backend: Backend, cache: KVCache, token: int) -> Tensor:
    """Commit one token and return the logits of the next."""
    item = ForwardInput(cache=cache, tokens=(token,), draw=TokenDraw(), needs_logits=True)
    (output,) = backend.run([item])
    assert output.logits_V is not None
    return output.logits_V


class Steps(NamedTuple):
    """The states after the test's steps, and the inputs of the last pass."""

    states: list[CanvasState]
    inputs: list[ForwardInput]


def _steps(
    backend: Backend, cache: KVCache, states: list[CanvasState], block: tuple[int, ...]
) -> Steps:
    """Commit a block with a first step, then step two canvases together, on forks of one prefix."""
    capacity = 3 * len(block)
    first, second = cache.fork(capacity), cache.fork(capacity)
    (begun,) = backend.run([ForwardInput(cache=first, tokens=block, state=states[0])])
    inputs = [
        ForwardInput(cache=first, state=begun.state),
        ForwardInput(cache=second, state=states[1]),
    ]
    outputs = [begun, *backend.run(inputs)]
    cache.end_sharing()
    return Steps([output.state for output in outputs if output.state is not None], inputs)


def _replayed(backend: CudaBackend, cache: KVCache, state: CanvasState) -> CanvasState:
    """Take one step three times: eager, captured, replayed."""
    fork = cache.fork(state.canvas.length)
    for _ in range(3):
        (output,) = backend.run([ForwardInput(cache=fork, state=state)])
    cache.end_sharing()
    assert output.state is not None
    return output.state


def _state_wrong(
    compare: Comparison, got: CanvasState, want: CanvasState, gap_L: Tensor | None
) -> str:
    """Compare entropies and soft embeddings of a canvas."""
    assert got.canvas.soft_LD is not None
    assert want.canvas.soft_LD is not None
    entropies = (got.canvas.entropy_L, want.canvas.entropy_L)
    softs = (got.canvas.soft_LD, want.canvas.soft_LD)
    return compare.absolute(ENTROPIES, *entropies, gap_L) or compare.soft(SOFT, *softs, gap_L)


def _dense_soft(backend: CudaBackend, inputs: list[ForwardInput]) -> Tensor:
    """Repeat a step; return the last canvas's mean embedding over the whole vocabulary."""
    pool = backend.pool
    entries = pool.place(inputs)
    pool.buffers.set_entries(entries)
    with current_device(backend.device):
        denoise = pool.pass_of(len(inputs), 0)
        denoise.soft_embed(denoise.step(), sparse=False)
    return pool.buffers.soft_ELD[entries[-1]]


def _update_wrong(before: CanvasState, after: CanvasState) -> str:
    """Compare the sampler's update with its rule, on the statistics of the step."""
    old, new = canvas_to_cpu(before.canvas), canvas_to_cpu(after.canvas)
    stats = PositionStats(
        draw_T=new.tokens_L,
        top_T=new.guess_L,
        entropy_T=new.entropy_L,
        top_p_T=new.entropy_L,  # this rule reads neither this nor the next
        current_p_T=new.entropy_L,
    )
    noise_L = before.noise.to_cpu().tokens_NL[new.num_steps]
    want = advance(old, stats, noise_L, before.sampler.rule)
    names = ("tokens_L", "guess_L", "accepted_L", "converged", "stable_steps")
    wrong = [name for name in names if not torch.equal(getattr(new, name), getattr(want, name))]
    fields = ", ".join(wrong)
    return f"the sampler's update is wrong: {fields} (kernel: sampler_update)" if wrong else ""


def _cache(model: Gemma, tokens: int) -> KVCache:
    weight, length = model.embed_tokens.weight, model.config.canvas_length
    capacity = Capacity(tokens=tokens + 4 * length + 8, segment=tokens + 2 * length)
    return KVCache(model.config, capacity, weight.dtype, weight.device)


def _new_state(model: Gemma, seed: int) -> CanvasState:
    weight, config = model.embed_tokens.weight, model.config
    noise = Noise(seed=seed).block(
        0, MAX_STEPS, config.canvas_length, config.vocab_size, weight.device
    )
    return start(
        Sampler(max_denoising_steps=MAX_STEPS), noise, Pins((1,), (5,)) if seed else NO_PINS
    )
