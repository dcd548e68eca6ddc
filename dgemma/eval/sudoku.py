"""Sudoku by a model, for benchmarks: see `engine.sudoku`, which the server uses too."""

from dgemma.engine.sudoku import (
    Attempt,
    How,
    Solved,
    canvas_length,
    follow,
    givens,
    plan,
    solve,
)

__all__ = ["Attempt", "How", "Solved", "canvas_length", "follow", "givens", "plan", "solve"]
