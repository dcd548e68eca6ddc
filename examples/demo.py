"""Show the built-in model at what it does well: a Sudoku, an edit, a hole, and JSON of a schema.

    python -m examples.demo

On a terminal the canvas is redrawn after each step; elsewhere each step that changes the beginning
of the canvas is printed as a line. The Sudoku is asked twice: the same weights also write it token
by token.
"""

import time
from collections.abc import Iterable

from dgemma import (
    Done,
    Draft,
    Engine,
    FillParams,
    SamplingParams,
    SudokuParams,
    SudokuResult,
    Text,
    fill,
    solve,
)
from dgemma.cli.chat import NANO_CANNOT
from dgemma.cli.show import CanvasView, printable
from dgemma.programs.sudoku.solve import solve_program

WIDTH = 100  # characters of a canvas that are printed
PAUSE = 0.15  # seconds a canvas stays on a screen
EDIT = "Change cat to dog.\n\nThe cat sat on the mat. The cat was happy."
DIALOGUE = """\
Write the function call for this dialogue as JSON.

USER: I want to find a restaurant in San Jose. Something Italian."""
WORDS = {"type": "string", "maxLength": 24}
ARGUMENTS = {"city": WORDS, "cuisine": WORDS}
FUNCTION = '''\
def factorial(n):
    """Return the product of the numbers from 1 to n."""
    result = 1
    for i in range(2, n + 1):
        <|fill|>
    return result
'''
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"


def main() -> None:
    engine = Engine.load("nano", device="cpu")
    headline(f"Solve this Sudoku: {PUZZLE}")
    print_grid(show(engine.follow(solve_program(engine, PUZZLE, SudokuParams(drafts=True)))))
    headline("The same weights, the same puzzle, one token at a time:")
    print_grid(solve(engine, [PUZZLE], SudokuParams(mode="ar", pinned=False))[0])
    headline(EDIT)
    print_reply(show(engine.stream(EDIT, SamplingParams(seed=1, drafts=True))))
    headline("A function with a hole:\n" + FUNCTION)
    filled = fill(engine, FUNCTION, FillParams(max_tokens=8, single_line=True, seed=1))
    print(filled.text)
    print(f"  [{filled.steps} steps, {filled.seconds:.2f} s; all but the hole is untouched]")
    headline(DIALOGUE)
    constraint = engine.constraint(schema=call_schema())
    params = SamplingParams(seed=1, drafts=True, constraint=constraint)
    print_reply(show(engine.stream(DIALOGUE, params)))
    print(f"\n{NANO_CANNOT}\nAsk it yourself: .venv/bin/dgemma chat")


def call_schema() -> dict[str, object]:
    """Return the schema of a function call, which the reply must fit."""
    properties = {"name": {"enum": ["FindRestaurants", "FindHotels"]}, "arguments": of(ARGUMENTS)}
    return of(properties)


def of(properties: dict[str, object]) -> dict[str, object]:
    required = list(properties)
    closed = {"additionalProperties": False, "required": required}
    return {"type": "object", "properties": properties, **closed}


def headline(text: str) -> None:
    print(f"\n> {text}")


def show(events: Iterable[object]) -> Done | SudokuResult:
    """Draw the drafts as they come; return the last event, which is the result."""
    shown = ""
    with CanvasView() as view:
        for event in events:
            if isinstance(event, Draft) and view.is_live:
                view.draw(event)
                time.sleep(PAUSE)
            elif isinstance(event, Draft):
                text = beginning(event)
                if text != shown:
                    print(f"  block {event.block + 1} step {event.step:2}  {text}")
                shown = text
            elif isinstance(event, Text) and view.is_live:
                view.promise(event)
    return event


def beginning(draft: Draft) -> str:
    text = "".join(map(printable, draft.guess_tokens)).replace("\n", "/")
    return text[:WIDTH].rstrip("·")


def print_reply(done: Done | SudokuResult) -> None:
    assert isinstance(done, Done)
    print(done.text)
    print(f"  [{done.tokens} tokens, {done.steps} steps, {done.seconds:.2f} s]")


def print_grid(result: SudokuResult) -> None:
    cells = result.solution
    lines = [] if cells is None else [" ".join(cells[i : i + 9]) for i in range(0, 81, 9)]
    print("\n".join(lines) or result.reply)
    outcome = "right" if result.is_right else "wrong" if lines else "wrong: that is no grid"
    print(f"  [{outcome}; {result.steps} steps, {result.seconds:.2f} s]")


if __name__ == "__main__":
    main()
