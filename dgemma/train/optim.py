"""Optimizers: Muon for matrices and AdamW for the rest, on float32 master weights.

Muon orthogonalizes the momentum of each matrix by a Newton-Schulz iteration (Jordan et al., 2024).
Stacked experts are many matrices; matrices of one shape are orthogonalized together. On a GPU the
step of a small model is captured as a CUDA graph: it is hundreds of short launches, which take the
host longer than the GPU.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dgemma.errors import ConfigError
from dgemma.train.distributed import full_tensor, shard_like, shard_state_like

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MAX_STACKED_ELEMENTS = 1 << 28  # orthogonalized together; a larger stack is processed alone
# Weights up to which a step is captured. A graph keeps its memory for good, and with more weights
# the GPU is slower than the host in any case.
MAX_CAPTURED_ELEMENTS = 1 << 28
UNCAPTURED_STEPS = 3  # before the capture, while memory is allocated and libraries set up
# Keys of AdamW's param groups that say how it runs, and are not part of a saved state.
RUNTIME_KEYS = ("lr", "foreach", "fused", "capturable")

StepFunction = Callable[[], Tensor]
Capture = Callable[[StepFunction], StepFunction]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """Optimizer settings; learning rates are peaks, which the schedule scales."""

    muon_lr: float = 0.02  # peak rate of Muon, for hidden matrices and experts
    adam_lr: float = 3e-3  # peak rate of AdamW, for embeddings, norms and routers
    momentum: float = 0.95  # Muon's
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    eps: float = 1e-8  # AdamW's
    weight_decay: float = 0.0  # of both
    clip: float = 1.0  # maximum norm of the gradient
    muon: bool = True  # false: AdamW for all weights. Adapters are always trained by AdamW

    def __post_init__(self) -> None:
        for name in ("muon_lr", "adam_lr", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"[optim] {name} is {getattr(self, name)}; it must be 0 or more")
        # A clip of 0 would leave no gradient; it does not turn clipping off.
        for name in ("clip", "eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"[optim] {name} is {getattr(self, name)}; it must be above 0")
        for name, values in (("momentum", [self.momentum]), ("betas", self.betas)):
            if not all(0 <= value < 1 for value in values):
                listed = ", ".join(map(str, values))
                raise ConfigError(f"[optim] {name} is {listed}; it must be 0 or more, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning-rate schedule: linear warm-up, constant, then decay to `floor`."""

    steps: int  # number of training steps
    warmup: int = 100  # steps of linear warm-up
    hold: float = 0.4  # fraction of the steps after which the rate decays
    floor: float = 0.0  # fraction of the peak rate at the end
    shape: Literal["linear", "cosine"] = "linear"  # shape of the decay

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise ConfigError(
                f"[schedule] has {self.steps} steps and a warm-up of {self.warmup}; it needs at "
                "least 1 step, and a warm-up of 0 or more"
            )
        if not (0 <= self.hold <= 1 and 0 <= self.floor <= 1):
            raise ConfigError(
                f"[schedule] hold is {self.hold} and floor {self.floor}; both must be from 0 to 1"
            )

    def scale(self, step: int) -> float:
        """Return the factor of the peak rate for step 0, 1, ..."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        decay_start = max(self.warmup, int(self.hold * self.steps))
        left = min(1.0, (self.steps - step) / max(1, self.steps - decay_start))
        if self.shape == "cosine":
            left = 0.5 - 0.5 * math.cos(math.pi * left)
        return min(rise, self.floor + (1 - self.floor) * left)


# --- Muon


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for 2-D weights, and for 3-D ones as stacks of matrices.

    The rate may be a tensor on the device, which a captured step reads anew.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float | Tensor,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(tuple(weight.shape[-2:]), []).append(weight)
            for weights in by_shape.values():
                for portion in _portions(weights):
                    self._update(portion, group)

    def _update(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            if "momentum" not in self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum"] for weight in weights]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        # Nesterov momentum.
        nesterov = torch._foreach_mul(grads, 1 - group["momentum"])
        torch._foreach_add_(nesterov, buffers, alpha=group["momentum"])
        rows, columns = weights[0].shape[-2:]
        # A sharded matrix is gathered to be orthogonalized.
        stacked = torch.cat([full_tensor(x).reshape(-1, rows, columns) for x in nesterov])
        sizes = [weight.numel() // (rows * columns) for weight in weights]
        lr, shape_factor = group["lr"], max(1.0, rows / columns) ** 0.5
        if group["weight_decay"]:
            torch._foreach_mul_(list(weights), 1 - lr * group["weight_decay"])
        update = orthogonalize(stacked).to(weights[0].dtype)
        if isinstance(lr, Tensor):
            update, scale = update * (-shape_factor * lr), 1.0
        else:
            scale = -lr * shape_factor
        pieces = torch.split(update.contiguous(), sizes)
        updates = [shard_like(p.reshape(w.shape), w) for p, w in zip(pieces, weights, strict=True)]
        torch._foreach_add_(list(weights), updates, alpha=scale)


def _portions(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group weights into portions of at most `MAX_STACKED_ELEMENTS`."""
    portion: list[Tensor] = []
    for weight in weights:
        size = sum(w.numel() for w in portion)
        if portion and size + weight.numel() > MAX_STACKED_ELEMENTS:
            yield portion
            portion = []
        portion.append(weight)
    yield portion


