"""What moves the weights: Muon for matrices, AdamW for the rest, on float32 masters.

Muon turns the momentum of each matrix into the nearest orthogonal one by a Newton-Schulz iteration
(Jordan et al., 2024). Stacked experts are many matrices; matrices of one shape go through together.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dgemma.errors import ConfigError
from dgemma.train.replay import Capture, Replay, cuda_graph
from dgemma.train.shards import like, spread, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
TOGETHER = 1 << 28  # numbers that are orthogonalised at once; a large stack alone may be more
# Numbers up to which a step is captured. It keeps its memory for good, and with more of them the
# GPU is slower than the host in any case.
CAPTURED = 1 << 28
# How AdamW is run, which is no matter of a saved state.
OWN = ("lr", "foreach", "fused", "capturable")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSettings:
    """Learning rates are peaks; the schedule scales both."""

    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    muon: bool = True  # False: AdamW for all

    def __post_init__(self) -> None:
        for name in ("muon_lr", "adam_lr", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"[optim] {name} is {getattr(self, name)}; it must be 0 or more")
        # A clip of 0 is no absence of clipping: it would leave no gradient.
        for name in ("clip", "eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"[optim] {name} is {getattr(self, name)}; it must be above 0")
        for name, shares in (("momentum", [self.momentum]), ("betas", self.betas)):
            if not all(0 <= share < 1 for share in shares):
                given = ", ".join(map(str, shares))
                raise ConfigError(f"[optim] {name} is {given}; it must be 0 or more, below 1")


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for weights of two dimensions, or of three as stacks of matrices.

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
                for together in _portions(weights):
                    self._move(together, group)

    def _move(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            if "momentum" not in self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum"] for weight in weights]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        # Nesterov: look ahead by one more step of momentum.
        ahead = torch._foreach_mul(grads, 1 - group["momentum"])
        torch._foreach_add_(ahead, buffers, alpha=group["momentum"])
        rows, columns = weights[0].shape[-2:]
        # A matrix can only be orthogonalised whole.
        stacked = torch.cat([whole(update).reshape(-1, rows, columns) for update in ahead])
        sizes = [weight.numel() // (rows * columns) for weight in weights]
        lr, further = group["lr"], max(1.0, rows / columns) ** 0.5
        if group["weight_decay"]:
            torch._foreach_mul_(list(weights), 1 - lr * group["weight_decay"])
        found = orthogonal(stacked).to(weights[0].dtype)
        if isinstance(lr, Tensor):
            found, scale = found * (-further * lr), 1.0
        else:
            scale = -lr * further
        pieces = torch.split(found.contiguous(), sizes)
        updates = [like(p.reshape(w.shape), w) for p, w in zip(pieces, weights, strict=True)]
        torch._foreach_add_(list(weights), updates, alpha=scale)


def _portions(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Weights in portions that fit the memory they are gathered in."""
    portion: list[Tensor] = []
    for weight in weights:
        if portion and sum(w.numel() for w in portion) + weight.numel() > TOGETHER:
            yield portion
            portion = []
        portion.append(weight)
    yield portion


