"""Puzzles to train on, made by program: Sudoku and graph colouring."""
