"""Graph colouring for training: graphs of 8 to 12 vertices, three colours, one solution.

As with Sudoku, a bank holds graphs with their solution and the givens that a minimal puzzle keeps;
a draw adds some givens back, and shuffles vertices and colours.

B graphs of a bank, N drawn ones; V vertices, of which a graph has the first few.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dgemma.text import colouring as text
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.colouring import Puzzle
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.puzzles.bank import read_arrays
from dgemma.train.puzzles.fast import compile_all

Ints = NDArray[Any]
Flags = NDArray[np.bool_]
TokenIds = NDArray[np.int32]

FEWEST, MOST = 8, 12  # vertices
DENSITY = (1.7, 2.3)  # edges per vertex, from and to
MOST_GIVEN = 0.4  # of the vertices of a minimal puzzle
EXTRA = 3  # a draw adds fewer givens than this
HELD_OUT_SHARE = 16  # one class of graphs in so many is kept from training
CHUNK = 4096
TRIALS = 8
TURN_ENDS = "<turn|>"


@dataclass(frozen=True, slots=True)
class ColouringBank:
    """Graphs, their only solution, and the givens of a minimal puzzle."""

    sizes_B: NDArray[np.uint8]
    edges_BVV: Flags  # symmetric
    colours_BV: NDArray[np.uint8]  # 0 to 2
    minimal_BV: Flags

    def __len__(self) -> int:
        return len(self.sizes_B)

    def save(self, path: Path) -> None:
        """Write the bank: an edge or a given in one bit."""
        path.parent.mkdir(parents=True, exist_ok=True)
        edges = np.packbits(self.edges_BVV[:, *_upper()], axis=1)
        givens = np.packbits(self.minimal_BV, axis=1)
        np.savez(path, sizes=self.sizes_B, edges=edges, colours=self.colours_BV, givens=givens)

    @classmethod
    def load(cls, path: Path) -> "ColouringBank":
        """Read what `save` wrote."""
        sizes, packed, colours, given = read_arrays(path, ("sizes", "edges", "colours", "givens"))
        givens = np.unpackbits(given, axis=1, count=MOST).view(bool)
        rows, columns = _upper()
        edges = np.zeros((len(sizes), MOST, MOST), np.bool_)
        edges[:, rows, columns] = np.unpackbits(packed, axis=1, count=len(rows)).view(bool)
        return cls(sizes, edges | edges.transpose(0, 2, 1), colours, givens)


def search(edges_VV: Ints, masks_V: Ints, size: int) -> bool:
    """Whether the graph can be coloured; a mask has bit c set where colour c may stand."""
    tried_V = np.zeros(size + 1, np.int64)
    vertex = 0
    while 0 <= vertex < size:
        free = masks_V[vertex] & ~tried_V[vertex]
        for other in range(vertex):
            if edges_VV[vertex, other]:
                # The colour it has is the highest one tried.
                free &= ~_highest(tried_V[other])
        colour = free & -free
        # Colours are tried in rising order, so those passed over for a neighbour count as tried.
        if colour:
            tried_V[vertex] |= colour | (colour - 1)
            vertex += 1
            tried_V[vertex] = 0
        else:
            vertex -= 1
    return vertex == size


def _highest(mask: int) -> int:
    return 4 if mask & 4 else mask & 2 if mask & 2 else mask & 1


def dig_all(bank: tuple[Ints, Ints, Ints], order_BV: Ints, minimal_BV: Ints) -> None:
    """Mark the givens that stay when all that can go are taken in the given order."""
    sizes_B, edges_BVV, colours_BV = bank
    for b in range(len(sizes_B)):
        masks_V = 1 << colours_BV[b].astype(np.int64)
        for vertex in order_BV[b]:
            if vertex < sizes_B[b]:
                own = masks_V[vertex]
                masks_V[vertex] = 7 & ~own
                minimal_BV[b, vertex] = search(edges_BVV[b], masks_V, sizes_B[b])
                masks_V[vertex] = own if minimal_BV[b, vertex] else 7


@cache
def compiled() -> dict[str, Callable[..., Any]]:
    """The functions above, compiled where that is possible."""
    return compile_all((_highest, search, dig_all))


def make_bank(rng: np.random.Generator, count: int, *, held_out: bool) -> ColouringBank:
    """Make minimal puzzles from graphs that belong to training, or are held out from it."""
    banks: list[ColouringBank] = []
    chunk = min(CHUNK, 8 * count)
    while sum(map(len, banks)) < count:
        sizes_B, edges_BVV, colours_BV = random_graphs(rng, chunk)
        minimal_BV = np.zeros((chunk, MOST), np.bool_)
        order_BV = np.argsort(rng.random((chunk, MOST)), axis=1)
        compiled()["dig_all"]((sizes_B, edges_BVV, colours_BV), order_BV, minimal_BV)
        fits_B = minimal_BV.sum(axis=1) <= MOST_GIVEN * sizes_B
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
    """Random sizes, edges between vertices of different colours, and these colours."""
    sizes_B = rng.integers(FEWEST, MOST, size=count, endpoint=True).astype(np.uint8)
    colours_BV = rng.integers(3, size=(count, MOST)).astype(np.uint8)
    rows, columns = _upper()
    may_join = (colours_BV[:, rows] != colours_BV[:, columns]) & (columns < sizes_B[:, None])
    keys = np.where(may_join, rng.random(may_join.shape), 2.0)
    wanted_B = (sizes_B * rng.uniform(*DENSITY, size=count)).astype(np.int64)
    limit_B1 = np.take_along_axis(np.sort(keys, axis=1), wanted_B[:, None], axis=1)
    edges_BVV = np.zeros((count, MOST, MOST), np.bool_)
    edges_BVV[:, rows, columns] = (keys < limit_B1) & may_join
    colours_BV[np.arange(MOST) >= sizes_B[:, None]] = 0
    return sizes_B, edges_BVV | edges_BVV.transpose(0, 2, 1), colours_BV


def is_held_out(edges_BVV: Flags) -> Flags:
    """Whether a graph may be used for evaluation only; the same for all graphs isomorphic to it.

    Labels are refined by the labels of neighbours, three times, and summed: no order matters.
    """
    labels_BV = edges_BVV.sum(axis=2).astype(np.uint64)
    for _ in range(3):
        around_BV = np.where(edges_BVV, _mix(labels_BV)[:, None, :], np.uint64(0)).sum(axis=2)
        labels_BV = _mix(labels_BV) * np.uint64(3) + around_BV
    held_out: Flags = _mix(labels_BV).sum(axis=1) % np.uint64(HELD_OUT_SHARE) == 0
    return held_out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A good scrambling of 64 bits (splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(bank: ColouringBank, rng: np.random.Generator, count: int) -> ColouringBank:
    """Draw graphs with some givens added back, vertices and colours shuffled."""
    chosen = rng.integers(len(bank), size=count)
    sizes_N, minimal_NV = bank.sizes_B[chosen], bank.minimal_BV[chosen]
    is_vertex_NV = np.arange(MOST) < sizes_N[:, None]
    keys_NV = np.where(is_vertex_NV, rng.random((count, MOST)), 2.0)
    keys_NV[minimal_NV] = -1
    last_N = minimal_NV.sum(axis=1) + rng.integers(EXTRA, size=count) - 1
    givens_NV = keys_NV <= np.take_along_axis(np.sort(keys_NV, axis=1), last_N[:, None], axis=1)
    order_NV = np.argsort(np.where(is_vertex_NV, rng.random((count, MOST)), 2.0), axis=1)
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
    """Every puzzle of a bank, its edges in alphabetical order, and the colours that solve it."""
    every_pair = list(zip(*(ends.tolist() for ends in _upper()), strict=True))
    for b, (size, edges) in enumerate(zip(bank.sizes_B, edge_lists(bank), strict=True)):
        colours = tuple(text.COLOURS[c] for c in bank.colours_BV[b, :size])
        shown = zip(colours, bank.minimal_BV[b], strict=False)
        givens = tuple(colour if is_given else text.OPEN for colour, is_given in shown)
        yield Puzzle(tuple(every_pair[edge] for edge in edges), givens), colours


def edge_lists(bank: ColouringBank) -> list[list[int]]:
    """The edges of each graph: the numbers of pairs, of which A-B is 0, A-C 1, and so on."""
    graph, edge = np.nonzero(bank.edges_BVV[:, *_upper()])
    return [part.tolist() for part in np.split(edge, np.cumsum(np.bincount(graph))[:-1])]


def _upper() -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The pairs of vertices, each once."""
    rows, columns = np.triu_indices(MOST, 1)
    return rows, columns


