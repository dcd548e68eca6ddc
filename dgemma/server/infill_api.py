"""Routes that fill holes: Mistral's and Mercury's FIM, llama.cpp's infill, and this server's."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, model_validator

from dgemma.server import limits
from dgemma.server.body_params import (
    check_length,
    check_program,
    generations,
    new_seed,
    sampler_for,
    text_constraint,
)
from dgemma.server.chat_api import ReplyMessage
from dgemma.server.errors import ApiError
from dgemma.server.field_policy import COMMON, FieldTable, harmless, refusal, refused
from dgemma.server.format import ChoicesFormat, Chunk, Format, ResultFormat, finite
from dgemma.server.schemas import (
    EFFORT,
    STRICT,
    Body,
    ChoicesReply,
    HoleEffort,
    ReplyChoice,
    RequestNote,
    ResultReply,
    Sampling,
    Seed,
    honoured,
)
from dgemma.server.sentinels import HoleContext
from dgemma.server.service import ServiceDep, answer, make_router, whole_or_stream

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine
    from dgemma.engine.request import Program
    from dgemma.programs.infill.document import InfillDocument
    from dgemma.programs.infill.infill import FillParams, FillResult
    from dgemma.programs.infill.search import FillEffort

MAX_HOLE = "longest hole; lowered to what one canvas holds"
EDITORS_EFFORT = f"{EFFORT}; fast by default"


# --- requests


class FimBody(Body):
    """`POST /v1/fim/completions`."""

    unhonoured: ClassVar[FieldTable] = {
        **COMMON,
        "diffusing": refused("a hole is shown when it is filled; see drafts", False),
    }

    max_tokens: int | None = honoured(None, MAX_HOLE, ge=1)
    prompt: str = honoured(..., "the text before the hole; may be empty if there is a suffix")
    suffix: str = honoured("", "the text after it; without one the prompt is continued")
    effort: HoleEffort | None = honoured(None, EDITORS_EFFORT)
    random_seed: Seed | None = honoured(None, "as seed, Mistral's name for it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.prompt and not self.suffix:
            raise refusal("prompt", "prompt and suffix are empty; give one of them")
        if self.random_seed is not None and self.seed not in (None, self.random_seed):
            raise refusal("seed", "seed and random_seed differ; give one of them")
        return self

    @property
    def sampling(self) -> Sampling:
        seed = self.random_seed if self.seed is None else self.seed
        return replace(super().sampling, seed=seed)


class ExtraText(BaseModel):
    """Another text that an editor sends along."""

    model_config = STRICT

    text: str
    filename: str = ""
    time: float | None = None


class InfillBody(Body):
    """`POST /infill` of llama.cpp."""

    omitted: ClassVar[frozenset[str]] = frozenset({"max_tokens", "n", "diffusing"})
    unhonoured: ClassVar[FieldTable] = {
        **COMMON,
        "samplers": harmless("as top_p"),
        "id_slot": harmless("prefixes are found by their tokens"),
        "n_indent": harmless("lines are not cut by their indentation"),
        "t_max_prompt_ms": harmless("see dgemma.max_seconds"),
        "t_max_predict_ms": harmless("see dgemma.max_seconds"),
        "response_fields": harmless("the reply has all its fields"),
        "n_keep": harmless("text that does not fit is left out at the far ends"),
        "repeat_last_n": harmless("as repetition_penalty"),
        "timings_per_token": harmless("timings come with the answer"),
        "n_probs": refused("holes come without probabilities", 0),
        "grammar": refused("a hole takes no grammar", ""),
        "json_schema": refused("a hole takes no schema", {}),
        "lora": refused("adapters are chosen when the server starts", []),
    }

    input_prefix: str = honoured("", "the text before the cursor's line")
    prompt: str = honoured("", "the cursor's line up to the cursor")
    input_suffix: str = honoured("", "the text after the cursor")
    input_extra: list[ExtraText] = honoured(
        [], "other texts, {filename, text}; set before the prefix", max_length=limits.MAX_MESSAGES
    )
    n_predict: int = honoured(-1, f"{MAX_HOLE}; 0: an empty answer at once; -1: no limit", ge=-1)
    effort: HoleEffort | None = honoured(None, EDITORS_EFFORT)
    seed: int | None = honoured(None, "same seed, same answer; -1 draws one", ge=-1, lt=1 << 64)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.input_prefix or self.prompt or self.input_suffix):
            raise refusal("input_prefix", "there is no text around the hole; give some")
        return self

    @property
    def sampling(self) -> Sampling:
        seed, most = None if self.seed == -1 else self.seed, max(self.n_predict, 0)
        return replace(super().sampling, seed=seed, max_tokens=most or None)

    @property
    def before(self) -> str:
        extra = "".join(f"{other.text.rstrip()}\n\n" for other in self.input_extra)
        return extra + self.input_prefix + self.prompt


class FillBody(Body):
    """`POST /v1/dgemma/fill`."""

    omitted: ClassVar[frozenset[str]] = frozenset({"n", "diffusing"})
    unhonoured: ClassVar[FieldTable] = {}

    text: str | Annotated[list[str], Field(min_length=2, max_length=limits.MAX_HOLES + 1)] = (
        honoured(..., "a text with the mark of `dgemma fill` at each hole, or the pieces around")
    )
    max_tokens: int | None = honoured(
        None, "longest of each hole; lowered to what one canvas holds", ge=1
    )
    single_line: bool = honoured(False, "a hole ends with its line")
    allow_empty: bool = honoured(False, "a hole may stay empty")
    candidates: int = honoured(
        1, "1 to 8 ways to fill, the best first", ge=1, le=limits.MAX_ANSWERS
    )
    effort: HoleEffort = honoured("thorough", f"{EFFORT}; thorough by default")


def parse_fim(engine: "Engine", body: FimBody) -> list[Any]:
    if body.suffix:
        return hole_programs(engine, body, HoleContext(body.prompt, body.suffix), body.effort)
    check_no_effort(body.effort)
    check_length(engine, body.prompt)
    constraint = text_constraint(engine, body.dgemma, None)
    prompt = engine.plain_prompt(body.prompt)
    return list(generations(engine, body, prompt, body.max_tokens, constraint))


def parse_infill(engine: "Engine", body: InfillBody) -> list[Any]:
    return hole_programs(engine, body, HoleContext(body.before, body.input_suffix), body.effort)


def parse_fill(engine: "Engine", body: FillBody) -> list[Any]:
    from dgemma.programs.infill.document import InfillDocument

    text = body.text
    document = InfillDocument.parse(text) if isinstance(text, str) else InfillDocument(tuple(text))
    params = replace(
        fill_params(engine, body, body.effort),
        single_line=body.single_line,
        allow_empty=body.allow_empty,
        num_candidates=body.candidates,
    )
    return [fill_answer(engine, document, params)]


def check_no_effort(effort: "FillEffort | None") -> None:
    """Refuse an effort without a hole."""
    if effort is not None:
        sentence = "effort is for a hole, and there is none; give a suffix"
        raise ApiError(400, sentence, param="effort")


def hole_programs(
    engine: "Engine", body: Body, hole: HoleContext, effort: "FillEffort | None" = None
) -> "list[Program[Done]]":
    """Return a program per answer; without an effort, a fast one for editors."""
    from dgemma.programs.infill.document import InfillDocument

    params = fill_params(engine, body, effort or "fast")
    assert params.seed is not None
    document = InfillDocument((hole.before, hole.after))
    seeds = [(params.seed + answer) % (1 << 64) for answer in range(body.n)]
    # Causal candidates do not depend on the seed: they would be the best of every answer.
    others = [replace(params, seed=seed, num_proposals=0) for seed in seeds[1:]]
    return [fill_answer(engine, document, own) for own in (params, *others)]


def fill_params(engine: "Engine", body: Body, effort: "FillEffort") -> "FillParams":
    """Return the parameters of a fill; refuses what does not apply to fills."""
    from dgemma.programs.infill.infill import FillParams, check_fill
    from dgemma.programs.infill.search import min_visible_after

    check_program(engine, body)
    length, sampling = engine.model.config.canvas_length, body.sampling
    most = max(1, length - min_visible_after(length))
    params = FillParams(
        max_tokens=min(sampling.max_tokens or most, most),
        stop=sampling.stop,
        effort=effort,
        seed=new_seed(sampling.seed),
        sampler=sampler_for(engine, body),
        drafts=body.dgemma.drafts,
    )
    check_fill(params)
    return params


def fill_answer(
    engine: "Engine", document: "InfillDocument", params: "FillParams"
) -> "Program[Done]":
    """Fill the holes of a text; emits the text of a single hole, or the whole text."""
    from dgemma.engine import Text
    from dgemma.programs.infill.infill import fill_program

    result = yield from fill_program(engine, document, params)
    text = result.holes[0].text if document.num_holes == 1 else result.text
    yield Text(text=text)
    return program_done(engine, result, text, (hole.text for hole in result.holes))


def program_done(engine: "Engine", result: Any, text: str, written: Iterable[str]) -> "Done":
    """Return the end of a fill or an edit; its cost counts the tokens written."""
    from dgemma.engine import Done
    from dgemma.text.reply import Reply

    return Done(
        reply=Reply(answer=text),
        ids=tuple(token for part in written for token in engine.tokenizer.encode(part)),
        prompt_tokens=result.prompt_tokens,
        blocks=result.canvases,
        steps=result.steps,
        seconds=result.seconds,
        seed=result.seed,
        mode="diffusion",
        result=result,
    )


# --- replies


class FimChoice(ReplyChoice):
    """A choice with the fields of both Mistral's (message) and Mercury's (text) clients."""

    text: str
    message: ReplyMessage


class FimCompletion(ChoicesReply):
    object: Literal["chat.completion"]
    choices: list[FimChoice]


class Timings(BaseModel):
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class InfillReply(BaseModel):
    """A reply of llama.cpp's `/infill`."""

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
    dgemma: RequestNote


