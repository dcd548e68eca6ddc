"""A subset of Ollama's API under `/api`: chat, generate, tags, show, version; streams are NDJSON.

No models are pulled, created or unloaded: only the served one exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import (
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from dgemma import __version__
from dgemma.images import Image, refuse_address
from dgemma.server import limits
from dgemma.server.body_params import check_length, generations, text_constraint
from dgemma.server.chat_api import ChatInput, chat_generations
from dgemma.server.errors import OLLAMA_PATH, ApiError
from dgemma.server.field_policy import (
    COMMON,
    FieldPolicy,
    FieldTable,
    check_ar,
    harmless,
    refused,
    sort_fields,
)
from dgemma.server.format import FINISH_REASONS, Chunk, Format, stats, unique_calls, write_json
from dgemma.server.infill_api import hole_programs
from dgemma.server.schemas import STRICT, Body, ResponseFormat, Sampling, Stops, honoured
from dgemma.server.sentinels import HoleContext
from dgemma.server.service import (
    Service,
    ServiceDep,
    answer,
    iso_time,
    make_router,
    whole_or_stream,
)
from dgemma.text import messages as reader
from dgemma.text.messages import Message, Part, Tool, ToolCall

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine

NDJSON = "application/x-ndjson"
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
API_VERSION = "0.12.0"  # of Ollama's API that is followed; clients compare it
ARCHITECTURE = "diffusion_gemma"
MESSAGE_FIELDS = "role content thinking images tool_calls tool_name tool_call_id".split()
SAMPLING = "top_k top_p min_p tfs_z typical_p mirostat mirostat_tau mirostat_eta"
PENALTIES = "repeat_last_n repeat_penalty presence_penalty frequency_penalty penalize_newline"
MACHINE = (
    "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap "
    "use_mlock embedding_only num_thread num_keep draft_num_predict"
)
OPTIONS: FieldTable = {
    "temperature": FieldPolicy("honoured", "0 to 2; 1 is the model's own"),
    "seed": FieldPolicy("honoured", "same seed, same answer"),
    "num_predict": FieldPolicy("honoured", "longest answer; below 1: what the context holds"),
    "stop": FieldPolicy("honoured", "a string or up to 64; the answer ends before the first"),
    **dict.fromkeys(SAMPLING.split(), COMMON["top_p"]),
    **dict.fromkeys(PENALTIES.split(), COMMON["repetition_penalty"]),
    **dict.fromkeys(MACHINE.split(), harmless("set when the server starts")),
}
FORMAT = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}


# --- requests


class OllamaOptions(BaseModel):
    """The honoured fields of `options`."""

    model_config = STRICT
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _ignored: list[str] = PrivateAttr(default_factory=list)

    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = Field(default=None, ge=-1, lt=1 << 64)
    num_predict: int | None = None
    stop: Stops = []

    @model_validator(mode="wrap")
    @classmethod
    def _sort(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        kept, ignored = sort_fields(data, OPTIONS)
        options = handler(kept)
        options._given, options._ignored = data, [f"options.{name}" for name in ignored]
        return options


class OllamaBody(Body):
    """Fields shared by `/api/chat` and `/api/generate`."""

    omitted: ClassVar[frozenset[str]] = frozenset(
        "stream_options max_tokens temperature seed stop n diffusing".split()
    )
    unhonoured: ClassVar[FieldTable] = {
        "keep_alive": COMMON["keep_alive"],
        "truncate": harmless("a conversation that does not fit is refused"),
        "shift": harmless("an answer ends where the context ends"),
        "logprobs": refused("only OpenAI's routes have logprobs", False),
        "top_logprobs": refused("only OpenAI's routes have logprobs", 0),
    }

    stream: bool = honoured(True, "lines of JSON, the default; false: one object")
    format: Annotated[Any, WithJsonSchema(FORMAT)] = honoured(
        "", "json, or a JSON Schema that the answer fits"
    )
    options: OllamaOptions = honoured(
        OllamaOptions(), "temperature, seed, num_predict, stop; see below"
    )
    think: bool | Literal["low", "medium", "high"] = honoured(False, "true or a level: a thought")

    @field_validator("model")
    @classmethod
    def _without_tag(cls, model: str | None) -> str | None:
        return None if model is None else model.removesuffix(LATEST)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_ar(self.options._given, self.dgemma.mode, self.options.temperature)
        if not isinstance(self.format, dict) and self.format not in ("", "json"):
            raise ApiError(400, "format must be json or a JSON Schema", param="format")
        return self

    @property
    def ignored(self) -> list[str]:
        return super().ignored + self.options._ignored

    @property
    def sampling(self) -> Sampling:
        options = self.options
        seed = self.seed if options.seed in (None, -1) else options.seed
        most = max(options.num_predict or 0, 0) or None
        return Sampling(most, options.temperature, seed, tuple(options.stop))

    @property
    def has_constraint(self) -> bool:
        return super().has_constraint or bool(self.format)

    @property
    def response_format(self) -> ResponseFormat | None:
        if isinstance(self.format, dict) and self.format:
            return ResponseFormat.of_schema(self.format)
        return ResponseFormat(type="json_object") if self.format else None


class OllamaChatBody(OllamaBody):
    """`POST /api/chat`."""

    messages: list[dict[str, Any]] = honoured(
        [],
        "system, user, assistant, tool; pictures in base64; none: an empty answer",
        max_length=limits.MAX_MESSAGES,
    )
    tools: list[dict[str, Any]] = honoured(
        [], "functions the model may call", max_length=limits.MAX_TOOLS
    )

    @property
    def has_images(self) -> bool:
        return any(message.get("images") for message in self.messages)


class OllamaGenerateBody(OllamaBody):
    """`POST /api/generate`."""

    unhonoured: ClassVar[FieldTable] = {
        **OllamaBody.unhonoured,
        "context": refused("nothing is stored; use /api/chat", []),
        "template": refused("the template is the checkpoint's; use raw", ""),
    }

    prompt: str = honoured("", "a user's message; empty: an empty answer")
    images: list[str] = honoured([], "pictures before it, in base64")
    suffix: str = honoured("", "text after a hole that is filled")
    system: str = honoured("", "a system message before it")
    raw: bool = honoured(False, "true: plain text to continue, without the template")

    @property
    def has_images(self) -> bool:
        return bool(self.images)


class ShowBody(BaseModel):
    """`POST /api/show`."""

    model_config = STRICT

    model: str
    verbose: bool = False  # harmless


def parse_chat(engine: "Engine", body: OllamaChatBody) -> list[Any]:
    return _chat(engine, body, _read_messages(body.messages), reader.read_tools(body.tools))


def parse_generate(engine: "Engine", body: OllamaGenerateBody) -> list[Any]:
    if body.images and (body.suffix or body.raw):
        raise ApiError(400, "pictures go with a user's message; leave out raw and suffix")
    if body.suffix:
        if body.has_constraint or body.system or body.think:
            raise ApiError(400, "a hole takes no format, system or think; leave them out")
        return list(hole_programs(engine, body, HoleContext(body.prompt, body.suffix)))
    if body.raw:
        check_length(engine, body.prompt)
        constraint = text_constraint(engine, body.dgemma, body.response_format)
        prompt = engine.plain_prompt(body.prompt)
        return list(generations(engine, body, prompt, body.sampling.max_tokens, constraint))
    system = [Message(role="system", content=body.system)] if body.system else []
    message = Message(role="user", content=_content(body.prompt, body.images))
    return _chat(engine, body, [*system, message])


def _chat(
    engine: "Engine", body: OllamaBody, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> list[Any]:
    chat = ChatInput(
        messages=messages,
        tools=tools,
        thinking=bool(body.think),
        max_tokens=body.sampling.max_tokens,
        response_format=body.response_format,
        image_tokens=body.dgemma.image_tokens,
    )
    return list(chat_generations(engine, body, chat))


def _read_messages(raw: Sequence[object]) -> list[Message]:
    """Read messages; tool results without a tool name belong to the calls in order."""
    messages, names = [], list[str]()
    for message in reader.read_each(raw, "messages", _read_message):
        if message.role == "assistant":
            names = [call.name for call in message.tool_calls]
        elif message.role == "tool" and not (message.name or message.tool_call_id):
            name = names.pop(0) if names else ""
            message = replace(message, name=name)
        messages.append(message)
    return messages


def _read_message(raw: object) -> Message:
    fields = reader.read_fields(raw, MESSAGE_FIELDS, "a message")
    role: Any = reader.read_string(fields, "role", "a message")
    calls = []
    entries = reader.read_list(fields.get("tool_calls") or [], "tool_calls")
    for number, entry in enumerate(entries):
        call = reader.read_fields(entry, {"id", "type", "function"}, "a tool call")
        function = reader.read_object(call.get("function"), "a tool call's function")
        calls.append(
            ToolCall(
                id=reader.read_string(call, "id", "a tool call", default=f"call_{number}"),
                name=reader.read_string(function, "name", "a tool call's function"),
                arguments=reader.read_arguments(function.get("arguments")),
            )
        )
    return Message(
        role=role,
        content=_content(
            reader.read_string(fields, "content", "a message", default=""),
            reader.read_list(fields.get("images") or (), "images"),
        ),
        thought=reader.read_string(fields, "thinking", "a message", default=""),
        tool_calls=tuple(calls),
        name=reader.read_string(fields, "tool_name", "a message", default=""),
        tool_call_id=reader.read_string(fields, "tool_call_id", "a message", default=""),
    )


def _content(text: str, images: Sequence[object]) -> str | tuple[Part, ...]:
    """Put pictures before the text, as Ollama does."""
    pictures = []
    for data in images:
        if not isinstance(data, str):
            reader.refuse("an image", data, "a picture in base64")
        refuse_address(data, "base64")
        pictures.append(Image.from_base64(data))
    return (*pictures, text) if pictures else text


# --- replies


class OllamaReply(BaseModel):
    model: str
    created_at: str
    done: Literal[True]
    done_reason: str
    message: dict[str, Any] | None = None  # of /api/chat
    response: str | None = None  # of /api/generate


class OllamaError(BaseModel):
    error: str


class OllamaModels(BaseModel):
    models: list[dict[str, Any]]


class OllamaVersion(BaseModel):
    version: str  # of the API
    dgemma: str


@dataclass(frozen=True, kw_only=True)
class OllamaFormat(Format):
    """Write replies of `/api/chat`, or of `/api/generate`, which have no message."""

    is_chat: bool
    media_type: ClassVar[str] = NDJSON
    end: ClassVar[str] = ""

    def full(self, answers: "Sequence[Done]") -> dict[str, Any]:
        (done,) = answers
        return {**self._text(done.text, done.reply.thought, self._calls(done)), **self._end(done)}

    def empty_chunk(self, index: int) -> Chunk:
        return {**self._text("", ""), "done": False}

    def text_chunks(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        content, thought = ("", text) if is_thought else (text, "")
        return [{**self._text(content, thought), "done": False}]

    def last_chunks(self, index: int, done: "Done") -> list[Chunk]:
        calls = self._calls(done)
        called = [{**self._text("", "", calls), "done": False}] if calls else []
        return [*called, {**self._text("", ""), **self._end(done)}]

    def line(self, chunk: Chunk, number: int = 0) -> str:
        return write_json(chunk) + "\n"

    def heartbeat(self) -> str:
        return self.line(self.empty_chunk(0))

    def error_line(self, error: ApiError, number: int = 0) -> str:
        return self.line(error.body_for(OLLAMA_PATH))

    def loaded(self) -> dict[str, Any]:
        """Return the reply to an empty request: the model is loaded."""
        return {**self._text("", ""), "done": True, "done_reason": "load"}

    def _text(self, text: str, thought: str, calls: Sequence[Any] = ()) -> dict[str, Any]:
        head = {"model": self.envelope.model, "created_at": iso_time(self.envelope.created)}
        more = {"thinking": thought} if thought else {}
        if not self.is_chat:
            return {**head, "response": text, **more}
        called = {"tool_calls": list(calls)} if calls else {}
        return {**head, "message": {"role": "assistant", "content": text, **more, **called}}

    def _calls(self, done: "Done") -> list[dict[str, Any]]:
        calls = unique_calls(done, self.envelope, one_call=False)
        return [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in calls]

    def _end(self, done: "Done") -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": FINISH_REASONS[done.finish],
            "total_duration": _nanoseconds(done.seconds),
            "load_duration": 0,
            "prompt_eval_count": done.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(done.prefill_seconds),
            "eval_count": done.tokens,
            "eval_duration": _nanoseconds(done.seconds - done.prefill_seconds),
            "dgemma": {**stats(done), **self.envelope.note},
        }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _details(service: Service) -> dict[str, Any]:
    families = {"family": ARCHITECTURE, "families": [ARCHITECTURE]}
    kind = {"format": "", "parameter_size": "", "quantization_level": "", **families}
    return {"modified_at": iso_time(service.created), "details": kind}


def _capabilities(service: Service) -> list[str]:
    chat = ["tools", "thinking"] if service.engine.template is not None else []
    fill = ["insert"] if service.engine.model.config.can_denoise else []
    vision = ["vision"] if service.engine.images is not None else []
    return ["completion", *chat, *fill, *vision]


router = make_router(OllamaError)


@router.post("/api/chat", **whole_or_stream(OllamaReply, NDJSON))
async def chat(request: Request, body: OllamaChatBody, service: ServiceDep) -> Response:
    """Answer a conversation, in Ollama's format."""
    fmt = OllamaFormat(envelope=service.envelope(request, "", body), is_chat=True)
    if not body.messages:
        service.check_model(body.model)
        return JSONResponse(fmt.loaded())
    return await answer(request, service, body, parse_chat, fmt)


