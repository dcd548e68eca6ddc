"""`POST /v1/messages` and its `count_tokens`, in Anthropic's format: schema, parsing, replies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel, Field, WithJsonSchema, model_validator

from dgemma.server import limits
from dgemma.server.chat_api import ChatInput, chat_generations, chat_prompt
from dgemma.server.errors import MESSAGES_PATH, ApiError
from dgemma.server.field_policy import COMMON, FieldTable, harmless, refused
from dgemma.server.format import Chunk, Parts, PartsFormat, ReplyPart, arguments_text, stats
from dgemma.server.messages_blocks import ROLES, read_turn, system_messages
from dgemma.server.schemas import (
    STRICT,
    Body,
    ResponseFormat,
    Sampling,
    StopString,
    honoured,
    names_images,
)
from dgemma.server.service import MAX_INLINE_BYTES, ServiceDep, answer, make_router, whole_or_stream
from dgemma.text import messages as reader
from dgemma.text.messages import ToolCall

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine
    from dgemma.engine.generation import Generation

VERSIONS = ("2023-06-01", "2026-10-21")  # accepted values of the header anthropic-version
TOOL_HARMLESS = {
    "cache_control",
    "eager_input_streaming",
    "input_examples",
    "defer_loading",
    "allowed_callers",
}
STOP_REASONS = {
    "stop": "end_turn",
    "stop_string": "stop_sequence",
    "length": "max_tokens",
    "budget": "max_tokens",
}
BLOCKS = {"type": "array", "items": {"type": "object", "required": ["type"]}}
TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, BLOCKS]}
# Parsed below with better error messages; these types document it.
TURN = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": list(ROLES)}, "content": TEXT_OR_BLOCKS},
}
RawTurn = Annotated[dict[str, Any], WithJsonSchema(TURN)]
RawSystem = Annotated[str | list[Any], WithJsonSchema(TEXT_OR_BLOCKS)]


# --- request


class ThinkingConfig(BaseModel):
    """The field `thinking`; a budget is harmless, since max_tokens bounds thought and answer."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class CallChoice(BaseModel):
    """The field `tool_choice`."""

    model_config = STRICT

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            sentence = "tool_choice has a name if its type is tool, only then"
            raise ApiError(400, sentence, param="tool_choice")
        return self


class OutputSchema(BaseModel):
    model_config = STRICT

    type: Literal["json_schema"]
    body: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(BaseModel):
    """The field `output_config`; an effort is harmless: `thinking` asks for a thought."""

    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputSchema | None = None


