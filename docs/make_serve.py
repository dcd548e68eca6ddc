"""Write the tables of docs/serve.md from the server's own, so that they cannot lie.

python docs/make_serve.py [--check]
"""

import json
from pathlib import Path
from typing import get_args

from fastapi.routing import APIRoute
from generated import save, with_tables

from dgemma.engine.events import Draft
from dgemma.server import app, edit_api, infill_api, sudoku_api
from dgemma.server.chat_api import ChatBody
from dgemma.server.completions_api import CompletionBody
from dgemma.server.edit_api import EditBody, MercuryBody
from dgemma.server.field_policy import MESSAGE_HARMLESS, FieldPolicy, FieldTable
from dgemma.server.infill_api import FillBody, FimBody, InfillBody
from dgemma.server.messages_api import CountTokensBody, MessagesBody
from dgemma.server.ollama_api import OPTIONS, OllamaChatBody, OllamaGenerateBody
from dgemma.server.responses_api import ResponsesBody
from dgemma.server.schemas import Body, Extension, ResultReply, field_table
from dgemma.server.service import REASONS
from dgemma.server.stream import draft_data
from dgemma.server.sudoku_api import SudokuBody

PAGE = Path(__file__).parent / "serve.md"
DRAFT = {
    "block": "index of the canvas, from 0",
    "step": "steps that it has run",
    "ids tokens": "tokens on the canvas, accepted ones and noise; a control token has no text",
    "guess guess_tokens text": "tokens that would be committed now, and their text in one piece",
    "entropy": "nats at each position in this step; null if not a number",
    "accepted": "positions accepted in this step; the others are noise again",
    "pinned": "positions that must keep their token",
}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def sorted_by_kind(table: FieldTable) -> list[str]:
    rows = [row("field", "", "what becomes of it"), "|---|---|---|"]
    for kind in ("honoured", "harmless", "refused"):
        rows += [
            row(f"`{name}`", kind, _with_neutral(field))
            for name, field in table.items()
            if field.kind == kind
        ]
    return rows


def _with_neutral(field: FieldPolicy) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"{field.note}; {values} passes" if values else field.note


def added(body: type[Body], base: FieldTable) -> list[str]:
    """Return the table of the fields that the base lacks or treats otherwise."""
    return sorted_by_kind({n: f for n, f in body.table.items() if base.get(n) != f})


def routes() -> list[str]:
    modules = (*app.RESOURCES, app)
    rows = [row("route", "does"), "|---|---|"]
    for route in [r for module in modules for r in module.router.routes if isinstance(r, APIRoute)]:
        path = route.path.replace("{name:path}", "NAME")
        does = (route.endpoint.__doc__ or "").splitlines()[0]
        rows.append(row(f"`{min(route.methods)} {path}`", does[:1].lower() + does[1:].rstrip(".")))
    return rows


def replies() -> list[str]:
    """Return the fields of the replies of the server's own routes."""
    rows = [row("reply of", "fields"), "|---|---|"]
    for model in (infill_api.FillReply, edit_api.EditReply, sudoku_api.SudokuReply):
        name = model.__name__.removesuffix("Reply").lower()
        common = {"object", *ResultReply.model_fields}
        own = {n: f for n, f in model.model_fields.items() if n not in common}
        shown = [_with_parts(n, f.annotation) for n, f in own.items()]
        rows.append(row(f"`/v1/dgemma/{name}`", "; ".join(shown)))
    return rows


def _with_parts(name: str, annotation: object) -> str:
    """Return a field, with those of its items if it is a list of objects."""
    items = [item for item in get_args(annotation) if hasattr(item, "model_fields")]
    parts = [f"`{part}`" for item in items for part in item.model_fields]
    return f"`{name}` of {', '.join(parts)}" if parts else f"`{name}`"


def draft() -> list[str]:
    arrays = {name: () for name in Draft.__slots__ if name not in ("block", "step")}
    fields = draft_data(Draft(block=0, step=0, **arrays)).keys() - {"type"}
    listed = [name for names in DRAFT for name in names.split()]
    assert fields == set(listed), f"a draft has {fields}"
    rows = [row(", ".join(f"`{n}`" for n in names.split()), note) for names, note in DRAFT.items()]
    return [row("field", "meaning"), "|---|---|", *rows]


def tables() -> dict[str, list[str]]:
    notes, common = [row("field", "meaning"), "|---|---|"], field_table(Body)
    extension = {n: f.description or "" for n, f in Extension.model_fields.items()}
    return {
        "routes": routes(),
        "draft": draft(),
        "replies": replies(),
        "statuses": [row("status", ""), "|---|---|"]
        + [row(str(n), t[:1].lower() + t[1:]) for n, t in REASONS.items()],
        "both": sorted_by_kind(common),
        "chat": added(ChatBody, common),
        "anthropic": added(MessagesBody, common),
        "count": added(CountTokensBody, field_table(MessagesBody)),
        "responses": added(ResponsesBody, common),
        "ollama chat": sorted_by_kind(OllamaChatBody.table),
        "ollama generate": added(OllamaGenerateBody, OllamaChatBody.table),
        "ollama options": sorted_by_kind(OPTIONS),
        "completions": added(CompletionBody, common),
        "fim": added(FimBody, common),
        "infill": added(InfillBody, common),
        "one message": added(MercuryBody, common),
        "fill": added(FillBody, common),
        "edit": added(EditBody, common),
        "sudoku": added(SudokuBody, common),
        "messages": notes + [row(f"`{n}`", t) for n, t in MESSAGE_HARMLESS.items()],
        "extension": notes + [row(f"`{n}`", t) for n, t in extension.items()],
    }


if __name__ == "__main__":
    save(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), tables()))