@router.post("/api/generate", **whole_or_stream(OllamaReply, NDJSON))
async def generate(request: Request, body: OllamaGenerateBody, service: ServiceDep) -> Response:
    """Answer a prompt or fill a hole, in Ollama's format."""
    fmt = OllamaFormat(envelope=service.envelope(request, "", body), is_chat=False)
    if not (body.prompt or body.suffix or body.images):
        service.check_model(body.model)
        return JSONResponse(fmt.loaded())
    return await answer(request, service, body, parse_generate, fmt)


@router.get("/api/tags")
async def tags(service: ServiceDep) -> OllamaModels:
    """List the model that is served, in Ollama's format."""
    model = service.engine.model
    size = sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()))
    names = [{"name": name, "model": name} for name in service.settings.names]
    details = {"size": size, "digest": "", **_details(service)}
    return OllamaModels(models=[{**name, **details} for name in names])


@router.post("/api/show")
async def show(body: ShowBody, service: ServiceDep) -> dict[str, Any]:
    """Describe the model of that name, in Ollama's format."""
    service.check_model(body.model.removesuffix(LATEST))
    config = service.engine.model.config
    info = {
        "general.architecture": ARCHITECTURE,
        f"{ARCHITECTURE}.context_length": config.max_position_embeddings,
        f"{ARCHITECTURE}.embedding_length": config.hidden_size,
        f"{ARCHITECTURE}.block_count": len(config.layer_types),
    }
    return {**_details(service), "model_info": info, "capabilities": _capabilities(service)}


@router.get("/api/version")
async def version() -> OllamaVersion:
    """Return the supported version of Ollama's API."""
    return OllamaVersion(version=API_VERSION, dgemma=__version__)
