"""Graph colouring: nano's second task whose answer cannot be written from left to right.

    python -m recipes.nano.colouring [--model nano] [--limit 150] [--dtype float32]

measures it on held-out graphs; `recipes.nano.bank` writes these and the graphs to train on. The
user's turn names the edges, then the vertices, each with its colour or a question mark; the model's
turn names every vertex with its colour:

    Colour this graph with red, green and blue so that no edge joins equal colours.
    A-B A-C B-C B-D C-D
    A red
    B ?
    C blue
    D ?

Graphs have 8 to 12 vertices and one solution. As with Sudoku, a bank holds the givens of minimal
puzzles; a draw adds some givens back, and shuffles vertices and colours.

B graphs of a bank, N drawn ones; V vertices, of which a graph has the first few.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma import Engine
from dgemma.errors import UsageError
from dgemma.eval.answers import read_pairs, replies_by_mode, set_batch_size
from dgemma.eval.data import Data
from dgemma.eval.measure import Measure, table
from recipes.nano.sudoku import Flags, Ints, compile_all

TASK = "Colour this graph with red, green and blue so that no edge joins equal colours."
COLOURS = ("red", "green", "blue")
OPEN = "?"
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FILE = "colouring.jsonl"
MIN_VERTICES, MAX_VERTICES = 8, 12
EDGES_PER_VERTEX = (1.7, 2.3)  # minimum and maximum
MAX_GIVEN_FRACTION = 0.4  # of the vertices of a minimal puzzle
MAX_EXTRA_GIVENS = 3  # exclusive; added by a draw
HELD_OUT_MODULUS = 16  # one class of graphs in so many is held out from training
GRAPHS_PER_ROUND = 4096
ROWS = 8  # requests in one pass


# --- text


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A graph with some vertices coloured; vertex 0 is called A."""

    edges: tuple[tuple[int, int], ...]
    givens: tuple[str, ...]  # a colour or OPEN for each vertex

    @property
    def vertices(self) -> int:
        return len(self.givens)


def prompt_text(puzzle: Puzzle) -> str:
    """Return the user turn."""
    edges = " ".join(f"{NAMES[a]}-{NAMES[b]}" for a, b in puzzle.edges)
    return f"{TASK}\n{edges}\n{reply_text(puzzle.givens)}"


def reply_text(colours: Sequence[str]) -> str:
    """Return the model turn."""
    return "\n".join(f"{NAMES[i]} {colour}" for i, colour in enumerate(colours))


def parse(prompt: str) -> Puzzle:
    """Read a puzzle from a user turn."""
    task, _, body = prompt.partition("\n")
    edge_line, _, vertex_lines = body.partition("\n")
    givens = read_reply(vertex_lines, allowed=(*COLOURS, OPEN))
    if task != TASK or givens is None:
        raise UsageError(
            f"this is no graph to colour; write {TASK!r}, a line of edges such as A-B A-C, and "
            "a line such as A red or B ? for each vertex, in order"
        )
    return Puzzle(tuple(_edge(edge, len(givens)) for edge in edge_line.split()), givens)


def read_reply(text: str, allowed: Sequence[str] = COLOURS) -> tuple[str, ...] | None:
    """Return the colours of all vertices if the reply is well-formed, else None."""
    lines = text.strip().split("\n")
    if len(lines) > len(NAMES):
        return None
    colours = tuple(line.removeprefix(f"{NAMES[i]} ") for i, line in enumerate(lines))
    is_well_formed = reply_text(colours) == text.strip() and set(colours) <= set(allowed)
    return colours if is_well_formed else None


def is_solution(puzzle: Puzzle, reply: str) -> bool:
    """Return True if a reply names all vertices, keeps the givens and joins no equal colours."""
    colours = read_reply(reply)
    if colours is None or len(colours) != puzzle.vertices:
        return False
    keeps = all(g in (OPEN, c) for g, c in zip(puzzle.givens, colours, strict=True))
    return keeps and all(colours[a] != colours[b] for a, b in puzzle.edges)


def _edge(text: str, vertices: int) -> tuple[int, int]:
    match = re.fullmatch("([A-Z])-([A-Z])", text)
    ends = [NAMES.index(name) for name in match.groups()] if match else []
    if len(set(ends)) != 2 or max(ends) >= vertices:
        last = NAMES[vertices - 1]
        raise UsageError(f"{text!r} is no edge; join two different vertices from A to {last}")
    return ends[0], ends[1]


# --- banks


