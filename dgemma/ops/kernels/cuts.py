"""How a canvas's products with 8-bit weights outside the experts are cut. Data, found by trying.

By `bench/gpu_cuts.py` on an H200 at the released shapes, and kept where whole layers ran
faster so. The dense part's first product is not among them: alone it would be faster too, but it
runs beside the experts.
"""

from dataclasses import dataclass

MOST = 512  # rows, a canvas behind a commit; with more, the library has enough programs too


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows and outputs of a program, and a step of its depth.

    `parts`: so many programs share the depth, and what reads the product adds them up.
    """

    rows: int = 128
    outputs: int = 64
    depth: int = 128
    parts: int = 1
    warps: int = 4
    stages: int = 4  # loads in flight


QKV = Cut()  # what follows it does not add parts up
OUT = Cut(parts=3)  # of attention
DOWN = Cut(parts=2)  # of the dense part
# A part of the soft embedding (`soft_8.py`), by `bench/gpu_soft.py --cuts`: all positions of a
# canvas, so that the table is read once. How many parts there are, the table says.
SOFT = Cut(rows=256, outputs=128, depth=128, warps=8, stages=4)
