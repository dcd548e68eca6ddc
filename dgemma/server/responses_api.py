"""`POST /v1/responses`: schema, parsing and replies. Stateless: input contains all items."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from fastapi import Request, Response
from pydantic import BaseModel, Field, WithJsonSchema, model_validator

from dgemma.server import limits
from dgemma.server.chat_api import ChatInput, ReasoningEffort, chat_generations, wants_thought
from dgemma.server.errors import ApiError, shown
from dgemma.server.field_policy import COMMON, FieldTable, harmless, refusal, refused
from dgemma.server.format import Chunk, Parts, PartsFormat, ReplyPart, arguments_text, stats
from dgemma.server.schemas import STRICT, Body, PromptTokens, ResponseFormat, honoured, names_images
from dgemma.server.service import ServiceDep, answer, make_router, whole_or_stream
from dgemma.text import messages as reader
from dgemma.text.control_tokens import CHANNEL, CHANNEL_END
from dgemma.text.messages import Message, ToolCall

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine
    from dgemma.engine.generation import Generation
    from dgemma.text.tokenizer import Tokenizer

STATELESS = "nothing is stored; send all items of the conversation in input"
ENCRYPTED = "reasoning.encrypted_content"
TOOL_HARMLESS = {"defer_loading", "allowed_callers", "output_schema", "async"}
# Fields of items; those after the bar are accepted without effect.
ITEM_FIELDS = {
    "message": "role content | id status phase",
    "function_call": "call_id name arguments | id status caller async",
    "function_call_output": "call_id output name | id status caller",
    "reasoning": "content summary | id status encrypted_content",
}
ITEM = {"type": "object", "properties": {"type": {"enum": list(ITEM_FIELDS)}}}
# Parsed below with better error messages; these types document it.
RawInput = Annotated[
    str | list[Any],
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": ITEM}]}),
]
NAMED_FUNCTION = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
}
FunctionChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required"]}, NAMED_FUNCTION]})
]


# --- request


class TextFormatConfig(BaseModel):
    """The field `text.format`; a name, a description and strict are harmless."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"] = "text"
    body: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    name: str = Field(default="", max_length=256)
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.body is not None):
            sentence = "text.format has a schema if its type is json_schema, only then"
            raise refusal("text", sentence)
        return self

    @property
    def response_format(self) -> ResponseFormat:
        if self.body is not None:
            return ResponseFormat.of_schema(self.body)
        return ResponseFormat(type=self.type)


class TextConfig(BaseModel):
    model_config = STRICT

    format: TextFormatConfig = TextFormatConfig()
    verbosity: Literal["low", "medium", "high"] | None = None  # harmless


