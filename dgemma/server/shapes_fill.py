"""Answers of requests that fill, edit and solve, whole and in chunks."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from dgemma.server import replies, replies_fill
from dgemma.server.shapes import FINISH, Chunk, Head, took
from dgemma.server.worker import Finished

if TYPE_CHECKING:
    from dgemma.engine import Edited, Filled
    from dgemma.engine.sudoku import Solved


@dataclass(frozen=True, slots=True)
class FimShape:
    """Chat's shape with the text beside the message, so that either kind of client reads it."""

    head: Head

    def whole(self, ended: list[Finished]) -> dict[str, Any]:
        choices = []
        for index, finished in enumerate(ended):
            text = finished.done.text
            choices.append(
                replies_fill.FimChoice(
                    index=index,
                    text=text,
                    message=replies.ChatMessage(role="assistant", content=text, refusal=None),
                    finish_reason=FINISH[finished.done.finish],
                    dgemma=took(finished.done),
                )
            )
        reply = replies_fill.FimCompletion(
            **self.head.fields("chat.completion"),
            choices=choices,
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
        last = self._chunk(index, "", FINISH[finished.done.finish])
        last["choices"][0]["dgemma"] = took(finished.done).model_dump()
        last["dgemma"] = self.head.note().model_dump()
        return [last]

    def usage(self, ended: list[Finished]) -> Chunk:
        usage = self.head.usage(ended).model_dump()
        return {**self.head.fields("chat.completion.chunk"), "choices": [], "usage": usage}

    def _chunk(self, index: int, text: str, finish: str | None = None) -> Chunk:
        delta = {"role": "assistant", "content": text} if text else {}
        choice = {"index": index, "delta": delta, "text": text, "finish_reason": finish}
        return {**self.head.fields("chat.completion.chunk"), "choices": [choice]}


@dataclass(frozen=True, slots=True)
class InfillShape:
    """llama.cpp's `/infill`."""

    head: Head

    def whole(self, ended: list[Finished]) -> dict[str, Any]:
        if not ended:
            return self._reply("", None)
        return self._reply(ended[0].done.text, ended[0])

    def opening(self, index: int) -> list[Chunk]:
        return []

    def text(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        return [{"index": index, "content": text, "stop": False}]

    def bare(self, index: int) -> Chunk:
        return {"index": index, "content": "", "stop": False}

    def ending(self, index: int, finished: Finished) -> list[Chunk]:
        return [self._reply("", finished)]

    def usage(self, ended: list[Finished]) -> Chunk:
        return {"index": 0, "content": "", "stop": True, "usage": self.head.usage(ended)}

    def _reply(self, content: str, finished: Finished | None) -> dict[str, Any]:
        done = None if finished is None else finished.done
        seconds = 0.0 if done is None else done.seconds
        count = 0 if done is None else done.tokens
        timings = replies_fill.Timings(
            prompt_n=0 if done is None else done.prompt_tokens,
            prompt_ms=0.0,
            predicted_n=count,
            predicted_ms=round(1000 * seconds, 3),
            predicted_per_second=round(count / seconds, 3) if seconds else 0.0,
        )
        reply = replies_fill.Infilled(
            index=0,
            content=content,
            stop=True,
            stop_type="none" if done is None else "eos",
            stopping_word="",
            model=self.head.model,
            truncated=False,
            tokens_predicted=count,
            tokens_evaluated=timings.prompt_n,
            tokens_cached=0 if done is None else done.reused_tokens,
            timings=timings,
            dgemma=self.head.note(),
        )
        return reply.model_dump()


@dataclass(frozen=True, slots=True)
class ResultShape:
    """This server's own shape: one object, and in a stream drafts before it."""

    head: Head
    kind: str
    describe: Callable[[Any], dict[str, Any]]
    first: dict[str, Any] | None = None  # what a stream begins with

    def whole(self, ended: list[Finished]) -> dict[str, Any]:
        (finished,) = ended
        note = {**took(finished.done).model_dump(), **self.head.note().model_dump()}
        usage = self.head.usage(ended).model_dump()
        described = self.describe(finished.result)
        return {**self.head.fields(self.kind), **described, "usage": usage, "dgemma": note}

    def opening(self, index: int) -> list[Chunk]:
        return [] if self.first is None else [{**self.bare(index), "dgemma": self.first}]

    def text(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        return []  # it comes with the result

    def bare(self, index: int) -> Chunk:
        return self.head.fields(f"{self.kind}.chunk")

    def ending(self, index: int, finished: Finished) -> list[Chunk]:
        return [self.whole([finished])]

    def usage(self, ended: list[Finished]) -> Chunk:
        usage = self.head.usage(ended).model_dump()
        return {**self.head.fields(f"{self.kind}.chunk"), "usage": usage}


def of_fill(filled: "Filled") -> dict[str, Any]:
    candidates = [
        {
            "text": one.text,
            "score": _finite(one.score),
            "holes": [{**asdict(hole), "score": _finite(hole.score)} for hole in one.holes],
        }
        for one in filled.candidates
    ]
    return {"text": filled.text, "holes": candidates[0]["holes"], "candidates": candidates}


def of_edit(edited: "Edited") -> dict[str, Any]:
    return {
        "text": edited.text,
        "changed": [asdict(change) for change in edited.changed],
        "opened": [list(span) for span in edited.opened],
        "diff": edited.diff(),
    }


def of_sudoku(solved: "Solved") -> dict[str, Any]:
    return {
        "puzzle": solved.puzzle,
        "solution": solved.solution,
        "solved": solved.is_right,
        "settled": solved.settled,
        "restarts": solved.restarts,
    }


def _finite(score: float) -> float:
    return round(score, 4) if isfinite(score) else -9999.0
