"""The mutants are faults of the present code: their texts and tests are there."""

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_that_a_test_covers(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    file, _, test = mutant.test.partition("::")
    assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
