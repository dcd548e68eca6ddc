"""Graph colouring as text: a second task whose answer cannot be read off from left to right.

The user's turn names the edges, then the vertices, each with its colour or a question mark; the
model's turn names every vertex with its colour:

    Colour this graph with red, green and blue so that no edge joins equal colours.
    A-B A-C B-C B-D C-D
    A red
    B ?
    C blue
    D ?

Nothing here solves anything.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dgemma.errors import UsageError

TASK = "Colour this graph with red, green and blue so that no edge joins equal colours."
COLOURS = ("red", "green", "blue")
OPEN = "?"
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A graph with some vertices coloured; vertex 0 is called A."""

    edges: tuple[tuple[int, int], ...]
    givens: tuple[str, ...]  # a colour or OPEN for each vertex

    @property
    def vertices(self) -> int:
        return len(self.givens)


def prompt_pieces(puzzle: Puzzle) -> list[str]:
    """What the user's turn says, in pieces that recur from puzzle to puzzle."""
    edges = [f"{NAMES[a]}-{NAMES[b]}" for a, b in puzzle.edges]
    first = ["\n" + edge for edge in edges[:1]]
    rest = [" " + edge for edge in edges[1:]]
    return [TASK, *first, *rest, *("\n" + line for line in _lines(puzzle.givens))]


def reply_pieces(colours: Sequence[str]) -> list[str]:
    """What the model's turn says, in pieces."""
    lines = _lines(colours)
    return [*lines[:1], *("\n" + line for line in lines[1:])]


def prompt_text(puzzle: Puzzle) -> str:
    """What the user's turn says."""
    return "".join(prompt_pieces(puzzle))


def reply_text(colours: Sequence[str]) -> str:
    """What the model's turn says."""
    return "".join(reply_pieces(colours))


def parse(prompt: str) -> Puzzle:
    """Read a puzzle back from what the user's turn says."""
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
    """The colours of all vertices of a reply in the agreed form, else None."""
    lines = text.strip().split("\n")
    if len(lines) > len(NAMES):
        return None
    colours = tuple(line.removeprefix(f"{NAMES[i]} ") for i, line in enumerate(lines))
    is_agreed = reply_text(colours) == text.strip() and set(colours) <= set(allowed)
    return colours if is_agreed else None


def is_solution(puzzle: Puzzle, reply: str) -> bool:
    """Whether a reply names all vertices, keeps the givens and joins no equal colours."""
    colours = read_reply(reply)
    if colours is None or len(colours) != puzzle.vertices:
        return False
    keeps = all(g in (OPEN, c) for g, c in zip(puzzle.givens, colours, strict=True))
    return keeps and all(colours[a] != colours[b] for a, b in puzzle.edges)


def _lines(colours: Sequence[str]) -> list[str]:
    return [f"{NAMES[i]} {colour}" for i, colour in enumerate(colours)]


def _edge(text: str, vertices: int) -> tuple[int, int]:
    match = re.fullmatch("([A-Z])-([A-Z])", text)
    ends = [NAMES.index(name) for name in match.groups()] if match else []
    if len(set(ends)) != 2 or max(ends) >= vertices:
        last = NAMES[vertices - 1]
        raise UsageError(f"{text!r} is no edge; join two different vertices from A to {last}")
    return ends[0], ends[1]
