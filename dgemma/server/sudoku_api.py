"""`POST /v1/dgemma/sudoku`: a puzzle solved by the model alone."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastapi import Request, Response

from dgemma.server.body_params import check_streamed, check_unconstrained, new_seed
from dgemma.server.errors import ApiError
from dgemma.server.field_policy import FieldTable
from dgemma.server.format import ResultFormat
from dgemma.server.schemas import Body, ResultReply, honoured
from dgemma.server.service import ServiceDep, answer, make_router, whole_or_stream

if TYPE_CHECKING:
    from dgemma.engine import Done, Engine
    from dgemma.engine.request import Program
    from dgemma.programs.sudoku.solve import SudokuParams, SudokuResult


class SudokuBody(Body):
    """`POST /v1/dgemma/sudoku`."""

    omitted: ClassVar[frozenset[str]] = frozenset(
        {"max_tokens", "temperature", "stop", "n", "diffusing"}
    )
    unhonoured: ClassVar[FieldTable] = {}

    puzzle: str | None = honoured(
        None, "81 cells row by row, 0 or . where one is empty", min_length=81, max_length=400
    )
    image: str | None = honoured(None, "instead of a puzzle: its picture, as a data: URL")
    pinned: bool | None = honoured(None, "true: givens are pinned; the default, but not in AR")
    restarts: int = honoured(
        0, "most new attempts at a canvas that does not converge, 0 to 16", ge=0, le=16
    )

    @property
    def has_images(self) -> bool:
        return self.image is not None


class SudokuReply(ResultReply):
    object: Literal["dgemma.sudoku"]
    puzzle: str
    solution: str | None
    solved: bool
    converged: bool
    restarts: int


def parse_sudoku(engine: "Engine", body: SudokuBody) -> "list[Program[Done]]":
    from dgemma.images import Image
    from dgemma.programs.sudoku.grid import parse
    from dgemma.programs.sudoku.solve import (
        SudokuParams,
        picture_program,
        reading_task,
        solve_program,
        sudoku_task,
    )
    from dgemma.text.messages import image_data

    if (body.puzzle is None) == (body.image is None):
        raise ApiError(400, "give either a puzzle of 81 cells or an image of one")
    mode = body.dgemma.mode
    check_unconstrained(body.dgemma)
    check_streamed(body)
    if mode == "ar" and body.pinned:
        raise ApiError(400, "AR mode has no canvas to pin givens on; leave out pinned")
    params = SudokuParams(
        mode=mode,
        pinned=mode != "ar" if body.pinned is None else body.pinned,
        restarts=body.restarts,
        seed=new_seed(body.seed),
        drafts=body.dgemma.drafts and mode != "ar",
    )
    if body.image is not None:
        image = Image.from_base64(image_data(body.image))
        reading = reading_task(engine, image, params)  # decodes, and refuses what cannot be
        program = picture_program(engine, reading, image.name, params)
        return [sudoku_answer(engine, program, params)]
    puzzle = parse(body.puzzle or "")
    sudoku_task(engine, puzzle, 0, params)
    return [sudoku_answer(engine, solve_program(engine, puzzle, params), params)]


def sudoku_answer(
    engine: "Engine", program: "Program[SudokuResult]", params: "SudokuParams"
) -> "Program[Done]":
    """Solve a puzzle; the text is the grid, if the reply has one."""
    from dgemma.engine import Done, Text
    from dgemma.text.reply import Reply

    result = yield from program
    text = result.solution or ""
    yield Text(text=text)
    return Done(
        reply=Reply(answer=text),
        ids=tuple(engine.tokenizer.encode(text)),
        prompt_tokens=result.prompt_tokens,
        blocks=1 + result.restarts,
        steps=result.steps,
        seconds=result.seconds,
        seed=params.seed,
        mode=params.mode,
        retries=result.restarts,
        unconverged_blocks=int(not result.converged),
        result=result,
    )


def describe_sudoku(result: "SudokuResult") -> dict[str, Any]:
    return {
        "puzzle": result.puzzle,
        "solution": result.solution,
        "solved": result.is_right,
        "converged": result.converged,
        "restarts": result.restarts,
    }


router = make_router()


@router.post("/v1/dgemma/sudoku", **whole_or_stream(SudokuReply))
async def sudoku(request: Request, body: SudokuBody, service: ServiceDep) -> Response:
    """Solve a Sudoku by the model alone; the solution is checked when all is over."""
    from dgemma.programs.sudoku.grid import reply_slots

    positions = list(reply_slots(service.engine.tokenizer).positions)
    fmt = ResultFormat(
        envelope=service.envelope(request, "sudoku-", body),
        kind="dgemma.sudoku",
        describe=describe_sudoku,
        first={"type": "layout", "positions": positions},
    )
    return await answer(request, service, body, parse_sudoku, fmt)
