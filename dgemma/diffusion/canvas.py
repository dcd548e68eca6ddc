"""The canvas and its noise: the forward process, shared by sampler and trainer.

A canvas is a block of tokens being refined. Fresh, it is uniform noise; pinned positions hold
their token from the start and for ever. Randomness is counter-based: each number belongs to
(seed, choice, retry, block, step, position) and never to a place in a batch.

L canvas length, N steps (0 is the fresh canvas), D width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dgemma.diffusion.philox import WORD, philox_on_host
from dgemma.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """One row's canvas after some number of steps. A step makes a new one."""

    tokens_L: Tensor  # what the model sees next
    pinned_L: Tensor  # positions that keep their token
    kept_L: Tensor  # positions whose token was decided, not renoised, in the last step
    guess_L: Tensor  # what would be committed now; -1 before the first step
    entropy_L: Tensor  # nats at each position in the last step; infinite before the first
    soft_LD: Tensor | None  # self-conditioning for the next step; None before the first
    settled: Tensor  # bool, 0-d: no more steps needed
    steady_steps: Tensor  # int, 0-d: how many steps in a row the guess has not changed
    reopened_L: Tensor | None = None  # positions that take no self-conditioning into the next step
    num_steps: int = 0

    @property
    def length(self) -> int:
        return self.tokens_L.shape[0]


@dataclass(frozen=True, slots=True)
class Pins:
    """Tokens that must stand at given positions of a canvas."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.positions) != len(self.tokens) or len(set(self.positions)) < len(self.tokens):
            raise UsageError("pins need one token for each of their positions, each given once")


NO_PINS = Pins((), ())


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """All the noise one block may use: row n belongs to step n."""

    uniform_NL: Tensor  # decides draws, float64 in [0, 1)
    tokens_NL: Tensor  # replaces undecided tokens; row 0 is the fresh canvas
    host: "BlockNoise | None" = None  # the same in host memory, where this is not

    def on_host(self) -> "BlockNoise":
        return self if self.host is None else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The source of a request's randomness."""

    seed: int = 0
    choice: int = 0  # which of several answers to the same request
    retry: int = 0  # which attempt at a block that went wrong

    def __post_init__(self) -> None:
        limits = {"seed": 1 << 64, "choice": 1 << 16, "retry": 1 << 16}
        for name, limit in limits.items():
            if not 0 <= getattr(self, name) < limit:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 to {limit - 1}")

    def block(
        self, block: int, steps: int, length: int, vocab: int, device: torch.device
    ) -> BlockNoise:
        """The noise of one block of `length` positions and up to `steps` steps."""
        position_1L = np.arange(length, dtype=np.uint64)[None]
        step_N1 = np.arange(steps + 1, dtype=np.uint64)[:, None]
        block_11 = np.full((1, 1), block, dtype=np.uint64)
        branch_11 = np.full((1, 1), self._branch, dtype=np.uint64)
        counter = (position_1L, step_N1, block_11, branch_11)
        a, b, c, _ = philox_on_host(counter, (self.seed & WORD, self.seed >> 32))
        # Both in one piece of memory, which takes one copy to a device.
        both_2NL = np.empty((2, steps + 1, length), dtype=np.int64)
        # 53 bits of the first two words make the float64; the third is scaled to the vocabulary.
        bits_NL = (a << np.uint64(21)) | (b >> np.uint64(11))
        np.multiply(bits_NL, 2.0**-53, out=both_2NL[0].view(np.float64))
        both_2NL[1] = (c * np.uint64(vocab)) >> np.uint64(32)
        host_2NL = torch.from_numpy(both_2NL)
        on_host = BlockNoise(host_2NL[0].view(torch.float64), host_2NL[1])
        if device.type == "cpu":
            return on_host
        if device.type == "mps":  # has no float64
            uniform_NL = on_host.uniform_NL.float().clamp(max=1 - 2**-24).to(device)
            return BlockNoise(uniform_NL, on_host.tokens_NL.to(device), on_host)
        uniform_NL, tokens_NL = host_2NL.to(device).unbind()
        return BlockNoise(uniform_NL.view(torch.float64), tokens_NL, on_host)

    @property
    def _branch(self) -> int:
        return (self.choice << 16) | self.retry


def fresh(noise_L: Tensor, pins: Pins = NO_PINS) -> Canvas:
    """A canvas of noise with its pins in place."""
    length, device = noise_L.shape[0], noise_L.device
    outside = [position for position in pins.positions if not 0 <= position < length]
    if outside:
        raise UsageError(f"pins at {outside} lie outside a canvas of {length} tokens")
    tokens_L = noise_L
    pinned_L = torch.zeros(length, dtype=torch.bool, device=device)
    if pins.positions:
        where = torch.tensor(pins.positions, dtype=torch.long, device=device)
        what = torch.tensor(pins.tokens, dtype=noise_L.dtype, device=device)
        tokens_L, pinned_L = noise_L.index_copy(0, where, what), pinned_L.index_fill(0, where, True)
    return Canvas(
        tokens_L=tokens_L,
        pinned_L=pinned_L,
        kept_L=pinned_L,
        guess_L=torch.full_like(noise_L, -1),
        entropy_L=torch.full(noise_L.shape, torch.inf, device=device),
        soft_LD=None,
        settled=torch.zeros((), dtype=torch.bool, device=device),
        steady_steps=torch.zeros((), dtype=torch.long, device=device),
    )


def corrupt(tokens: Tensor, noise: Tensor, uniform: Tensor, level: Tensor) -> Tensor:
    """The forward process: each token turns into its noise with probability `level`."""
    return torch.where(uniform < level, noise, tokens)
