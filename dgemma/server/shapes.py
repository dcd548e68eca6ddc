"""Answers in the shapes of chat and of plain completions, whole and in chunks."""

import json
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from dgemma import __version__
from dgemma.server import replies
from dgemma.server.worker import Finished

if TYPE_CHECKING:
    from dgemma.engine import Done
    from dgemma.text.tokenizer import Tokenizer

FINISH: dict[str, replies.FinishReason] = {
    "stop": "stop",
    "stop_string": "stop",
    "length": "length",
    "budget": "length",
}
NEVER = -9999.0  # how the API writes a log-probability of minus infinity
FINGERPRINT = f"dgemma-{__version__}"

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every reply and chunk of a request repeats."""

    id: str
    created: int
    model: str
    ignored: tuple[str, ...]
    choices_per_prompt: int = 1

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def note(self) -> replies.Note:
        return replies.Note(ignored=list(self.ignored))

    def usage(self, ended: list[Finished]) -> replies.Usage:
        """A prompt counts once, however many answers it has."""
        prompts = [finished.done for finished in ended[:: self.choices_per_prompt]]
        prompt_tokens = sum(done.prompt_tokens for done in prompts)
        completion_tokens = sum(finished.done.tokens for finished in ended)
        return replies.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=replies.CachedTokens(
                cached_tokens=sum(done.reused_tokens for done in prompts)
            ),
        )


class Shape(Protocol):
    """How a kind of request is answered."""

    def whole(self, ended: list[Finished]) -> dict[str, Any]: ...

    def opening(self, index: int) -> list[Chunk]: ...

    def text(self, index: int, text: str, is_thought: bool) -> list[Chunk]: ...

    def bare(self, index: int) -> Chunk: ...

    def ending(self, index: int, finished: Finished) -> list[Chunk]: ...

    def usage(self, ended: list[Finished]) -> Chunk: ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    """`chat.completion` and its chunks."""

    head: Head
    tokenizer: "Tokenizer"
    one_call: bool = False

    def whole(self, ended: list[Finished]) -> dict[str, Any]:
        reply = replies.ChatCompletion(
            **self.head.fields("chat.completion"),
            choices=[self._choice(index, finished) for index, finished in enumerate(ended)],
            usage=self.head.usage(ended),
            dgemma=self.head.note(),
        )
        return reply.model_dump(exclude_unset=True)

    def opening(self, index: int) -> list[Chunk]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def text(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        return [self._chunk(index, {"reasoning_content" if is_thought else "content": text})]

    def bare(self, index: int) -> Chunk:
        return self._chunk(index, {})

    def ending(self, index: int, finished: Finished) -> list[Chunk]:
        calls = self._calls(finished.done)
        chunks = []
        if calls:
            numbered = [{"index": i, **call.model_dump()} for i, call in enumerate(calls)]
            chunks.append(self._chunk(index, {"tool_calls": numbered}))
        last = self._chunk(index, {}, _finish(finished.done, bool(calls)))
        choice = last["choices"][0]
        logprobs = self._logprobs(finished)
        choice["logprobs"] = None if logprobs is None else logprobs.model_dump()
        choice["dgemma"] = took(finished.done).model_dump()
        last["dgemma"] = self.head.note().model_dump()
        return [*chunks, last]

    def usage(self, ended: list[Finished]) -> Chunk:
        usage = self.head.usage(ended).model_dump()
        return {**self.head.fields("chat.completion.chunk"), "choices": [], "usage": usage}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None) -> Chunk:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self.head.fields("chat.completion.chunk"), "choices": [choice]}

    def _choice(self, index: int, finished: Finished) -> replies.ChatChoice:
        done, calls = finished.done, self._calls(finished.done)
        optional: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if done.reply.thought:
            optional["reasoning_content"] = done.reply.thought
        message = replies.ChatMessage(
            role="assistant",
            content=None if calls and not done.text else done.text,
            refusal=None,
            **optional,
        )
        return replies.ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(finished),
            finish_reason=_finish(done, bool(calls)),
            dgemma=took(done),
        )

    def _calls(self, done: "Done") -> list[replies.ToolCall]:
        calls = done.reply.tool_calls[: 1 if self.one_call else None]
        # An id that no other reply of the conversation has.
        suffix = self.head.id.rpartition("-")[2][:12]
        return [
            replies.ToolCall(
                id=f"{call.id}_{suffix}",
                type="function",
                function=replies.FunctionCall(
                    name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False)
                ),
            )
            for call in calls
        ]

    def _logprobs(self, finished: Finished) -> replies.ChatLogprobs | None:
        if finished.logprobs is None:
            return None
        pairs = zip(finished.done.ids, finished.logprobs, strict=True)
        content = [
            replies.TokenLogprob(
                token=self.tokenizer.decode([token]),
                logprob=logprob if isfinite(logprob) else NEVER,
                bytes=list(self.tokenizer.token_bytes(token)),
                top_logprobs=[],
            )
            for token, logprob in pairs
        ]
        return replies.ChatLogprobs(content=content, refusal=None)


@dataclass(frozen=True, slots=True)
class TextShape:
    """`text_completion`, whole and in chunks. Thoughts are no part of a text."""

    head: Head
    tokenizer: "Tokenizer"

    def whole(self, ended: list[Finished]) -> dict[str, Any]:
        reply = replies.TextCompletion(
            **self.head.fields("text_completion"),
            choices=[self._choice(index, finished) for index, finished in enumerate(ended)],
            usage=self.head.usage(ended),
            dgemma=self.head.note(),
        )
        return reply.model_dump(exclude_unset=True)

    def opening(self, index: int) -> list[Chunk]:
        return []

    def text(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        return [] if is_thought else [self._chunk(index, text)]

    def bare(self, index: int) -> Chunk:
        return self._chunk(index, "")

    def ending(self, index: int, finished: Finished) -> list[Chunk]:
        last = self._chunk(index, "", _finish(finished.done, has_calls=False))
        choice = last["choices"][0]
        logprobs = self._logprobs(finished)
        choice["logprobs"] = None if logprobs is None else logprobs.model_dump()
        choice["dgemma"] = took(finished.done).model_dump()
        last["dgemma"] = self.head.note().model_dump()
        return [last]

    def usage(self, ended: list[Finished]) -> Chunk:
        usage = self.head.usage(ended).model_dump()
        return {**self.head.fields("text_completion"), "choices": [], "usage": usage}

    def _chunk(self, index: int, text: str, finish: str | None = None) -> Chunk:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        return {**self.head.fields("text_completion"), "choices": [choice]}

    def _choice(self, index: int, finished: Finished) -> replies.TextChoice:
        return replies.TextChoice(
            index=index,
            text=finished.done.text,
            logprobs=self._logprobs(finished),
            finish_reason=_finish(finished.done, has_calls=False),
            dgemma=took(finished.done),
        )

    def _logprobs(self, finished: Finished) -> replies.TextLogprobs | None:
        if finished.logprobs is None:
            return None
        tokens = [self.tokenizer.decode([token]) for token in finished.done.ids]
        offsets = [len("".join(tokens[:i])) for i in range(len(tokens))]
        logprobs = [value if isfinite(value) else NEVER for value in finished.logprobs]
        return replies.TextLogprobs(
            tokens=tokens, token_logprobs=logprobs, top_logprobs=None, text_offset=offsets
        )


def took(done: "Done") -> replies.Took:
    """What an answer took, as the reply tells it."""
    remaining = done.remaining_entropy
    return replies.Took(
        mode=done.mode,
        seed=done.seed,
        finish=done.finish,
        blocks=done.blocks,
        steps=done.steps,
        tokens_per_step=round(done.tokens_per_step, 3),
        unsettled_blocks=done.unsettled_blocks,
        retries=done.retries,
        fault=done.fault,
        remaining_entropy=round(remaining, 3) if isfinite(remaining) else None,
        seconds=round(done.seconds, 4),
        prefill_seconds=round(done.prefill_seconds, 4),
        broken_calls=[
            replies.BrokenCall(raw=call.raw, reason=call.reason) for call in done.reply.broken_calls
        ],
    )


def _finish(done: "Done", has_calls: bool) -> replies.FinishReason:
    return "tool_calls" if has_calls else FINISH[done.finish]
