"""`POST /v1/chat/completions`: schema, parsing and replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from fastapi import Request, Response
from pydantic import BaseModel, WithJsonSchema, model_validator

from dgemma.server import limits
from dgemma.server.body_params import (
    check_length,
    compile_constraint,
    generations,
    text_constraint,
)
from dgemma.server.errors import ApiError, shown
from dgemma.server.field_policy import COMMON, FieldTable, harmless, refusal, refused
from dgemma.server.format import ChoicesFormat, arguments_text, finite, unique_calls
from dgemma.server.schemas import (
    STRICT,
    Body,
    ChoicesReply,
    FormattedBody,
    ReplyChoice,
    ResponseFormat,
    honoured,
    names_images,
)
from dgemma.server.service import ServiceDep, answer, make_router, whole_or_stream
from dgemma.text.messages import (
    FRAMES_URL,
    Message,
    Tool,
    read_messages,
    read_tools,
    with_media_named,
)

if TYPE_CHECKING:
    from dgemma.constrain.matcher import Constraint
    from dgemma.engine import Done, Engine
    from dgemma.engine.generation import Generation
    from dgemma.text.chat import Prompt
    from dgemma.text.tokenizer import Tokenizer

TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
IMAGE_URL = {"type": "string", "pattern": "^data:[^,]*;base64,"}


def _url_part(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a content part whose `kind` is an object with a URL."""
    value = {"type": "object", "required": ["url"], "properties": fields}
    properties = {"type": {"const": kind}, kind: value}
    return {"type": "object", "required": ["type", kind], "properties": properties}


IMAGE_PART = _url_part(
    "image_url", {"url": IMAGE_URL, "detail": {"enum": ["low", "auto", "high", "original"]}}
)
VIDEO_PART = _url_part(
    "video_url",
    {
        "url": {"type": "string", "pattern": f"^{FRAMES_URL},"},
        "fps": {"type": "number", "description": "frames a second; 24 by default"},
    },
)
CONTENT_PART = {
    "anyOf": [
        {"$ref": "#/components/schemas/TextPart"},
        {"$ref": "#/components/schemas/ImagePart"},
        {"$ref": "#/components/schemas/VideoPart"},
    ]
}
CONTENT_PARTS = {"type": "array", "items": CONTENT_PART}
TEXT_OR_NULL = {"type": ["string", "null"]}
# Parsed by dgemma.text.messages, which has better error messages; these types document it.
MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [TEXT_OR_NULL, CONTENT_PARTS]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        **dict.fromkeys(("reasoning_content", "tool_call_id", "name"), TEXT_OR_NULL),
    },
}
FUNCTION = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
NAMED_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
}
RawMessage = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]
ToolChoice = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["auto", "none", "required"]}, NAMED_TOOL]})
]


ReasoningEffort = Literal["none", "minimal", "instant", "low", "medium", "high", "xhigh", "max"]


# --- request


def wants_thought(effort: str | None) -> bool | None:
    """Return whether a reasoning effort asks for a thought; None if it is not given."""
    return None if effort is None else effort not in ("none", "minimal", "instant")


class TemplateOptions(BaseModel):
    model_config = STRICT

    enable_thinking: bool | None = None


