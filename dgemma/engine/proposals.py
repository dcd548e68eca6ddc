"""What the causal mode proposes for a hole that has a canvas for itself.

Which tokens may stand there is said here, by the seam before the hole and the line it may have; the
likeliest texts of such tokens are found by `engine.beam`. They are no more than candidates, beside
what canvases say (`engine.search`).
"""

from dataclasses import dataclass, replace
from functools import partial

from dgemma.constrain.holes import BREAKS, is_own_line
from dgemma.constrain.seams import Variant
from dgemma.engine.beam import Ids, Wanted, likeliest
from dgemma.engine.trials import SharedPrefix
from dgemma.text.tokenizer import Tokenizer

LONGEST = 48  # tokens of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """What a text has to agree with that is to stand in a hole."""

    variant: Variant  # how its seams are treated
    edge: str  # the end of the text before it
    piece: str  # the text behind it
    single_line: bool
    least: int  # tokens
    most: int
    by_total: bool = False  # whether the likeliest texts are wanted, or those with the best mean

    @property
    def size(self) -> int | None:
        """Its tokens, if they are known."""
        return self.most if self.least == self.most else None

    def allows(self, tokenizer: Tokenizer, token: int, place: int) -> bool:
        """Whether a token may stand at a place of the hole."""
        if tokenizer.is_control(token):
            return False
        if self.is_ended_by(tokenizer, token):
            # A line of its own breaks with its last token.
            return is_own_line(self.edge, self.piece) and self.size in (None, place + 1)
        return place > 0 or tokenizer.token_bytes(token).startswith(self.variant.gaps[0].owed)

    def is_ended_by(self, tokenizer: Tokenizer, token: int) -> bool:
        """Whether a token ends the one line that the hole may have."""
        data = tokenizer.token_bytes(token)
        return self.single_line and any(mark.encode() in data for mark in BREAKS)


def propose(shared: SharedPrefix, hole: Hole, width: int) -> list[Ids]:
    """The likeliest texts for a hole behind a prefix, the best first; `width`: at most so many."""
    hole = replace(hole, most=min(hole.most, LONGEST))
    if not width or hole.most < hole.least:
        return []
    engine, after = shared.engine, hole.variant.gaps[0].after
    wanted = Wanted(
        least=hole.least,
        most=hole.most,
        width=width,
        after=after[0] if after and hole.size is None else None,
        allowed=partial(hole.allows, engine.tokenizer),
        ends=partial(hole.is_ended_by, engine.tokenizer),
        by_total=hole.by_total,
    )
    return likeliest(engine.backend, shared.behind(hole.variant.ids), wanted, engine.step)
