"""A minute with the built-in model: it chats, fills a hole in a function and solves a Sudoku.

    python -m examples.demo

On a terminal the canvas moves; elsewhere each step is a line. At the end the same weights try the
same puzzle one token at a time.
"""

import time
from collections.abc import Iterable

from dgemma import Done, Draft, Engine, FillOptions, Options, Text
from dgemma.cli.show import CanvasView, printable
from dgemma.engine.sudoku import How, Solved, follow, solve

PAUSE = 0.15  # seconds a canvas stays on a screen
QUESTIONS = (
    "Change cat to dog.\n\nThe cat sat on the mat. The cat was happy.",
    "Write a short story about a girl and a kite.",
)
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
    for question in QUESTIONS:
        headline(question)
        show(engine.stream(question, Options(seed=1, drafts=True)))
    headline("A function with a hole:\n" + FUNCTION)
    filled = engine.fill(FUNCTION, FillOptions(max_tokens=8, single_line=True, seed=1))
    print(filled.text)
    print(f"  [{filled.steps} steps, {filled.seconds:.2f} s; all but the hole is untouched]")
    headline(f"Solve this Sudoku: {PUZZLE}")
    show(event for _, event in follow(engine, [PUZZLE], How(drafts=True)))
    headline("The same weights, the same puzzle, one token at a time:")
    told(solve(engine, [PUZZLE], mode="ar")[0])
    print("\nAsk it yourself: .venv/bin/dgemma chat")


def headline(text: str) -> None:
    print(f"\n> {text}")


def show(events: Iterable[object]) -> None:
    with CanvasView() as view:
        for event in events:
            if isinstance(event, Draft) and view.is_live:
                view.draw(event)
                time.sleep(PAUSE)
            elif isinstance(event, Draft):
                text = "".join(map(printable, event.guess_tokens)).replace("\n", "/")
                print(f"  block {event.block + 1} step {event.step:2}  {text[:100]}")
            elif isinstance(event, Text) and view.is_live:
                view.promise(event)
            elif isinstance(event, Done | Solved):
                last = event
    if isinstance(last, Solved):
        told(last)
    else:
        print(last.text)
        print(f"  [{last.tokens} tokens, {last.steps} steps, {last.seconds:.2f} s]")


def told(solved: Solved) -> None:
    cells = solved.solution
    lines = [] if cells is None else [" ".join(cells[i : i + 9]) for i in range(0, 81, 9)]
    print("\n".join(lines) or solved.reply)
    verdict = "right" if solved.is_right else "wrong" if lines else "wrong: that is no grid"
    print(f"  [{verdict}; {solved.steps} steps, {solved.seconds:.2f} s]")


if __name__ == "__main__":
    main()
