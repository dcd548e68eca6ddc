"""Which captured work serves a row: the place where an engine asks.

fast = Fast.of(model)                     # None where passes cannot be captured
after = fast.step(row, cache)             # None: take this step the ordinary way
after = fast.first(block, row, cache)     # the same, with a commit before it
logits_V = fast.tell(token, cache)        # None: likewise

`Fast.of` is also where it is decided which kernels run at all.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar
from weakref import ref

import torch
from torch import Tensor

from dgemma.cache import KVCache
from dgemma.denoise import Row
from dgemma.graph.capture import new_pool
from dgemma.graph.check import DeviceFault, Verdicts, check, still_answers
from dgemma.graph.check_soft import soft_off
from dgemma.graph.memory import Shape
from dgemma.graph.record import FORM, OF, SOFT, facts, recall, remember
from dgemma.graph.rehearsal import rehearse
from dgemma.graph.step import Stepper
from dgemma.graph.token import Committer, Teller
from dgemma.model import Gemma
from dgemma.ops.fast import FAMILIES, decide, reason_against
from dgemma.sampler import Sampler
from dgemma.stack import Stack, can_fuse, layers_of
from dgemma.weights.head import Fp8HeadTable

MAX_STEPPERS = 4  # captures kept; each holds a canvas's logits
STEPS = 64  # a capture takes so many steps at least: samplers that differ in their number share it

# Tokens of a prompt that a captured pass commits. Passes by Python of fewer than some 1500 tokens
# last as long as their launches; for more a capture would gain little and hold much memory.
PROMPTS = (256, 512, 1024)

logger = logging.getLogger("dgemma")
Result = TypeVar("Result")


class Fast:
    """A model's captured passes."""

    def __init__(self, model: Gemma, stack: Stack | None = None) -> None:
        self.model, self.stack = model, stack or Stack(model)
        self.steppers: OrderedDict[Shape, Stepper] = OrderedDict()  # the one used last is last
        self.committers: dict[int, Committer] = {}
        # For each size of commits the first prompt that asked: its row, and how far it was.
        self.asked: dict[int, tuple[ref[KVCache], int]] = {}
        self.teller: Teller | None = None
        self.pool = new_pool(model.embed_tokens.weight.device)
        self.is_broken = False  # a capture failed: from then on the ordinary way is taken...
        self.takes_prompts = True  # ...for prompts alone, if it was one of theirs

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
        if wrong := judge_soft(model):
            logger.warning("no soft embeddings in 8 bits: %s", wrong)
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
        """Commit part of a prompt; False, and nothing done, if it is for the ordinary way.

        The first prompt of a size does not wait for a capture, which lasts as long as many passes:
        the same work is launched piece by piece, so that the same comes of it.
        """
        size = self._size(len(tokens), cache)
        if size is None or not self.takes_prompts:
            return False
        if size not in self.committers:
            self.committers[size] = Committer(self.model, self.stack, size, self.pool)
        committer = self.committers[size]
        comes_again = self._comes_again(size, len(tokens), cache)
        work = partial(committer.commit, tokens, cache, captured=comes_again)
        return self._try(work, self._without_prompts) or False

    def _comes_again(self, size: int, count: int, cache: KVCache) -> bool:
        """Whether a size was asked for by another prompt before."""
        row, length = self.asked.get(size, (ref(cache), cache.length))
        if row() is not cache or length != cache.length:
            return True
        self.asked[size] = (row, length + count)  # where the same prompt would go on
        return False

    def _size(self, count: int, cache: KVCache) -> int | None:
        """The smallest commit that holds so many tokens and that the row's buffers hold."""
        room = min(cache.room.span, cache.room.tokens - cache.length)
        return next((size for size in PROMPTS if count <= size <= room), None)

    def can_step(self, sampler: Sampler) -> bool:
        """Whether canvases of this sampler are stepped by captured passes."""
        return not self.is_broken and sampler.temperature == 1

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
        if row.walker is not None or not self.can_step(row.sampler):
            return None
        stepper = self.steppers.pop(shape, None)
        stepper = stepper or Stepper(self.model, self.stack, shape, self.pool)
        self.steppers[shape] = stepper
        if len(self.steppers) > MAX_STEPPERS:
            self.steppers.popitem(last=False)
        return stepper if stepper.takes(row) else None

    def _try(
        self, work: Callable[[], Result], go_without: Callable[[], str] | None = None
    ) -> Result | None:
        """Do it; where it cannot be captured, say so once and never try again."""
        if self.is_broken:
            return None
        try:
            return work()
        except RuntimeError as error:
            if self.pool is None:
                raise  # nothing is captured here: it is an error like any other
            what = (go_without or self._without_all)()
            reason = (str(error).splitlines() or [""])[0]
            logger.warning("%s are not captured from now on: %s", what, reason)
            return None

    def _without_all(self) -> str:
        self.is_broken, self.teller = True, None
        self.steppers.clear()
        self.committers.clear()
        return "passes"

    def _without_prompts(self) -> str:
        """Theirs are the largest passes: steps may go on where there is no memory for these."""
        self.takes_prompts = False
        self.committers.clear()
        return "prompts"


