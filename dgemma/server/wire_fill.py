"""The bodies of requests that fill, edit and solve. What a field means stands in fields_fill.py."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, WithJsonSchema, model_validator

from dgemma.server import fields, fields_fill, limits
from dgemma.server.wire import STRICT, Body, HoleEffort

MAX_HOLES = 64
Pieces = Annotated[list[str], Field(min_length=2, max_length=MAX_HOLES + 1)]
Place = Annotated[int, Field(ge=0)]
Pair = Annotated[
    list[Place],
    Field(min_length=2, max_length=2),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {"type": "integer", "minimum": 0},
        }
    ),
]


class Narrow(Body):
    """A body that has only the fields of its table."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        schema = super().__get_pydantic_json_schema__(core, handler)
        known = schema.get("properties", {})
        schema["properties"] = {name: known[name] for name in known if name in cls.table}
        return schema


class FimBody(Narrow):
    """`POST /v1/fim/completions`."""

    table: ClassVar[dict[str, fields.Field]] = fields_fill.FIM

    prompt: str
    suffix: str = ""
    effort: HoleEffort | None = None
    random_seed: int | None = Field(default=None, ge=0, lt=1 << 64)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.prompt and not self.suffix:
            raise fields.refusal("prompt", "prompt and suffix are empty; give one of them")
        if self.random_seed is not None and self.seed not in (None, self.random_seed):
            raise fields.refusal("seed", "seed and random_seed differ; give one of them")
        if self.seed is None:
            self.seed = self.random_seed
        return self


class Extra(BaseModel):
    """Another text that an editor sends along."""

    model_config = STRICT

    text: str
    filename: str = ""
    time: float | None = None


class InfillBody(Narrow):
    """`POST /infill`, as llama.cpp has it."""

    table: ClassVar[dict[str, fields.Field]] = fields_fill.INFILL

    input_prefix: str = ""
    prompt: str = ""
    input_suffix: str = ""
    input_extra: list[Extra] = Field(default=[], max_length=limits.MAX_MESSAGES)
    n_predict: int = Field(default=-1, ge=-1)
    effort: HoleEffort | None = None
    seed: int | None = Field(default=None, ge=-1, lt=1 << 64)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.seed == -1:
            self.seed = None
        if self.n_predict > 0:
            self.max_tokens = self.n_predict
        if not (self.input_prefix or self.prompt or self.input_suffix):
            raise fields.refusal("input_prefix", "there is no text around the hole; give some")
        return self

    @property
    def before(self) -> str:
        extra = "".join(f"{one.text.rstrip()}\n\n" for one in self.input_extra)
        return extra + self.input_prefix + self.prompt


class UserMessage(BaseModel):
    model_config = STRICT

    role: Literal["user"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        parts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(parts) != len(self.content) or not all(isinstance(part, str) for part in parts):
            raise fields.refusal("messages", "the message must be text")
        return "".join(map(str, parts))


class OneMessageBody(Narrow):
    """`POST /v1/edit/completions` and `/v1/apply/completions`, in Mercury's form."""

    table: ClassVar[dict[str, fields.Field]] = fields_fill.ONE_MESSAGE

    messages: list[UserMessage] = Field(min_length=1, max_length=1)

    @property
    def message(self) -> str:
        return self.messages[0].text


class FillBody(Narrow):
    """`POST /v1/dgemma/fill`."""

    table: ClassVar[dict[str, fields.Field]] = fields_fill.FILL

    text: str | Pieces
    single_line: bool = False
    allow_empty: bool = False
    candidates: int = Field(default=1, ge=1, le=limits.MAX_CHOICES)
    effort: HoleEffort = "thorough"


class EditBody(Narrow):
    """`POST /v1/dgemma/edit`."""

    table: ClassVar[dict[str, fields.Field]] = fields_fill.EDIT

    text: str = Field(min_length=1)
    instruction: str | None = Field(default=None, min_length=1)
    selection: list[Pair] | None = Field(default=None, min_length=1, max_length=MAX_HOLES)
    lines: Pair | None = None
    strength: float | None = Field(default=None, ge=0, le=1)
    passes: int | None = Field(default=None, ge=1, le=8)


class SudokuBody(Narrow):
    """`POST /v1/dgemma/sudoku`."""

    table: ClassVar[dict[str, fields.Field]] = fields_fill.SUDOKU

    puzzle: str = Field(min_length=81, max_length=400)
    pinned: bool | None = None
    restarts: int = Field(default=0, ge=0, le=16)
