"""Numbers of few bits, with a factor for each row: what the 8-bit products read."""

from typing import NamedTuple

from torch import Tensor


class Quantized(NamedTuple):
    """Numbers and the factor of each row: `numbers * factor[..., None]` is what they stand for."""

    numbers: Tensor  # int8 or e4m3
    factor: Tensor  # float32

    def whole(self) -> Tensor:
        return self.numbers.float() * self.factor[..., None]