@dataclass(frozen=True, slots=True)
class ColouringBank:
    """Graphs, their only solution, and the givens of a minimal puzzle."""

    sizes_B: NDArray[np.uint8]
    edges_BVV: Flags  # symmetric
    colours_BV: NDArray[np.uint8]  # 0 to 2
    minimal_BV: Flags

    def __len__(self) -> int:
        return len(self.sizes_B)


def search(edges_VV: Ints, masks_V: Ints, size: int) -> bool:
    """Return whether the graph can be coloured; a mask has bit c set where colour c is allowed."""
    used_V = np.zeros(size + 1, np.int64)
    vertex = 0
    while 0 <= vertex < size:
        free = masks_V[vertex] & ~used_V[vertex]
        for other in range(vertex):
            if edges_VV[vertex, other]:
                # Its colour is the highest one used so far.
                free &= ~_highest(used_V[other])
        colour = free & -free
        # Colours are used in rising order, so those skipped for a neighbour count as used.
        if colour:
            used_V[vertex] |= colour | (colour - 1)
            vertex += 1
            used_V[vertex] = 0
        else:
            vertex -= 1
    return vertex == size


def _highest(mask: int) -> int:
    return 4 if mask & 4 else mask & 2 if mask & 2 else mask & 1


def dig_all(bank: tuple[Ints, Ints, Ints], order_BV: Ints, minimal_BV: Ints) -> None:
    """Mark the givens that remain when redundant ones are removed in the given order."""
    sizes_B, edges_BVV, colours_BV = bank
    for b in range(len(sizes_B)):
        masks_V = 1 << colours_BV[b].astype(np.int64)
        for vertex in order_BV[b]:
            if vertex < sizes_B[b]:
                colour = masks_V[vertex]
                masks_V[vertex] = 7 & ~colour
                minimal_BV[b, vertex] = search(edges_BVV[b], masks_V, sizes_B[b])
                masks_V[vertex] = colour if minimal_BV[b, vertex] else 7


@cache
def compiled() -> dict[str, Callable[..., Any]]:
    """Return the functions above by name, compiled if numba is installed."""
    return compile_all((_highest, search, dig_all))


def make_bank(rng: np.random.Generator, count: int, *, held_out: bool) -> ColouringBank:
    """Make minimal puzzles from graphs that belong to training, or are held out from it."""
    banks: list[ColouringBank] = []
    chunk = min(GRAPHS_PER_ROUND, 8 * count)
    while sum(map(len, banks)) < count:
        sizes_B, edges_BVV, colours_BV = random_graphs(rng, chunk)
        minimal_BV = np.zeros((chunk, MAX_VERTICES), np.bool_)
        order_BV = np.argsort(rng.random((chunk, MAX_VERTICES)), axis=1)
        compiled()["dig_all"]((sizes_B, edges_BVV, colours_BV), order_BV, minimal_BV)
        fits_B = minimal_BV.sum(axis=1) <= MAX_GIVEN_FRACTION * sizes_B
        fits_B &= (edges_BVV.sum(axis=2) >= 2).sum(axis=1) == sizes_B
        fits_B &= is_held_out(edges_BVV) == held_out
        banks.append(
            ColouringBank(
                sizes_B[fits_B], edges_BVV[fits_B], colours_BV[fits_B], minimal_BV[fits_B]
            )
        )
    return ColouringBank(
        np.concatenate([bank.sizes_B for bank in banks])[:count],
        np.concatenate([bank.edges_BVV for bank in banks])[:count],
        np.concatenate([bank.colours_BV for bank in banks])[:count],
        np.concatenate([bank.minimal_BV for bank in banks])[:count],
    )


def random_graphs(
    rng: np.random.Generator, count: int
) -> tuple[NDArray[np.uint8], Flags, NDArray[np.uint8]]:
    """Draw sizes, edges between vertices of different colours, and these colours."""
    sizes_B = rng.integers(MIN_VERTICES, MAX_VERTICES, size=count, endpoint=True).astype(np.uint8)
    colours_BV = rng.integers(3, size=(count, MAX_VERTICES)).astype(np.uint8)
    rows, columns = _upper()
    may_join = (colours_BV[:, rows] != colours_BV[:, columns]) & (columns < sizes_B[:, None])
    keys = np.where(may_join, rng.random(may_join.shape), 2.0)
    num_edges_B = (sizes_B * rng.uniform(*EDGES_PER_VERTEX, size=count)).astype(np.int64)
    limit_B1 = np.take_along_axis(np.sort(keys, axis=1), num_edges_B[:, None], axis=1)
    edges_BVV = np.zeros((count, MAX_VERTICES, MAX_VERTICES), np.bool_)
    edges_BVV[:, rows, columns] = (keys < limit_B1) & may_join
    colours_BV[np.arange(MAX_VERTICES) >= sizes_B[:, None]] = 0
    return sizes_B, edges_BVV | edges_BVV.transpose(0, 2, 1), colours_BV