class ColouringSource:
    """Graphs as token ids, in the form the model is asked in.

    Where the tokenizer cuts at the borders of a puzzle's pieces, which is tried, ids are put
    together from those of the pieces; otherwise each text is encoded as a whole.
    """

    def __init__(self, bank: ColouringBank, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.bank, self.tokenizer, self.template = bank, tokenizer, template
        self.pieces = Pieces(tokenizer, template)
        self.ends = tokenizer.control_ids[TURN_ENDS]
        sample = draw(bank, np.random.default_rng(0), TRIALS)
        self.is_piecewise = list(self.by_pieces(sample)) == list(self.as_whole(sample))

    def draw(self, rng: np.random.Generator, count: int) -> list[tuple[TokenIds, TokenIds]]:
        """Prompt and reply of random puzzles; the reply ends with the token that ends a turn."""
        drawn = draw(self.bank, rng, count)
        pairs = self.by_pieces(drawn) if self.is_piecewise else self.as_whole(drawn)
        return [(np.array(p, np.int32), np.array(r, np.int32)) for p, r in pairs]

    def by_pieces(self, drawn: ColouringBank) -> Iterator[tuple[list[int], list[int]]]:
        """Prompt and reply ids from the table of pieces."""
        colours_NV = drawn.colours_BV
        shown_NV = np.where(drawn.minimal_BV, colours_NV, len(text.COLOURS))
        for n, edges in enumerate(edge_lists(drawn)):
            size = int(drawn.sizes_B[n])
            prompt = self.pieces.prompt(edges, shown_NV[n, :size].tolist())
            yield prompt, [*self.pieces.reply(colours_NV[n, :size].tolist()), self.ends]

    def as_whole(self, drawn: ColouringBank) -> Iterator[tuple[list[int], list[int]]]:
        """The same from the tokenizer itself."""
        for puzzle, colours in puzzles(drawn):
            message = Message(role="user", content=text.prompt_text(puzzle))
            reply = self.tokenizer.encode(text.reply_text(colours))
            yield list(self.template.prompt([message]).ids), [*reply, self.ends]


class Pieces:
    """The token ids of everything a graph may be written with: edges, and vertices with colours."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        rendered = template.prompt([Message(role="user", content=text.TASK)]).text
        before, _, after = rendered.partition(text.TASK)
        self.head = tokenizer.encode_control(before + text.TASK)
        self.tail = tokenizer.encode_control(after)
        colours = [(c,) * MOST for c in (*text.COLOURS, text.OPEN)]
        every_pair = Puzzle(tuple(zip(*(i.tolist() for i in _upper()), strict=True)), ())
        edges = text.prompt_pieces(every_pair)[2:]  # less the task, and the edge that begins a line
        encode = tokenizer.encode
        self.edges = [encode(" A-B"), *map(encode, edges)]
        self.first_edges = [encode(piece.replace(" ", "\n")) for piece in (" A-B", *edges)]
        self.lines = [list(map(encode, text.prompt_pieces(Puzzle((), c))[1:])) for c in colours]
        self.first_lines = [encode(text.reply_pieces(c)[0]) for c in colours]

    def prompt(self, edges: Sequence[int], shown: Sequence[int]) -> list[int]:
        """A prompt from the numbers of its edges and of its vertices' colours."""
        ids = [*self.head, *self.first_edges[edges[0]]]
        for edge in edges[1:]:
            ids += self.edges[edge]
        for vertex, colour in enumerate(shown):
            ids += self.lines[colour][vertex]
        return ids + self.tail

    def reply(self, colours: Sequence[int]) -> list[int]:
        """A reply from the numbers of the vertices' colours."""
        ids = list(self.first_lines[colours[0]])
        for vertex, colour in enumerate(colours[1:], start=1):
            ids += self.lines[colour][vertex]
        return ids
