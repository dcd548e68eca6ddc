"""Canvas state and counter-based noise.

A canvas is a block of tokens being refined. It starts as uniform noise; pinned positions keep
their token throughout. Randomness is counter-based (Philox): each number is keyed by (seed, choice,
retry, block, step, position), so it is the same on every device, in any batch and in any order.

L canvas length, N steps (0 is the initial canvas), D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dgemma.errors import UsageError, require

WORD = 0xFFFFFFFF
HALF = 0xFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]
HostWord = NDArray[np.uint64]
HostWords = tuple[HostWord, HostWord, HostWord, HostWord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """A canvas after some number of steps. A step makes a new one."""

    tokens_L: Tensor  # what the model sees next
    pinned_L: Tensor  # positions that keep their token
    accepted_L: Tensor  # positions whose token was accepted, not renoised, in the last step
    guess_L: Tensor  # argmax, committed if the canvas ends now; -1 before the first step
    entropy_L: Tensor  # nats at each position in the last step; infinite before the first
    soft_LD: Tensor | None  # self-conditioning for the next step; None before the first
    converged: Tensor  # bool, 0-d: no more steps needed
    stable_steps: Tensor  # int, 0-d: steps in a row for which the guess has not changed
    reopened_L: Tensor | None = None  # positions without self-conditioning in the next step
    num_steps: int = 0

    @property
    def length(self) -> int:
        return self.tokens_L.shape[0]


@dataclass(frozen=True, slots=True)
class Pins:
    """Positions of a canvas and the tokens they keep."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.positions) != len(self.tokens) or len(set(self.positions)) < len(self.tokens):
            raise UsageError("pins need exactly one token per position, and each position once")