def is_held_out(edges_BVV: Flags) -> Flags:
    """Return True for graphs that are for evaluation only; isomorphic graphs agree.

    Labels are refined by the labels of neighbours three times (Weisfeiler-Lehman) and summed.
    """
    labels_BV = edges_BVV.sum(axis=2).astype(np.uint64)
    for _ in range(3):
        around_BV = np.where(edges_BVV, _mix(labels_BV)[:, None, :], np.uint64(0)).sum(axis=2)
        labels_BV = _mix(labels_BV) * np.uint64(3) + around_BV
    held_out: Flags = _mix(labels_BV).sum(axis=1) % np.uint64(HELD_OUT_MODULUS) == 0
    return held_out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits (splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(bank: ColouringBank, rng: np.random.Generator, count: int) -> ColouringBank:
    """Draw graphs with some givens added back, vertices and colours shuffled."""
    chosen = rng.integers(len(bank), size=count)
    sizes_N, minimal_NV = bank.sizes_B[chosen], bank.minimal_BV[chosen]
    is_vertex_NV = np.arange(MAX_VERTICES) < sizes_N[:, None]
    keys_NV = np.where(is_vertex_NV, rng.random((count, MAX_VERTICES)), 2.0)
    keys_NV[minimal_NV] = -1
    last_N = minimal_NV.sum(axis=1) + rng.integers(MAX_EXTRA_GIVENS, size=count) - 1
    givens_NV = keys_NV <= np.take_along_axis(np.sort(keys_NV, axis=1), last_N[:, None], axis=1)
    order_NV = np.argsort(np.where(is_vertex_NV, rng.random((count, MAX_VERTICES)), 2.0), axis=1)
    labels_N3 = np.argsort(rng.random((count, 3)), axis=1).astype(np.uint8)
    colours_NV = np.take_along_axis(bank.colours_BV[chosen], order_NV, axis=1)
    rows_N1 = np.arange(count)[:, None, None]
    return ColouringBank(
        sizes_N,
        bank.edges_BVV[chosen][rows_N1, order_NV[:, :, None], order_NV[:, None, :]],
        np.take_along_axis(labels_N3, colours_NV.astype(np.intp), axis=1),
        np.take_along_axis(givens_NV, order_NV, axis=1),
    )


def puzzles(bank: ColouringBank) -> Iterator[tuple[Puzzle, tuple[str, ...]]]:
    """Yield every puzzle of a bank, its edges in alphabetical order, and its solution."""
    for b, size in enumerate(bank.sizes_B):
        edges = np.argwhere(np.triu(bank.edges_BVV[b])).tolist()
        colours = tuple(COLOURS[c] for c in bank.colours_BV[b, :size])
        shown = zip(colours, bank.minimal_BV[b], strict=False)
        givens = tuple(colour if is_given else OPEN for colour, is_given in shown)
        yield Puzzle(tuple((a, b) for a, b in edges), givens), colours


def records(bank: ColouringBank) -> Iterator[dict[str, str]]:
    """Yield every puzzle of a bank as a pair of prompt and reply."""
    for puzzle, colours in puzzles(bank):
        yield {"prompt": prompt_text(puzzle), "reply": reply_text(colours)}


def _upper() -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the pairs of vertices, each once."""
    rows, columns = np.triu_indices(MAX_VERTICES, 1)
    return rows, columns


# --- evaluation


def colouring(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure valid colourings, any that obeys the graph, and their steps."""
    pairs = read_pairs(data, FILE, limit)
    parsed = [parse(pair.prompt) for pair in pairs]
    measures = []
    for replies in replies_by_mode(engine, pairs, "colouring", seed):
        valid = [is_solution(p, text) for p, text in zip(parsed, replies.texts, strict=True)]
        measures.append(replies.case.share("valid", valid, replies.note))
        measures.append(replies.case.mean("steps", replies.steps, "steps"))
    return measures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--heldout", type=Path, default=Path("out/nano/heldout"))
    parser.add_argument("--limit", type=int, help="most graphs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    engine = Engine.load(options.model, device=options.device, dtype=options.dtype)
    set_batch_size(engine, ROWS)
    print(table(colouring(engine, Data(options.heldout, None), options.limit, options.seed)))


if __name__ == "__main__":
    main()
