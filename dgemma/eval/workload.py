"""Workloads of `dgemma bench`: TOML files with prompts, limits and acceptance checks.

A workload says nothing about modes or samplers: every arm gets the same task. `program` names the
kind of task: `generate` (a user's message), `fill` (a text with `<|fill|>`), `edit` (an instruction
and a text) or `sudoku` (81 digits). `{filler}` in a prompt becomes `filler_words` neutral words.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, get_args

from dgemma.errors import UsageError
from dgemma.eval.checks import CHECKS, CheckSpec

ProgramKind = Literal["generate", "fill", "edit", "sudoku"]
AREAS = {
    "short": "short answer",
    "chat": "chat reply",
    "long": "long text over several blocks",
    "rewrite": "rewrite of a paragraph or a page",
    "edit": "inline edit, edit loop",
    "code": "code infill and function bodies",
    "structure": "JSON, tables, tool calls",
    "grounded": "answer from sources with citations",
    "puzzle": "puzzle with global constraints",
    "context": "long prompt",
    "failure": "ambiguous or over-constrained request",
    "languages": "languages other than English",
}
FILLER = (
    "The harbour opens at six and the boats leave before the sun is up. "
    "A clerk writes the names of the boats in a book with a blue cover. "
    "In winter the road to the hills is closed and the bread comes by train. "
    "Children walk along the wall to the school near the old mill. "
    "The baker sells the last loaves at half price when the lamps are lit. "
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One request of a workload, with the checks that accept its answer."""

    prompt: str  # user's message, text with holes, text to edit, or puzzle
    checks: tuple[CheckSpec, ...]
    instruction: str = ""  # of an edit
    swap: tuple[str, str] | None = None  # old and new words of the prompt, for `context`

    @property
    def swapped_prompt(self) -> str:
        """The prompt with its evidence swapped."""
        assert self.swap is not None
        return self.prompt.replace(*self.swap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task with its cases and the settings that do not depend on the mode."""

    name: str
    title: str
    area: str
    program: ProgramKind = "generate"
    max_tokens: int = 128
    cases: tuple[BenchCase, ...] = ()
    schema: Mapping[str, Any] | None = None  # the answer is held to it
    tools: tuple[Mapping[str, Any], ...] = ()  # name, description, parameters
    single_line: bool = False  # of a hole
    is_quick: bool = False  # part of `--quick`


CASE_KEYS = {"prompt", "checks", "instruction", "swap", "filler_words"}
KEYS = {f.name for f in fields(Workload)} - {"name", "cases", "is_quick"} | {"quick", "case"}


def builtin_workloads() -> list[Path]:
    """Return the files of the package, by name."""
    directory = Path(str(files("dgemma.eval"))) / "workloads"
    return sorted(directory.glob("*.toml"))


def find_workloads(names: Sequence[str], *, quick: bool = False) -> list[Workload]:
    """Read workloads by name, file or directory; none given means all built-in ones."""
    known = {path.stem: path for path in builtin_workloads()}
    paths: list[Path] = [] if names else list(known.values())
    for name in names:
        path = known.get(name, Path(name))
        if not path.exists():
            raise UsageError(
                f"workload {name!r} is neither built in nor a file; use {', '.join(known)}, or "
                "the path of a TOML file"
            )
        paths += sorted(path.glob("*.toml")) if path.is_dir() else [path]
    workloads = [read_workload(path) for path in paths]
    twice = {w.name for w in workloads if sum(w.name == o.name for o in workloads) > 1}
    if twice:
        raise UsageError(f"two workloads are named {sorted(twice)[0]!r}; rename one of the files")
    return [w for w in workloads if w.is_quick] if quick and not names else workloads


def read_workload(path: Path) -> Workload:
    """Read a file strictly: an unknown key or check is refused by name."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"workload {path} cannot be read: {error}") from None
    _refuse_unknown(path, raw, KEYS)
    if raw.get("area") not in AREAS:
        raise UsageError(f"{path}: area is {raw.get('area')!r}; it must be {', '.join(AREAS)}")
    if raw.get("program", "generate") not in get_args(ProgramKind):
        allowed = ", ".join(get_args(ProgramKind))
        raise UsageError(f"{path}: program is {raw['program']!r}; it must be {allowed}")
    cases = tuple(_read_case(path, case) for case in raw.pop("case", []))
    if not cases or not raw.get("title"):
        raise UsageError(f"{path}: a workload needs a title and at least one [[case]]")
    is_quick, tools = raw.pop("quick", False), tuple(raw.pop("tools", ()))
    return Workload(name=path.stem, cases=cases, is_quick=is_quick, tools=tools, **raw)


def _read_case(path: Path, raw: dict[str, Any]) -> BenchCase:
    _refuse_unknown(path, raw, CASE_KEYS)
    if not raw.get("prompt") or not raw.get("checks"):
        raise UsageError(f"{path}: a case needs a prompt and at least one check")
    checks = tuple(_read_check(path, check) for check in raw["checks"])
    filler = " ".join(islice(cycle(FILLER), raw.get("filler_words", 0)))
    prompt = raw["prompt"].replace("{filler}", filler)
    swap = raw.get("swap")
    if any(check.needs_swap for check in checks) and swap is None:
        raise UsageError(f"{path}: the check context needs swap = [old, new] in its case")
    if swap is not None and (len(swap) != 2 or swap[0] not in prompt):
        raise UsageError(f"{path}: swap is {swap}; it must be [words of the prompt, other words]")
    return BenchCase(
        prompt=prompt,
        checks=checks,
        instruction=raw.get("instruction", ""),
        swap=None if swap is None else (swap[0], swap[1]),
    )


def _read_check(path: Path, raw: dict[str, Any]) -> CheckSpec:
    params = dict(raw)
    name = params.pop("name", "")
    if name not in CHECKS:
        raise UsageError(f"{path}: check {name!r} is not known; use {', '.join(CHECKS)}")
    return CheckSpec.read(name, params, str(path))


def _refuse_unknown(path: Path, raw: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(raw.keys() - known)
    if unknown:
        raise UsageError(f"{path}: {unknown[0]!r} is not known; use {', '.join(sorted(known))}")
