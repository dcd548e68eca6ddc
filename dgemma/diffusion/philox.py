"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011) in plain tensor arithmetic.

A number depends on its key and counter alone, so it is the same on every device, in any batch and
in any order. 32-bit words travel in int64 tensors. On the host the same numbers are made of numpy
arrays of uint64, in a fraction of the time: a device would start some two hundred tiny kernels.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

WORD = 0xFFFFFFFF
HALF = 0xFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]
HostWord = NDArray[np.uint64]
HostWords = tuple[HostWord, HostWord, HostWord, HostWord]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random 32-bit words for each counter; counters are four words that broadcast."""
    a, b, c, d = counter
    key_0, key_1 = key
    for _ in range(ROUNDS):
        low_a, high_a = _multiply(a, MULTIPLIERS[0])
        low_c, high_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ key_0, low_c, high_a ^ d ^ key_1, low_a
        key_0, key_1 = (key_0 + WEYL[0]) & WORD, (key_1 + WEYL[1]) & WORD
    return a, b, c, d


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The low and the high word of a product, by halves: a compiler may not count on overflow."""
    low = word * (multiplier & HALF)
    high = word * (multiplier >> 16) + (low >> 16)
    return (high & HALF) << 16 | low & HALF, high >> 16


def philox_on_host(counter: HostWords, key: tuple[int, int]) -> HostWords:
    """The same for numpy arrays. What varies along one axis alone stays small while it does."""
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
