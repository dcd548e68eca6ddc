"""The bodies of replies that fill, edit and solve."""

from typing import Any, Literal

from pydantic import BaseModel

from dgemma.server.replies import ChatMessage, FinishReason, Note, Took, Usage


class FimChoice(BaseModel):
    """Read by Mistral's clients as a message, and by Mercury's as a text."""

    index: int
    text: str
    message: ChatMessage
    finish_reason: FinishReason
    dgemma: Took


class FimCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[FimChoice]
    usage: Usage
    dgemma: Note


class Timings(BaseModel):
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class Infilled(BaseModel):
    """llama.cpp's form."""

    index: int
    content: str
    stop: bool
    stop_type: Literal["eos", "limit", "none"]
    stopping_word: str
    model: str
    truncated: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    timings: Timings
    dgemma: Note


class Hole(BaseModel):
    start: int
    end: int
    text: str
    score: float
    tokens: int
    settled: bool


class FilledText(BaseModel):
    text: str
    score: float
    holes: list[Hole]


class Common(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    dgemma: dict[str, Any]  # what it took, and the harmless fields that were given


class FillReply(Common):
    object: Literal["dgemma.fill"]
    text: str
    holes: list[Hole]
    candidates: list[FilledText]


class Change(BaseModel):
    start: int
    end: int
    old_start: int
    old_end: int
    old: str
    new: str


class EditReply(Common):
    object: Literal["dgemma.edit"]
    text: str
    changed: list[Change]
    opened: list[list[int]]
    diff: str


class SudokuReply(Common):
    object: Literal["dgemma.sudoku"]
    puzzle: str
    solution: str | None
    solved: bool
    settled: bool
    restarts: int
