"""`POST /v1/completions`: continues plain text or token ids, or fills a hole before a suffix."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from fastapi import Request, Response
from pydantic import BaseModel, model_validator

from dgemma.server import limits
from dgemma.server.body_params import check_ids, check_length, generations, text_constraint
from dgemma.server.errors import ApiError, shown
from dgemma.server.field_policy import refusal
from dgemma.server.format import ChoicesFormat, finite
from dgemma.server.infill_api import check_no_effort, hole_programs
from dgemma.server.schemas import (
    EFFORT,
    ChoicesReply,
    FormattedBody,
    HoleEffort,
    ReplyChoice,
    honoured,
    texts_schema,
)
from dgemma.server.sentinels import HoleContext, find_hole
from dgemma.server.service import ServiceDep, answer, make_router, whole_or_stream

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine
    from dgemma.engine.request import Program
    from dgemma.text.chat import Prompt
    from dgemma.text.tokenizer import Tokenizer

TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
ID_LISTS = {"type": "array", "minItems": 1, "items": TOKEN_IDS}
RawPrompt = Annotated[str | list[Any], texts_schema(TOKEN_IDS, ID_LISTS)]


class CompletionBody(FormattedBody):
    """`POST /v1/completions`."""

    prompt: RawPrompt = honoured(
        ..., "text or token ids to continue, up to 16 of either; see sentinels"
    )
    max_tokens: int | None = honoured(
        None, "longest answer, cut exactly; lowered to what the context holds; 0 with echo", ge=0
    )
    echo: bool = honoured(
        False,
        "true: the prompt is repeated and scored by the causal pass; max_tokens must be 0, or 1: "
        "the most likely next token",
    )
    suffix: str = honoured("", "text after the hole that is filled; diffusion only")
    effort: HoleEffort | None = honoured(None, f"of a hole; {EFFORT}; fast by default")
    logprobs: int | None = honoured(
        None,
        "0: of each token of the answer, from the causal pass; 1, with echo: the most likely too",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        prompts = self.prompts
        is_texts = all(isinstance(prompt, str) for prompt in prompts)
        is_ids = all(isinstance(p, list) and all(type(t) is int for t in p) for p in prompts)
        if not (is_texts or is_ids) or not 1 <= len(prompts) <= limits.MAX_PROMPTS:
            kinds = f"a text or token ids, or 1 to {limits.MAX_PROMPTS} of one kind"
            raise refusal("prompt", f"prompt is {shown(self.prompt)}; it must be {kinds}")
        if not all(prompts) and not (is_texts and self.suffix):
            raise refusal("prompt", "prompt is empty; give at least one token")
        self._check_echo()
        return self

    def _check_echo(self) -> None:
        if not self.echo:
            if self.max_tokens == 0:
                raise refusal("max_tokens", "max_tokens is 0; it must be 1 or more without echo")
            if self.logprobs == 1:
                raise refusal("logprobs", "logprobs is 1; it must be 0 without echo")
        elif self.max_tokens not in (0, 1):
            sentence = f"max_tokens is {self.max_tokens}; with echo it must be 0 or 1"
            raise refusal("max_tokens", sentence)
        elif self.stream or self.suffix or self.n > 1 or self.has_constraint:
            sentence = "echo takes no stream, suffix, n or constraint; leave them out"
            raise refusal("echo", sentence)

    @property
    def prompts(self) -> list[Any]:
        """One or more prompts: texts, or lists of token ids."""
        if isinstance(self.prompt, list) and not any(type(part) is int for part in self.prompt):
            return self.prompt
        return [self.prompt]

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and not self.echo


def parse_completion(engine: "Engine", body: CompletionBody) -> list[Any]:
    tasks: list[Any] = []
    if body.echo:
        check_no_effort(body.effort)
        num_new = body.max_tokens or 0
        return [echo_program(engine, prompt, num_new) for prompt in body.prompts]
    constraint = text_constraint(engine, body.dgemma, body.response_format)
    for prompt in body.prompts:
        hole = _hole(prompt, body.suffix)
        if hole is None:
            check_no_effort(body.effort)
            plain = _plain_prompt(engine, prompt)
            tasks += generations(engine, body, plain, body.max_tokens, constraint)
        elif constraint is not None:
            raise ApiError(400, "a hole takes no constraint; leave one of them out")
        elif body.logprobs is not None:
            raise ApiError(400, "a hole is filled without logprobs; leave them out", param="suffix")
        else:
            tasks += hole_programs(engine, body, hole, body.effort)
    return tasks


def _hole(prompt: str | Sequence[int], suffix: str) -> HoleContext | None:
    """Return the hole before the suffix, or between sentinels in the prompt."""
    if isinstance(prompt, str):
        return HoleContext(prompt, suffix) if suffix else find_hole(prompt)
    if suffix:
        raise ApiError(400, "a suffix needs a prompt of text, not of token ids", param="suffix")
    return None


def _plain_prompt(engine: "Engine", prompt: str | Sequence[int]) -> "Prompt":
    from dgemma.text.chat import Prompt

    check_length(engine, prompt)
    if isinstance(prompt, str):
        return engine.plain_prompt(prompt)
    check_ids(engine, prompt)
    return Prompt(text=engine.tokenizer.decode(prompt), ids=tuple(prompt))


@dataclass(frozen=True, slots=True)
class EchoScore:
    """A scored prompt and its next token."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]  # None for the first token
    best: tuple[tuple[int, float] | None, ...]


