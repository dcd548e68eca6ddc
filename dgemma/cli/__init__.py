"""The command line: parse, call, print. What is heavy is imported inside the command it serves."""

# Importing a module registers its commands.
from dgemma.cli import (  # noqa: F401
    chat,
    download,
    edit,
    evaluate,
    export,
    fill,
    fit,
    generate,
    info,
    quantize,
    serve,
    sudoku,
    train,
)
from dgemma.cli.app import run as main  # noqa: F401
