"""Applies a constraint to a reply: thoughts are unconstrained, the answer is constrained.

A thought ends with its closing token. If the model ends it otherwise, or too few tokens remain for
the answer, the closing token is inserted.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dgemma.constrain.constrained_canvas import ConstrainedCanvas
from dgemma.constrain.matcher import Constraint, mask_logits
from dgemma.diffusion.canvas import NO_PINS, Pins
from dgemma.text.control_tokens import CHANNEL, CHANNEL_END, THINK
from dgemma.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dgemma.engine.generation import Generation

RESERVED_DIVISOR = 4  # reserve a quarter of max_tokens for the answer
# start: the reply may begin with a thought; opening: its first canvas does.
Phase = Literal["start", "opening", "thought", "text"]


class ConstrainedReply:
    """The constraint of one generation. `used` counts the reply's tokens so far."""

    def __init__(
        self, generation: "Generation", constraint: Constraint, tokenizer: Tokenizer
    ) -> None:
        self.text = ConstrainedCanvas(constraint)
        self.tokenizer, self.max_tokens = tokenizer, generation.limits.max_tokens
        self.opens = tokenizer.control_ids.get(CHANNEL)
        self.closes = tokenizer.control_ids.get(CHANNEL_END)
        shortest = self.text.state.completion
        needed = 0 if shortest is None else len(shortest.tokens)
        self.min_answer_tokens = max(needed, self.max_tokens // RESERVED_DIVISOR)
        may_think = thinks(generation, tokenizer) and needed + 2 <= self.max_tokens
        in_thought = generation.prompt.in_thought
        self.phase: Phase = "thought" if in_thought else "start" if may_think else "text"
        self.pins = generation.params.pins  # for the first canvas of the answer
        self.text.start(self.max_tokens - in_thought)

    @property
    def fault(self) -> str:
        return self.text.state.fault

    @property
    def is_complete(self) -> bool:
        return self.text.state.is_complete

    @property
    def is_cut(self) -> bool:
        """True if the token limit cut an unconstrained text or forced a constrained one to end."""
        is_free = self.text.constraint.grammar.is_free and self.text.state.tokens_left == 0
        return is_free or self.text.state.forced_from is not None

    def forced_from(self, ids: Sequence[int], answer: str) -> int | None:
        """Return the character of the answer from which a limit forced tokens.

        None if nothing was forced.
        """
        if self.text.state.forced_from is None:
            return None
        before = len(ids) - self.text.state.num_tokens  # tokens of the thought
        own = self.tokenizer.decode(ids[before : before + self.text.state.forced_from])
        return min(len(own), len(answer))

    def begin_block(self, max_steps: int) -> tuple[ConstrainedCanvas | None, Pins]:
        """Return the constraint of the next canvas, if any, and its pins."""
        if self.phase in ("start", "opening") and self.opens is not None:
            self.phase = "opening"
            return None, Pins((0,), (self.opens,))
        if self.phase == "thought":
            return None, NO_PINS
        self.text.begin_block(self.pins, max_steps)
        return self.text, self.pins

    def end_block(self, ids: Sequence[int], used: int) -> list[int]:
        """Return the tokens of a finished canvas to commit."""
        if self.text.state.error is not None:
            raise self.text.state.error
        if self.phase == "text":
            self.pins = NO_PINS
            return self.text.end_block()
        first, self.phase = int(self.phase == "opening"), "thought"
        room = max(first, self.max_tokens - self.min_answer_tokens - used - 1)
        controls = (i for i in range(first, len(ids)) if self.tokenizer.is_control(ids[i]))
        end = next(controls, len(ids))
        if end == len(ids) and end < room:
            return list(ids)
        thought = [*ids[: min(end, room)], *self._close_thought()]
        self.text.start(self.max_tokens - used - len(thought))
        return thought

    def choose(self, logits_V: Tensor, used: int, draw: Callable[[Tensor], int]) -> int:
        """Choose the next AR token."""
        if self.phase == "thought":
            return self._think(logits_V, used, draw)
        if self.phase == "start":
            if draw(self._or_opening(logits_V)) == self.opens:
                self.phase = "thought"
                return self.opens
            self.phase = "text"
            self.text.start(self.max_tokens - used)
        return self.text.next_token(logits_V, draw)

    def close(self, ids: Sequence[int], used: int) -> list[int]:
        """Return the shortest completion of the reply; `ids`: the canvas of a thought."""
        is_open = self.phase in ("opening", "thought")
        thought = self.end_block(ids, used) if is_open and ids else []
        if self.phase in ("opening", "thought"):
            thought += self._close_thought()
        return [*thought, *self.text.close()]

    def _think(self, logits_V: Tensor, used: int, draw: Callable[[Tensor], int]) -> int:
        is_over = used >= self.max_tokens - self.min_answer_tokens - 1
        controls = [token for token in self.tokenizer.control_ids.values() if token != self.closes]
        index = torch.tensor(controls, device=logits_V.device)
        token = -1 if is_over else draw(logits_V.index_fill(0, index, -torch.inf))
        if is_over or token == self.closes:
            (token,) = self._close_thought()
            self.text.start(self.max_tokens - used - 1)
        return token

    def _or_opening(self, logits_V: Tensor) -> Tensor:
        """Mask logits to tokens that may start a reply: of a thought or of the answer."""
        allowed = self.text.matcher.allowed()
        allowed[self.opens] = True
        return mask_logits(logits_V, allowed)

    def _close_thought(self) -> list[int]:
        assert self.closes is not None
        self.phase = "text"
        return [self.closes]


def thinks(generation: "Generation", tokenizer: Tokenizer) -> bool:
    """True if a reply may begin with a thought, by its prompt or in hybrid mode."""
    names = tokenizer.control_ids
    if generation.prompt.in_thought or CHANNEL not in names or CHANNEL_END not in names:
        return False
    return generation.params.mode == "hybrid" or names.get(THINK) in generation.prompt.ids