class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`."""

    omitted: ClassVar[frozenset[str]] = frozenset(
        "stream stream_options max_tokens temperature seed stop n diffusing dgemma".split()
    )
    harmless_inside: ClassVar[dict[str, set[str]]] = {
        "tools": TOOL_HARMLESS,
        "system": {"cache_control"},
    }
    unhonoured: ClassVar[FieldTable] = {
        "cache_control": harmless("prefixes are found by their tokens"),
        "speed": harmless("there is one"),
        "user_profile_id": harmless("nothing is stored per user"),
        "workspace_id": harmless("nothing is stored"),
    }

    messages: list[RawTurn] = honoured(
        ...,
        "user, assistant and system; text, image, thinking, tool_use and tool_result",
        min_length=1,
        max_length=limits.MAX_MESSAGES,
    )
    system: RawSystem = honoured("", "a text or text blocks")
    tools: list[dict[str, Any]] = honoured(
        [], "tools of the client, with input_schema; strict holds a call to it", max_length=128
    )
    tool_choice: CallChoice = honoured(
        CallChoice(type="auto"), "auto, any, tool with a name, none; disable_parallel_tool_use"
    )
    thinking: ThinkingConfig = honoured(
        ThinkingConfig(type="disabled"),
        "enabled and adaptive: a thought; display: omitted leaves out its text; no budget applies",
    )
    output_config: OutputConfig = honoured(
        OutputConfig(), "format: a JSON Schema that the answer fits; effort has no effect"
    )

    @property
    def ignored_inside(self) -> set[str]:
        budget, effort = self.thinking.budget_tokens, self.output_config.effort
        given = {"thinking.budget_tokens": budget, "output_config.effort": effort}
        return super().ignored_inside | {name for name in given if given[name] is not None}

    @property
    def has_constraint(self) -> bool:
        is_strict = any(tool.get("strict") for tool in self.tools)
        is_forced = self.tool_choice.type in ("any", "tool")
        has_format = self.output_config.format is not None
        return super().has_constraint or is_strict or is_forced or has_format

    @property
    def has_images(self) -> bool:
        return names_images(self.messages)


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    omitted: ClassVar[frozenset[str]] = frozenset({"stream_options", "stop", "n", "diffusing"})
    unhonoured: ClassVar[FieldTable] = {
        **COMMON,
        **CountTokensBody.unhonoured,
        "context_management": harmless("the conversation is read as it is sent"),
        "inference_geo": harmless("the model runs on this machine"),
        "diagnostics": harmless("dgemma of the reply has the cost of an answer"),
        "container": refused("no code runs on the server"),
        "mcp_servers": refused("the server opens no connections of its own", []),
    }

    stream: bool = honoured(False, "server-sent events: message_start to message_stop")
    max_tokens: int = honoured(
        ..., "longest answer, thought included; lowered to what the context holds", ge=1
    )
    stop_sequences: list[StopString] = honoured(
        [], "up to 64; the answer ends before the first of them", max_length=limits.MAX_STOPS
    )

    @property
    def sampling(self) -> Sampling:
        return replace(super().sampling, stop=tuple(self.stop_sequences))


def parse_messages(engine: "Engine", body: MessagesBody) -> "list[Generation]":
    return chat_generations(engine, body, _chat_input(body, body.max_tokens))


def _count(engine: "Engine", body: CountTokensBody) -> int:
    return len(chat_prompt(engine, _chat_input(body, None)).ids)


def _chat_input(body: CountTokensBody, max_tokens: int | None) -> ChatInput:
    if body.messages[-1].get("role") == "assistant":
        sentence = "the last message is the assistant's, and an answer is a new turn; end with user"
        raise ApiError(400, sentence, param="messages")
    choice, output = body.tool_choice, body.output_config.format
    parsed = reader.read_each(body.messages, "messages", read_turn)
    return ChatInput(
        messages=[*system_messages(body.system), *chain(*parsed)],
        tools=reader.read_flat_tools(body.tools, "custom", "input_schema"),
        tool_choice="required" if choice.type in ("any", "tool") else choice.type,  # type: ignore[arg-type]
        named_tool=choice.name,
        thinking=body.thinking.type != "disabled",
        max_tokens=max_tokens,
        response_format=None if output is None else ResponseFormat.of_schema(output.body),
        image_tokens=body.dgemma.image_tokens,
    )


# --- reply


class MessagesUsage(BaseModel):
    input_tokens: int  # not found in the prefix cache
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageReply(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    dgemma: dict[str, Any]  # cost, and harmless fields that were given


class TokenCount(BaseModel):
    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


@dataclass(frozen=True, kw_only=True)
class MessagesFormat(PartsFormat):
    """Write messages; with `hides_thought`, a thinking block has no text."""

    hides_thought: bool = False

    def full(self, answers: "Sequence[Done]") -> dict[str, Any]:
        (done,) = answers
        content = [self._content(part, part.text) for part in self.parts_of(done)]
        content += [self._call(call, call.arguments) for call in self.calls(done)]
        message = {**self._message(content), **self._stop(done), "usage": _usage(done)}
        return {**message, "dgemma": {**stats(done), **self.envelope.note}}

    def first_chunks(self, index: int, prompt_tokens: int) -> list[Chunk]:
        usage = _usage_fields(prompt_tokens, 0, 0)
        start = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [{"type": "message_start", "message": start}, self.empty_chunk(0)]

    def start_part(self, number: int, part: ReplyPart) -> list[Chunk]:
        empty = self._content(part, "")
        if part.is_thought:
            empty["signature"] = ""
        return [{"type": "content_block_start", "index": number, "content_block": empty}]

    def part_delta(self, number: int, part: ReplyPart, text: str) -> list[Chunk]:
        if not part.is_thought:
            return [_delta(number, {"type": "text_delta", "text": text})]
        if self.hides_thought:
            return []
        return [_delta(number, {"type": "thinking_delta", "thinking": text})]

    def end_part(self, number: int, part: ReplyPart) -> list[Chunk]:
        signature = {"type": "signature_delta", "signature": self.envelope.id}
        signed = [_delta(number, signature)] if part.is_thought else []
        return [*signed, {"type": "content_block_stop", "index": number}]

    def call_chunks(self, number: int, call: ToolCall) -> list[Chunk]:
        start = {"index": number, "content_block": self._call(call, {})}
        return [
            {"type": "content_block_start", **start},
            _delta(number, {"type": "input_json_delta", "partial_json": arguments_text(call)}),
            {"type": "content_block_stop", "index": number},
        ]

    def final_chunks(self, done: "Done", parts: Parts) -> list[Chunk]:
        note = {**stats(done), **self.envelope.note}
        last = {"delta": self._stop(done), "usage": _usage(done), "dgemma": note}
        return [{"type": "message_delta", **last}, {"type": "message_stop"}]

    def empty_chunk(self, index: int) -> Chunk:
        return {"type": "ping"}

    def heartbeat(self) -> str:
        return self.line(self.empty_chunk(0))

    def error_line(self, error: ApiError, number: int = 0) -> str:
        return self.line(error.body_for(MESSAGES_PATH))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        fields = {"id": self.envelope.id, "type": "message", "role": "assistant"}
        return {**fields, "model": self.envelope.model, "content": content}

    def _content(self, part: ReplyPart, text: str) -> dict[str, Any]:
        if not part.is_thought:
            return {"type": "text", "text": text}
        shown = "" if self.hides_thought else text
        # Not verified when sent back; clients expect one.
        return {"type": "thinking", "thinking": shown, "signature": self.envelope.id}

    def _call(self, call: ToolCall, arguments: object) -> dict[str, Any]:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def _stop(self, done: "Done") -> dict[str, Any]:
        reason = "tool_use" if done.reply.tool_calls else STOP_REASONS[done.finish]
        return {"stop_reason": reason, "stop_sequence": done.stop_string or None}


def _delta(number: int, delta: dict[str, Any]) -> Chunk:
    return {"type": "content_block_delta", "index": number, "delta": delta}


def _usage(done: "Done") -> dict[str, int]:
    return _usage_fields(done.prompt_tokens - done.reused_tokens, done.reused_tokens, done.tokens)


def _usage_fields(new: int, cached: int, written: int) -> dict[str, int]:
    caches = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    return {"input_tokens": new, **caches, "output_tokens": written}


async def check_version(anthropic_version: Annotated[str | None, Header()] = None) -> None:
    """Refuse unsupported versions of the API; a missing header is accepted."""
    if anthropic_version is not None and anthropic_version not in VERSIONS:
        spoken = " and ".join(VERSIONS)
        sentence = f"anthropic-version is {anthropic_version[:60]!r}; this server speaks {spoken}"
        raise ApiError(400, sentence)


router = make_router(AnthropicError, dependencies=[Depends(check_version)])


@router.post(MESSAGES_PATH, **whole_or_stream(MessageReply))
async def messages(request: Request, body: MessagesBody, service: ServiceDep) -> Response:
    """Answer a conversation, in Anthropic's format."""
    fmt = MessagesFormat(
        envelope=service.envelope(request, "msg_", body),
        one_call=body.tool_choice.disable_parallel_tool_use,
        hides_thought=body.thinking.display == "omitted",
    )
    return await answer(request, service, body, parse_messages, fmt)


@router.post(f"{MESSAGES_PATH}/count_tokens")
async def count_tokens(request: Request, body: CountTokensBody, service: ServiceDep) -> TokenCount:
    """Count the tokens of a conversation, in Anthropic's format."""
    service.check_model(body.model)
    if request.state.body_bytes <= MAX_INLINE_BYTES and not body.has_images:
        return TokenCount(input_tokens=_count(service.engine, body))
    deadline = service.deadline(request)
    count = await service.run_in_thread(request, deadline, _count, service.engine, body)
    return TokenCount(input_tokens=count)
