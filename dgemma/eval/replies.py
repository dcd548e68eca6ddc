"""Tasks whose replies are checked by rule: Sudoku, JSON calls, texts with planted errors.

A Sudoku counts as solved if the reply is a whole grid that obeys the rules and keeps the givens. No
solver is used at inference: a canvas is restarted only if it did not converge. JSON is compared as
parsed values.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from dgemma.engine import Engine
from dgemma.eval.answers import read_pairs, replies_by_mode, show_progress
from dgemma.eval.data import Data, MissingData
from dgemma.eval.measure import SHARE, Case, Measure
from dgemma.programs.sudoku.grid import RESTARTS
from dgemma.programs.sudoku.solve import MAX_STEPS, SudokuParams, SudokuResult, solve_program

SUDOKU = "sudoku"
CLUE_17_FILE, CLUE_17_LIMIT = "sudoku_17clue.txt", 1000
CALLS_LIMIT, FIX_LIMIT = 500, 200
NOT_JSON = object()  # equal to no parsed value


def sudoku(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure every set with givens pinned and not, without and with restarts, and by AR.

    The sets are the held-out files, by number of givens, and the list of 17-clue puzzles.
    """
    measures: list[Measure] = []
    try:
        files = data.puzzles("sudoku_*.txt")  # many givens first
    except MissingData as reason:
        files, measures = [], [Case(SUDOKU, prefix="held out: ").skipped(str(reason))]
    for path in files:
        clues, puzzles = path.stem.removeprefix("sudoku_"), read_puzzles(path)[:limit]
        for pinned in (True, False):
            measures += _diffusion(engine, puzzles, clues, pinned, seed)
        measures += _ar(engine, puzzles, clues, seed)
    try:
        puzzles = read_puzzles(data.evaluation(CLUE_17_FILE))[: limit or CLUE_17_LIMIT]
    except MissingData as reason:
        return [*measures, Case(SUDOKU, prefix="17: ").skipped(str(reason))]
    measures += _diffusion(engine, puzzles, "17", True, seed)
    return measures + _ar(engine, puzzles, "17", seed)


def read_puzzles(path: Path) -> list[str]:
    """Return the first word of each line: 81 digits, 0 for an empty cell."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _diffusion(
    engine: Engine, puzzles: Sequence[str], clues: str, pinned: bool, seed: int
) -> list[Measure]:
    """Solve without restarts, then again with restarts those that would be restarted.

    The noise depends on the puzzle alone, so the others would come out the same.
    """
    first = solve_all(engine, puzzles, SudokuParams(pinned=pinned, seed=seed))
    unsolved = [one.puzzle for one in first if not converged_early(one)]
    params = SudokuParams(pinned=pinned, restarts=RESTARTS, seed=seed)
    again = iter(solve_all(engine, unsolved, params))
    restarted = [one if converged_early(one) else next(again) for one in first]
    name = f"{clues}, {'pinned' if pinned else 'free'}, "
    return [
        *sudoku_measures(first, Case(SUDOKU, "diffusion", f"{name}no restart: ")),
        *sudoku_measures(restarted, Case(SUDOKU, "diffusion", f"{name}{RESTARTS} restarts: ")),
    ]


def converged_early(result: SudokuResult) -> bool:
    """Return True if it converged before a restart would have been made."""
    return result.converged and result.steps <= MAX_STEPS


def sudoku_measures(results: Sequence[SudokuResult], case: Case) -> list[Measure]:
    return [
        case.share("solved", [one.is_right for one in results]),
        case.share("converged", [one.converged for one in results]),
        case.share("right if converged", [one.is_right for one in results if one.converged]),
        case.mean("steps", [float(one.steps) for one in results], "steps", "all attempts"),
    ]


def _ar(engine: Engine, puzzles: Sequence[str], clues: str, seed: int) -> list[Measure]:
    results = solve_all(engine, puzzles, SudokuParams(mode="ar", pinned=False, seed=seed))
    # In the row of the diffusion that has no more help than AR.
    case = Case(SUDOKU, "ar", f"{clues}, free, no restart: ")
    return [case.share("solved", [one.is_right for one in results], "greedy")]


def solve_all(engine: Engine, puzzles: Sequence[str], params: SudokuParams) -> list[SudokuResult]:
    """Solve puzzles in the engine's batches, with progress."""
    programs = [solve_program(engine, puzzle, params) for puzzle in puzzles]
    results: dict[int, SudokuResult] = {}
    for index, result in engine.as_completed(programs):
        results[index] = result
        show_progress(f"{SUDOKU}, {params.mode}", len(results), len(puzzles))
    return [results[index] for index in range(len(puzzles))]


