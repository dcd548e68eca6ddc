"""Committed ids to text deltas.

Owns two promises: no delta holds a broken character, and no delta holds a part of a stop string.
Joined, the deltas are the text of all ids, up to the earliest stop string. Knows nothing of chats.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from dgemma.errors import UsageError
from dgemma.text.tokenizer import Tokenizer

BROKEN = "\ufffd"  # stands for bytes that are no character


class StopStrings:
    """Lets text through up to the stop string that begins first; of two at one place, the shorter.

    That rule depends on the text alone, not on how it arrives: where an earlier stop string may
    still complete, a later one that has completed waits for it.
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
        self._longest = max(map(len, strings), default=0)
        self._held = ""

    def may_stop_in(self, data: bytes) -> bool:
        """Whether a stop string may be complete when these bytes of text have come.

        The first of them may end a character that began before, which is not known here.
        """
        begins_inside = data[:1] and 0x80 <= data[0] < 0xC0
        if begins_inside or any(BROKEN in stop for stop in self._strings):
            return bool(self._strings)
        text = self._held + data.decode("utf-8", "replace")
        return any(stop in text for stop in self._strings)

    def feed(self, text: str) -> str:
        """Take text, return what can be promised."""
        if not self._strings:
            return text
        if self.stopped_by is not None:
            return ""
        self._held += text
        return self._release(self._first_beginning())

    def finish(self) -> str:
        """Return what was held back; no more text will come."""
        return self._release(len(self._held))

    def _release(self, safe: int) -> str:
        """Give out `safe` characters, or fewer and stop, if a stop string begins by then."""
        found = [(self._held.find(stop), len(stop), stop) for stop in self._strings]
        start, _, stop = min((f for f in found if f[0] >= 0), default=(safe + 1, 0, ""))
        if start > safe:
            text, self._held = self._held[:safe], self._held[safe:]
            return text
        self.stopped_by = stop
        text, self._held = self._held[:start], ""
        return text

    def _first_beginning(self) -> int:
        """Where a stop string may begin that has not completed yet; the end if nowhere."""
        length = len(self._held)
        for start in range(max(0, length - self._longest + 1), length):
            tail = self._held[start:]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._strings):
                return start
        return length


class TextStream:
    """Turns committed ids into text as they come."""

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), *, skip_control: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(stop_strings)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.stopped_by

    def feed(self, ids: Iterable[int]) -> str:
        """Take committed ids, return the text they make sure."""
        data = self._tokenizer.decode_bytes(ids, skip_control=self._skip_control)
        return self._stops.feed(self._characters.decode(data))

    def finish(self) -> str:
        """Return what was held back, bytes that never became a character as U+FFFD."""
        text = self._stops.feed(self._characters.decode(b"", final=True))
        return text + self._stops.finish()
