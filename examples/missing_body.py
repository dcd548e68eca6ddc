"""Fill in the missing body of a function: the canvas sees its head and the call below it.

    python -m examples.missing_body [MODEL]

Everything but the hole is printed byte for byte as below; other candidates follow.
"""

import sys

from dgemma import Engine, FillParams, fill
from dgemma.text.control_tokens import FILL_MARK

SOURCE = f'''\
def largest(numbers):
    """Return the largest of the numbers."""
{FILL_MARK}

print(largest([3, 1, 2]))
'''


def main() -> None:
    engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else "nano")
    params = FillParams(max_tokens=32, stop=("\n\n",), num_candidates=3, seed=1)
    filled = fill(engine, SOURCE, params)
    print(filled.text)
    before, after = SOURCE.split(FILL_MARK)
    assert filled.text.startswith(before) and filled.text.endswith(after)
    for candidate in filled.candidates:
        print(f"{candidate.score:7.3f}  {candidate.holes[0].text!r}")
    print(f"{filled.canvases} canvases, {filled.steps} steps, {filled.seconds:.1f} s")


if __name__ == "__main__":
    main()