class ChatBody(FormattedBody):
    """`POST /v1/chat/completions`."""

    unhonoured: ClassVar[FieldTable] = {
        **COMMON,
        "prediction": harmless("a hint for speed; the answer does not depend on it"),
        "verbosity": harmless("the model has no such setting"),
        "reasoning_summary": harmless("the thought is sent in full"),
        "reasoning_summary_wait": harmless("the thought comes before the answer"),
        "top_logprobs": refused("only the tokens of the answer are scored", 0),
        "functions": refused("outdated; use tools", []),
        "function_call": refused("outdated; use tool_choice", "auto", "none"),
        "modalities": refused("answers are text", ["text"], []),
        "audio": refused("answers are text"),
        "web_search_options": refused("the server opens no connections of its own"),
    }

    messages: list[RawMessage] = honoured(
        ...,
        "system, developer, user, assistant and tool; text, pictures and frames as data: URLs",
        min_length=1,
        max_length=limits.MAX_MESSAGES,
    )
    max_completion_tokens: int | None = honoured(None, "as max_tokens", ge=1)
    tools: list[dict[str, Any]] = honoured(
        [], "functions the model may call", max_length=limits.MAX_TOOLS
    )
    tool_choice: ToolChoice = honoured("auto", "auto, none, required, or the function to call")
    parallel_tool_calls: bool = honoured(True, "false: calls after the first are left out")
    reasoning_effort: ReasoningEffort | None = honoured(
        None, "none, minimal, instant: no thought; other levels: one"
    )
    chat_template_kwargs: TemplateOptions = honoured(TemplateOptions(), "enable_thinking")
    logprobs: bool = honoured(False, "of each token of the reply, from the causal pass")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_choice not in ("auto", "none", "required") and self.named_tool is None:
            raise refusal(
                "tool_choice",
                f"tool_choice is {shown(self.tool_choice)}; it must be auto, none, required or "
                '{"type": "function", "function": {"name": ...}}',
            )
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            sentence = "max_tokens and max_completion_tokens differ; give one of them"
            raise refusal("max_tokens", sentence)
        enabled = self.chat_template_kwargs.enable_thinking
        if enabled is not None and enabled != self.wants_thought:
            sentence = "reasoning_effort and enable_thinking differ; give one of them"
            raise refusal("reasoning_effort", sentence)
        return self

    @property
    def named_tool(self) -> str | None:
        """The name of the tool that must be called."""
        match self.tool_choice:
            case {"type": "function", "function": {"name": str(name), **more}, **others}:
                return None if more or others else name
        return None

    @property
    def wants_thought(self) -> bool | None:
        found = wants_thought(self.reasoning_effort)
        return self.chat_template_kwargs.enable_thinking if found is None else found

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def has_constraint(self) -> bool:
        functions = [tool.get("function") for tool in self.tools]
        is_strict = any(isinstance(f, dict) and f.get("strict") for f in functions)
        return super().has_constraint or is_strict or self.tool_choice not in ("auto", "none")

    @property
    def has_images(self) -> bool:
        return names_images(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A conversation to answer, independent of the API it came by."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    named_tool: str | None = None  # the tool that must be called, if one is required
    thinking: bool = False
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    image_tokens: int | None = None  # per picture; None: by its detail

    @property
    def needs_grammar(self) -> bool:
        """True if calls are constrained to the declared tools."""
        is_strict = any(tool.strict for tool in self.tools)
        return self.tool_choice == "required" or (self.tool_choice == "auto" and is_strict)


def parse_chat(engine: "Engine", body: ChatBody) -> "list[Generation]":
    choice: Literal["auto", "none", "required"]
    choice = "required" if body.named_tool else body.tool_choice
    chat = ChatInput(
        messages=read_messages(body.messages),
        tools=read_tools(body.tools),
        tool_choice=choice,
        named_tool=body.named_tool,
        thinking=bool(body.wants_thought),
        max_tokens=body.max_tokens or body.max_completion_tokens,
        response_format=body.response_format,
        image_tokens=body.dgemma.image_tokens,
    )
    return chat_generations(engine, body, chat)


def chat_generations(engine: "Engine", body: Body, chat: ChatInput) -> "list[Generation]":
    """Return one generation for each answer to a conversation."""
    prompt, calls = chat_prompt(engine, chat), _calls_constraint(engine, chat)
    constraint = text_constraint(engine, body.dgemma, chat.response_format)
    if constraint is not None and chat.tools and chat.tool_choice != "none":
        sentence = "a constraint does not go together with tools; use tool_choice none"
        raise ApiError(400, sentence)
    return generations(engine, body, prompt, chat.max_tokens, calls or constraint)


def chat_prompt(engine: "Engine", chat: ChatInput) -> "Prompt":
    """Render a conversation; refuses one that cannot fit."""
    for content in (message.content for message in chat.messages):
        for part in (content,) if isinstance(content, str) else content:
            if isinstance(part, str):
                check_length(engine, part)
    messages = with_media_named(chat.messages, chat.image_tokens)
    offered = () if chat.tool_choice == "none" else chat.tools
    return engine.prompt(messages, offered, thinking=chat.thinking)


def _calls_constraint(engine: "Engine", chat: ChatInput) -> "Constraint | None":
    """Compile a constraint to tool calls, if the choice forces one or a tool is strict."""
    if not chat.needs_grammar:
        return None
    named = chat.named_tool
    called = [tool for tool in chat.tools if named in (None, tool.name)]
    if not called:
        what = "there are no tools" if named is None else f"the tool {named[:60]!r} is not declared"
        raise ApiError(400, f"tool_choice demands a call, but {what}", param="tool_choice")
    kind = "auto" if chat.tool_choice == "auto" else "required"
    return compile_constraint(engine, {"tools": called, "tool_choice": kind}, "tools")


# --- reply


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ReplyToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ReplyMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ReplyToolCall] | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[None]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class ChatChoice(ReplyChoice):
    message: ReplyMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(ChoicesReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


@dataclass(frozen=True, kw_only=True)
class ChatFormat(ChoicesFormat):
    """Write chat completions; with `one_call`, drop tool calls after the first."""

    tokenizer: "Tokenizer"
    with_logprobs: bool = False
    one_call: bool = False
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    empty_delta: ClassVar[dict[str, Any]] = {"delta": {}, "logprobs": None}
    first_delta: ClassVar[dict[str, Any]] = {
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
    }

    def choice(self, done: "Done") -> dict[str, Any]:
        called = self._calls(done)
        content = None if called and not done.text else done.text
        message = {"role": "assistant", "content": content, "refusal": None}
        if done.reply.thought:
            message["reasoning_content"] = done.reply.thought
        return {"message": {**message, "tool_calls": called} if called else message}

    def delta(self, text: str, is_thought: bool) -> dict[str, Any]:
        name = "reasoning_content" if is_thought else "content"
        return {**self.empty_delta, "delta": {name: text}}

    def last_deltas(self, done: "Done") -> list[dict[str, Any]]:
        called = [{"index": index, **call} for index, call in enumerate(self._calls(done))]
        return [{**self.empty_delta, "delta": {"tool_calls": called}}] if called else []

    def finish(self, done: "Done") -> dict[str, Any]:
        fields = {"logprobs": self._logprobs(done), **super().finish(done)}
        return {**fields, "finish_reason": "tool_calls"} if done.reply.tool_calls else fields

    def _calls(self, done: "Done") -> list[dict[str, Any]]:
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_text(call)},
            }
            for call in unique_calls(done, self.envelope, one_call=self.one_call)
        ]

    def _logprobs(self, done: "Done") -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        content = [
            {
                "token": self.tokenizer.decode([token]),
                "logprob": finite(logprob),
                "bytes": list(self.tokenizer.token_bytes(token)),
                "top_logprobs": [],
            }
            for token, logprob in zip(done.ids, done.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


router = make_router()


@router.post("/v1/chat/completions", **whole_or_stream(ChatCompletion))
async def chat(request: Request, body: ChatBody, service: ServiceDep) -> Response:
    """Answer a conversation."""
    fmt = ChatFormat(
        envelope=service.envelope(request, "chatcmpl-", body),
        tokenizer=service.engine.tokenizer,
        with_logprobs=body.logprobs,
        one_call=not body.parallel_tool_calls,
    )
    return await answer(request, service, body, parse_chat, fmt)
