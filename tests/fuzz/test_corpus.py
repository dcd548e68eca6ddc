"""The kept inputs of the fuzzers, and the seeds, still end in a result or a sentence."""

import pytest

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.targets import TARGETS, check, seeds


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_end_in_a_result_or_a_sentence(name: str) -> None:
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    for data in [*seeds(name), *kept, b"", b"\0", b"{}"]:
        check(name, data)
