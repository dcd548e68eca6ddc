"""The kernels at both ends of a step, compiled for a GPU that is not here."""

from pathlib import Path

from tests.kernels.test_interpreted import needs_triton, path_with_root, run


@needs_triton
def test_the_kernels_at_both_ends_of_a_step_compile() -> None:
    script = Path(__file__).with_name("compile_ends.py")
    out = run(str(script), TRITON_INTERPRET="0", PYTHONPATH=path_with_root())
    assert out.count("compiled") == 17
