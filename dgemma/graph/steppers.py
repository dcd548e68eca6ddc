"""Which captured work serves a row: the place where an engine asks.

fast = Fast.of(model)                     # None where passes cannot be captured
after = fast.step(row, cache)             # None: take this step the ordinary way
after = fast.first(block, row, cache)     # the same, with a commit before it
logits_V = fast.tell(token, cache)        # None: likewise

`Fast.of` is also where it is decided which kernels run at all.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dgemma.cache import KVCache
from dgemma.denoise import Row
from dgemma.graph.capture import new_pool
from dgemma.graph.check import DeviceFault, Verdicts, check
from dgemma.graph.memory import Shape
from dgemma.graph.record import FORM, facts, recall, remember
from dgemma.graph.step import Stepper
from dgemma.graph.token import Committer, Teller
from dgemma.model import Gemma
from dgemma.ops.fast import FAMILIES, decide, reason_against
from dgemma.stack import Stack, can_fuse, layers_of

MAX_STEPPERS = 4  # captures kept; each holds a canvas's logits
STEPS = 64  # a capture takes so many steps at least: samplers that differ in their number share it

logger = logging.getLogger("dgemma")
Result = TypeVar("Result")


class Fast:
    """A model's captured passes."""

    def __init__(self, model: Gemma, stack: Stack | None = None) -> None:
        self.model, self.stack = model, stack or Stack(model)
        self.steppers: OrderedDict[Shape, Stepper] = OrderedDict()  # the one used last is last
        self.committers: dict[int, Committer] = {}
        self.teller: Teller | None = None
        self.pool = new_pool(model.embed_tokens.weight.device)
        self.is_broken = False  # a capture failed: from then on the ordinary way is taken

    @classmethod
    def of(cls, model: Gemma) -> "Fast | None":
        """Lay a model out for its device and let it take kernels, those that a check passed.

        None where passes cannot be captured, since there are no kernels, or not all that it takes.
        """
        weight = model.embed_tokens.weight
        if reason_against(weight.device, weight.dtype) is not None or not can_fuse(model):
            return None
        if weight.device.type == "cuda":
            from dgemma.ops.kernels.launch import switch_early

            switch_early(True)  # before the check, which so covers it
        stack = Stack(model)
        verdicts = judge(model, stack)
        for family, reason in verdicts.items():
            if reason:
                logger.warning("no kernels for %s: %s", family, reason)
        passed = [family for family in FAMILIES if not verdicts.get(family, "unknown")]
        decide(weight.device, passed)
        model.runner = stack
        return cls(model, stack) if len(passed) == len(FAMILIES) else None

    def step(self, row: Row, cache: KVCache) -> Row | None:
        """The row after one more step; None if it has to be taken the ordinary way."""
        stepper = self._stepper(row)
        return self._try(lambda: stepper.step(row, cache)) if stepper is not None else None

    def first(self, tokens: Sequence[int], row: Row, cache: KVCache) -> Row | None:
        """The same for a canvas's first step, and a block is committed before it."""
        if len(tokens) != row.canvas.length or row.canvas.num_steps:
            return None
        stepper = self._stepper(row)
        return self._try(lambda: stepper.first(tokens, row, cache)) if stepper is not None else None

    def commit(self, tokens: Sequence[int], cache: KVCache) -> bool:
        """Commit a block of the model's own canvas length; False, and nothing done, if not."""
        length = self.model.config.canvas_length
        if len(tokens) != length:
            return False
        if length not in self.committers:
            self.committers[length] = Committer(self.model, self.stack, length, self.pool)
        return self._try(lambda: self.committers[length].commit(tokens, cache)) or False

    def tell(self, token: int, cache: KVCache) -> Tensor | None:
        """Commit a token and return the logits behind it; None, and nothing done, if it cannot."""
        if self.teller is None:
            self.teller = Teller(self.model, self.stack, self.pool)
        teller = self.teller
        return self._try(lambda: teller.tell(token, cache))

    def _stepper(self, row: Row) -> Stepper | None:
        """What takes a row's steps, if anything does."""
        steps = -(-row.sampler.max_steps // STEPS) * STEPS
        shape = Shape(row.canvas.length, steps, row.sampler.rule)
        if self.is_broken or row.walker is not None or row.sampler.temperature != 1:
            return None
        stepper = self.steppers.pop(shape, None)
        stepper = stepper or Stepper(self.model, self.stack, shape, self.pool)
        self.steppers[shape] = stepper
        if len(self.steppers) > MAX_STEPPERS:
            self.steppers.popitem(last=False)
        return stepper if stepper.takes(row) else None

    def _try(self, work: Callable[[], Result]) -> Result | None:
        """Do it; where it cannot be captured, say so once and never try again."""
        if self.is_broken:
            return None
        try:
            return work()
        except RuntimeError as error:
            if self.pool is None:
                raise  # nothing is captured here: it is an error like any other
            self.is_broken = True
            self.steppers.clear()
            self.committers.clear()
            self.teller = None
            logger.warning("passes are not captured from now on: %s", str(error).splitlines()[0])
            return None


def judge(model: Gemma, stack: Stack) -> Verdicts:
    """What a check says of every family on this model, now or at an earlier start."""
    weight = model.embed_tokens.weight
    of = {**facts(model.config, weight.dtype, weight.device), FORM: _form(model)}
    known = recall(of) or {}
    if all(family in known for family in FAMILIES):
        return known
    try:
        verdicts = check(model, stack, known)
    except torch.cuda.OutOfMemoryError:
        return dict.fromkeys(FAMILIES, "there was no memory to check it with")
    except DeviceFault as fault:
        remember(of, fault.verdicts)  # the next start goes on behind it
        raise
    remember(of, verdicts)
    return verdicts


def _form(model: Gemma) -> str:
    """How the weights are stored, by the first layer's modules."""
    kinds = {type(part).__name__ for part in layers_of(model)[0].modules()}
    return " ".join(sorted(kinds))
