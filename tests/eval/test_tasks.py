"""Tasks on a model that knows one answer of each kind: the numbers must be what it knows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dgemma.config import GenerationConfig
from dgemma.engine import Engine
from dgemma.eval.data import Data, MissingData
from dgemma.eval.evaluate import TASKS
from dgemma.eval.infill import (
    HoleCase,
    continue_prefixes,
    fill_by_program,
    fill_canvases,
    is_trivial,
    parses,
)
from dgemma.eval.measure import TEXT, Case, Measure
from dgemma.eval.replies import (
    check_fix,
    converged_early,
    read_puzzles,
    sudoku_measures,
    text_of,
)
from dgemma.eval.stories import distinct_2, doubled_words, story_prompt
from dgemma.programs.sudoku.solve import MAX_STEPS, SudokuResult
from dgemma.weights.load import random_model
from recipes.nano.colouring import colouring
from tests.eval.conftest import (
    CHATS,
    CONTEXT,
    MIDDLE,
    PREFIX,
    SUFFIX,
    save_lines,
    without_denoiser,
)
from tests.taught import taught_config
from tests.text.small import small_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
MODES = ("diffusion", "ar")
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
HOLE = HoleCase(PREFIX, MIDDLE, SUFFIX)
ALL_TASKS = {**TASKS, "colouring": colouring}


def run(name: str, engine: Engine, data: Data, limit: int | None = None) -> dict[str, Measure]:
    """A task's measures by `mode name`."""
    measures = ALL_TASKS[name](engine, data, limit, 0)
    assert all(measure.task == name for measure in measures)
    found = {f"{measure.mode} {measure.name}".strip(): measure for measure in measures}
    assert len(found) == len(measures), "two measures of one name"
    return found


@pytest.mark.parametrize("mode", MODES)
def test_infill_counts_what_is_exact_and_what_parses(
    knowing: Engine, data: Data, mode: str
) -> None:
    found = run("infill", knowing, data)
    for section, share, count in (("package", 0.5, 2), ("problem", 0.25, 4)):
        assert found[f"diffusion {section}: fill: exact"].value == share
        assert found[f"{mode} {section}: exact"].value == share  # of those that are long enough
        assert found[f"{mode} {section}: exact"].count == count
        assert found[f"{mode} {section}: non-trivial"].value == 1.0
        assert found[f"{mode} {section}: parses if non-trivial"].value == 1.0
    # `y = x` in both modes; `return y` only where the canvas is seen to end behind it.
    assert found[f"{mode} mbpp: exact"].value == {"diffusion": 1.0, "ar": 0.5}[mode]
    assert found[f"{mode} mbpp: exact"].count == 2
    assert found["diffusion mbpp: fill: exact"].value == 1.0


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("package", "heldout has no infill.jsonl"),
        ("problem", "heldout has no problems.jsonl"),
        ("mbpp", "shared has no eval/mbpp.jsonl"),
    ],
)
def test_infill_says_which_lines_are_not_there(
    knowing: Engine, data: Data, section: str, told: str
) -> None:
    (data.heldout.parent / told.replace(" has no ", "/")).unlink()
    found = run("infill", knowing, data, limit=1)
    assert f"{told}; name" in found[f"{section}: skipped"].note
    others = {"package", "problem", "mbpp"} - {section}
    assert all(found[f"ar {other}: exact"].count == 1 for other in others)


@pytest.mark.parametrize("mode", MODES)
def test_humaneval_runs_the_tests(knowing: Engine, data: Data, mode: str) -> None:
    found = run("humaneval_infill", knowing, data)
    assert found[f"{mode} exact"].value == 0.5
    assert found[f"{mode} tests pass"].value == 0.5
    first = run("humaneval_infill", knowing, data, limit=1)
    assert first[f"{mode} tests pass"].value == 1.0


KNOWN = {
    "json_calls": {"name and arguments": 0.5, "name": 1.0, "parses": 1.0},  # compared as values
    "fix": {"errors corrected": 1.0, "right words kept": 1.0, "text exact": 1.0},
    "colouring": {"valid": 1.0},  # another one than the file's; it is as good
}


@pytest.mark.parametrize("task", KNOWN)
@pytest.mark.parametrize("mode", MODES)
def test_replies_that_the_model_knows(knowing: Engine, data: Data, mode: str, task: str) -> None:
    found = run(task, knowing, data)
    assert {name: found[f"{mode} {name}"].value for name in KNOWN[task]} == KNOWN[task]


