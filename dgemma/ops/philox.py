"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011) in plain tensor arithmetic.

A number depends on its key and counter alone, so it is the same on every device, in any batch and
in any order. 32-bit words travel in int64 tensors.
"""

from torch import Tensor

WORD = 0xFFFFFFFF
HALF = 0xFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


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
