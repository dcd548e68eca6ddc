"""Rename a variable by instruction: only the spans that the model opens can change.

    python -m examples.rename_variable [MODEL]

Prints the opened spans and a diff.
"""

import sys

from dgemma import EditParams, Engine, edit

SOURCE = """\
def mean(values):
    total = sum(values)
    return total / len(values)
"""
INSTRUCTION = "Rename total to result."


def main() -> None:
    engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
    edited = edit(engine, SOURCE, INSTRUCTION, EditParams(seed=1))
    print("opened:", [SOURCE[start:end] for start, end in edited.opened])
    print(edited.diff("mean.py") or "nothing changed")
    print(f"{edited.canvases} canvases, {edited.steps} steps, {edited.seconds:.1f} s")


if __name__ == "__main__":
    main()