def echo_program(engine: "Engine", given: str | Sequence[int], num_new: int) -> "Program[Done]":
    """Score a prompt and, if `num_new` is 1, return the most likely next token."""
    prompt, started = _plain_prompt(engine, given), time.monotonic()
    return _echo(engine, prompt, isinstance(given, str), num_new, started)


def _echo(
    engine: "Engine", prompt: "Prompt", hides_bos: bool, num_new: int, started: float
) -> "Program[Done]":
    from dgemma.engine import Done
    from dgemma.engine.scoring import NextTokens, Prefill
    from dgemma.text.reply import Reply

    new: tuple[int, ...] = ()
    if num_new:
        (prefix,) = yield [Prefill(prompt.ids)]
        try:
            (most_likely,) = yield [NextTokens(prefix, 1)]
        finally:
            engine.keep(prefix)
        new = tuple(most_likely)
    ids = (*prompt.ids, *new)
    logprobs: tuple[float | None, ...] = (None,)
    best: tuple[tuple[int, float] | None, ...] = (None,)
    if len(ids) > 1:
        (score,) = yield from engine.score_program(ids[:1], [ids[1:]])
        logprobs, best = (None, *score.logprobs), (None, *score.best)
    answer, first = engine.tokenizer.decode(new), int(hides_bos)
    return Done(
        reply=Reply(answer=answer),
        ids=new,
        prompt_tokens=len(prompt.ids),
        blocks=0,
        steps=len(new),
        seconds=time.monotonic() - started,
        seed=0,
        mode="ar",
        finish="length",
        result=EchoScore(prompt.text + answer, ids[first:], logprobs[first:], best[first:]),
    )


# --- reply


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(ReplyChoice):
    text: str
    logprobs: TextLogprobs | None


class TextCompletion(ChoicesReply):
    object: Literal["text_completion"]
    choices: list[TextChoice]


@dataclass(frozen=True, kw_only=True)
class TextFormat(ChoicesFormat):
    """Write text completions, without thoughts."""

    tokenizer: "Tokenizer"
    logprobs: int | None = None
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    empty_delta: ClassVar[dict[str, Any]] = {"text": "", "logprobs": None}

    def choice(self, done: "Done") -> dict[str, Any]:
        return {"text": done.result.text if isinstance(done.result, EchoScore) else done.text}

    def delta(self, text: str, is_thought: bool) -> dict[str, Any] | None:
        return None if is_thought else {"text": text, "logprobs": None}

    def finish(self, done: "Done") -> dict[str, Any]:
        return {"logprobs": self._logprobs(done), **super().finish(done)}

    def _logprobs(self, done: "Done") -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        echo = done.result if isinstance(done.result, EchoScore) else None
        ids, logprobs = (echo.ids, echo.logprobs) if echo else (done.ids, done.logprobs)
        tokens = [self.tokenizer.decode([token]) for token in ids]
        ends = list(accumulate(map(len, tokens), initial=0))
        return {
            "tokens": tokens,
            "token_logprobs": [None if value is None else finite(value) for value in logprobs],
            "top_logprobs": [self._named(e) for e in echo.best] if echo and self.logprobs else None,
            "text_offset": ends[:-1],
        }

    def _named(self, best: tuple[int, float] | None) -> dict[str, float] | None:
        return None if best is None else {self.tokenizer.decode([best[0]]): finite(best[1])}


router = make_router()


@router.post("/v1/completions", **whole_or_stream(TextCompletion))
async def completions(request: Request, body: CompletionBody, service: ServiceDep) -> Response:
    """Continue a text."""
    fmt = TextFormat(
        envelope=service.envelope(request, "cmpl-", body),
        tokenizer=service.engine.tokenizer,
        logprobs=body.logprobs,
    )
    return await answer(request, service, body, parse_completion, fmt)
