"""Bodies of requests that fill, edit and solve, to errands for the engine."""

from dataclasses import replace
from typing import TYPE_CHECKING

from dgemma.server.asking import (
    Asked,
    check_errand,
    check_no_effort,
    fill_options,
    fills_for,
    plans_for,
    sampler_for,
)
from dgemma.server.errands import (
    edit_errand,
    fill_errand,
    new_seed,
    region_errand,
    rewrite_errand,
    sudoku_errand,
)
from dgemma.server.faults import ApiError
from dgemma.server.guest import Errand
from dgemma.server.sentinels import Around, read_region, read_update
from dgemma.server.structure import check_none, text_guide
from dgemma.server.wire import Body
from dgemma.server.wire_fill import (
    EditBody,
    FillBody,
    FimBody,
    InfillBody,
    OneMessageBody,
    SudokuBody,
)

if TYPE_CHECKING:
    from dgemma.engine import EditOptions, Engine

NEXT_EDIT = "These edits were made just now:\n\n{history}\n\nMake the next edit that follows."
APPLY = (
    "Apply the update to the file, and write the whole new file, nothing else. In the update, "
    "lines that say that existing code follows stand for code of the file that stays.\n\n"
    "The update:\n\n{update}\n\nThe file:\n\n{original}"
)
STRENGTH = 0.5  # of a next edit: what is not doubtful stays


def read_fim(engine: "Engine", body: FimBody) -> Asked:
    if body.suffix:
        around = Around(body.prompt, body.suffix)
        return _asked(body, *fills_for(engine, body, around, body.effort))
    check_no_effort(body.effort)
    guide = text_guide(engine, body.dgemma, None)
    plain = plans_for(engine, body, [engine.plain(body.prompt)], body.max_tokens, guide)
    return Asked(plans=plain, wants_logprobs=False, max_seconds=body.dgemma.max_seconds)


def read_infill(engine: "Engine", body: InfillBody) -> Asked:
    if body.n_predict == 0:  # an editor warms a cache up; nothing is to be written
        check_errand(engine, body)
        return _asked(body)
    around = Around(body.before, body.input_suffix)
    return _asked(body, *fills_for(engine, body, around, body.effort))


def read_next_edit(engine: "Engine", body: OneMessageBody) -> Asked:
    region = read_region(body.message)
    if not region.old.strip():  # nothing to edit: what stands there is to be written
        raise ApiError(400, "the code to edit is empty; ask /v1/fim/completions to fill it")
    instruction = NEXT_EDIT.format(history=region.history) if region.history else None
    start = len(region.before)
    options = replace(
        _edit_options(engine, body),
        selection=((start, start + len(region.old)),),
        strength=STRENGTH,
    )
    around = (region.before, region.old, region.after)
    return _asked(body, region_errand(engine, around, instruction, options))


def read_apply(engine: "Engine", body: OneMessageBody) -> Asked:
    from dgemma.text.chat import Message

    check_errand(engine, body)
    original, update = read_update(body.message)
    content = APPLY.format(update=update, original=original)
    prompt = engine.prompt([Message(role="user", content=content)])
    (plan,) = plans_for(engine, body, [prompt], body.max_tokens)
    return _asked(body, rewrite_errand(plan, original))


def read_fill(engine: "Engine", body: FillBody) -> Asked:
    from dgemma.constrain.holes import Holed

    text = body.text
    holed = Holed.read(text) if isinstance(text, str) else Holed(tuple(text))
    options = replace(
        fill_options(engine, body, body.effort),
        single_line=body.single_line,
        allow_empty=body.allow_empty,
        candidates=body.candidates,
    )
    return _asked(body, fill_errand(engine, holed, options))


def read_edit(engine: "Engine", body: EditBody) -> Asked:
    from dgemma.constrain.edits import line_spans
    from dgemma.constrain.holes import check_spans
    from dgemma.engine.edit import check_edit

    options = replace(
        _edit_options(engine, body),
        selection=None if body.selection is None else tuple((a, b) for a, b in body.selection),
        lines=None if body.lines is None else (body.lines[0], body.lines[1]),
        strength=body.strength,
        passes=body.passes,
    )
    check_edit(options)
    if options.lines is not None:
        line_spans(body.text, *options.lines)
    check_spans(options.selection or (), len(body.text))
    return _asked(body, edit_errand(engine, body.text, body.instruction, options))


def read_sudoku(engine: "Engine", body: SudokuBody) -> Asked:
    from dgemma.engine.sudoku import Attempt, How, plan
    from dgemma.text.sudoku import parse, reply_slots

    puzzle, mode = parse(body.puzzle), body.dgemma.mode
    check_none(body.dgemma)
    if mode == "ar" and body.pinned:
        raise ApiError(400, "AR mode has no canvas to pin givens on; leave out pinned")
    if body.dgemma.drafts and not body.stream:
        raise ApiError(400, "drafts need stream to be true", param="dgemma")
    how = How(
        mode=mode,
        pinned=mode != "ar" if body.pinned is None else body.pinned,
        restarts=body.restarts,
        seed=new_seed(body.seed),
        drafts=body.dgemma.drafts and mode != "ar",
    )
    plan(engine, Attempt(0, puzzle), reply_slots(engine.tokenizer), how)  # refuses what cannot be
    return _asked(body, sudoku_errand(engine, puzzle, how))


def _edit_options(engine: "Engine", body: Body) -> "EditOptions":
    from dgemma.engine import EditOptions

    check_errand(engine, body)
    return EditOptions(
        seed=new_seed(body.seed),
        sampler=sampler_for(engine, body),
        drafts=body.dgemma.drafts,
    )


def _asked(body: Body, *errands: Errand) -> Asked:
    return Asked(plans=errands, wants_logprobs=False, max_seconds=body.dgemma.max_seconds)
