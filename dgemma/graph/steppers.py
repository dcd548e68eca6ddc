"""Which captured work serves a row: the place where an engine asks.

fast = Fast.of(model)                     # None where there are no kernels
after = fast.step(row, cache)             # None: take this step the ordinary way
logits_V = fast.tell(token, cache)        # None: likewise
"""

from collections import OrderedDict

from torch import Tensor

from dgemma.cache import KVCache
from dgemma.denoise import Row
from dgemma.graph.step import Shape, Stepper
from dgemma.graph.token import Teller
from dgemma.model import Gemma
from dgemma.ops.fast import reason_against, switch
from dgemma.stack import Stack, can_fuse

MAX_STEPPERS = 4  # captures kept; each holds a canvas's logits


class Fast:
    """A model's captured passes."""

    def __init__(self, model: Gemma) -> None:
        self.model, self.stack = model, Stack(model)
        self.steppers: OrderedDict[Shape, Stepper] = OrderedDict()  # the one used last is last
        self.teller: Teller | None = None

    @classmethod
    def of(cls, model: Gemma) -> "Fast | None":
        """Lay a model out for its device, and let its passes take kernels; None if it has none."""
        if reason_against(model.embed_tokens.weight.device) is not None or not can_fuse(model):
            return None
        switch(True)
        fast = cls(model)
        model.runner = fast.stack
        return fast

    def step(self, row: Row, cache: KVCache) -> Row | None:
        """The row after one more step; None if it has to be taken the ordinary way."""
        shape = Shape(row.canvas.length, row.sampler.max_steps, row.sampler.rule)
        stepper = self.steppers.pop(shape, None) or Stepper(self.model, self.stack, shape)
        self.steppers[shape] = stepper
        if len(self.steppers) > MAX_STEPPERS:
            self.steppers.popitem(last=False)
        return stepper.step(row, cache) if stepper.takes(row) else None

    def tell(self, token: int, cache: KVCache) -> Tensor | None:
        """Commit a token and return the logits behind it; None, and nothing done, if it cannot."""
        if self.teller is None:
            self.teller = Teller(self.model, self.stack)
        return self.teller.tell(token, cache)
