"""A function without its body: the canvas sees its head and what calls it, and fills it in.

    python -m examples.missing_body [MODEL]

Everything but the hole is printed as it stands below, byte for byte; other candidates follow.
"""

import sys

from dgemma import Engine, FillOptions
from dgemma.constrain.holes import MARK

SOURCE = f'''\
def largest(numbers):
    """Return the largest of the numbers."""
{MARK}

print(largest([3, 1, 2]))
'''


def main() -> None:
    engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
    options = FillOptions(max_tokens=32, stop=("\n\n",), candidates=3, seed=1)
    filled = engine.fill(SOURCE, options)
    print(filled.text)
    before, after = SOURCE.split(MARK)
    assert filled.text.startswith(before) and filled.text.endswith(after)
    for one in filled.candidates:
        print(f"{one.score:7.3f}  {one.holes[0].text!r}")
    print(f"{filled.canvases} canvases, {filled.steps} steps, {filled.seconds:.1f} s")


if __name__ == "__main__":
    main()
