"""Puzzles for training: each has one solution, is drawn evenly, and reads as the text says."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma.errors import CheckpointError, UsageError
from dgemma.programs.sudoku import grid as sudoku_text
from dgemma.programs.sudoku.grid import find_slots
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.tokenizer import Tokenizer
from dgemma.train import sudoku
from dgemma.train.sudoku import SudokuBank, SudokuSource
from recipes.nano import sudoku as banks
from tests.text import small

NANO = Path(__file__).parents[2] / "out" / "nano" / "tokenizer"
SOLUTION = "987514632316782495524693871832971546765428319149356728671849253498235167253167984"
PUZZLE = "087500632000700000504690800000001006065420319100300728000009050090200160003007980"
PLAIN_ORDER_C9 = np.tile(np.arange(1, 10), (81, 1))


@pytest.fixture(scope="module")
def bank() -> SudokuBank:
    return banks.make_bank(np.random.default_rng(0), 24, held_out=False)


@pytest.fixture(scope="module", params=["split", "merged", "nano"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One that writes "▁" and "5" apart, one that joins them, and nano's where it is made."""
    if request.param == "nano":
        if not NANO.is_dir():
            pytest.skip("nano's tokenizer is not made yet; run recipes/nano_tokenizer.py")
        return Tokenizer.load(NANO)
    return small.small_tokenizer() if request.param == "split" else joining_tokenizer()


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(small.TEMPLATE, tokenizer)


def joining_tokenizer(*more: tuple[str, str]) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        merged = [*small.MERGES, *(("▁", digit) for digit in "0123456789"), *more]
        patch.setattr(small, "MERGES", merged)
        return Tokenizer(small.make_backend())


def masks(puzzle_C: np.ndarray) -> np.ndarray:
    return np.where(puzzle_C > 0, 1 << (puzzle_C.astype(np.int64) - 1).clip(0), banks.ALL_DIGITS)


def count(puzzle_C: np.ndarray, limit: int = 2) -> int:
    number: int = banks.search(masks(puzzle_C), PLAIN_ORDER_C9, limit, np.zeros(81, np.int64))
    return number


def digits(cells_C: Any) -> str:
    return "".join(map(str, cells_C))


# --- making Sudoku


def test_the_search_counts_solutions() -> None:
    full_C = np.array([int(c) for c in SOLUTION], np.uint8)
    assert count(full_C) == 1
    wrong_C = full_C.copy()
    wrong_C[0] = wrong_C[1]
    assert count(wrong_C) == 0
    assert count(np.zeros(81, np.uint8), limit=50) == 50
    # Without all fours and fives the two may change places; a transposed grid has as many.
    open_C = full_C * (full_C != 4) * (full_C != 5)
    several = count(open_C, limit=1000)
    assert 2 <= several < 1000
    assert several == count(open_C.reshape(9, 9).T.ravel(), limit=1000)
    found_C = np.zeros(81, np.int64)
    banks.search(masks(open_C), PLAIN_ORDER_C9, 1, found_C)
    assert sudoku_text.is_solution(digits(open_C), digits(found_C))


def test_a_minimal_puzzle_has_one_solution_and_loses_it_with_any_clue(bank: SudokuBank) -> None:
    for solution_C, minimal_C in zip(bank.solutions_B81, bank.minimal_B81, strict=True):
        puzzle_C = solution_C * minimal_C
        assert sudoku_text.is_solution(digits(puzzle_C), digits(solution_C))
        assert count(puzzle_C) == 1
    for cell in np.flatnonzero(minimal_C):
        fewer_C = puzzle_C.copy()
        fewer_C[cell] = 0
        assert count(fewer_C) == 2


def test_compiled_and_plain_functions_agree() -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(3)
    order_B819 = np.argsort(rng.random((3, 81, 9)), axis=2) + 1
    cells_B81 = np.argsort(rng.random((3, 81)), axis=1)
    made = []
    for tools in ({part.__name__: part for part in banks.COMPILED}, banks.compiled()):
        solutions, minimal = np.zeros((3, 81), np.uint8), np.zeros((3, 81), np.bool_)
        tools["fill_all"](order_B819, solutions)
        tools["dig_all"](solutions, cells_B81, order_B819, minimal)
        made.append((solutions, minimal))
    assert banks.compiled()["search"] is not banks.search
    for plain, fast in zip(*made, strict=True):
        np.testing.assert_array_equal(plain, fast)


def test_a_bank_depends_on_its_seed_alone_and_survives_a_file(tmp_path: Path) -> None:
    made = [banks.make_bank(np.random.default_rng(seed), 5, held_out=False) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(made[0].solutions_B81, made[1].solutions_B81)
    np.testing.assert_array_equal(made[0].minimal_B81, made[1].minimal_B81)
    assert (made[0].solutions_B81 != made[2].solutions_B81).any()
    path = tmp_path / "deep" / "bank.npz"
    made[0].save(path)
    loaded = SudokuBank.load(path)
    assert len(loaded) == 5
    np.testing.assert_array_equal(loaded.solutions_B81, made[0].solutions_B81)
    np.testing.assert_array_equal(loaded.minimal_B81, made[0].minimal_B81)
    with pytest.raises(UsageError, match="make one with"):
        SudokuBank.load(tmp_path / "other.npz")


def test_a_file_that_is_no_bank_is_refused(bank: SudokuBank, tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no bank")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "others.npz", digits=np.zeros(3))
    bank.save(tmp_path / "sudoku.npz")
    whole = (tmp_path / "sudoku.npz").read_bytes()
    (tmp_path / "spoiled.npz").write_bytes(whole[:200] + b"x" + whole[201:])
    for name in ("text.npz", "array.npy", "others.npz", "spoiled.npz"):
        with pytest.raises(UsageError, match=rf"{name} is not .*; make one with"):
            SudokuBank.load(tmp_path / name)


# --- drawing Sudoku


def test_a_symmetry_keeps_the_class_of_a_grid(bank: SudokuBank) -> None:
    rng = np.random.default_rng(0)
    grids_B81 = bank.solutions_B81
    cells_B81, labels_B10 = sudoku.random_symmetries(rng, len(bank))
    moved_B81 = np.take_along_axis(grids_B81, cells_B81, axis=1)
    moved_B81 = np.take_along_axis(labels_B10, moved_B81.astype(np.intp), axis=1)
    assert (moved_B81 != grids_B81).any(axis=1).all()
    np.testing.assert_array_equal(banks.grid_class(grids_B81), banks.grid_class(moved_B81))
    assert len(set(banks.grid_class(grids_B81).tolist())) > len(bank) / 2
    assert not banks.is_held_out(moved_B81).any()
    other = banks.make_bank(rng, 2, held_out=True)
    assert banks.is_held_out(other.solutions_B81).all()


def test_draws_are_right_unique_and_spread_over_the_levels(bank: SudokuBank) -> None:
    rng = np.random.default_rng(0)
    puzzles_N81, solutions_N81 = sudoku.draw(bank, rng, 400)
    assert puzzles_N81.dtype == solutions_N81.dtype == np.uint8
    for puzzle_C, solution_C in zip(puzzles_N81, solutions_N81, strict=True):
        assert sudoku_text.is_solution(digits(puzzle_C), digits(solution_C))
    assert all(count(puzzle_C) == 1 for puzzle_C in puzzles_N81[:20])
    clues_N = (puzzles_N81 > 0).sum(axis=1)
    assert clues_N.min() >= 20 and clues_N.max() <= 50
    fractions = [((clues_N >= low) & (clues_N <= high)).mean() for _, low, high in sudoku.LEVELS]
    assert fractions == pytest.approx([fraction for fraction, _, _ in sudoku.LEVELS], abs=0.08)
    # Symmetries: every digit comes to stand everywhere, and no solution is drawn twice.
    assert len({digits(cells_C) for cells_C in solutions_N81}) == 400
    assert all(len(set(column)) == 9 for column in solutions_N81.T)
    again = sudoku.draw(bank, np.random.default_rng(0), 400)
    np.testing.assert_array_equal(again[0], puzzles_N81)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), wanted=st.integers(17, 81))
def test_clues_are_added_up_to_the_wanted_number(bank: SudokuBank, seed: int, wanted: int) -> None:
    wanted_B = np.full(len(bank), wanted)
    clues_B81 = sudoku.add_clues(np.random.default_rng(seed), bank.minimal_B81, wanted_B)
    assert (clues_B81 >= bank.minimal_B81).all()
    np.testing.assert_array_equal(
        clues_B81.sum(axis=1), np.maximum(wanted, bank.minimal_B81.sum(axis=1))
    )


def test_a_batch_is_drawn_while_a_step_is_taken(bank: SudokuBank) -> None:
    tokenizer = joining_tokenizer()
    source = SudokuSource(bank, tokenizer, ChatTemplate(small.TEMPLATE, tokenizer))
    rng, times = np.random.default_rng(0), []
    for _ in range(5):
        begin = time.perf_counter()
        source.draw(rng, 256)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.02, f"a draw takes {min(times) * 1000:.1f} ms"


# --- as tokens


def test_sudoku_ids_are_those_of_the_text(
    bank: SudokuBank, tokenizer: Tokenizer, template: ChatTemplate
) -> None:
    source = SudokuSource(bank, tokenizer, template)
    puzzles_N81, solutions_N81 = sudoku.draw(bank, np.random.default_rng(5), 20)
    drawn = source.draw(np.random.default_rng(5), 20)
    assert len(drawn) == 20
    for (prompt, reply), puzzle_C, solution_C in zip(
        drawn, puzzles_N81, solutions_N81, strict=True
    ):
        content = sudoku_text.prompt_text(digits(puzzle_C))
        expected = template.prompt([Message(role="user", content=content)])
        assert expected.text.endswith("<|turn>model\n")
        answer = tokenizer.encode(sudoku_text.grid_text(digits(solution_C)))
        assert prompt.dtype == reply.dtype == np.int32
        assert prompt.tolist() == list(expected.ids)
        assert reply.tolist() == [*answer, tokenizer.control_ids["<turn|>"]]


@pytest.mark.parametrize("pair", [("\n", "1"), ("▁1", "▁1")], ids=ascii)
def test_a_tokenizer_that_joins_cells_is_refused(pair: tuple[str, str]) -> None:
    tokenizer = joining_tokenizer(pair)
    with pytest.raises(CheckpointError, match="splits digits"):
        sudoku_text.reply_slots(tokenizer)


def test_slots_that_look_at_their_neighbours_are_refused() -> None:
    def encode(values: Sequence[int]) -> list[int]:
        return [10 * value + (0 if i and values[i - 1] == value else 5 * (i > 0))
                for i, value in enumerate(values)]  # fmt: skip

    with pytest.raises(CheckpointError, match="splits digits"):
        find_slots(encode, 4, 3)


# --- Sudoku as text


def test_a_puzzle_is_read_in_every_usual_form() -> None:
    assert sudoku_text.parse(PUZZLE) == PUZZLE
    assert sudoku_text.parse(PUZZLE.replace("0", ".") + "\n") == PUZZLE
    assert sudoku_text.parse(sudoku_text.grid_text(PUZZLE)) == PUZZLE


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        (PUZZLE[:-1], "80 cells"),
        (PUZZLE + "1", "82 cells"),
        ("", "0 cells"),
        ("x" + PUZZLE[1:], "'x'"),
        ("8" + PUZZLE[1:], "two 8s in row 1"),
        ("1" + PUZZLE[1:], "two 1s in column 1"),
        ("5" + "0" * 9 + "5" + "0" * 70, "two 5s in box 1"),
        ("٣" + PUZZLE[1:], "'٣'"),
    ],
)
def test_what_is_no_puzzle_is_refused(text: str, phrase: str) -> None:
    with pytest.raises(UsageError, match=phrase):
        sudoku_text.parse(text)


def test_the_prompt_has_the_agreed_form() -> None:
    lines = sudoku_text.prompt_text(PUZZLE).split("\n")
    assert lines[:2] == ["Solve this Sudoku.", "0 8 7 5 0 0 6 3 2"] and len(lines) == 10


def test_a_reply_counts_only_if_it_is_right() -> None:
    grid = sudoku_text.grid_text(SOLUTION)
    assert sudoku_text.read_reply(grid) == SOLUTION
    assert sudoku_text.read_reply(grid + "\n") == SOLUTION
    assert sudoku_text.is_solution(PUZZLE, grid) and sudoku_text.is_solution(PUZZLE, SOLUTION)
    for wrong in (grid[:-2], grid + " 1", grid.replace("\n", " "), "Here: " + grid, "", "0 " * 81):
        assert sudoku_text.read_reply(wrong) is None
        assert not sudoku_text.is_solution(PUZZLE, wrong)
    # Obeys the rules but not the givens; keeps the givens but not the rules.
    relabelled = SOLUTION.translate(str.maketrans("12", "21"))
    assert not sudoku_text.is_solution(PUZZLE, relabelled)
    assert sudoku_text.is_solution("0" * 81, relabelled)
    swapped = SOLUTION[1] + SOLUTION[0] + SOLUTION[2:]
    assert not sudoku_text.is_solution("0" * 81, swapped)