class ReplyHole(BaseModel):
    start: int
    end: int
    text: str
    score: float
    tokens: int
    converged: bool


class ReplyCandidate(BaseModel):
    text: str
    score: float
    holes: list[ReplyHole]


class FillReply(ResultReply):
    object: Literal["dgemma.fill"]
    text: str
    holes: list[ReplyHole]
    candidates: list[ReplyCandidate]


class FimFormat(ChoicesFormat):
    """Write FIM replies: chat choices with the text also at the top level."""

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    empty_delta: ClassVar[dict[str, Any]] = {"delta": {}, "text": ""}

    def choice(self, done: "Done") -> dict[str, Any]:
        message = {"role": "assistant", "content": done.text, "refusal": None}
        return {"text": done.text, "message": message}

    def delta(self, text: str, is_thought: bool) -> dict[str, Any] | None:
        message = {"role": "assistant", "content": text} if text else {}
        return None if is_thought else {"delta": message, "text": text}


@dataclass(frozen=True, kw_only=True)
class InfillFormat(Format):
    """Write replies of llama.cpp's `/infill`."""

    limit: int  # n_predict: 0 for a warm-up, negative for no limit

    def full(self, answers: "Sequence[Done]") -> dict[str, Any]:
        return self._reply(answers[0].text, answers[0]) if answers else self._reply("", None)

    def text_chunks(self, index: int, text: str, is_thought: bool) -> list[Chunk]:
        return [{"index": index, "content": text, "stop": False}]

    def empty_chunk(self, index: int) -> Chunk:
        return {"index": index, "content": "", "stop": False}

    def last_chunks(self, index: int, done: "Done") -> list[Chunk]:
        return [self._reply("", done)]

    def usage_chunk(self, answers: "Sequence[Done]") -> Chunk:
        return {**super().usage_chunk(answers), "stop": True}

    def _stop_type(self, done: "Done | None") -> str:
        if done is None:
            return "none"
        return "limit" if 0 < self.limit <= done.result.holes[0].tokens else "eos"

    def _reply(self, content: str, done: "Done | None") -> dict[str, Any]:
        seconds = 0.0 if done is None else done.seconds
        count, num_prompt = (0, 0) if done is None else (done.tokens, done.prompt_tokens)
        return {
            "index": 0,
            "content": content,
            "stop": True,
            "stop_type": self._stop_type(done),
            "stopping_word": "",
            "model": self.envelope.model,
            "truncated": False,
            "tokens_predicted": count,
            "tokens_evaluated": num_prompt,
            "tokens_cached": 0 if done is None else done.reused_tokens,
            "timings": {
                "prompt_n": num_prompt,
                "prompt_ms": 0.0,
                "predicted_n": count,
                "predicted_ms": round(1000 * seconds, 3),
                "predicted_per_second": round(count / seconds, 3) if seconds else 0.0,
            },
            "dgemma": self.envelope.note,
        }


