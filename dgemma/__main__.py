"""`python -m dgemma`: the command line, also where scripts are not on the path."""

from dgemma.cli import main

if __name__ == "__main__":
    main()
