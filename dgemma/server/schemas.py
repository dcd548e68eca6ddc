"""Schemas shared by requests and replies.

Bodies are read strictly. A request field is declared once: type, bounds, and the note that
docs/serve.md prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from dgemma.config import Mode, Preset
from dgemma.server import field_policy, limits
from dgemma.server.field_policy import COMMON, FieldPolicy, FieldTable

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
HoleEffort = Literal["fast", "thorough"]
EFFORT = "fast: one batch of canvases; thorough: a search that takes several times as long"
PositiveFloat = Annotated[float, Field(gt=0, le=1e6)]
ConstraintText = Annotated[str, Field(min_length=1, max_length=limits.MAX_CONSTRAINT)]
Seed = Annotated[int, Field(ge=0, lt=1 << 64)]


def honoured(default: Any, note: str, **bounds: Any) -> Any:
    """Declare an honoured request field with its note; `...`: required."""
    return Field(default, description=note, **bounds)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def texts_schema(*others: dict[str, Any]) -> WithJsonSchema:
    """Schema of a non-empty text or list of texts."""
    text = {"type": "string", "minLength": 1}
    return WithJsonSchema({"anyOf": [text, {"type": "array", "items": text}, *others]})


StopString = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_LENGTH)]
Stops = Annotated[
    list[StopString],
    Field(max_length=limits.MAX_STOPS),
    BeforeValidator(_as_list),
    texts_schema(),
]


# --- requests


class StreamOptions(BaseModel):
    model_config = STRICT

    include_usage: bool = False
    include_obfuscation: bool = False  # harmless: there is none


class NamedSchema(BaseModel):
    """The schema of a response format, as in OpenAI's API."""

    model_config = STRICT

    body: dict[str, Any] | bool = Field(alias="schema")
    name: str = Field(default="", max_length=256)  # harmless, as are the others
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The required format of an answer."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # llama.cpp's name

    @model_validator(mode="after")
    def _check(self) -> Self:
        sentence = ""
        if (self.type == "json_schema") != (self.json_schema is not None):
            sentence = "response_format needs json_schema if its type is json_schema, only then"
        elif self.schema_ is not None and self.type != "json_object":
            sentence = "response_format has a schema of its own only as json_object"
        if sentence:
            raise field_policy.refusal("response_format", sentence)
        return self

    @classmethod
    def of_schema(cls, schema: dict[str, Any] | bool) -> Self:
        return cls(type="json_schema", json_schema=NamedSchema(schema=schema))

    @property
    def schema_body(self) -> dict[str, Any] | bool:
        if self.json_schema is not None:
            return self.json_schema.body
        return {"type": "object"} if self.schema_ is None else self.schema_


