"""Fills, edits and puzzles as errands: each reports drafts, then what it promises, then its end.

A canvas is numbered by its place among those that are shown: a search tries several at once and
shows one of each batch.
"""

import re
import secrets
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from dgemma.server.guest import Errand

if TYPE_CHECKING:
    from dgemma.constrain.holes import Holed
    from dgemma.engine import Done, Draft, Edited, EditOptions, Engine, Filled, FillOptions
    from dgemma.engine.options import Plan
    from dgemma.engine.sudoku import How, Solved
    from dgemma.server.guest import Course

R = TypeVar("R")
ROWS = 16  # canvases that a search keeps at once, about
FENCE = re.compile(r"\A```[^\n]*\n(.*?)\n?```\s*\Z", re.DOTALL)


def fill_errand(engine: "Engine", holed: "Holed", options: "FillOptions") -> Errand:
    """Fill the holes of a text; a single one is promised as the text."""

    def run(engine: "Engine") -> "Course":
        from dgemma.engine import Text
        from dgemma.engine.fill import fill

        filled = yield from _numbered(fill(engine, holed, options))
        text = filled.holes[0].text if holed.count == 1 else filled.text
        yield Text(text=text)
        written = [token for hole in filled.holes for token in engine.tokenizer.encode(hole.text)]
        given = sum(len(engine.tokenizer.encode(piece)) for piece in holed.pieces)
        return _done(filled, text, written, given), filled

    return Errand(run=run, room=_room(engine, sum(map(len, holed.pieces))))


def edit_errand(
    engine: "Engine", text: str, instruction: str | None, options: "EditOptions"
) -> Errand:
    """Change a text in place; the new one is promised."""

    def run(engine: "Engine") -> "Course":
        from dgemma.engine import Text
        from dgemma.engine.edit import edit

        edited = yield from _numbered(edit(engine, text, instruction, options))
        yield Text(text=edited.text)
        given = len(engine.tokenizer.encode(text))
        return _done(edited, edited.text, engine.tokenizer.encode(edited.text), given), edited

    return Errand(run=run, room=_room(engine, len(text)))


def region_errand(
    engine: "Engine", around: tuple[str, str, str], instruction: str | None, options: "EditOptions"
) -> Errand:
    """Change the middle of a text; promised is its new form in a fence, or None if it is the old.

    That is how Mercury's clients read a next edit.
    """
    before, old, after = around

    def run(engine: "Engine") -> "Course":
        from dgemma.engine import Text
        from dgemma.engine.edit import edit

        edited = yield from _numbered(edit(engine, before + old + after, instruction, options))
        new = edited.text[len(before) : len(edited.text) - len(after)]
        shown = "None" if new == old else f"```\n{new.removesuffix(chr(10))}\n```"
        yield Text(text=shown)
        given = len(engine.tokenizer.encode(edited.old))
        return _done(edited, shown, engine.tokenizer.encode(shown), given), edited

    return Errand(run=run, room=_room(engine, len(before) + len(old) + len(after)))


def rewrite_errand(plan: "Plan", old: str) -> Errand:
    """Answer a plan, from the old text instead of noise; promised is the answer without a fence."""

    def run(engine: "Engine") -> "Course":
        from dgemma.engine import Done, Draft, Text
        from dgemma.engine.edit import warm_canvas

        canvas = warm_canvas(engine, plan.prompt, old)
        job = engine.submit(replace(plan, options=replace(plan.options, canvas=canvas)))
        done = None
        try:
            while not job.is_over:
                engine.step()
                while job.events:
                    event = job.events.popleft()
                    if isinstance(event, Draft):
                        yield event
                    elif isinstance(event, Done):
                        done = event
        finally:
            engine.cancel(job)
        if job.error is not None or done is None:
            raise job.error or RuntimeError("a request ended without its end")
        fenced = FENCE.match(done.text.strip())
        text = fenced[1] if fenced else done.text
        yield Text(text=text)
        return replace(done, reply=replace(done.reply, answer=text)), text

    return Errand(run=run, room=plan.room)


def sudoku_errand(engine: "Engine", puzzle: str, how: "How") -> Errand:
    """Solve a puzzle; promised is the grid, if the reply has one."""

    def run(engine: "Engine") -> "Course":
        from dgemma.engine import Text
        from dgemma.engine.sudoku import follow

        solved = yield from _numbered(_solve(follow(engine, [puzzle], how)))
        text = solved.solution or ""
        yield Text(text=text)
        ids = engine.tokenizer.encode(text)
        return _solved(solved, how, ids, len(engine.tokenizer.encode(puzzle))), solved

    return Errand(run=run, room=_room(engine, 400))


def new_seed(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else seed


def _solve(events: Any) -> "Generator[Draft, None, Solved]":
    from dgemma.engine import Draft

    for _, event in events:
        if not isinstance(event, Draft):
            solved: Solved = event
            return solved
        yield event
    raise AssertionError("a puzzle ends with its result")


def _numbered(course: "Generator[Draft, None, R]") -> "Generator[Draft, None, R]":
    """The same with canvases numbered: one begins where the steps do not go on."""
    block, last = -1, 0
    while True:
        try:
            draft = next(course)
        except StopIteration as end:
            result: R = end.value
            return result
        block += block < 0 or draft.step <= last
        last = draft.step
        yield replace(draft, block=block)


def _room(engine: "Engine", characters: int) -> int:
    config = engine.model.config
    return min(config.max_position_embeddings, characters) + ROWS * config.canvas_length


def _done(result: "Filled | Edited", text: str, ids: list[int], prompt: int) -> "Done":
    return _end(
        text=text,
        ids=tuple(ids),
        prompt_tokens=prompt,
        blocks=result.canvases,
        steps=result.steps,
        seconds=result.seconds,
        seed=result.seed,
    )


def _solved(solved: "Solved", how: "How", ids: list[int], prompt: int) -> "Done":
    return _end(
        text=solved.solution or "",
        ids=tuple(ids),
        prompt_tokens=prompt,
        blocks=1 + solved.restarts,
        steps=solved.steps,
        seconds=solved.seconds,
        seed=how.seed,
        mode=how.mode,
        retries=solved.restarts,
        unsettled_blocks=int(not solved.settled),
    )


def _end(*, text: str, **fields: Any) -> "Done":
    from dgemma.engine import Done
    from dgemma.text.reply import Reply

    usual: dict[str, Any] = {
        "finish": "stop",
        "mode": "diffusion",
        "reused_tokens": 0,
        "unsettled_blocks": 0,
        "retries": 0,
        "fault": "",
        "remaining_entropy": 0.0,
        "logprobs": (),
        "prefill_seconds": 0.0,
    }
    return Done(reply=Reply(answer=text), **{**usual, **fields})
