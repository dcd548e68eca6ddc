"""What a constraint means for a request: a thought is free, and the text behind it is held.

A thought ends with its closing token. Should the model end or leave it in any other way, or take
so long that too little is left for the text, it is closed for the model.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dgemma.constrain.frontier import Frontier
from dgemma.constrain.masks import masked
from dgemma.constrain.matcher import Guide
from dgemma.diffusion.canvas import NO_PINS, Pins
from dgemma.engine.options import Plan
from dgemma.text.tokenizer import Tokenizer

THOUGHT_OPENS, THOUGHT_CLOSES, THINKS = "<|channel>", "<channel|>", "<|think|>"
KEPT_FROM_THOUGHT = 4  # one token of so many is left for the text, if it needs no more


class Guided:
    """One request's constraint. `used` is always the number of tokens the reply has so far."""

    def __init__(self, plan: Plan, guide: Guide, tokenizer: Tokenizer) -> None:
        self.frontier = Frontier(guide)
        self.tokenizer, self.max_tokens = tokenizer, plan.max_tokens
        self.opens = tokenizer.control_ids.get(THOUGHT_OPENS)
        self.closes = tokenizer.control_ids.get(THOUGHT_CLOSES)
        needed = 0 if self.frontier.ending is None else len(self.frontier.ending.tokens)
        self.kept = max(needed, plan.max_tokens // KEPT_FROM_THOUGHT)
        self.in_thought = plan.prompt.in_thought
        self.may_think = thinks(plan, tokenizer) and needed + 2 <= plan.max_tokens
        self.pins = plan.options.pins  # of the first canvas of the text, behind any thought
        self.frontier.start(plan.max_tokens - self.in_thought)

    @property
    def fault(self) -> str:
        return self.frontier.fault

    @property
    def is_complete(self) -> bool:
        return self.frontier.is_complete

    @property
    def is_cut(self) -> bool:
        """Whether the limit has cut a free text."""
        return self.frontier.guide.grammar.is_free and self.frontier.left == 0

    def begin_block(self, max_steps: int) -> tuple[Frontier | None, Pins]:
        """Who walks the next canvas, if anyone does, and what is pinned in it."""
        if self.may_think and self.opens is not None:
            self.in_thought = True
            return None, Pins((0,), (self.opens,))
        if self.in_thought:
            return None, NO_PINS
        self.frontier.begin_block(self.pins, max_steps)
        return self.frontier, self.pins

    def end_block(self, ids: Sequence[int], used: int) -> list[int]:
        """What of a canvas is committed."""
        if self.frontier.error is not None:
            raise self.frontier.error
        if not self.in_thought:
            self.pins = NO_PINS
            return self.frontier.end_block()
        first, self.may_think = int(self.may_think), False
        room = max(first, self.max_tokens - self.kept - used - 1)
        controls = (i for i in range(first, len(ids)) if self.tokenizer.is_control(ids[i]))
        end = next(controls, len(ids))
        if end == len(ids) and end < room:
            return list(ids)
        thought = [*ids[: min(end, room)], *self._close_thought()]
        self.frontier.start(self.max_tokens - used - len(thought))
        return thought

    def choose(self, logits_V: Tensor, used: int, draw: Callable[[Tensor], int]) -> int:
        """AR: the next token."""
        if self.in_thought:
            return self._think(logits_V, used, draw)
        is_first, self.may_think = self.may_think, False
        if is_first and self.opens is not None:
            token = draw(self._or_opening(logits_V))
            if token == self.opens:
                self.in_thought = True
                return token
        if is_first:
            self.frontier.start(self.max_tokens - used)
        return self.frontier.choose(logits_V, draw)

    def close(self, ids: Sequence[int], used: int) -> list[int]:
        """The shortest way to a whole text; `ids` is what stands on the canvas of a thought."""
        if not self.in_thought and not self.may_think:
            return self.frontier.close()
        thought = self.end_block(ids, used) if self.in_thought and ids else []
        thought += self._close_thought() if self.in_thought else []
        return [*thought, *self.frontier.close()]

    def _think(self, logits_V: Tensor, used: int, draw: Callable[[Tensor], int]) -> int:
        is_over = used >= self.max_tokens - self.kept - 1
        controls = [token for token in self.tokenizer.control_ids.values() if token != self.closes]
        index = torch.tensor(controls, device=logits_V.device)
        token = -1 if is_over else draw(logits_V.index_fill(0, index, -torch.inf))
        if is_over or token == self.closes:
            (token,) = self._close_thought()
            self.frontier.start(self.max_tokens - used - 1)
        return token

    def _or_opening(self, logits_V: Tensor) -> Tensor:
        """Logits of what may begin a reply: a thought, or the text."""
        allowed = self.frontier.matcher.allowed()
        allowed[self.opens] = True
        return masked(logits_V, allowed)

    def _close_thought(self) -> list[int]:
        assert self.closes is not None
        self.in_thought = False
        return [self.closes]


def thinks(plan: Plan, tokenizer: Tokenizer) -> bool:
    """Whether a reply may begin with a thought: its prompt asks for one, or its mode is made so."""
    names = tokenizer.control_ids
    if plan.prompt.in_thought or THOUGHT_OPENS not in names or THOUGHT_CLOSES not in names:
        return False
    return plan.mode == "hybrid" or names.get(THINKS) in plan.prompt.ids
