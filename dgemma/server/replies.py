"""The bodies of whole replies, in OpenAI's shapes; `dgemma` holds what only this server tells."""

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class BrokenCall(BaseModel):
    """A tool call that could not be read."""

    raw: str
    reason: str


class Took(BaseModel):
    """What an answer took."""

    mode: str
    seed: int
    finish: str  # stop, stop_string, length or budget
    blocks: int
    steps: int
    tokens_per_step: float
    unsettled_blocks: int  # blocks that ran out of steps
    retries: int
    fault: str
    remaining_entropy: float | None  # nats left on a canvas that the deadline cut short
    seconds: float
    prefill_seconds: float
    broken_calls: list[BrokenCall]


class Note(BaseModel):
    """Of the request as a whole."""

    ignored: list[str]  # harmless fields that were given


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    dgemma: Took


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    dgemma: Note


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    dgemma: Took


class TextCompletion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    dgemma: Note


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    canvas_length: int
    modes: list[str]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Piece(BaseModel):
    id: int
    piece: str | list[int]  # bytes, where they are no whole character


class Tokens(BaseModel):
    tokens: list[int] | list[Piece]


class Content(BaseModel):
    content: str


class Status(BaseModel):
    status: str
    running: int
    waiting: int


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail
