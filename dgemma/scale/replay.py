"""Replay of a stream written by several replicas in turn, as its client sees it.

Noise is keyed by the seed, so a replica that takes over a request writes the same events again. It
starts after the committed tokens. Events already delivered are dropped here after comparing their
checksum: a stream never continues with another text.
"""

import json
import re
from collections import Counter
from typing import Any

from dgemma.server.call import COMMITTED, ENDED, RECORD_END

NAME = re.compile(rb"id: (-?\d+)\.(\d+)-([0-9a-f]{8})\n")


class ReplayDiffers(Exception):
    """A replica wrote a text that differs from its predecessor's."""


class Replay:
    """The events of one stream: those delivered, and the tokens committed."""

    def __init__(self) -> None:
        self.committed: dict[int, list[dict[str, Any]]] = {}  # by answer
        self.is_over = False
        self._delivered: dict[bytes, tuple[int, bytes]] = {}  # number and checksum, by answer
        self._missing: set[bytes] = set()  # answers whose delivered events are not yet repeated
        self._num_commits: Counter[int] = Counter()  # commits of the current replica
        self._tail = b""

    def restart(self) -> None:
        """Expect the stream from its beginning, from another replica."""
        self._missing = set(self._delivered)
        self._num_commits.clear()
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """Process bytes of the current replica; return those that the client does not have."""
        *records, self._tail = (self._tail + data).split(RECORD_END.encode())
        return b"".join(self._record(record) for record in records)

    def _record(self, event: bytes) -> bytes:
        if event.startswith(COMMITTED.encode()):
            self._commit(json.loads(event[len(COMMITTED) :]))
            return b""
        if event == ENDED.encode():
            self.is_over = True
            return b""
        name = NAME.match(event)
        if name is None:
            return self._unnamed(event)
        answer, number, checksum = name[1], int(name[2]), name[3]
        last, expected = self._delivered.get(answer, (0, b""))
        if number <= last:
            if number == last:
                self._missing.discard(answer)
                if checksum != expected:
                    raise ReplayDiffers("a replica wrote another text than its predecessor")
            return b""
        self._delivered[answer] = (number, checksum)
        return event[name.end() :]

    def _unnamed(self, event: bytes) -> bytes:
        """Pass on comments, errors and drafts, except drafts of delivered blocks."""
        is_draft = not (self.is_over or event.startswith(b":"))
        return b"" if is_draft and self._missing else event

    def _commit(self, fields: dict[str, Any]) -> None:
        index = fields.pop("index")
        known = self.committed.setdefault(index, [])
        if self._num_commits[index] == len(known):
            known.append(fields)
        self._num_commits[index] += 1