def describe_fill(result: "FillResult") -> dict[str, Any]:
    def rounded(scored: Any) -> dict[str, Any]:
        return {**asdict(scored), "score": round(finite(scored.score), 4)}

    candidates = [
        {**rounded(filled), "holes": [rounded(hole) for hole in filled.holes]}
        for filled in result.candidates
    ]
    return {"text": result.text, "holes": candidates[0]["holes"], "candidates": candidates}


router = make_router()


@router.post("/v1/fim/completions", **whole_or_stream(FimCompletion))
async def fim(request: Request, body: FimBody, service: ServiceDep) -> Response:
    """Fill the hole between a prompt and a suffix, for clients of Mistral and of Mercury."""
    fmt = FimFormat(envelope=service.envelope(request, "fim-", body))
    return await answer(request, service, body, parse_fim, fmt)


@router.post("/infill", **whole_or_stream(InfillReply))
async def infill(request: Request, body: InfillBody, service: ServiceDep) -> Response:
    """Fill the hole at a cursor, in llama.cpp's format."""
    fmt = InfillFormat(envelope=service.envelope(request, "infill-", body), limit=body.n_predict)
    if body.n_predict == 0:  # an editor warms up the prefix cache
        service.check_model(body.model)
        return JSONResponse(fmt.full([]))
    return await answer(request, service, body, parse_infill, fmt)


@router.post("/v1/dgemma/fill", **whole_or_stream(FillReply))
async def fill(request: Request, body: FillBody, service: ServiceDep) -> Response:
    """Fill all holes of a text; the rest stays as it is."""
    envelope = service.envelope(request, "fill-", body)
    fmt = ResultFormat(envelope=envelope, kind="dgemma.fill", describe=describe_fill)
    return await answer(request, service, body, parse_fill, fmt)