class ReasoningConfig(BaseModel):
    """The field `reasoning`; all but the effort is harmless: the thought is sent in full."""

    model_config = STRICT

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    omitted: ClassVar[frozenset[str]] = frozenset({"max_tokens", "stop", "n", "diffusing"})
    harmless_inside: ClassVar[dict[str, set[str]]] = {"tools": TOOL_HARMLESS}
    unhonoured: ClassVar[FieldTable] = {
        **COMMON,
        "prompt_cache_options": harmless("prefixes are found by their tokens"),
        "max_tool_calls": harmless("no tools run on the server"),
        "client_metadata": harmless("nothing is stored"),
        "stream_options": harmless("there is no obfuscation; usage is always sent"),
        "previous_response_id": refused(STATELESS),
        "conversation": refused(STATELESS),
        "context_management": refused("the conversation is read as it is sent", []),
        "prompt": refused("there are no stored prompts; write it into input"),
        "background": refused("an answer is sent as it is written", False),
        "truncation": refused("nothing is left out; shorten input", "disabled"),
        "top_logprobs": refused("only chat and completions have logprobs", 0),
        "moderation": refused("nothing is moderated"),
    }

    input: RawInput = honoured(
        ..., "a text, or items: message, function_call, function_call_output, reasoning"
    )
    instructions: str = honoured("", "a system message before the input")
    stream: bool = honoured(False, "server-sent events: response.created to response.completed")
    max_output_tokens: int | None = honoured(
        None, "longest answer, thought included; lowered to what the context holds", ge=1
    )
    tools: list[dict[str, Any]] = honoured(
        [], "functions the model may call; other kinds are refused", max_length=limits.MAX_TOOLS
    )
    tool_choice: FunctionChoice = honoured("auto", "auto, none, required, or the function to call")
    parallel_tool_calls: bool = honoured(True, "false: calls after the first are left out")
    text: TextConfig = honoured(
        TextConfig(), "format: text, json_object or json_schema; verbosity has no effect"
    )
    reasoning: ReasoningConfig = honoured(
        ReasoningConfig(), "effort: none and minimal: no thought, others: one; the rest no effect"
    )
    include: list[str] = honoured([], f"{ENCRYPTED} has no effect; others are refused")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_choice not in ("auto", "none", "required") and self.named_tool is None:
            choices = 'auto, none, required or {"type": "function", "name": ...}'
            sentence = f"tool_choice is {shown(self.tool_choice)}; it must be {choices}"
            raise refusal("tool_choice", sentence)
        unknown = [name for name in self.include if name != ENCRYPTED]
        if unknown:
            raise refusal("include", f"include has {unknown[0][:60]!r}; only {ENCRYPTED} passes")
        return self

    @property
    def ignored_inside(self) -> set[str]:
        given = {"include": self.include, "text.verbosity": self.text.verbosity}
        reasoning = self.reasoning.model_dump(exclude={"effort"}, exclude_none=True)
        names = {name for name in given if given[name]} | {f"reasoning.{n}" for n in reasoning}
        return super().ignored_inside | names

    @property
    def named_tool(self) -> str | None:
        match self.tool_choice:
            case {"type": "function", "name": str(name), **more} if not more:
                return name
        return None

    @property
    def has_constraint(self) -> bool:
        is_strict = any(tool.get("strict") for tool in self.tools)
        is_forced = self.tool_choice not in ("auto", "none")
        return super().has_constraint or is_strict or is_forced or self.text.format.type != "text"

    @property
    def has_images(self) -> bool:
        return not isinstance(self.input, str) and names_images(self.input)


def parse_responses(engine: "Engine", body: ResponsesBody) -> "list[Generation]":
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    chat = ChatInput(
        messages=[*system, *_read_input(body.input)],
        tools=reader.read_flat_tools(body.tools, "function", "parameters"),
        tool_choice="required" if body.named_tool else body.tool_choice,
        named_tool=body.named_tool,
        thinking=bool(wants_thought(body.reasoning.effort)),
        max_tokens=body.max_output_tokens,
        response_format=body.text.format.response_format,
        image_tokens=body.dgemma.image_tokens,
    )
    return chat_generations(engine, body, chat)


def _read_input(raw: str | Sequence[object]) -> list[Message]:
    """Read items; consecutive thoughts, texts and calls of the assistant become one message."""
    if isinstance(raw, str):
        return [Message(role="user", content=raw)]
    messages: list[Message] = []
    for message in reader.read_each(raw, "input", _read_item):
        if messages and message.role == messages[-1].role == "assistant":
            message = _merged(messages.pop(), message)
        messages.append(message)
    return messages


