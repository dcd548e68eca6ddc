"""Routes that edit text: this server's own, and Mercury's next edit and apply."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from pydantic import BaseModel, Field, WithJsonSchema

from dgemma.server import limits
from dgemma.server.body_params import (
    check_length,
    check_program,
    generations,
    new_seed,
    sampler_for,
)
from dgemma.server.chat_api import ChatCompletion, ChatFormat
from dgemma.server.errors import ApiError
from dgemma.server.field_policy import COMMON, FieldTable, harmless, refusal, refused
from dgemma.server.format import ResultFormat
from dgemma.server.infill_api import program_done
from dgemma.server.schemas import STRICT, Body, ResultReply, honoured
from dgemma.server.sentinels import Region, read_region, read_update
from dgemma.server.service import ServiceDep, answer, make_router, whole_or_stream

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine
    from dgemma.engine.generation import Generation
    from dgemma.engine.request import Program
    from dgemma.programs.edit.edit import EditParams, EditResult

NEXT_EDIT = "These edits were made just now:\n\n{history}\n\nMake the next edit that follows."
APPLY = (
    "Apply the update to the file, and write the whole new file, nothing else. In the update, "
    "lines that say that existing code follows stand for code of the file that stays.\n\n"
    "The update:\n\n{update}\n\nThe file:\n\n{original}"
)
PAIR = {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer", "minimum": 0}}
Pair = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2), WithJsonSchema(PAIR)
]


# --- requests


class EditBody(Body):
    """`POST /v1/dgemma/edit`."""

    omitted: ClassVar[frozenset[str]] = frozenset({"max_tokens", "stop", "n", "diffusing"})
    unhonoured: ClassVar[FieldTable] = {}

    text: str = honoured(..., "the text to change", min_length=1)
    instruction: str | None = honoured(
        None, "what to change; without it words that the model doubts are replaced", min_length=1
    )
    selection: list[Pair] | None = honoured(
        None,
        "spans of characters that may change, [[start, end], ...]",
        min_length=1,
        max_length=limits.MAX_HOLES,
    )
    lines: Pair | None = honoured(None, "the same as first and last line, counted from 1")
    strength: float | None = honoured(
        None, "0 to 1, how readily text is opened; 0.5, or 1 of a selection", ge=0, le=1
    )
    passes: int | None = honoured(None, "most times over the text", ge=1, le=8)


class UserMessage(BaseModel):
    model_config = STRICT

    role: Literal["user"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        texts = [part.get("text") for part in self.content if part.get("type") == "text"]
        if len(texts) != len(self.content) or not all(isinstance(text, str) for text in texts):
            raise refusal("messages", "the message must be text")
        return "".join(map(str, texts))


class MercuryBody(Body):
    """`POST /v1/edit/completions` and `/v1/apply/completions`, in Mercury's format."""

    unhonoured: ClassVar[FieldTable] = {
        **COMMON,
        "stop": harmless("an edit ends where its region ends"),
        "max_completion_tokens": harmless("as max_tokens"),
        "prediction": harmless("the old text is known"),
        "reasoning_effort": harmless("an edit has no thought"),
        "parallel_tool_calls": harmless("there are no tools here"),
        "n": refused("there is one answer", 1),
        "diffusing": refused("an edit is shown when it is done; see drafts", False),
        "tools": refused("an edit calls no tools", []),
        "tool_choice": refused("an edit calls no tools", "auto", "none"),
        "response_format": refused("an edit is plain text", {"type": "text"}),
    }

    max_tokens: int | None = honoured(
        None, "longest new file; an edit ends where its region ends", ge=1
    )
    messages: list[UserMessage] = honoured(
        ..., "one user message in Mercury's format", min_length=1, max_length=1
    )

    @property
    def message(self) -> str:
        return self.messages[0].text


def parse_edit(engine: "Engine", body: EditBody) -> "list[Program[Done]]":
    from dgemma.programs.edit.edit import check_edit
    from dgemma.programs.edit.spans import line_span
    from dgemma.programs.infill.document import check_spans

    params = replace(
        _edit_params(engine, body),
        selection=None if body.selection is None else tuple((a, b) for a, b in body.selection),
        lines=None if body.lines is None else (body.lines[0], body.lines[1]),
        strength=body.strength,
        passes=body.passes,
    )
    check_edit(params)
    if params.lines is not None:
        line_span(body.text, *params.lines)
    check_spans(params.selection or (), len(body.text))
    return [edit_answer(engine, body.text, body.instruction, params)]


