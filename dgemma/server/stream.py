"""Answers as server-sent events: chunks of final text, and drafts on request.

A draft is a valid chunk with an empty delta and the canvas in `dgemma`; a client that appends
deltas sees final text only. Text may be paced, since a block arrives at once and people read word
by word.

A stream that must survive its server (`Call.is_resumable`) is written in records. They name each
final event by answer, number and a checksum of the text so far (`0.3-1c291ca3`), and report
commits: the front asks another server for the same stream and drops what was already delivered.
"""

import asyncio
import re
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from itertools import count
from math import isfinite
from typing import TYPE_CHECKING, Any

from dgemma.server.call import COMMITTED, ENDED, RECORD_END, Call
from dgemma.server.errors import ApiError
from dgemma.server.format import Chunk, Format, write_json
from dgemma.server.schemas import Body
from dgemma.text.control_tokens import CHANNEL

if TYPE_CHECKING:
    from dgemma.engine import Committed, Done, Draft, Retry, Text
    from dgemma.engine.generation import Generation
    from dgemma.server.service import Service, Submission
    from dgemma.server.worker import Item
    from dgemma.text.tokenizer import StopIds, Tokenizer

HEARTBEAT = 15.0  # seconds of silence before a comment is sent, to keep the connection
MAX_PAUSE = 0.5  # longest sleep of a paced stream, which then checks for a drain
END_INDEX = -1  # index of events that belong to no answer
WORD = re.compile(r"\s*\S+\s*\Z|\s*\S+|\s+")


class Stream:
    """Writes the answers of one request as they arrive."""

    def __init__(
        self,
        submission: "Submission",
        format: Format,
        body: Body,
        service: "Service",
        call: Call | None,
    ) -> None:
        engine = service.engine
        self.submission, self.format, self.body, self.service = submission, format, body, service
        self.drafts = [
            DraftText(task, engine.tokenizer, engine.stop_ids) for task in submission.tasks
        ]
        self.answers: dict[int, Done] = {}
        self.numbers = count()  # numbers the lines
        self.has_ids = call is not None and call.is_resumable
        committed = {} if call is None else call.committed
        # Commits of a stream begun by another server; their text is not paced again.
        self.num_old = Counter({index: len(given) for index, given in committed.items()})
        self.num_commits: Counter[int] = Counter()
        self.num_final: Counter[int] = Counter()  # number of final events by answer
        self.sums: Counter[int] = Counter()

    async def lines(self) -> AsyncIterator[str]:
        """Yield every event as text; closing the iterator cancels unfinished requests."""
        try:
            async for line in self._events():
                yield line + RECORD_END if self.has_ids else line
        finally:
            self.submission.close()

    async def _events(self) -> AsyncIterator[str]:
        try:
            for index, task in enumerate(self.submission.tasks):
                chunks = self.format.first_chunks(index, _prompt_tokens(task))
                for line in self._final(index, chunks):
                    yield line
            while not self.submission.is_over:
                found = await self.submission.next(HEARTBEAT)
                if found is None:
                    yield self.format.heartbeat()
                    continue
                async for line in self._item(*found):
                    yield line
            for line in self._end_lines():
                yield line
        except ApiError as error:
            if self.has_ids:
                yield ENDED
            yield self.format.error_line(error, next(self.numbers))

    def _end_lines(self) -> list[str]:
        lines = []
        if self.body.stream_options.include_usage:
            answers = [self.answers[index] for index in sorted(self.answers)]
            lines.append(self._name(END_INDEX) + self._line(self.format.usage_chunk(answers)))
        if self.format.end:
            lines.append(self._name(END_INDEX) + self.format.end)
        return [*lines, ENDED] if self.has_ids else lines

    async def _item(self, index: int, item: "Item") -> AsyncIterator[str]:
        from dgemma.engine import Committed, Draft, Retry, Text

        if isinstance(item, Committed):
            self.num_commits[index] += 1
            yield committed_line(index, item)
        elif isinstance(item, Text):
            async for line in self._text(index, item):
                yield line
        elif isinstance(item, Draft):
            for chunk in self._draft(index, item):
                yield self._line(chunk)
        elif isinstance(item, Retry) and self.body.dgemma.drafts:
            yield self._line({**self.format.empty_chunk(index), "dgemma": retry_data(item)})
        elif item is self.submission.requests[index]:
            done: Done = self.submission.requests[index].result  # type: ignore[assignment]
            if self.body.wants_logprobs:
                done = await self.service.with_logprobs(self.submission, index, done)
            self.answers[index] = done
            chunks = [*self._corrections(index), *self.format.last_chunks(index, done)]
            for line in self._final(index, chunks):
                yield line

    async def _text(self, index: int, text: "Text") -> AsyncIterator[str]:
        drafts, pace = self.drafts[index], self.body.dgemma.pace
        is_old = 0 < self.num_commits[index] <= self.num_old[index]
        drafts.commit(text)
        if self.body.diffusing:
            whole = drafts.final[text.is_thought]
            chunks = self.format.text_chunks(index, whole, text.is_thought)
            for line in self._final(index, chunks, text.text):
                yield line
            return
        for piece in [text.text] if pace is None else WORD.findall(text.text):
            chunks = self.format.text_chunks(index, piece, text.is_thought)
            self.format = self.format.after_text(piece, text.is_thought)
            for line in self._final(index, chunks, piece):
                yield line
            async for line in self._pause(len(piece) / pace if pace and not is_old else 0.0):
                yield line

    async def _pause(self, seconds: float) -> AsyncIterator[str]:
        """Sleep for the pace, but not past the deadline or into a drain."""
        end, silent = min(time.monotonic() + seconds, self.submission.deadline), 0.0
        while (left := end - time.monotonic()) > 0 and self.service.drain.began is None:
            await asyncio.sleep(min(left, MAX_PAUSE))
            silent += MAX_PAUSE
            if silent >= HEARTBEAT:
                silent = 0.0
                yield self.format.heartbeat()

    def _draft(self, index: int, draft: "Draft") -> list[Chunk]:
        chunks = []
        if self.body.dgemma.drafts:
            chunks.append({**self.format.empty_chunk(index), "dgemma": draft_data(draft)})
        if self.body.diffusing:
            shown = self.drafts[index].show(draft)
            if shown[True]:
                chunks += self.format.text_chunks(index, shown[True], is_thought=True)
            chunks += self.format.text_chunks(index, shown[False], is_thought=False)
        return chunks

    def _corrections(self, index: int) -> list[Chunk]:
        """Return the final text where the last draft showed another."""
        drafts, chunks = self.drafts[index], list[Chunk]()
        for is_thought in (True, False) if self.body.diffusing else ():
            if drafts.shown[is_thought] != (text := drafts.final[is_thought]):
                chunks += self.format.text_chunks(index, text, is_thought)
        return chunks

    def _final(self, index: int, chunks: Iterable[Chunk], text: str = "") -> list[str]:
        """Write reproducible chunks: a repeated request repeats them."""
        self.sums[index] = zlib.crc32(text.encode("utf-8", "surrogatepass"), self.sums[index])
        return [self._name(index) + self._line(chunk) for chunk in chunks]

    def _name(self, index: int) -> str:
        """Return the id of the next final event, if events have ids."""
        if not self.has_ids:
            return ""
        self.num_final[index] += 1
        return f"id: {index}.{self.num_final[index]}-{self.sums[index]:08x}\n"

    def _line(self, chunk: Chunk) -> str:
        if self.body.stream_options.include_usage:
            chunk = {"usage": None, **chunk}
        return self.format.line(chunk, next(self.numbers))