def _read_item(raw: object) -> Message:
    kind = reader.read_object(raw, "an item").get("type", "message")
    if not isinstance(kind, str) or kind not in ITEM_FIELDS:
        reader.refuse("an item's type", kind, f"one of {', '.join(ITEM_FIELDS)}")
    allowed = {"type", *ITEM_FIELDS[kind].replace("|", "").split()}
    where = f"a {kind} item"
    item = reader.read_fields(raw, allowed, where)
    if kind == "function_call":
        call = ToolCall(
            id=reader.read_string(item, "call_id", where),
            name=reader.read_string(item, "name", where),
            arguments=reader.read_arguments(item.get("arguments")),
        )
        return Message(role="assistant", tool_calls=(call,))
    if kind == "function_call_output":
        return Message(
            role="tool",
            content=reader.read_flat_content(item.get("output")),
            tool_call_id=reader.read_string(item, "call_id", where),
            name=reader.read_string(item, "name", where, default=""),
        )
    if kind == "reasoning":
        texts = item.get("content") or item.get("summary") or []
        thought = "\n".join(reader.read_flat_parts(texts, reader.read_text_part))
        return Message(role="assistant", thought=thought)
    role: Any = reader.read_string(item, "role", where)
    if role == "tool":
        reader.refuse("a message's role", role, "one of system, developer, user, assistant")
    return Message(role=role, content=reader.read_flat_content(item.get("content")))


def _merged(first: Message, second: Message) -> Message:
    contents = [text for text in (first.content, second.content) if isinstance(text, str) and text]
    return Message(
        role="assistant",
        content="\n\n".join(contents),
        thought="\n".join(filter(None, (first.thought, second.thought))),
        tool_calls=first.tool_calls + second.tool_calls,
    )


# --- reply


class ReasoningTokens(BaseModel):
    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseReply(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponsesUsage
    dgemma: dict[str, Any]  # cost, and harmless fields that were given


@dataclass(frozen=True, kw_only=True)
class ResponsesFormat(PartsFormat):
    """Write responses. `echoed`: request fields that a response repeats."""

    tokenizer: "Tokenizer"
    echoed: dict[str, Any]

    def full(self, answers: "Sequence[Done]") -> dict[str, Any]:
        (done,) = answers
        return self._finished(done, self.parts_of(done))

    def line(self, chunk: Chunk, number: int = 0) -> str:
        return super().line({"sequence_number": number, **chunk})

    def empty_chunk(self, index: int) -> Chunk:
        return {"type": "response.in_progress", "response": self._response("in_progress")}

    def first_chunks(self, index: int, prompt_tokens: int) -> list[Chunk]:
        progress = self.empty_chunk(index)
        return [{**progress, "type": "response.created"}, progress]

    def start_part(self, number: int, part: ReplyPart) -> list[Chunk]:
        item = {**self._item(number, part, "in_progress"), "content": []}
        added = {"type": "response.output_item.added", "output_index": number, "item": item}
        content = {"part": _content(ReplyPart(part.is_thought))}
        return [added, self._event("content_part.added", number, part, content)]

    def part_delta(self, number: int, part: ReplyPart, text: str) -> list[Chunk]:
        more = {"delta": text} if part.is_thought else {"delta": text, "logprobs": []}
        return [self._event(f"{_content(part)['type']}.delta", number, part, more)]

    def end_part(self, number: int, part: ReplyPart) -> list[Chunk]:
        more = {"text": part.text} if part.is_thought else {"text": part.text, "logprobs": []}
        item = self._item(number, part, "completed")
        return [
            self._event(f"{_content(part)['type']}.done", number, part, more),
            self._event("content_part.done", number, part, {"part": _content(part)}),
            {"type": "response.output_item.done", "output_index": number, "item": item},
        ]

    def call_chunks(self, number: int, call: ToolCall) -> list[Chunk]:
        item, arguments = self._call(number, call), arguments_text(call)
        place = {"item_id": item["id"], "output_index": number}
        empty = {**item, "arguments": "", "status": "in_progress"}
        name = "response.function_call_arguments"
        return [
            {"type": "response.output_item.added", "output_index": number, "item": empty},
            {"type": f"{name}.delta", **place, "delta": arguments},
            {"type": f"{name}.done", **place, "name": call.name, "arguments": arguments},
            {"type": "response.output_item.done", "output_index": number, "item": item},
        ]

    def final_chunks(self, done: "Done", parts: Parts) -> list[Chunk]:
        response = self._finished(done, parts)
        return [{"type": f"response.{response['status']}", "response": response}]

    def error_line(self, error: ApiError, number: int = 0) -> str:
        code = "rate_limit_exceeded" if error.status in (429, 503) else "server_error"
        reason = {"code": error.code or code, "message": error.body["error"]["message"]}
        response = {**self._response("failed"), "error": reason}
        return self.line({"type": "response.failed", "response": response}, number)

    def _finished(self, done: "Done", parts: Sequence[ReplyPart]) -> dict[str, Any]:
        is_cut = done.finish in ("length", "budget")
        output = [self._item(number, part, "completed") for number, part in enumerate(parts)]
        calls = enumerate(self.calls(done), len(parts))
        output += [self._call(number, call) for number, call in calls]
        response = self._response("incomplete" if is_cut else "completed")
        return {
            **response,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": self._usage(done),
            "dgemma": {**stats(done), **self.envelope.note},
        }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.envelope.id,
            "object": "response",
            "created_at": self.envelope.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.envelope.model,
            "output": [],
            "usage": None,
            **self.echoed,
        }

    def _usage(self, done: "Done") -> dict[str, Any]:
        thought = _thought_tokens(done, self.tokenizer)
        details = {
            "cached_tokens": done.reused_tokens,
            "cache_write_tokens": 0,
            "image_tokens": done.image_tokens,
        }
        return {
            "input_tokens": done.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": done.tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": done.prompt_tokens + done.tokens,
        }

    def _item(self, number: int, part: ReplyPart, status: str) -> dict[str, Any]:
        item_id = f"{'rs' if part.is_thought else 'msg'}_{self.envelope.suffix}_{number}"
        fields: dict[str, Any] = {"id": item_id, "status": status, "content": [_content(part)]}
        if part.is_thought:
            return {"type": "reasoning", "summary": [], **fields}
        return {"type": "message", "role": "assistant", **fields}

    def _call(self, number: int, call: ToolCall) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": f"fc_{self.envelope.suffix}_{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": arguments_text(call),
            "status": "completed",
        }

    def _event(self, name: str, number: int, part: ReplyPart, more: dict[str, Any]) -> Chunk:
        item_id = self._item(number, part, "")["id"]
        place = {"item_id": item_id, "output_index": number, "content_index": 0}
        return {"type": f"response.{name}", **place, **more}