def test_a_wrong_colouring_is_not_valid(knowing: Engine, data: Data) -> None:
    graph = next(q for q in CHATS if q.startswith("Colour")).replace("A red", "A blue")
    save_lines(data.heldout / "colouring.jsonl", {"prompt": graph, "reply": "A blue\nB red"})
    valid = run("colouring", knowing, data)["ar valid"]
    assert (valid.count, valid.value) == (1, 0.0)


def test_a_prompt_that_does_not_fit_counts_as_wrong(knowing: Engine, data: Data) -> None:
    known = {"prompt": "call", "reply": "{}"}
    save_lines(data.heldout / "json_calls.jsonl", known, {**known, "prompt": "x " * CONTEXT})
    parses_ = run("json_calls", knowing, data)
    assert parses_["ar parses"].value == 0.5
    assert parses_["ar name and arguments"].note.startswith("1 did not fit")


def test_blimp_prefers_the_likelier_sentence(knowing: Engine, data: Data) -> None:
    found = run("blimp", knowing, data)
    assert found["ar all"].value == pytest.approx(2 / 3)
    assert found["ar syntax"].value == 1.0 and found["ar semantics"].value == 0.5
    assert run("blimp", knowing, data, limit=1)["ar all"].value == 1.0


def test_cross_entropy_is_low_on_what_is_known(knowing: Engine, data: Data) -> None:
    found = run("cross_entropy", knowing, data)
    known, unknown = found["ar code: next token"], 4.0
    assert known.value is not None and known.value < 1.5
    assert "has no dialogue.jsonl; name" in found["dialogue: skipped"].note
    text = PREFIX + MIDDLE + SUFFIX
    tokens = len(small_tokenizer().encode(text)) + 1  # and its end
    per_byte = found["ar code: next token, per byte"].value
    assert per_byte == pytest.approx(known.value * tokens / len(text.encode()))
    easy, hard = (found[f"diffusion code: denoising at {level}"].value for level in (0.1, 0.9))
    assert easy is not None and hard is not None and easy < hard
    name = "diffusion code: denoising, {}, with self-conditioning"
    every, noised = found[name.format("all")].value, found[name.format("noised")].value
    assert every is not None and noised is not None and every < noised
    # Random weights know nothing of anything.
    blank = Engine(random_model(taught_config(), seed=9), *_parts(knowing))
    worse = run("cross_entropy", blank, data)["ar code: next token"].value
    assert worse is not None and worse > unknown


def test_without_a_denoiser_only_the_causal_loss_is_measured(knowing: Engine, data: Data) -> None:
    found = run("cross_entropy", without_denoiser(knowing), data)
    assert found["ar stories: next token"].value is not None
    assert not any("denoising" in name for name in found)


def _parts(engine: Engine) -> tuple:  # type: ignore[type-arg]
    return engine.tokenizer, engine.template, engine.generation_config


def test_samples_are_texts(knowing: Engine, data: Data) -> None:
    measures = TASKS["samples"](knowing, data, 2, 0)
    assert [m.name for m in measures] == [
        *("story, seed 0", "story, seed 1", "infill, seed 0", "infill, seed 1")
    ]
    assert all(m.unit == TEXT for m in measures)
    assert measures[0].note.startswith(story_prompt(0))
    assert f"{PREFIX}[[{MIDDLE}]]{SUFFIX}" in measures[2].note
    (data.heldout / "infill.jsonl").unlink()
    assert "has no infill.jsonl; name" in TASKS["samples"](knowing, data, 1, 0)[-1].note


def test_a_model_too_small_for_a_story_is_told_so(knowing: Engine, data: Data) -> None:
    small = Engine(random_model(taught_config(), seed=0), *_parts(knowing))
    with pytest.raises(MissingData, match="context does not hold"):
        TASKS["samples"](small, data, 1, 0)


def test_stories_need_the_judge(knowing: Engine, data: Data) -> None:
    with pytest.raises(MissingData, match="stories15M"):
        TASKS["stories"](knowing, data, 2, 0)


@pytest.mark.skipif(not (SHARED / "train").is_dir(), reason=f"{SHARED} does not exist")
def test_stories_are_judged_in_both_modes(knowing: Engine, data: Data) -> None:
    found = run("stories", knowing, Data(data.heldout, SHARED), limit=3)
    values = [found[f"{mode} perplexity"].value for mode in MODES]
    assert all(value is not None and value > 1 for value in values)
    times = found["perplexity, diffusion / AR"].value
    assert times == pytest.approx(values[0] / values[1])  # type: ignore[operator]
    assert found["ar perplexity"].note == "temperature 0.8"