def orthogonal(matrices_KRC: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1."""
    a, b, c = NEWTON_SCHULZ
    on_gpu = matrices_KRC.device.type == "cuda"
    x: Tensor = matrices_KRC.to(torch.bfloat16 if on_gpu else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    x = x.mT if is_tall else x
    return x


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon takes a weight: hidden matrices, not tables, routers or anything flat."""
    return weight.ndim >= 2 and "embed_tokens" not in name and "router" not in name


class Masters:
    """Float32 copies of a model's weights, which the optimizers move; the model holds them rounded.

    A float32 model is its own master. `weights` and `model` change, and nothing else here.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimSettings,
        dtype: torch.dtype | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`dtype`: round the model to it, after its weights were copied.

        `capture`: how a step becomes one piece of work; None: as a CUDA graph, where one is of use.
        """
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in named]
        self.rounded: list[Tensor] = [weight for _, weight in named]
        kinds = {weight.dtype for weight in self.rounded} | ({dtype} if dtype else set())
        self.is_own = kinds == {torch.float32}
        self.weights: list[Tensor] = (
            list(self.rounded)
            if self.is_own
            else [nn.Parameter(w.detach().float().clone()) for w in self.rounded]
        )
        if dtype is not None:
            model.to(dtype)
        self.settings = settings
        self.capture = cuda_graph if capture is None and can_capture(self.weights) else capture
        # A captured step finds gradients where they always are.
        self.grads = [torch.zeros_like(w) for w in self.weights] if self.capture else None
        self.optimizers = self._optimizers()
        self.replay = self._replay()

    def _replay(self) -> Replay | None:
        return None if self.capture is None else Replay(self._advance, self.capture)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        s = self.settings
        pairs = list(zip(self.names, self.weights, strict=True))
        matrices = [w for name, w in pairs if s.muon and is_matrix(name, w)]
        rest = [w for name, w in pairs if not (s.muon and is_matrix(name, w))]
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(Muon(matrices, s.muon_lr, s.momentum, s.weight_decay))
        if rest:
            own = {"fused": True, "capturable": True} if self.capture else {}
            optimizers.append(
                torch.optim.AdamW(
                    rest, lr=s.adam_lr, betas=s.betas, eps=s.eps, weight_decay=s.weight_decay, **own
                )
            )
        for optimizer in optimizers:
            # Its first steps are not captured, and that is as it should be.
            optimizer._warned_capturable_if_run_uncaptured = True
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
                if self.capture:
                    group["lr"] = torch.zeros((), device=self.weights[0].device)
        return optimizers

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """Move the weights by their gradients at `scale` times the peak rates; the norm before."""
        self._take_gradients()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = group["peak"] * scale
                if self.capture is None:
                    group["lr"] = rate
                else:
                    group["lr"].fill_(rate)
        norm = self._advance() if self.replay is None else self.replay()
        for weight in (*self.rounded, *self.weights):
            weight.grad = None
        return norm

    def _take_gradients(self) -> None:
        """Give the masters the model's gradients, in float32."""
        grads = [weight.grad for weight in self.rounded if weight.grad is not None]
        assert len(grads) == len(self.rounded), "a weight that is trained got no gradient"
        if self.grads is not None:
            torch._foreach_copy_(self.grads, grads)
            grads = self.grads
        if self.grads is not None or not self.is_own:
            for master, grad in zip(self.weights, grads, strict=True):
                master.grad = grad.float()

    @torch.no_grad()
    def _advance(self) -> Tensor:
        norm = whole(nn.utils.clip_grad_norm_(self.weights, self.settings.clip))
        for optimizer in self.optimizers:
            optimizer.step()
        if not self.is_own:
            torch._foreach_copy_(self.rounded, self.weights)
        return norm

    def state(self) -> dict[str, Any]:
        return {
            "weights": dict(zip(self.names, self.weights, strict=True)),
            "optimizers": [_saved(optimizer) for optimizer in self.optimizers],
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Take a state, whole or of this process; it must be of the same weights."""
        if state["weights"].keys() != set(self.names):
            raise ConfigError("the saved state is of other weights than the recipe trains")
        for name, weight in zip(self.names, self.weights, strict=True):
            weight.copy_(like(state["weights"][name], weight))
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            own = [weight for group in optimizer.param_groups for weight in group["params"]]
            remembered = {i: spread(one, own[i]) for i, one in saved["state"].items()}
            groups = [
                {**theirs, **{key: mine[key] for key in OWN if key in mine}}
                for mine, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True)
            ]
            optimizer.load_state_dict({"state": remembered, "param_groups": groups})
        if not self.is_own:
            torch._foreach_copy_(self.rounded, self.weights)
        self.replay = self._replay()  # what was captured is of other memory


def can_capture(weights: Sequence[Tensor]) -> bool:
    """Whether a step can be captured as a CUDA graph, and should be."""
    # Only the current GPU's work is: another's would be done once, and left out of the graph.
    devices = {weight.device for weight in weights}
    on_gpu = all(d.type == "cuda" and d.index == torch.cuda.current_device() for d in devices)
    is_spread = any(hasattr(weight, "full_tensor") for weight in weights)
    return on_gpu and not is_spread and sum(weight.numel() for weight in weights) <= CAPTURED


def _saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer remembers, with rates as plain numbers."""
    state: dict[str, Any] = optimizer.state_dict()
    for group in state["param_groups"]:
        group["lr"] = float(group["lr"])
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warm up, hold, then fall to `floor`, in a line or along a cosine."""

    steps: int
    warmup: int = 100
    hold: float = 0.4  # share of the steps until which the rate is held
    floor: float = 0.0  # share of the peak rate at the end
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise ConfigError(
                f"[schedule] has {self.steps} steps and a warm-up of {self.warmup}; it needs at "
                "least 1 step, and a warm-up of 0 or more"
            )
        if not (0 <= self.hold <= 1 and 0 <= self.floor <= 1):
            raise ConfigError(
                f"[schedule] hold is {self.hold} and floor {self.floor}; both are shares, 0 to 1"
            )

    def scale(self, step: int) -> float:
        """Of the peak rate, for step 0, 1, ..."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        begin = max(self.warmup, int(self.hold * self.steps))
        left = min(1.0, (self.steps - step) / max(1, self.steps - begin))
        if self.shape == "cosine":
            left = 0.5 - 0.5 * math.cos(math.pi * left)
        return min(rise, self.floor + (1 - self.floor) * left)
