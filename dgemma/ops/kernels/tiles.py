"""How the experts' products are cut, by how many rows an expert has. Data, found by trying."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a product is cut. What is best depends on the product and on the rows per expert."""

    rows: int  # of one expert, taken together
    columns: int  # of the output; of both halves where there are two
    depth: int  # of the inner dimension at a time
    warps: int = 4
    stages: int = 3  # loads in flight
    swap: bool = False  # weights on the left: they fill the tall side of the matrix unit
    tma: bool = False  # weights through the copy engine, where there is one
    registers: int | None = None  # at most, of a thread: more programs share a processor then
    whole: bool = False  # 4-bit weights only: a step's depth in one product instead of four
    unroll: int = 1  # 4-bit weights only: steps of the depth in one turn of the loop


@dataclass(frozen=True, slots=True)
class Tiles:
    gate_up: Tile
    down: Tile


# By the greatest number of rows per expert, were they spread evenly, that an entry is for. Found by
# `bench/gpu_experts.py` on an H200 at the released shapes.
TABLE = (
    (
        1.0,
        Tiles(
            Tile(rows=16, columns=32, depth=128, stages=4),
            Tile(rows=16, columns=64, depth=64, stages=4),
        ),
    ),
    (
        24.0,
        Tiles(
            Tile(rows=32, columns=64, depth=128, stages=2, tma=True),
            Tile(rows=32, columns=64, depth=64, stages=4, swap=True, tma=True),
        ),
    ),
    (
        96.0,
        Tiles(
            Tile(rows=64, columns=64, depth=64, stages=3),
            Tile(rows=64, columns=128, depth=64, stages=3),
        ),
    ),
    (
        float("inf"),
        Tiles(
            Tile(rows=128, columns=128, depth=64, warps=8, stages=4, swap=True, tma=True),
            Tile(rows=256, columns=128, depth=64, warps=8, stages=4, swap=True, tma=True),
        ),
    ),
)


# The same for 8-bit weights.
TABLE_8 = (
    (
        1.0,
        Tiles(
            Tile(rows=16, columns=32, depth=256, stages=3, tma=True),
            Tile(rows=16, columns=64, depth=64, stages=4, tma=True),
        ),
    ),
    (
        24.0,
        Tiles(
            Tile(rows=32, columns=64, depth=128, stages=3, swap=True, tma=True),
            Tile(rows=32, columns=64, depth=128, stages=3, swap=True, tma=True),
        ),
    ),
    (
        96.0,
        Tiles(
            Tile(rows=64, columns=64, depth=128, stages=3, tma=True),
            Tile(rows=64, columns=128, depth=128, stages=3, tma=True),
        ),
    ),
    (
        float("inf"),
        Tiles(
            Tile(rows=128, columns=64, depth=128, stages=3, swap=True, tma=True),
            Tile(rows=128, columns=128, depth=128, stages=3, tma=True),
        ),
    ),
)


# The same for 4-bit weights, which are always on the left and never through the copy engine.
TABLE_4 = (
    (
        24.0,
        Tiles(
            Tile(rows=32, columns=64, depth=64, stages=3, whole=True, unroll=2),
            Tile(rows=32, columns=128, depth=64, stages=4, registers=96, whole=True),
        ),
    ),
    (
        96.0,
        Tiles(
            Tile(rows=64, columns=64, depth=64, stages=3, whole=True, unroll=2),
            Tile(rows=64, columns=128, depth=64, stages=3),
        ),
    ),
    (
        float("inf"),
        Tiles(
            Tile(rows=128, columns=64, depth=64, stages=4),
            Tile(rows=128, columns=128, depth=64, stages=3),
        ),
    ),
)

TABLES = {16: TABLE, 8: TABLE_8, 4: TABLE_4}


def tiles(num_choices: int, num_experts: int, bits: int = 16) -> Tiles:
    share = num_choices / num_experts
    return next(entry for most, entry in TABLES[bits] if share <= most)
