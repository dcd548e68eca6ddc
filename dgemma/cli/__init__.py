"""The command line: parse, call, print. What is heavy is imported inside the command it serves."""

# Importing a module registers its commands.
from dgemma.cli import chat, download, evaluate, generate, info, sudoku  # noqa: F401
from dgemma.cli.app import run as main  # noqa: F401