def test_distinct_2_counts_pairs_of_words() -> None:
    case = Case("stories", "ar")
    assert distinct_2(case, ["a b c", "a b d"]).value == pytest.approx(3 / 4)
    assert distinct_2(case, ["a b", "a b", "a b", "a b"]).value == 0.25
    assert distinct_2(case, [""]).value is None
    told = ["The frog, frog saw the frog.", "Bye bye!", "", "one"]
    assert doubled_words(case, told).value == pytest.approx(2 / 6)
    assert doubled_words(case, [""]).value is None
    varied = distinct_2(case, ["a b a b a b a b", "c d e f g h"])
    assert varied.low is not None and varied.value is not None and varied.low < varied.value


def test_prompts_do_not_come_again_soon() -> None:
    assert len({story_prompt(i) for i in range(200)}) == 200


def test_ar_stops_at_the_line_and_keeps_its_end(knowing: Engine) -> None:
    assert continue_prefixes(knowing, [HOLE], "test") == [MIDDLE]
    # Several lines: as many tokens as there were.
    several = replace(HOLE, middle="\n" + MIDDLE)
    assert not several.is_line
    size = len(small_tokenizer().encode(several.middle))
    text = continue_prefixes(knowing, [several], "test")[0]
    assert text is not None and len(small_tokenizer().encode(text)) <= size
    assert text.startswith(MIDDLE)


def test_holes_are_filled_alone_as_together(knowing: Engine) -> None:
    other = replace(HOLE, prefix="", middle="one", suffix="")
    together = fill_canvases(knowing, [HOLE, other, HOLE], 0, "test")
    assert together[0] is not None and together[0].text == MIDDLE and together[0].converged
    assert fill_canvases(knowing, [HOLE], 0, "test")[0] == together[0]


def test_fill_is_told_the_length_and_whether_a_hole_is_a_line(knowing: Engine) -> None:
    lines = replace(HOLE, middle=f"{MIDDLE}and\nmore")
    one, several = fill_by_program(knowing, [HOLE, lines], 0, "test")
    assert one.text == MIDDLE and one.converged
    assert len(small_tokenizer().encode(several.text)) > len(small_tokenizer().encode(MIDDLE))


def test_a_hole_that_no_canvas_holds_is_left_open(knowing: Engine) -> None:
    long = replace(HOLE, middle="too long for it, by far")
    assert fill_canvases(knowing, [long, HOLE], 0, "test")[0] is None


def test_a_long_prefix_is_cut_at_its_beginning(knowing: Engine) -> None:
    long = replace(HOLE, prefix="#" * 2 * CONTEXT + PREFIX)
    assert fill_canvases(knowing, [long], 0, "test")[0] is not None
    assert continue_prefixes(knowing, [long], "test")[0] is not None


@pytest.mark.parametrize(
    ("text", "trivial"), [("  pass\n", True), ("\n", True), ("...", True), ("x = 1", False)]
)
def test_trivial_fills(text: str, trivial: bool) -> None:
    assert is_trivial(text) == trivial


def test_functions_and_methods_parse_by_themselves() -> None:
    assert parses("  def f(self):\n    return '\\d'\n")
    assert not parses("def f(:\n  pass") and not parses("x = '\0'")


@pytest.mark.parametrize(
    ("answer", "errors", "kept"),
    [
        ("the cat sat down on the mat now", [True, True, True], 6),
        ("the caat sat down down on mat now", [False, False, False], 6),
        ("the cat sat down on mat now", [True, True, False], 6),
        ("the dog sat down on the rug now", [False, True, True], 5),
        ("", [False, False, False], 0),
    ],
)
def test_errors_are_counted_by_word(answer: str, errors: list[bool], kept: int) -> None:
    given, original = "the caat sat down down on mat now", "the cat sat down on the mat now"
    checked = check_fix(given, original, answer)
    assert (checked.corrected, checked.num_unchanged, checked.num_right) == (errors, kept, 6)


def test_a_word_too_many_at_an_end_is_an_error() -> None:
    assert check_fix("a a b", "a b", "a b").corrected == [True]
    assert check_fix("a b b", "a b", "a b b").corrected == [False]
    assert check_fix("a b", "a b", "c").corrected == []


