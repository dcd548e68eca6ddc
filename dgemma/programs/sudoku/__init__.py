"""Sudoku: the text form of puzzles, and solving them by the model alone."""
