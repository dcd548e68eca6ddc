"""The routes that fill, edit and solve: in the shapes editors know, and in this server's own."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from dgemma.server import replies, replies_fill
from dgemma.server.asking import Asked
from dgemma.server.asking_fill import (
    read_apply,
    read_edit,
    read_fill,
    read_fim,
    read_infill,
    read_next_edit,
    read_sudoku,
)
from dgemma.server.service import ERRORS, Served, answer, head, whole_or_stream
from dgemma.server.shapes import ChatShape, Shape
from dgemma.server.shapes_fill import (
    FimShape,
    InfillShape,
    ResultShape,
    of_edit,
    of_fill,
    of_sudoku,
)
from dgemma.server.wire_fill import (
    EditBody,
    FillBody,
    FimBody,
    InfillBody,
    OneMessageBody,
    SudokuBody,
)

router = APIRouter(responses=ERRORS)


@router.post("/v1/fim/completions", **whole_or_stream(replies_fill.FimCompletion))
async def fim(request: Request, body: FimBody, service: Served) -> Response:
    """Fill the hole between a prompt and a suffix, for clients of Mistral and of Mercury."""
    shape = FimShape(head("fim", service, body))
    return await answer(request, service, body, read_fim, lambda asked: shape)


@router.post("/infill", **whole_or_stream(replies_fill.Infilled))
async def infill(request: Request, body: InfillBody, service: Served) -> Response:
    """Fill the hole at a cursor, in llama.cpp's shape."""
    shape = InfillShape(head("infill", service, body))
    if body.n_predict == 0:
        service.check_model(body.model)
        return JSONResponse(shape.whole([]))
    return await answer(request, service, body, read_infill, lambda asked: shape)


@router.post("/v1/edit/completions", **whole_or_stream(replies.ChatCompletion))
async def next_edit(request: Request, body: OneMessageBody, service: Served) -> Response:
    """The next edit of a region of a file, in Mercury's form."""
    shape = ChatShape(head("edit", service, body), service.engine.tokenizer)
    return await answer(request, service, body, read_next_edit, lambda asked: shape)


@router.post("/v1/apply/completions", **whole_or_stream(replies.ChatCompletion))
async def apply(request: Request, body: OneMessageBody, service: Served) -> Response:
    """A file with an update applied, in Mercury's form."""
    shape = ChatShape(head("apply", service, body), service.engine.tokenizer)
    return await answer(request, service, body, read_apply, lambda asked: shape)


@router.post("/v1/dgemma/fill", **whole_or_stream(replies_fill.FillReply))
async def fill(request: Request, body: FillBody, service: Served) -> Response:
    """Fill all holes of a text; the rest stays as it is."""
    shape = ResultShape(head("fill", service, body), "dgemma.fill", of_fill)
    return await answer(request, service, body, read_fill, lambda asked: shape)


@router.post("/v1/dgemma/edit", **whole_or_stream(replies_fill.EditReply))
async def edit(request: Request, body: EditBody, service: Served) -> Response:
    """Change a text as told, only where it must."""
    shape = ResultShape(head("edit", service, body), "dgemma.edit", of_edit)
    return await answer(request, service, body, read_edit, lambda asked: shape)


@router.post("/v1/dgemma/sudoku", **whole_or_stream(replies_fill.SudokuReply))
async def sudoku(request: Request, body: SudokuBody, service: Served) -> Response:
    """Solve a Sudoku by the model alone; the solution is checked when all is over."""
    start = head("sudoku", service, body)

    def shape(asked: Asked) -> Shape:
        from dgemma.text.sudoku import reply_slots

        positions = list(reply_slots(service.engine.tokenizer).positions)
        layout = {"type": "layout", "positions": positions}
        return ResultShape(start, "dgemma.sudoku", of_sudoku, first=layout)

    return await answer(request, service, body, read_sudoku, shape)
