"""Replies and stream chunks: the parts shared by all resources.

A format also writes its stream: server-sent events, or another line format.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Self

from dgemma import __version__
from dgemma.server.errors import ApiError
from dgemma.server.schemas import AnswerStats

if TYPE_CHECKING:
    from dgemma.engine import Done
    from dgemma.text.messages import ToolCall

FINISH_REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "budget": "length"}
MIN_LOGPROB = -9999.0  # the API's value for minus infinity
FINGERPRINT = f"dgemma-{__version__}"
STILL_WORKING = ": still at work\n\n"

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Fields repeated in every reply and chunk of a request."""

    id: str
    created: int
    model: str
    ignored: tuple[str, ...]
    answers_per_prompt: int = 1

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    @property
    def suffix(self) -> str:
        """Characters shared by the ids of parts and calls of a reply, unique to it."""
        return self.id[-12:]

    @property
    def note(self) -> dict[str, Any]:
        return {"ignored": list(self.ignored)}

    def usage(self, answers: "Sequence[Done]") -> dict[str, Any]:
        """Count tokens; a prompt counts once, whatever the number of answers."""
        prompts = answers[:: self.answers_per_prompt]
        prompt_tokens = sum(done.prompt_tokens for done in prompts)
        completion_tokens = sum(done.tokens for done in answers)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(done.reused_tokens for done in prompts),
                "image_tokens": sum(done.image_tokens for done in prompts),
            },
        }