def test_the_text_of_an_edit_is_behind_its_instruction() -> None:
    assert text_of("Correct this.\n\nOne.\n\nTwo.") == "One.\n\nTwo."


def solved(solution: str | None, *, converged: bool, steps: int, restarts: int = 0) -> SudokuResult:
    puzzle = "0" + SOLUTION[1:]
    return SudokuResult(
        puzzle=puzzle,
        solution=solution,
        converged=converged,
        steps=steps,
        restarts=restarts,
        seconds=1.0,
    )


def test_sudoku_counts_what_is_right_and_what_converged() -> None:
    wrong = "9" + SOLUTION[1:]
    outcomes = [
        solved(SOLUTION, converged=True, steps=4),
        solved(wrong, converged=True, steps=6),
        solved(SOLUTION, converged=False, steps=10, restarts=2),
        solved(None, converged=False, steps=20),
    ]
    found = {m.name: m.value for m in sudoku_measures(outcomes, Case("sudoku", "diffusion"))}
    assert found == {
        "solved": 0.5,
        "converged": 0.5,
        "right if converged": 0.5,
        "steps": 10.0,
    }


def test_a_late_puzzle_counts_as_restarted_where_restarts_are_made() -> None:
    assert converged_early(solved(SOLUTION, converged=True, steps=MAX_STEPS))
    assert not converged_early(solved(SOLUTION, converged=True, steps=MAX_STEPS + 1))
    assert not converged_early(solved(SOLUTION, converged=False, steps=MAX_STEPS))


def test_sudoku_runs_every_set_in_every_way(data: Data) -> None:
    line = "0" + SOLUTION[1:]
    (data.heldout / "sudoku_36-45.txt").write_text(f"{line} {SOLUTION}\n{line} {SOLUTION}\n")
    (data.shared / "eval" / "sudoku_17clue.txt").write_text(line + "\n")
    found = run("sudoku", large_engine(), data, limit=1)
    for way in ("pinned, no restart", "pinned, 8 restarts", "free, no restart", "free, 8 restarts"):
        assert found[f"diffusion 36-45, {way}: solved"].count == 1
        assert found[f"diffusion 36-45, {way}: steps"].value is not None
    steps = found["diffusion 36-45, pinned, 8 restarts: steps"].value
    assert steps is not None
    assert steps >= 9  # nine attempts, none of which converges; a faulty canvas is retried
    assert found["ar 36-45, free, no restart: solved"].value == 0.0
    assert found["diffusion 17, pinned, no restart: solved"].count == 1
    (data.shared / "eval" / "sudoku_17clue.txt").unlink()


def large_engine() -> Engine:
    """Random weights with a canvas that holds a grid."""
    config = replace(taught_config(), canvas_length=192, max_position_embeddings=1024)
    generation = GenerationConfig(stop_ids=(1, 16), max_new_tokens=192, max_denoising_steps=1)
    return Engine(random_model(config, seed=0), small_tokenizer(), None, generation)


def test_sudoku_says_which_of_its_files_are_missing(data: Data) -> None:
    found = run("sudoku", large_engine(), data, limit=1)
    assert "has no sudoku_*.txt; name" in found["held out: skipped"].note
    assert "has no eval/sudoku_17clue.txt; name" in found["17: skipped"].note
    # The list alone is enough for its part.
    (data.shared / "eval" / "sudoku_17clue.txt").write_text("0" + SOLUTION[1:] + "\n")
    found = run("sudoku", large_engine(), data, limit=1)
    assert found["diffusion 17, pinned, no restart: solved"].count == 1


def test_puzzles_are_the_first_word_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(f"{SOLUTION} {SOLUTION}\n\n{SOLUTION[::-1]}\n")
    assert read_puzzles(tmp_path / "p.txt") == [SOLUTION, SOLUTION[::-1]]


def test_the_limit_spreads_records_over_the_file(data: Data) -> None:
    save_lines(data.heldout / "x.jsonl", *({"text": str(i)} for i in range(5)))
    assert data.texts("x.jsonl", 2) == ["0", "2"]
    assert data.texts("x.jsonl", 4) == ["0", "1", "2", "3"]
    assert data.texts("x.jsonl", 9) == ["0", "1", "2", "3", "4"]
    text = json.dumps({"text": "a\u2028b"}, ensure_ascii=False)
    (data.heldout / "x.jsonl").write_text(text + "\n", encoding="utf-8")
    assert data.texts("x.jsonl", None) == ["a\u2028b"]