def judge(model: Gemma, stack: Stack) -> Verdicts:
    """What a check says of every family on this model, now or at an earlier start."""
    weight, of = model.embed_tokens.weight, _facts(model)
    known = recall(of) or {}
    if all(family in known for family in FAMILIES):
        return known
    try:
        if not known and weight.device.type == "cuda":
            _compile_beforehand(model, stack, of)
        verdicts = check(model, stack, known)
    except torch.cuda.OutOfMemoryError:
        return dict.fromkeys(FAMILIES, "there was no memory to check it with")
    except DeviceFault as fault:
        remember(of, fault.verdicts)  # the next start goes on behind it
        raise
    remember(of, verdicts)
    return verdicts


def judge_soft(model: Gemma) -> str:
    """Why soft embeddings in 8 bits are not right here, if they are not: then they are let go."""
    table = model.embed_tokens
    if not isinstance(table, Fp8HeadTable) or table.soft is None:
        return ""
    of = {**_facts(model), OF: SOFT}
    known = recall(of)
    wrong = _check_soft(model, of) if known is None else known["row_stats"]
    if wrong:
        table.forget_soft()
    return wrong


def _check_soft(model: Gemma, of: Mapping[str, str]) -> str:
    """The verdict of their check, which is kept under these facts."""
    try:
        wrong = soft_off(model)
    except torch.cuda.OutOfMemoryError:
        return "there was no memory to check them with"  # another time there may be
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0][:200]
        wrong = f"their check raised {type(error).__name__}: {first_line}"
        remember(of, {"row_stats": wrong})  # the next start goes on behind it
        still_answers(model, {}, first_line)
    else:
        remember(of, {"row_stats": wrong})
    return wrong


def _facts(model: Gemma) -> dict[str, str]:
    weight = model.embed_tokens.weight
    return {**facts(model.config, weight.dtype, weight.device), FORM: _form(model)}


def _compile_beforehand(model: Gemma, stack: Stack, of: Mapping[str, str]) -> None:
    """At the first start of all. Noted before it begins: whatever comes of it, there is no second.

    Where it fails, kernels are compiled one by one as they are launched.
    """
    begun = {**of, "compiled beforehand": "begun"}
    if recall(begun) is not None:
        return
    remember(begun, {})
    try:
        rehearse(model, stack, PROMPTS)
        torch.cuda.empty_cache()
    except Exception as error:
        logger.debug("kernels are not compiled beforehand: %s", error)
    try:
        torch.cuda.synchronize(model.embed_tokens.weight.device)
    except RuntimeError as error:
        raise DeviceFault({}, str(error).partition("\n")[0]) from error


def _form(model: Gemma) -> str:
    """How the weights are stored, by the first layer's modules and the token table."""
    parts = [*layers_of(model)[0].modules(), model.embed_tokens]
    kinds = {type(part).__name__ for part in parts}
    if model.embed_tokens.soft is not None:
        kinds.add("soft")
    return " ".join(sorted(kinds))
