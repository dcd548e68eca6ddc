"""Graph colouring, a task of nano: graphs with one solution, their text, and the search."""

from itertools import product

import numpy as np
import pytest

from dgemma.errors import UsageError
from recipes.nano import colouring
from recipes.nano.colouring import ColouringBank


@pytest.fixture(scope="module")
def graphs() -> ColouringBank:
    return colouring.make_bank(np.random.default_rng(0), 200, held_out=False)


def test_every_graph_has_exactly_one_colouring(graphs: ColouringBank) -> None:
    for puzzle, colours in [*colouring.puzzles(graphs)][:40]:
        assert colouring.MIN_VERTICES <= puzzle.vertices <= colouring.MAX_VERTICES
        assert colouring.is_solution(puzzle, colouring.reply_text(colours))
        if puzzle.vertices < 10:
            assert solutions(puzzle) == [colours]
            # Minimal: without any one of its givens it has more.
            for vertex, given_colour in enumerate(puzzle.givens):
                if given_colour != "?":
                    fewer = (*puzzle.givens[:vertex], "?", *puzzle.givens[vertex + 1 :])
                    assert len(solutions(colouring.Puzzle(puzzle.edges, fewer))) > 1


def solutions(puzzle: colouring.Puzzle) -> list[tuple[str, ...]]:
    options = [colouring.COLOURS if g == "?" else (g,) for g in puzzle.givens]
    return [
        colours
        for colours in product(*options)
        if all(colours[a] != colours[b] for a, b in puzzle.edges)
    ]


def test_drawn_graphs_are_the_bank_s_in_other_words(graphs: ColouringBank) -> None:
    drawn = colouring.draw(graphs, np.random.default_rng(1), 300)
    np.testing.assert_array_equal(drawn.edges_BVV, drawn.edges_BVV.transpose(0, 2, 1))
    assert not colouring.is_held_out(drawn.edges_BVV).any()
    assert set(drawn.sizes_B.tolist()) == set(range(8, 13))
    for puzzle, colours in colouring.puzzles(drawn):
        assert colouring.is_solution(puzzle, colouring.reply_text(colours))
        assert puzzle.edges == tuple(sorted(puzzle.edges))
        if puzzle.vertices < 9:
            assert solutions(puzzle) == [colours]
    first = [colours[0] for _, colours in colouring.puzzles(drawn)]
    assert [first.count(c) / 300 for c in colouring.COLOURS] == pytest.approx([1 / 3] * 3, abs=0.1)


def test_held_out_graphs_stay_held_out_under_other_names() -> None:
    graphs = colouring.make_bank(np.random.default_rng(0), 20, held_out=True)
    drawn = colouring.draw(graphs, np.random.default_rng(0), 60)
    assert colouring.is_held_out(drawn.edges_BVV).all()


def test_a_graph_is_read_back_from_its_text(graphs: ColouringBank) -> None:
    for puzzle, colours in colouring.puzzles(graphs):
        assert colouring.parse(colouring.prompt_text(puzzle)) == puzzle
        assert colouring.read_reply(colouring.reply_text(colours)) == colours


@pytest.mark.parametrize(
    "body", ["A-B\nA red", "A-A\nA ?\nB ?", "A-B\nB ?\nA ?", "AB\nA ?\nB ?", "A-B\nA pink\nB ?"]
)
def test_what_is_no_graph_is_refused(body: str) -> None:
    with pytest.raises(UsageError, match=r"no graph|no edge"):
        colouring.parse(f"{colouring.TASK}\n{body}")


def test_a_colouring_counts_only_if_it_is_right() -> None:
    puzzle = colouring.Puzzle(((0, 1), (1, 2)), ("red", "?", "?"))
    assert colouring.is_solution(puzzle, "A red\nB green\nC red")
    for wrong in (
        "A red\nB red\nC green",
        "A green\nB red\nC green",
        "A red\nB green",
        "A red\nB green\nC red\nD red",
        "A red\nC red\nB green",
        "A red\nB green\nC ?",
        "",
    ):
        assert not colouring.is_solution(puzzle, wrong), wrong


def test_compiled_and_plain_searches_agree() -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(3)
    graphs = colouring.random_graphs(rng, 50)
    order_BV = np.argsort(rng.random((50, 12)), axis=1)
    plain, fast = np.zeros((50, 12), np.bool_), np.zeros((50, 12), np.bool_)
    colouring.dig_all(graphs, order_BV, plain)
    colouring.compiled()["dig_all"](graphs, order_BV, fast)
    np.testing.assert_array_equal(plain, fast)