class Extension(BaseModel):
    """The object `dgemma` of a request. Absent fields have the checkpoint's values."""

    model_config = STRICT

    mode: Mode = honoured(
        "diffusion",
        "diffusion, the default; ar; hybrid: the thought in ar, then diffusion; auto: ar for short "
        "replies, diffusion for others, by what both cost on this machine",
    )
    preset: Preset | None = honoured(
        None, "values of the sampler by name: quality, balanced or fast; other fields go before"
    )
    rule: Literal["entropy", "confidence"] | None = honoured(
        None, "rule that accepts positions of a canvas: entropy, the default, or confidence"
    )
    entropy_bound: PositiveFloat | None = honoured(
        None, "nats that the positions accepted in a step may have together"
    )
    confidence_threshold: PositiveFloat | None = honoured(
        None, "mean nats per position below which a canvas may converge"
    )
    stability_threshold: int | None = honoured(
        None, "steps for which its argmax must be stable by then", ge=0, le=limits.MAX_STEPS
    )
    max_denoising_steps: int | None = honoured(
        None, "most steps of a canvas, 1 to 512", ge=1, le=limits.MAX_STEPS
    )
    t_max: PositiveFloat | None = honoured(
        None, "temperature of a canvas's first step, falling linearly to t_min"
    )
    t_min: PositiveFloat | None = honoured(None, "of its last; `temperature` changes neither")
    canvas_length: int | None = honoured(None, "tokens of a canvas, up to the model's own", ge=1)
    retries: int | None = honoured(
        None, "attempts at a canvas that fails the output check, 0 to 8; 2 by default", ge=0, le=8
    )
    max_seconds: float | None = honoured(
        None, "deadline from arrival, up to the server's; the answer is what there is by then", gt=0
    )
    regex: ConstraintText | None = honoured(
        None, "a regular expression that the whole answer matches"
    )
    grammar: ConstraintText | None = honoured(
        None, "a context-free grammar of the answer in Lark's notation, from its rule `start`"
    )
    choices: list[ConstraintText] | None = honoured(
        None, "texts of which the answer is one, up to 256", min_length=1, max_length=256
    )
    image_tokens: Literal[70, 140, 280, 560, 1120] | None = honoured(
        None, "soft tokens of each picture, at most; without it, `detail` of a picture chooses"
    )
    drafts: bool = honoured(False, "with stream: the canvas after each step")
    pace: float | None = honoured(
        None, "with stream: text arrives word by word, at so many characters a second", gt=0
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Answer parameters that each API names differently."""

    max_tokens: int | None
    temperature: float | None
    seed: int | None
    stop: tuple[str, ...]


class Body(BaseModel):
    """A request body. `table` has the policy of each field."""

    model_config = STRICT
    unhonoured: ClassVar[FieldTable] = COMMON  # harmless and refused fields
    omitted: ClassVar[frozenset[str]] = frozenset()  # inherited fields that this body does not have
    harmless_inside: ClassVar[dict[str, set[str]]] = {}  # harmless fields of objects in a list
    table: ClassVar[FieldTable]
    _ignored: list[str] = PrivateAttr(default_factory=list)
    _inside: set[str] = PrivateAttr(default_factory=set)

    model: str | None = honoured(
        None, "a name from /v1/models, or left out; another is a 404", max_length=256
    )
    stream: bool = honoured(False, "server-sent events, ended by [DONE]")
    stream_options: StreamOptions = honoured(
        StreamOptions(), "include_usage; include_obfuscation is harmless"
    )
    max_tokens: int | None = honoured(
        None, "longest answer, cut exactly; lowered to what the context holds", ge=1
    )
    temperature: float | None = honoured(
        None, "0 to 2; 1 is the model's own; below 0.001 the most likely is drawn", ge=0, le=2
    )
    seed: Seed | None = honoured(
        None, "same seed, same answer; in float32 among other requests, too"
    )
    stop: Stops = honoured([], "a string or up to 64; the answer ends before the first of them")
    n: int = honoured(1, "1 to 8 answers", ge=1, le=limits.MAX_ANSWERS)
    diffusing: bool = honoured(False, "with stream: each chunk's text replaces the text so far")
    dgemma: Extension = honoured(
        Extension(), "the extension object: mode, sampler, drafts, pace, deadline"
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.table = field_table(cls)

    @property
    def ignored(self) -> list[str]:
        """Names of the harmless fields that were given."""
        return [*self._ignored, *sorted(self.ignored_inside)]

    @property
    def ignored_inside(self) -> set[str]:
        """Paths of the harmless fields in other fields."""
        return self._inside

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.seed, tuple(self.stop))

    @property
    def wants_logprobs(self) -> bool:
        return False

    @property
    def has_constraint(self) -> bool:
        """True if a grammar must be compiled, which may take seconds."""
        constraints = (self.dgemma.regex, self.dgemma.grammar, self.dgemma.choices)
        return any(constraint is not None for constraint in constraints)

    @property
    def has_images(self) -> bool:
        """True if pictures must be decoded, which may take seconds."""
        return False

    @model_validator(mode="wrap")
    @classmethod
    def _sort(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        kept, ignored = field_policy.sort_fields(data, cls.table)
        if "messages" in kept:
            kept["messages"], in_messages = field_policy.clean_messages(kept["messages"])
            ignored += in_messages
        inside: set[str] = set()
        for name, drop in cls.harmless_inside.items():
            if isinstance(kept.get(name), list):
                path = f"{name}[]"
                kept[name] = [field_policy.without(o, drop, path, inside) for o in kept[name]]
        body = handler(kept)
        field_policy.check_ar(data, body.dgemma.mode, body.sampling.temperature)
        body._ignored, body._inside = ignored, inside
        return body

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """List the honoured and the harmless fields."""
        schema: dict[str, Any] = handler.resolve_ref_schema(handler(core))
        table, properties = field_table(cls), schema["properties"]
        kinds = {name: policy.kind for name, policy in table.items()}
        schema["properties"] = {
            **{n: p for n, p in properties.items() if kinds.get(n) == "honoured"},
            **{n: {"description": table[n].note} for n, k in kinds.items() if k == "harmless"},
        }
        return schema


def field_table(body: type[Body]) -> FieldTable:
    """Return the policies of a body's fields; declared ones are honoured unless listed."""
    own = {
        name: FieldPolicy("honoured", field.description or "")
        for name, field in body.model_fields.items()
        if name not in body.omitted
    }
    return {**own, **body.unhonoured}


class FormattedBody(Body):
    """A request body whose answer may have a required format."""

    response_format: ResponseFormat | None = honoured(
        None, "text, json_object or json_schema; the answer fits, or there is none"
    )

    @property
    def has_constraint(self) -> bool:
        response_format = self.response_format
        is_constrained = response_format is not None and response_format.type != "text"
        return super().has_constraint or is_constrained


def names_images(entries: Sequence[object], depth: int = 2) -> bool:
    """True if a part of any entry is a picture or video; tool results may nest parts."""
    values = [value for entry in entries if isinstance(entry, dict) for value in entry.values()]
    parts = [part for value in values if isinstance(value, list) for part in value]
    kinds = [str(part.get("type")) for part in parts if isinstance(part, dict)]
    is_seen = any("image" in kind or "video" in kind for kind in kinds)
    return is_seen or (depth > 1 and names_images(parts, depth - 1))


# --- replies


def _rounded(value: float) -> float | None:
    return round(value, 4) if isfinite(value) else None


Rounded = Annotated[float | None, BeforeValidator(_rounded)]


class PromptTokens(BaseModel):
    cached_tokens: int
    image_tokens: int  # soft tokens of pictures


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class UnreadableCall(BaseModel):
    """A tool call that could not be parsed."""

    model_config = ConfigDict(from_attributes=True)

    raw: str
    reason: str


class AnswerStats(BaseModel):
    """The cost of an answer, in `dgemma` of its choice; fields of the engine's Done."""

    model_config = ConfigDict(from_attributes=True)

    mode: str
    seed: int
    finish: str  # stop, stop_string, length or budget
    blocks: int
    steps: int
    tokens_per_step: Rounded
    unconverged_blocks: int  # blocks that ran out of steps
    retries: int
    fault: str
    forced_from: int | None  # first character forced by a limit, under a constraint
    remaining_entropy: Rounded  # in nats, of a canvas cut short by the deadline
    seconds: Rounded
    prefill_seconds: Rounded
    notes: list[str]  # warnings, such as pictures shrunk until small text is lost
    broken_calls: list[UnreadableCall] = Field(validation_alias=AliasPath("reply", "broken_calls"))


class RequestNote(BaseModel):
    """`dgemma` of a whole reply."""

    ignored: list[str]  # harmless fields that were given


class ReplyEnvelope(BaseModel):
    """Fields of every reply."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChoicesReply(ReplyEnvelope):
    """A reply with `choices`, as in OpenAI's API."""

    dgemma: RequestNote


class ReplyChoice(BaseModel):
    """Fields of every choice."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    dgemma: AnswerStats


class ResultReply(ReplyEnvelope):
    """A reply of this server's own routes."""

    dgemma: dict[str, Any]  # cost, and harmless fields that were given


class Modalities(BaseModel):
    vision: bool  # accepts pictures


class ModelCard(BaseModel):
    """A model, with the fields that OpenAI's and Anthropic's clients read."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    created: int
    created_at: str
    display_name: str
    owned_by: str
    context_length: int
    canvas_length: int
    modes: list[str]
    modalities: Modalities


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool


class TokenPiece(BaseModel):
    id: int
    piece: str | list[int]  # bytes, if they are not whole characters


class TokenList(BaseModel):
    tokens: list[int] | list[TokenPiece]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail
