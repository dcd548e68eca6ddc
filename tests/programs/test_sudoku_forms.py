"""Forms of a Sudoku: what is a solution in one is a solution in every other."""

from random import Random

import pytest

from dgemma.programs.sudoku.grid import ORIGINAL, is_solution, random_form

SOLUTION = "987514632316782495524693871832971546765428319149356728671849253498235167253167984"
PUZZLE = "087500632000700000504690800000001006065420319100300728000009050090200160003007980"


@pytest.mark.parametrize("seed", range(20))
def test_a_form_is_the_same_puzzle_and_is_read_back(seed: int) -> None:
    form = random_form(Random(seed))
    puzzle, solution = form.write(PUZZLE), form.write(SOLUTION)
    assert puzzle != PUZZLE and puzzle.count("0") == PUZZLE.count("0")
    assert is_solution(puzzle, solution) and not is_solution(PUZZLE, solution)
    assert (form.read(puzzle), form.read(solution)) == (PUZZLE, SOLUTION)


def test_forms_differ_and_one_of_them_is_none() -> None:
    forms = {random_form(Random(seed)) for seed in range(50)}
    assert len(forms) == 50 and ORIGINAL not in forms
    assert ORIGINAL.write(PUZZLE) == PUZZLE == ORIGINAL.read(PUZZLE)
    turned = [form for form in forms if form.cells[1] // 9 != form.cells[0] // 9]
    assert 10 < len(turned) < 40
