"""The bodies of requests, strictly read. What a field means stands in fields.py."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from dgemma.server import fields, limits
from dgemma.server.faults import shown

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
HoleEffort = Literal["fast", "thorough"]
Share = Annotated[float, Field(gt=0, le=1e6)]
Constraint = Annotated[str, Field(min_length=1, max_length=limits.MAX_CONSTRAINT)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
Stops = Annotated[
    list[StopString],
    Field(max_length=limits.MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
            ]
        }
    ),
]
# Read by dgemma.text.messages, whose sentences say what is wrong; this is for those who look.
RawMessage = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}},
                        {"type": "null"},
                    ]
                },
                "reasoning_content": {"type": ["string", "null"]},
                "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
                "tool_call_id": {"type": ["string", "null"]},
                "name": {"type": ["string", "null"]},
            },
        }
    ),
]
RawPrompt = Annotated[
    str | list[Any],
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            ]
        }
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto", "none", "required"]},
                {
                    "type": "object",
                    "required": ["type", "function"],
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "properties": {"name": {"type": "string"}},
                        },
                    },
                },
            ]
        }
    ),
]
TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}


class StreamOptions(BaseModel):
    model_config = STRICT

    include_usage: bool = False
    include_obfuscation: bool = False  # harmless: there is none


class TemplateOptions(BaseModel):
    model_config = STRICT

    enable_thinking: bool | None = None


class NamedSchema(BaseModel):
    """The schema of a response format, as OpenAI has it."""

    model_config = STRICT

    form: dict[str, Any] | bool = Field(alias="schema")
    name: str = Field(default="", max_length=256)  # harmless, as are the others
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What an answer must look like."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # as llama.cpp has it

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise fields.refusal(
                "response_format",
                "response_format needs json_schema if its type says so, only then",
            )
        if self.schema_ is not None and self.type != "json_object":
            raise fields.refusal(
                "response_format", "response_format has a schema of its own only as json_object"
            )
        return self

    @property
    def form(self) -> dict[str, Any] | bool:
        """The schema that a text must fit."""
        if self.json_schema is not None:
            return self.json_schema.form
        return {"type": "object"} if self.schema_ is None else self.schema_


class Extension(BaseModel):
    """What only this server knows. Absent: as the checkpoint says."""

    model_config = STRICT

    mode: Literal["diffusion", "ar", "hybrid"] = "diffusion"
    rule: Literal["entropy", "confidence"] | None = None
    entropy_bound: Share | None = None
    confidence_threshold: Share | None = None
    stability_threshold: int | None = Field(default=None, ge=0, le=limits.MAX_STEPS)
    max_denoising_steps: int | None = Field(default=None, ge=1, le=limits.MAX_STEPS)
    t_max: Share | None = None
    t_min: Share | None = None
    canvas_length: int | None = Field(default=None, ge=1)
    retries: int | None = Field(default=None, ge=0, le=8)
    max_seconds: float | None = Field(default=None, gt=0)
    regex: Constraint | None = None
    grammar: Constraint | None = None
    choices: list[Constraint] | None = Field(
        default=None, min_length=1, max_length=limits.MAX_LABELS
    )
    drafts: bool = False
    pace: float | None = Field(default=None, gt=0)


class Body(BaseModel):
    """What chat and plain completions share."""

    model_config = STRICT
    table: ClassVar[dict[str, fields.Field]] = fields.COMMON
    _ignored: list[str] = PrivateAttr(default_factory=list)

    model: str | None = Field(default=None, max_length=256)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    seed: int | None = Field(default=None, ge=0, lt=1 << 64)
    stop: Stops = []
    n: int = Field(default=1, ge=1, le=limits.MAX_CHOICES)
    diffusing: bool = False
    dgemma: Extension = Extension()

    @property
    def ignored(self) -> list[str]:
        """Names of the harmless fields that were given."""
        return self._ignored

    @model_validator(mode="wrap")
    @classmethod
    def _sort(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        kept, ignored = fields.sort_fields(data, cls.table)
        if "messages" in kept:
            kept["messages"], in_messages = fields.clean_messages(kept["messages"])
            ignored += in_messages
        body = handler(kept)
        body._ignored = ignored
        return body

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """Fields that are accepted stand in the schema; null counts as absent everywhere."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core))
        for name, field in cls.table.items():
            if field.kind == "harmless":
                schema["properties"][name] = {"description": field.note}
        return schema


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    table: ClassVar[dict[str, fields.Field]] = fields.CHAT

    messages: list[RawMessage] = Field(min_length=1, max_length=limits.MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] = Field(default=[], max_length=limits.MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: (
        Literal["none", "minimal", "instant", "low", "medium", "high", "xhigh"] | None
    ) = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    logprobs: bool = False
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tool_choice not in ("auto", "none", "required") and self.named_tool is None:
            raise fields.refusal(
                "tool_choice",
                f"tool_choice is {shown(self.tool_choice)}; it must be auto, none, required or "
                '{"type": "function", "function": {"name": ...}}',
            )
        if self.max_tokens and self.max_completion_tokens not in (None, self.max_tokens):
            raise fields.refusal(
                "max_tokens", "max_tokens and max_completion_tokens differ; give one of them"
            )
        asked = self.chat_template_kwargs.enable_thinking
        if asked is not None and asked != self.wants_thought:
            raise fields.refusal(
                "reasoning_effort", "reasoning_effort and enable_thinking differ; give one of them"
            )
        return self

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        match self.tool_choice:
            case {"type": "function", "function": {"name": str(name), **more}, **others}:
                return None if more or others else name
        return None

    @property
    def wants_thought(self) -> bool | None:
        effort = self.reasoning_effort
        if effort is None:
            return self.chat_template_kwargs.enable_thinking
        return effort not in ("none", "minimal", "instant")


class CompletionBody(Body):
    """`POST /v1/completions`: plain text, or token ids, to go on with."""

    table: ClassVar[dict[str, fields.Field]] = fields.COMPLETIONS

    prompt: RawPrompt
    suffix: str = ""
    effort: HoleEffort | None = None
    logprobs: int | None = Field(default=None, ge=0, le=0)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        prompts = self.prompts
        is_texts = all(isinstance(prompt, str) for prompt in prompts)
        is_ids = len(prompts) == 1 and all(type(token) is int for token in prompts[0])
        if not (is_texts or is_ids) or not 1 <= len(prompts) <= limits.MAX_PROMPTS:
            kinds = f"a text, 1 to {limits.MAX_PROMPTS} texts, or token ids"
            raise fields.refusal("prompt", f"prompt is {shown(self.prompt)}; it must be {kinds}")
        if not all(prompts) and not (is_texts and self.suffix):
            raise fields.refusal("prompt", "prompt is empty; give at least one token")
        return self

    @property
    def prompts(self) -> list[Any]:
        """One or more prompts: texts, or the ids of a single one."""
        if not isinstance(self.prompt, list):
            return [self.prompt]
        is_ids = bool(self.prompt) and not any(isinstance(part, str) for part in self.prompt)
        return [self.prompt] if is_ids else self.prompt


class TokenizeBody(BaseModel):
    """`POST /tokenize`, as llama.cpp has it."""

    model_config = STRICT

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(BaseModel):
    """`POST /detokenize`, as llama.cpp has it."""

    model_config = STRICT

    tokens: list[int]
