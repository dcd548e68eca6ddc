"""Answers as server-sent events: chunks of promised text, and drafts for those who ask.

A draft is a legal chunk whose delta is empty, with the canvas in `dgemma`; a client that appends
deltas sees promised text alone. Text may be paced: a whole block arrives at once, and people read
word by word.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from math import isfinite
from typing import TYPE_CHECKING, Any

from dgemma.server.call import Call
from dgemma.server.rough import Rough
from dgemma.server.shapes import Chunk, Shape
from dgemma.server.wire import Body
from dgemma.server.worker import Failed, Finished

if TYPE_CHECKING:
    from dgemma.engine import Draft, Engine, Retry, Text
    from dgemma.server.worker import Item

HEARTBEAT = 15.0  # seconds of silence before a comment is sent, so that nobody hangs up
END = "data: [DONE]\n\n"
WORD = re.compile(r"\s*\S+\s*\Z|\s*\S+|\s+")


class Stream:
    """Writes one request's answers as they come."""

    def __init__(self, call: Call, shape: Shape, body: Body, engine: "Engine") -> None:
        self.call, self.shape, self.body = call, shape, body
        self.roughs = [Rough(plan, engine.tokenizer, engine.stop_ids) for plan in call.asked.plans]
        self.ended: dict[int, Finished] = {}

    async def lines(self) -> AsyncIterator[str]:
        """Every event, as text; closing this cancels what has not ended."""
        try:
            for index in range(len(self.roughs)):
                for chunk in self.shape.opening(index):
                    yield self._line(chunk)
            while not self.call.is_over:
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        index, item = await self.call.get()
                except TimeoutError:
                    yield ": still at work\n\n"
                    continue
                if isinstance(item, Failed):
                    yield f"data: {json.dumps(item.error.body)}\n\n"
                    return
                async for line in self._item(index, item):
                    yield line
            if self.body.stream_options.include_usage:
                yield self._line(self.shape.usage([self.ended[i] for i in sorted(self.ended)]))
            yield END
        finally:
            self.call.close()

    async def _item(self, index: int, item: "Item") -> AsyncIterator[str]:
        from dgemma.engine import Draft, Retry, Text

        if isinstance(item, Text):
            async for chunk in self._text(index, item):
                yield self._line(chunk)
        elif isinstance(item, Draft):
            for chunk in self._draft(index, item):
                yield self._line(chunk)
        elif isinstance(item, Retry) and self.body.dgemma.drafts:
            yield self._line({**self.shape.bare(index), "dgemma": retry_data(item)})
        elif isinstance(item, Finished):
            self.ended[index] = item
            for chunk in [*self._mended(index), *self.shape.ending(index, item)]:
                yield self._line(chunk)

    async def _text(self, index: int, text: "Text") -> AsyncIterator[Chunk]:
        rough, pace = self.roughs[index], self.body.dgemma.pace
        rough.promise(text)
        if self.body.diffusing:
            whole = rough.thought if text.is_thought else rough.answer
            for chunk in self.shape.text(index, whole, text.is_thought):
                yield chunk
            return
        for piece in [text.text] if pace is None else WORD.findall(text.text):
            for chunk in self.shape.text(index, piece, text.is_thought):
                yield chunk
            if pace is not None:
                await asyncio.sleep(len(piece) / pace)

    def _draft(self, index: int, draft: "Draft") -> list[Chunk]:
        chunks = []
        if self.body.dgemma.drafts:
            chunks.append({**self.shape.bare(index), "dgemma": draft_data(draft)})
        if self.body.diffusing:
            answer, thought = self.roughs[index].draw(draft)
            chunks += self.shape.text(index, thought, is_thought=True) if thought else []
            chunks += self.shape.text(index, answer, is_thought=False)
        return chunks

    def _mended(self, index: int) -> list[Chunk]:
        """What was promised, where the last draft showed something else."""
        rough, chunks = self.roughs[index], []
        if self.body.diffusing and rough.shown[1] != rough.thought:
            chunks += self.shape.text(index, rough.thought, is_thought=True)
        if self.body.diffusing and rough.shown[0] != rough.answer:
            chunks += self.shape.text(index, rough.answer, is_thought=False)
        return chunks

    def _line(self, chunk: Chunk) -> str:
        if self.body.stream_options.include_usage:
            chunk = {"usage": None, **chunk}
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def draft_data(draft: "Draft") -> dict[str, Any]:
    """A canvas as docs/serve.md describes it."""
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
        "kept": draft.kept,
        "pinned": draft.pinned,
    }


def retry_data(retry: "Retry") -> dict[str, Any]:
    return {"type": "retry", "block": retry.block, "retry": retry.retry, "reason": retry.reason}