def json_calls(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure exact match of name and arguments, of the name alone, and what is JSON at all.

    Parsed values are compared, so spelling and order do not matter.
    """
    pairs = read_pairs(data, "json_calls.jsonl", limit or CALLS_LIMIT)
    expected = [parse_json(pair.reply) for pair in pairs]
    measures = []
    for replies in replies_by_mode(engine, pairs, "json_calls", seed):
        parsed = [parse_json(text) for text in replies.texts]
        both = list(zip(expected, parsed, strict=True))
        case = replies.case
        measures += [
            case.share("name and arguments", [a == b for a, b in both], replies.note),
            case.share("name", [name_of(a) == name_of(b) for a, b in both]),
            case.share("parses", [value is not NOT_JSON for value in parsed]),
        ]
    return measures


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return NOT_JSON


def name_of(call: Any) -> Any:
    return call.get("name", NOT_JSON) if isinstance(call, dict) else NOT_JSON


def fix(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure errors corrected, right words left alone, and texts restored exactly."""
    pairs = read_pairs(data, "fix_stories.jsonl", limit or FIX_LIMIT)
    measures = []
    for replies in replies_by_mode(engine, pairs, "fix", seed):
        both = list(zip(pairs, replies.texts, strict=True))
        checked = [check_fix(text_of(pair.prompt), pair.reply, text) for pair, text in both]
        case = replies.case
        unchanged = [(float(one.num_unchanged), float(one.num_right)) for one in checked]
        exact = [pair.reply.strip() == text.strip() for pair, text in both]
        measures += [
            case.share("errors corrected", [hit for one in checked for hit in one.corrected]),
            case.rate("right words kept", unchanged, SHARE),
            case.share("text exact", exact, replies.note),
        ]
    return measures


@dataclass(frozen=True, slots=True)
class FixCheck:
    """A corrected text compared with the original."""

    corrected: list[bool]  # for each planted error
    num_unchanged: int  # words that were right and still are
    num_right: int  # words that were right


def text_of(prompt: str) -> str:
    """Return the text of an edit prompt: what follows the instruction and an empty line."""
    instruction, _, text = prompt.partition("\n\n")
    return text or instruction


def check_fix(text: str, original: str, reply: str) -> FixCheck:
    """Align words by difflib; each span in which text and original differ is a planted error.

    It is corrected if the reply has the original's words there.
    """
    words, right, written = text.split(), original.split(), reply.split()
    # Index in the reply of each of the original's words; the edges are aligned with the edges.
    index = {-1: -1, len(right): len(written)}
    for a, b, size in _matcher(right, written).get_matching_blocks():
        index.update({a + i: b + i for i in range(size)})
    corrected, num_unchanged, num_right = [], 0, 0
    for kind, first, last, begin, end in _matcher(words, right).get_opcodes():
        if kind == "equal":
            num_right += end - begin
            num_unchanged += sum(i in index for i in range(begin, end))
        else:
            span = range(begin, end) or _around(right, begin, words[first:last])
            corrected.append(_is_contiguous(index, span))
    return FixCheck(corrected, num_unchanged, num_right)


def _around(right: list[str], position: int, extra: list[str]) -> range:
    """Return the words of the original around a position where the text had `extra` words.

    Either copy of a doubled word may be the extra one, so equal words are included.
    """
    before, after = position - 1, position
    while before >= 0 and right[before] in extra:
        before -= 1
    while after < len(right) and right[after] in extra:
        after += 1
    return range(before, after + 1)


def _is_contiguous(index: dict[int, int], span: range) -> bool:
    """Return True if the reply has these words of the original, one after the other."""
    positions = [index.get(i) for i in span]
    first = positions[0]
    return first is not None and positions == [first + i for i in range(len(positions))]


def _matcher(a: list[str], b: list[str]) -> SequenceMatcher[str]:
    return SequenceMatcher(None, a, b, autojunk=False)
