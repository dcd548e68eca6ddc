"""Write the tables of docs/serve.md from the server's own, so that they cannot lie.

python docs/make_serve.py [--check]
"""

import json
import re
import sys
from pathlib import Path

from dgemma.server import fields, fields_fill

PAGE = Path(__file__).parent / "serve.md"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def sorted_by_kind(table: dict[str, fields.Field]) -> list[str]:
    rows = [row("field", "", "what becomes of it"), "|---|---|---|"]
    for kind in ("honoured", "harmless", "refused"):
        rows += [
            row(f"`{name}`", kind, _with_neutral(field))
            for name, field in table.items()
            if field.kind == kind
        ]
    return rows


def _with_neutral(field: fields.Field) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"{field.note}; {values} passes" if values else field.note


def own(table: dict[str, fields.Field]) -> dict[str, fields.Field]:
    return {name: field for name, field in table.items() if name not in fields.COMMON}


def changed(table: dict[str, fields.Field]) -> dict[str, fields.Field]:
    """The fields that chat and plain completions have not, or mean otherwise."""
    return {name: field for name, field in table.items() if fields.COMMON.get(name) != field}


def tables() -> dict[str, list[str]]:
    notes = [row("field", "meaning"), "|---|---|"]
    return {
        "both": sorted_by_kind(fields.COMMON),
        "chat": sorted_by_kind(own(fields.CHAT)),
        "completions": sorted_by_kind(own(fields.COMPLETIONS)),
        "fim": sorted_by_kind(changed(fields_fill.FIM)),
        "infill": sorted_by_kind(changed(fields_fill.INFILL)),
        "one message": sorted_by_kind(changed(fields_fill.ONE_MESSAGE)),
        "fill": sorted_by_kind(changed(fields_fill.FILL)),
        "edit": sorted_by_kind(changed(fields_fill.EDIT)),
        "sudoku": sorted_by_kind(changed(fields_fill.SUDOKU)),
        "messages": notes + [row(f"`{n}`", t) for n, t in fields.MESSAGE_HARMLESS.items()],
        "extension": notes + [row(f"`{n}`", t) for n, t in fields.EXTENSION.items()],
    }


def written(page: str) -> str:
    for name, lines in tables().items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert pattern.search(page), f"docs/serve.md has no place for {name}"
        table = "\n".join(lines)
        page = pattern.sub(lambda _, t=table, b=begin, e=end: f"{b}\n{t}\n{e}", page)
    return page


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        if written(page) != page:
            sys.exit("docs/serve.md is out of date; run: python docs/make_serve.py")
        return
    PAGE.write_text(written(page), encoding="utf-8")


if __name__ == "__main__":
    main()