def _prompt_tokens(task: object) -> int:
    """Return the prompt tokens of a generation; a program has prompts of its own."""
    from dgemma.engine.generation import Generation

    return len(task.prompt.ids) if isinstance(task, Generation) else 0


class DraftText:
    """The text of one answer if its canvas were committed now.

    For clients that replace the text with each chunk; nothing in it is final. Key False is the
    answer, True the thought.
    """

    def __init__(self, task: Any, tokenizer: "Tokenizer", stops: "StopIds") -> None:
        self.task: Generation = task  # of a chat or a completion; other tasks have no such drafts
        self.tokenizer, self.stops = tokenizer, stops
        self.final = {False: "", True: ""}
        self.shown = dict(self.final)  # last shown, or final since
        self._before = dict(self.final)  # text before the first canvas, written in AR
        self._blocks: list[int] = []  # tokens per finished canvas
        self._last: Draft | None = None

    def commit(self, text: "Text") -> None:
        self.final[text.is_thought] += text.text
        self.shown[text.is_thought] = self.final[text.is_thought]

    def show(self, draft: "Draft") -> dict[bool, str]:
        """Return answer and thought with this canvas as it stands."""
        from dgemma.text.detokenizer import StopStrings
        from dgemma.text.reply import parse_reply

        self._turn_to(draft)
        task, params = self.task, self.task.params
        ids, _ = self.stops.cut([*self._blocks, *draft.guess])
        in_thought = task.prompt.in_thought and not task.progress.logprobs
        reply = parse_reply(self.tokenizer, ids[: task.limits.max_tokens], in_thought=in_thought)
        stops = StopStrings(params.stop)
        answer = stops.feed(reply.answer) + stops.finish()
        self.shown[False] = self._before[False] + answer
        self.shown[True] = self._before[True] + reply.thought
        return self.shown

    def _turn_to(self, draft: "Draft") -> None:
        """Store the text before this canvas."""
        last, self._last = self._last, draft
        if last is None:
            self._before.update(self.final)
        elif draft.block == last.block:
            return
        elif self.task.params.constraint is None:
            self._blocks.extend(last.guess)
        else:  # only part of a constrained canvas is committed
            self._blocks[:] = self._open_thought(last)
            self._before.update(self.final)

    def _open_thought(self, last: "Draft") -> list[int]:
        """Return the token that opens a thought, if the last canvas left a thought open.

        Its end may have been inserted; then drafts count as thought until their text is final.
        """
        opens = self.tokenizer.control_ids.get(CHANNEL)
        was_open = bool(self._blocks) or last.guess[0] == opens
        is_closed = any(self.tokenizer.is_control(token) for token in last.guess[1:])
        return [opens] if was_open and opens is not None and not is_closed else []


def committed_line(index: int, committed: "Committed") -> str:
    """Write a commit record for the front."""
    data = {"index": index, **asdict(committed)}
    return COMMITTED + write_json(data)


def draft_data(draft: "Draft") -> dict[str, Any]:
    """Write a canvas in the format of docs/serve.md."""
    return {
        "type": "draft",
        "block": draft.block,
        "step": draft.step,
        "ids": draft.ids,
        "tokens": draft.tokens,
        "guess": draft.guess,
        "guess_tokens": draft.guess_tokens,
        "text": "".join(draft.guess_tokens),
        "entropy": [round(nats, 4) if isfinite(nats) else None for nats in draft.entropy],
        "accepted": draft.accepted,
        "pinned": draft.pinned,
    }


def retry_data(retry: "Retry") -> dict[str, Any]:
    return {"type": "retry", "block": retry.block, "retry": retry.retry, "reason": retry.reason}