def orthogonalize(matrices_KRC: Tensor) -> Tensor:
    """Bring the singular values of each matrix near 1."""
    a, b, c = NEWTON_SCHULZ
    on_gpu = matrices_KRC.device.type == "cuda"
    x: Tensor = matrices_KRC.to(torch.bfloat16 if on_gpu else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    x = x.mT if is_tall else x
    return x


def is_muon_weight(name: str, weight: Tensor) -> bool:
    """True for hidden matrices; AdamW trains embeddings, routers and vectors."""
    return weight.ndim >= 2 and "embed_tokens" not in name and "router" not in name


# --- a step as a CUDA graph


class CapturedStep:
    """Warms up a function, then replays it as a CUDA graph.

    The function must use the same memory every time and must not branch on device values.
    """

    def __init__(self, function: StepFunction, capture: Capture) -> None:
        self.function, self.capture = function, capture
        self.calls = 0
        self.replay: StepFunction | None = None

    @property
    def is_captured(self) -> bool:
        return self.replay not in (None, self.function)

    def forget(self) -> None:
        """Warm up again, since the graph's memory is no longer used."""
        self.calls, self.replay = 0, None

    def __call__(self) -> Tensor:
        self.calls += 1
        if self.calls <= UNCAPTURED_STEPS:
            return self.function()
        if self.replay is None:
            self.replay = self._capture()
        return self.replay()

    def _capture(self) -> StepFunction:
        try:
            return self.capture(self.function)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(
                f"the optimizer step could not be captured as a CUDA graph ({reason}); it runs "
                "launch by launch, and somewhat slower",
                stacklevel=2,
            )
            return self.function


def cuda_graph(function: StepFunction) -> StepFunction:
    """Capture a function, without running it; each replay returns a copy of its output."""
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads, such as those that copy batches, may use the GPU meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = function()
    finally:
        # A capture that fails does not leave its own stream.
        torch.cuda.set_stream(stream)

    def replay() -> Tensor:
        graph.replay()
        return out.clone()

    return replay


def can_capture(weights: Sequence[Tensor]) -> bool:
    """True if a step can be captured as a CUDA graph and gains from it."""
    # Only work on the current GPU can be captured.
    devices = {weight.device for weight in weights}
    on_gpu = all(d.type == "cuda" and d.index == torch.cuda.current_device() for d in devices)
    is_sharded = any(hasattr(weight, "full_tensor") for weight in weights)
    size = sum(weight.numel() for weight in weights)
    return on_gpu and not is_sharded and size <= MAX_CAPTURED_ELEMENTS


# --- mixed precision


class MixedPrecisionOptimizer:
    """Steps float32 master weights and copies them, rounded, into the model.

    A float32 model is its own master copy.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimSettings,
        dtype: torch.dtype | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`dtype`: convert the model to it, after its weights were copied.

        `capture`: how a step is captured; None: as a CUDA graph, where that is of use.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.model_weights: list[Tensor] = [weight for _, weight in named]
        dtypes = {weight.dtype for weight in self.model_weights} | ({dtype} if dtype else set())
        self.is_float32 = dtypes == {torch.float32}
        self.weights: list[Tensor] = (
            list(self.model_weights)
            if self.is_float32
            else [nn.Parameter(w.detach().float().clone()) for w in self.model_weights]
        )
        if dtype is not None:
            model.to(dtype)
        self.settings = settings
        self.capture = cuda_graph if capture is None and can_capture(self.weights) else capture
        # A captured step reads gradients from the same memory every time.
        self.grads = [torch.zeros_like(w) for w in self.weights] if self.capture else None
        self.optimizers = self._make_optimizers()
        self.captured = (
            None if self.capture is None else CapturedStep(self._clip_and_update, self.capture)
        )

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        s = self.settings
        pairs = list(zip(self.names, self.weights, strict=True))
        matrices = [w for name, w in pairs if s.muon and is_muon_weight(name, w)]
        rest = [w for name, w in pairs if not (s.muon and is_muon_weight(name, w))]
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(Muon(matrices, s.muon_lr, s.momentum, s.weight_decay))
        if rest:
            runtime = {"fused": True, "capturable": True} if self.capture else {}
            adam = {"lr": s.adam_lr, "betas": s.betas, "eps": s.eps, "weight_decay": s.weight_decay}
            optimizers.append(torch.optim.AdamW(rest, **adam, **runtime))  # type: ignore[arg-type]
        for optimizer in optimizers:
            # Its first steps are not captured, on purpose.
            optimizer._warned_capturable_if_run_uncaptured = True
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
                if self.capture:
                    group["lr"] = torch.zeros((), device=self.weights[0].device)
        return optimizers

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """Update the weights at `scale` times the peak rates; return the gradient norm."""
        self._collect_gradients()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                lr = group["peak"] * scale
                if self.capture is None:
                    group["lr"] = lr
                else:
                    group["lr"].fill_(lr)
        norm = self._clip_and_update() if self.captured is None else self.captured()
        for weight in (*self.model_weights, *self.weights):
            weight.grad = None
        return norm

    def _collect_gradients(self) -> None:
        """Copy the model's gradients to the master weights, in float32."""
        grads = [weight.grad for weight in self.model_weights if weight.grad is not None]
        assert len(grads) == len(self.model_weights), "a trained weight has no gradient"
        if self.grads is not None:
            torch._foreach_copy_(self.grads, grads)
            grads = self.grads
        if self.grads is not None or not self.is_float32:
            for master, grad in zip(self.weights, grads, strict=True):
                master.grad = grad.float()

    @torch.no_grad()
    def _clip_and_update(self) -> Tensor:
        norm = full_tensor(nn.utils.clip_grad_norm_(self.weights, self.settings.clip))
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.is_float32:
            torch._foreach_copy_(self.model_weights, self.weights)
        return norm

    def state(self) -> dict[str, Any]:
        return {
            "weights": dict(zip(self.names, self.weights, strict=True)),
            "optimizers": [_optimizer_state(optimizer) for optimizer in self.optimizers],
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Load a state, full or sharded, of the same weights."""
        if state["weights"].keys() != set(self.names):
            raise ConfigError("the saved state is of other weights than the recipe trains")
        for name, weight in zip(self.names, self.weights, strict=True):
            weight.copy_(shard_like(state["weights"][name], weight))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            by_weight = {i: shard_state_like(x, weights[i]) for i, x in saved["state"].items()}
            groups = [
                {**old, **{key: new[key] for key in RUNTIME_KEYS if key in new}}
                for new, old in zip(optimizer.param_groups, saved["param_groups"], strict=True)
            ]
            optimizer.load_state_dict({"state": by_weight, "param_groups": groups})
        if not self.is_float32:
            torch._foreach_copy_(self.model_weights, self.weights)
        if self.captured is not None:
            self.captured.forget()


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, with rates as plain numbers."""
    state: dict[str, Any] = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])
    return state
