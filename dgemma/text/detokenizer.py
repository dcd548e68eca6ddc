"""Incremental detokenization: committed ids to text deltas, up to a stop string.

No delta holds an incomplete character or part of a stop string. Concatenated, the deltas are the
text of all ids, up to the first stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from dgemma.errors import UsageError
from dgemma.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # of bytes that are not UTF-8


class StopStrings:
    """Passes text up to the stop string that begins first; of two at one position, the shorter.

    The result depends on the text alone, not on its chunks: while an earlier stop string may still
    complete, a later one that has completed waits for it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if isinstance(strings, str):
            raise UsageError(
                f"stop is the string {strings!r}; give a tuple, such as ({strings!r},)"
            )
        if "" in strings:
            raise UsageError("a stop string is empty; give at least one character")
        self.stopped_by: str | None = None
        self._strings = tuple(strings)
        self._max_length = max(map(len, strings), default=0)
        self._held = ""

    def may_stop_in(self, data: bytes) -> bool:
        """Return True if these next bytes of text may complete a stop string.

        The first of them may end a character that began in an earlier chunk.
        """
        begins_inside = data[:1] and 0x80 <= data[0] < 0xC0
        if begins_inside or any(REPLACEMENT in stop for stop in self._strings):
            return bool(self._strings)
        text = self._held + data.decode("utf-8", "replace")
        return any(stop in text for stop in self._strings)

    def feed(self, text: str) -> str:
        """Take text, return what cannot be part of a stop string."""
        if not self._strings:
            return text
        if self.stopped_by is not None:
            return ""
        self._held += text
        return self._release(self._first_partial())

    def finish(self) -> str:
        """Return the text held back; no more will come."""
        return self._release(len(self._held))

    def _release(self, safe: int) -> str:
        """Return `safe` characters, or fewer and stop, if a stop string begins by then."""
        matches = [(self._held.find(stop), len(stop), stop) for stop in self._strings]
        start, _, stop = min((m for m in matches if m[0] >= 0), default=(safe + 1, 0, ""))
        if start > safe:
            text, self._held = self._held[:safe], self._held[safe:]
            return text
        self.stopped_by = stop
        text, self._held = self._held[:start], ""
        return text

    def _first_partial(self) -> int:
        """Return the first position where an incomplete stop string may begin, else the end."""
        length = len(self._held)
        for start in range(max(0, length - self._max_length + 1), length):
            tail = self._held[start:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._strings):
                return start
        return length


class Detokenizer:
    """Decodes ids as they come; an incomplete character waits for its remaining bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Take committed ids, return their complete characters."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """Return the bytes held back, which never became a character, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
