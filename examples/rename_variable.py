"""A variable renamed by instruction: the model opens what must change, the rest cannot.

    python -m examples.rename_variable [MODEL]

Prints what was opened, and the change as a diff.
"""

import sys

from dgemma import EditOptions, Engine

SOURCE = """\
def mean(values):
    total = sum(values)
    return total / len(values)
"""
INSTRUCTION = "Rename total to result."


def main() -> None:
    engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
    edited = engine.edit(SOURCE, INSTRUCTION, EditOptions(seed=1))
    print("opened:", [SOURCE[start:end] for start, end in edited.opened])
    print(edited.diff("mean.py") or "nothing changed")
    print(f"{edited.canvases} canvases, {edited.steps} steps, {edited.seconds:.1f} s")


if __name__ == "__main__":
    main()
