"""Lines of code in a text of tokens: those that somebody would ask to have written.

Not the lines of a docstring: they are a third of what documented functions say, each says more than
a line of code, and nobody fills one from the code around it. Nor heads and comments.

N tokens of a text, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dgemma.text.tokenizer import Tokenizer

Flags = NDArray[np.bool_]
Span = tuple[int, int]

LEAST = 3  # tokens of a line that is worth asking for
# How a line begins that names something new, which nobody could guess, or that says nothing.
OTHER = (b"#", b"@", b"def", b"async", b"class", b"...")
QUOTES = (b'"""', b"'''")


@dataclass(frozen=True, slots=True, eq=False)
class LineTokens:
    """What each token of a vocabulary means to lines."""

    breaks_V: Flags  # ends a line
    blank_V: Flags  # nothing but blanks: indents one, at its beginning
    quotes_V: Flags  # opens a text of several lines, or closes it
    other_V: Flags  # no line of code begins so

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "LineTokens":
        known = [
            b"" if tokenizer.is_control(token) else tokenizer.token_bytes(token)
            for token in range(tokenizer.vocab_size)
        ]
        quoted = [sum(data.count(mark) for mark in QUOTES) % 2 for data in known]
        return cls(
            breaks_V=np.array([b"\n" in data for data in known]),
            blank_V=np.array([bool(data) and not data.strip(b" \t") for data in known]),
            quotes_V=np.array(quoted, bool),
            other_V=np.array([data.lstrip().startswith(OTHER) for data in known]),
        )

    def spans(self, text_N: NDArray[np.integer]) -> list[Span]:
        """Where lines of code stand, without what indents them and without their breaks.

        The text must not begin inside a docstring: its quotes are counted.
        """
        is_quote_N = self.quotes_V[text_N]
        is_text_N = is_quote_N | (is_quote_N.cumsum() % 2 > 0)
        stops = np.flatnonzero(self.breaks_V[text_N])
        starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
        starts = starts + self.blank_V[text_N[starts]]
        is_code = (stops - starts >= LEAST) & ~self.other_V[text_N[np.minimum(starts, stops)]]
        return [
            (int(start), int(stop))
            for start, stop in zip(starts[is_code], stops[is_code], strict=True)
            if not is_text_N[start:stop].any()
        ]
