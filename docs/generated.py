"""Generated parts of a page: written into it, or compared with it by `--check`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def with_tables(page: str, tables: Mapping[str, Sequence[str]]) -> str:
    """Return a page with each table between its pair of comments."""
    for name, lines in tables.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        before, is_marked, rest = page.partition(begin)
        _, is_closed, after = rest.partition(end)
        assert is_marked and is_closed, f"the page has no place for {name}"
        page = "\n".join([before + begin, *lines, end + after])
    return page


def save(path: Path, page: str) -> None:
    """Write a page; with `--check` exit with a message if it differs from the file."""
    if "--check" not in sys.argv:
        path.write_text(page, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != page:
        sys.exit(f"docs/{path.name} is out of date; run: python {sys.argv[0]}")