NO_PINS = Pins((), ())


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """All noise of one block: row n belongs to step n."""

    uniform_NL: Tensor  # decides draws, float64 in [0, 1)
    tokens_NL: Tensor  # replaces tokens that are not accepted; row 0 is the initial canvas
    host: "BlockNoise | None" = None  # CPU copy, if the tensors are on a GPU

    def to_cpu(self) -> "BlockNoise":
        return self if self.host is None else self.host

    def starting_from(self, tokens: Sequence[int]) -> "BlockNoise":
        """Return this noise with given tokens as the initial canvas; -1 keeps the noise."""
        if not tokens:
            return self
        first_L = self.tokens_NL[0].clone()
        given_L = torch.tensor(tokens, device=first_L.device)
        first_L[: len(tokens)] = torch.where(given_L >= 0, given_L, first_L[: len(tokens)])
        tokens_NL = torch.cat([first_L[None], self.tokens_NL[1:]])
        host = None if self.host is None else self.host.starting_from(tokens)
        return BlockNoise(self.uniform_NL, tokens_NL, host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The keys of a request's random numbers."""

    seed: int = 0
    choice: int = 0  # index among several answers to the same request
    retry: int = 0  # index among the attempts at a block that failed the output check

    def __post_init__(self) -> None:
        limits = {"seed": 1 << 64, "choice": 1 << 16, "retry": 1 << 16}
        for name, limit in limits.items():
            value = getattr(self, name)
            require(0 <= value < limit, name, value, f"0 to {limit - 1}")

    def block(
        self, block: int, steps: int, length: int, vocab: int, device: torch.device
    ) -> BlockNoise:
        """Return the noise of one block of `length` positions and up to `steps` steps."""
        position_1L = np.arange(length, dtype=np.uint64)[None]
        step_N1 = np.arange(steps + 1, dtype=np.uint64)[:, None]
        block_11 = np.full((1, 1), block, dtype=np.uint64)
        branch_11 = np.full((1, 1), self._branch, dtype=np.uint64)
        counter = (position_1L, step_N1, block_11, branch_11)
        a, b, c, _ = philox_numpy(counter, (self.seed & WORD, self.seed >> 32))
        # One buffer for both, so that one copy moves them to the device.
        both_2NL = np.empty((2, steps + 1, length), dtype=np.int64)
        # 53 bits of the first two words make the float64; the third is scaled to the vocabulary.
        bits_NL = (a << np.uint64(21)) | (b >> np.uint64(11))
        np.multiply(bits_NL, 2.0**-53, out=both_2NL[0].view(np.float64))
        both_2NL[1] = (c * np.uint64(vocab)) >> np.uint64(32)
        host_2NL = torch.from_numpy(both_2NL)
        on_cpu = BlockNoise(host_2NL[0].view(torch.float64), host_2NL[1])
        if device.type == "cpu":
            return on_cpu
        if device.type == "mps":  # has no float64
            uniform_NL = on_cpu.uniform_NL.float().clamp(max=1 - 2**-24).to(device)
            return BlockNoise(uniform_NL, on_cpu.tokens_NL.to(device), on_cpu)
        uniform_NL, tokens_NL = host_2NL.to(device).unbind()
        return BlockNoise(uniform_NL.view(torch.float64), tokens_NL, on_cpu)

    @property
    def _branch(self) -> int:
        return (self.choice << 16) | self.retry


def initial_canvas(noise_L: Tensor, pins: Pins = NO_PINS) -> Canvas:
    """Return a canvas of noise with its pins set."""
    length, device = noise_L.shape[0], noise_L.device
    outside = [position for position in pins.positions if not 0 <= position < length]
    if outside:
        raise UsageError(f"pins at {outside} are outside a canvas of {length} tokens")
    tokens_L = noise_L
    pinned_L = torch.zeros(length, dtype=torch.bool, device=device)
    if pins.positions:
        where = torch.tensor(pins.positions, dtype=torch.long, device=device)
        what = torch.tensor(pins.tokens, dtype=noise_L.dtype, device=device)
        tokens_L, pinned_L = noise_L.index_copy(0, where, what), pinned_L.index_fill(0, where, True)
    return Canvas(
        tokens_L=tokens_L,
        pinned_L=pinned_L,
        accepted_L=pinned_L,
        guess_L=torch.full_like(noise_L, -1),
        entropy_L=torch.full(noise_L.shape, torch.inf, device=device),
        soft_LD=None,
        converged=torch.zeros((), dtype=torch.bool, device=device),
        stable_steps=torch.zeros((), dtype=torch.long, device=device),
    )


def corrupt(tokens: Tensor, noise: Tensor, uniform: Tensor, level: Tensor) -> Tensor:
    """Apply the forward process: replace each token by its noise with probability `level`."""
    return torch.where(uniform < level, noise, tokens)


# --- Philox 4x32-10 (Salmon et al., SC 2011)


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Return four random 32-bit words per counter; a counter is four words that broadcast.

    Integer tensor arithmetic only, so all devices give the same words.
    """
    a, b, c, d = counter
    key_0, key_1 = key
    for _ in range(ROUNDS):
        low_a, high_a = _multiply(a, MULTIPLIERS[0])
        low_c, high_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ key_0, low_c, high_a ^ d ^ key_1, low_a
        key_0, key_1 = (key_0 + WEYL[0]) & WORD, (key_1 + WEYL[1]) & WORD
    return a, b, c, d


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the low and high word of a product, computed by halves to avoid 64-bit overflow."""
    low = word * (multiplier & HALF)
    high = word * (multiplier >> 16) + (low >> 16)
    return (high & HALF) << 16 | low & HALF, high >> 16


def philox_numpy(counter: HostWords, key: tuple[int, int]) -> HostWords:
    """Compute `philox` in numpy: on a GPU it would launch some two hundred tiny kernels."""
    a, b, c, d = counter
    key_0, key_1 = key
    word, half = np.uint64(WORD), np.uint64(32)
    for _ in range(ROUNDS):
        by_a, by_c = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a = (by_c >> half) ^ b ^ np.uint64(key_0)
        c = (by_a >> half) ^ d ^ np.uint64(key_1)
        b, d = by_c & word, by_a & word
        key_0, key_1 = (key_0 + WEYL[0]) & WORD, (key_1 + WEYL[1]) & WORD
    return a, b, c, d