def _content(part: ReplyPart) -> dict[str, Any]:
    if part.is_thought:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _thought_tokens(done: "Done", tokenizer: "Tokenizer") -> int:
    """Count the tokens of thoughts, including their control tokens."""
    opens, closes = (tokenizer.control_ids.get(name) for name in (CHANNEL, CHANNEL_END))
    if not done.reply.thought:
        return 0
    marks = [token for token in done.ids if token in (opens, closes)]
    is_open, num_tokens = marks[:1] != [opens], 0  # the prompt may have opened a thought
    for token in done.ids:
        is_open = is_open or token == opens
        num_tokens += is_open
        is_open = is_open and token != closes
    return num_tokens


router = make_router()


@router.post("/v1/responses", **whole_or_stream(ResponseReply))
async def responses(request: Request, body: ResponsesBody, service: ServiceDep) -> Response:
    """Answer a conversation, in the format of OpenAI's Responses API."""
    echoed = body.model_dump(
        include={"instructions", "max_output_tokens", "parallel_tool_calls", "tool_choice", "tools"}
    )
    fmt = ResponsesFormat(
        envelope=service.envelope(request, "resp_", body),
        tokenizer=service.engine.tokenizer,
        one_call=not body.parallel_tool_calls,
        echoed={
            **echoed,
            "temperature": body.temperature,
            "text": body.text.model_dump(by_alias=True, exclude_none=True),
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "truncation": "disabled",
            "previous_response_id": None,
            "metadata": {},
        },
    )
    return await answer(request, service, body, parse_responses, fmt)