def parse_next_edit(engine: "Engine", body: MercuryBody) -> "list[Program[Done]]":
    from dgemma.programs.edit.edit import STRENGTH

    region = read_region(body.message)
    if not region.old.strip():  # nothing to edit: a hole to fill
        raise ApiError(400, "the code to edit is empty; use /v1/fim/completions to fill it")
    start = len(region.before)
    params = replace(
        _edit_params(engine, body),
        selection=((start, start + len(region.old)),),
        strength=STRENGTH,  # explicit, so that unsurprising text always stays
    )
    instruction = NEXT_EDIT.format(history=region.history) if region.history else None
    show = partial(fenced_region, region)
    return [edit_answer(engine, region.text, instruction, params, show)]


def parse_apply(engine: "Engine", body: MercuryBody) -> "list[Program[Done]]":
    from dgemma.text.chat import Message

    check_program(engine, body)
    original, update = read_update(body.message)
    content = APPLY.format(update=update, original=original)
    check_length(engine, content)
    prompt = engine.prompt([Message(role="user", content=content)])
    (task,) = generations(engine, body, prompt, body.max_tokens)
    return [rewrite_answer(engine, task, original)]


def _edit_params(engine: "Engine", body: Body) -> "EditParams":
    from dgemma.programs.edit.edit import EditParams

    check_program(engine, body)
    seed, sampler = new_seed(body.seed), sampler_for(engine, body)
    return EditParams(seed=seed, sampler=sampler, drafts=body.dgemma.drafts)


# --- programs


def edit_answer(
    engine: "Engine",
    text: str,
    instruction: str | None,
    params: "EditParams",
    show: Callable[[str], str] = str,
) -> "Program[Done]":
    """Edit a text in place; emits the edited text."""
    from dgemma.engine import Text
    from dgemma.programs.edit.edit import edit_program

    result = yield from edit_program(engine, text, instruction, params)
    shown = show(result.text)
    yield Text(text=shown)
    return program_done(engine, result, shown, (change.new for change in result.changed))


def fenced_region(region: Region, text: str) -> str:
    """Return the region of an edited text in a fence, as Mercury's clients expect, or None."""
    new = text[len(region.before) : len(text) - len(region.after)]
    return "None" if new == region.old else f"```\n{new.removesuffix(chr(10))}\n```"


def rewrite_answer(engine: "Engine", task: "Generation", old: str) -> "Program[Done]":
    """Answer a prompt from the old text; emits the answer without a code fence."""
    from dgemma.engine import Text
    from dgemma.programs.edit.edit import rewrite_program, without_fence

    params = replace(task.params, max_tokens=task.limits.max_tokens)
    done = yield from rewrite_program(engine, task.prompt, old, params)
    text = without_fence(done.text)
    yield Text(text=text)
    return replace(done, reply=replace(done.reply, answer=text))


# --- replies


class ReplyChange(BaseModel):
    start: int
    end: int
    old_start: int
    old_end: int
    old: str
    new: str


class EditReply(ResultReply):
    object: Literal["dgemma.edit"]
    text: str
    changed: list[ReplyChange]
    opened: list[list[int]]
    diff: str


def describe_edit(result: "EditResult") -> dict[str, Any]:
    return {
        "text": result.text,
        "changed": [asdict(change) for change in result.changed],
        "opened": [list(span) for span in result.opened],
        "diff": result.diff(),
    }


router = make_router()


@router.post("/v1/dgemma/edit", **whole_or_stream(EditReply))
async def edit(request: Request, body: EditBody, service: ServiceDep) -> Response:
    """Change a text as instructed, only where it must."""
    envelope = service.envelope(request, "edit-", body)
    fmt = ResultFormat(envelope=envelope, kind="dgemma.edit", describe=describe_edit)
    return await answer(request, service, body, parse_edit, fmt)


@router.post("/v1/edit/completions", **whole_or_stream(ChatCompletion))
async def next_edit(request: Request, body: MercuryBody, service: ServiceDep) -> Response:
    """Return the next edit of a region of a file, in Mercury's format."""
    envelope, tokenizer = service.envelope(request, "edit-", body), service.engine.tokenizer
    fmt = ChatFormat(envelope=envelope, tokenizer=tokenizer)
    return await answer(request, service, body, parse_next_edit, fmt)


@router.post("/v1/apply/completions", **whole_or_stream(ChatCompletion))
async def apply(request: Request, body: MercuryBody, service: ServiceDep) -> Response:
    """Return a file with an update applied, in Mercury's format."""
    envelope, tokenizer = service.envelope(request, "apply-", body), service.engine.tokenizer
    fmt = ChatFormat(envelope=envelope, tokenizer=tokenizer)
    return await answer(request, service, body, parse_apply, fmt)