@dataclass(frozen=True, kw_only=True)
class Format:
    """Write the replies of a resource, whole or as a stream."""

    envelope: Envelope
    media_type: ClassVar[str] = "text/event-stream"
    end: ClassVar[str] = "data: [DONE]\n\n"  # the last line of a stream

    def full(self, answers: "Sequence[Done]") -> dict[str, Any]:
        raise NotImplementedError

    def empty_chunk(self, index: int) -> Chunk:
        raise NotImplementedError

    def last_chunks(self, index: int, done: "Done") -> list[Chunk]:
        raise NotImplementedError

    def first_chunks(self, index: int, prompt_tokens: int) -> list[Chunk]:
        return []

    def text_chunks(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        return []

    def after_text(self, text: str, is_thought: bool) -> Self:
        """Return the format for the rest of a stream."""
        return self

    def usage_chunk(self, answers: "Sequence[Done]") -> Chunk:
        return {**self.empty_chunk(0), "usage": self.envelope.usage(answers)}

    def line(self, chunk: Chunk, number: int = 0) -> str:
        """Write a chunk as a line of the stream, after `number` others."""
        return f"data: {write_json(chunk)}\n\n"

    def error_line(self, error: ApiError, number: int = 0) -> str:
        """Write an error that ends a stream."""
        return f"data: {write_json(error.body)}\n\n"

    def heartbeat(self) -> str:
        """Write a line that keeps a silent stream alive."""
        return STILL_WORKING


class ChoicesFormat(Format):
    """A reply with `choices`, as OpenAI has it."""

    kind: ClassVar[str]  # `object` of a reply...
    chunk_kind: ClassVar[str]  # ...and of a chunk
    empty_delta: ClassVar[dict[str, Any]]
    first_delta: ClassVar[dict[str, Any] | None] = None

    def choice(self, done: "Done") -> dict[str, Any]:
        """Return the answer's fields of its choice in a reply."""
        raise NotImplementedError

    def delta(self, text: str, is_thought: bool) -> dict[str, Any] | None:
        """Return text as a chunk's delta; None: not sent."""
        raise NotImplementedError

    def finish(self, done: "Done") -> dict[str, Any]:
        """Return the fields that end a choice, in a reply and in a stream."""
        return {"finish_reason": FINISH_REASONS[done.finish]}

    def last_deltas(self, done: "Done") -> list[dict[str, Any]]:
        return []

    def full(self, answers: "Sequence[Done]") -> dict[str, Any]:
        choices = [
            {"index": index, **self.choice(done), **self.finish(done), "dgemma": stats(done)}
            for index, done in enumerate(answers)
        ]
        fields = self.envelope.fields(self.kind)
        usage, note = self.envelope.usage(answers), self.envelope.note
        return {**fields, "choices": choices, "usage": usage, "dgemma": note}

    def first_chunks(self, index: int, prompt_tokens: int) -> list[Chunk]:
        return [] if self.first_delta is None else [self._chunk(index, self.first_delta)]

    def text_chunks(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        delta = self.delta(text, is_thought)
        return [] if delta is None else [self._chunk(index, delta)]

    def empty_chunk(self, index: int) -> Chunk:
        return self._chunk(index, self.empty_delta)

    def last_chunks(self, index: int, done: "Done") -> list[Chunk]:
        last = self._chunk(index, {**self.empty_delta, **self.finish(done), "dgemma": stats(done)})
        last["dgemma"] = self.envelope.note
        return [*(self._chunk(index, delta) for delta in self.last_deltas(done)), last]

    def usage_chunk(self, answers: "Sequence[Done]") -> Chunk:
        return {**super().usage_chunk(answers), "choices": []}

    def _chunk(self, index: int, delta: dict[str, Any]) -> Chunk:
        choice = {"index": index, "finish_reason": None, **delta}
        return {**self.envelope.fields(self.chunk_kind), "choices": [choice]}


@dataclass(frozen=True, kw_only=True)
class ResultFormat(Format):
    """Write a result of this server's own APIs: one object, after drafts in a stream."""

    kind: str
    describe: Callable[[Any], dict[str, Any]]  # describes the result of a program
    first: dict[str, Any] | None = None  # `dgemma` of a stream's first chunk

    def full(self, answers: "Sequence[Done]") -> dict[str, Any]:
        (done,) = answers
        return {
            **self.envelope.fields(self.kind),
            **self.describe(done.result),
            "usage": self.envelope.usage(answers),
            "dgemma": {**stats(done), **self.envelope.note},
        }

    def first_chunks(self, index: int, prompt_tokens: int) -> list[Chunk]:
        return [] if self.first is None else [{**self.empty_chunk(index), "dgemma": self.first}]

    def empty_chunk(self, index: int) -> Chunk:
        return self.envelope.fields(f"{self.kind}.chunk")

    def last_chunks(self, index: int, done: "Done") -> list[Chunk]:
        return [self.full([done])]


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A thought or text of a reply, as far as written."""

    is_thought: bool
    text: str = ""


Parts = tuple[ReplyPart, ...]


@dataclass(frozen=True, kw_only=True)
class PartsFormat(Format):
    """A reply of one answer in parts: thoughts, texts, calls; streamed as named events."""

    one_call: bool = False  # drop calls after the first
    parts: Parts = ()  # parts streamed so far; the last one is open
    end: ClassVar[str] = ""

    def start_part(self, number: int, part: ReplyPart) -> list[Chunk]:
        raise NotImplementedError

    def part_delta(self, number: int, part: ReplyPart, text: str) -> list[Chunk]:
        raise NotImplementedError

    def end_part(self, number: int, part: ReplyPart) -> list[Chunk]:
        raise NotImplementedError

    def call_chunks(self, number: int, call: "ToolCall") -> list[Chunk]:
        raise NotImplementedError

    def final_chunks(self, done: "Done", parts: Parts) -> list[Chunk]:
        raise NotImplementedError

    def after_text(self, text: str, is_thought: bool) -> Self:
        if self.parts and self.parts[-1].is_thought == is_thought:
            *before, last = self.parts
            return replace(self, parts=(*before, ReplyPart(is_thought, last.text + text)))
        return replace(self, parts=(*self.parts, ReplyPart(is_thought, text)))

    def text_chunks(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        parts, chunks = self.after_text(text, is_thought).parts, list[Chunk]()
        if len(parts) > len(self.parts):
            begun = self.start_part(len(self.parts), ReplyPart(is_thought))
            chunks = [*self._end_last(self.parts), *begun]
        return chunks + self.part_delta(len(parts) - 1, parts[-1], text)

    def last_chunks(self, index: int, done: "Done") -> list[Chunk]:
        calls, parts, chunks = self.calls(done), self.parts, list[Chunk]()
        if not parts and not calls:
            parts = (ReplyPart(is_thought=False),)
            chunks = self.start_part(0, parts[0])
        chunks += self._end_last(parts)
        for number, call in enumerate(calls, len(parts)):
            chunks += self.call_chunks(number, call)
        return chunks + self.final_chunks(done, parts)

    def _end_last(self, parts: Parts) -> list[Chunk]:
        return self.end_part(len(parts) - 1, parts[-1]) if parts else []

    def parts_of(self, done: "Done") -> list[ReplyPart]:
        """Return the parts of a whole reply; an empty reply has one empty text."""
        texts = [ReplyPart(True, done.reply.thought), ReplyPart(False, done.text)]
        written = [part for part in texts if part.text]
        return written or ([] if done.reply.tool_calls else [ReplyPart(False)])

    def calls(self, done: "Done") -> "list[ToolCall]":
        return unique_calls(done, self.envelope, one_call=self.one_call)

    def line(self, chunk: Chunk, number: int = 0) -> str:
        return f"event: {chunk['type']}\ndata: {write_json(chunk)}\n\n"


def unique_calls(done: "Done", envelope: Envelope, *, one_call: bool) -> "list[ToolCall]":
    """Return the calls of a reply, with ids unique in the conversation."""
    calls = done.reply.tool_calls[: 1 if one_call else None]
    return [replace(call, id=f"{call.id}_{envelope.suffix}") for call in calls]


def arguments_text(call: "ToolCall") -> str:
    return json.dumps(call.arguments, ensure_ascii=False)


def write_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def stats(done: "Done") -> dict[str, Any]:
    """Return the cost of an answer."""
    return AnswerStats.model_validate(done).model_dump()


def finite(score: float) -> float:
    """Replace numbers that JSON cannot represent."""
    return score if isfinite(score) else MIN_LOGPROB
