"""`dgemma sudoku`, and the solving behind it: on a tiny model that knows one puzzle by heart."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma.cli.show import CanvasView
from dgemma.cli.sudoku import SudokuReport
from dgemma.engine import Done, Draft, Engine
from dgemma.errors import UsageError
from dgemma.programs.sudoku import grid
from dgemma.programs.sudoku.solve import (
    MAX_LAST_STEPS,
    MAX_STEPS,
    SudokuParams,
    SudokuResult,
    attempt_form,
    canvas_length,
    givens,
    solve,
    solve_program,
    sudoku_task,
)
from dgemma.server.sudoku_api import sudoku_answer
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.reply import Reply
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from examples import demo, memorize
from tests.command import Call, Result, caller
from tests.taught import GENERATION, taught_config
from tests.text import small

SOLUTION = "987514632316782495524693871832971546765428319149356728671849253498235167253167984"
PUZZLE = "087500632000700000504690800000001006065420319100300728000009050090200160003007980"
OTHER = "000000000000003085001020000000507000004000100090000000500000073002010000000040009"
NO_GRID = SudokuResult(
    puzzle=PUZZLE, solution=None, converged=True, steps=90, restarts=0, seconds=1.0, reply=""
)
SHOWN = "· 8 7 │ 5 · · │ 6 3 2"  # its first row
CANVAS, STEPS = 96, 300
HERE = ["--device", "cpu", "--dtype", "float32", "--seed", "1"]
FIELDS = {
    *("puzzle", "solution", "solved", "steps", "seconds"),
    *("restarts", "converged", "mode", "pinned", "seed"),
}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capsys, ["sudoku"])


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one token a cell that has learnt one puzzle."""
    directory = tmp_path_factory.mktemp("solver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "MERGES", [*small.MERGES, *(("▁", d) for d in "0123456789")])
        small.make_backend().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(small.TEMPLATE, encoding="utf-8")
    tokenizer = Tokenizer.load(directory)
    config = replace(
        taught_config(),
        vocab_size=tokenizer.vocab_size,
        canvas_length=CANVAS,
        sliding_window=64,
        max_position_embeddings=512,
    )
    model = random_model(config, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memorize, "COPIES", 2)  # a long canvas: fewer of them are quicker
        for _ in memorize.memorize(model, [lesson(tokenizer)], STEPS):
            pass
    # What is learnt in seconds is never known as surely as what a trained model knows.
    generation = replace(GENERATION, max_new_tokens=CANVAS, confidence_threshold=0.1)
    save_checkpoint(Checkpoint(model=model, generation=generation), directory, overwrite=True)
    return directory


def lesson(tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    message = Message(role="user", content=grid.prompt_text(PUZZLE))
    prompt = ChatTemplate(small.TEMPLATE, tokenizer).prompt([message])
    reply = grid.reply_slots(tokenizer).fill([int(cell) - 1 for cell in SOLUTION])
    ending = reply + [tokenizer.control_ids["<eos>"]] * (CANVAS - len(reply))
    return torch.tensor(prompt.ids), torch.tensor(ending)


@pytest.fixture(scope="module")
def engine(solver: Path) -> Engine:
    return Engine.load(solver, device="cpu", dtype="float32")


# --- the solving itself


@pytest.mark.parametrize("pinned", [True, False])
def test_a_known_puzzle_is_solved_from_its_text(engine: Engine, pinned: bool) -> None:
    [one] = solve(engine, [PUZZLE.replace("0", ".")], SudokuParams(pinned=pinned, restarts=8))
    assert one.solution == SOLUTION and one.is_right and one.converged
    assert (one.puzzle, one.restarts) == (PUZZLE, 0)
    assert 0 < one.steps < 16 and one.seconds > 0


def test_ar_mode_writes_the_same_grid_token_by_token(engine: Engine) -> None:
    [one] = solve(engine, [PUZZLE], SudokuParams(mode="ar", restarts=8))
    assert one.solution == SOLUTION and one.converged
    assert one.reply.strip() == grid.grid_text(SOLUTION)
    assert (one.steps, one.restarts) == (len(grid.reply_slots(engine.tokenizer).ids), 0)


def test_the_demo_shows_what_was_written_also_where_it_is_no_grid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for solution, reply in ((SOLUTION, grid.grid_text(SOLUTION)), (None, "5 3 cats")):
        demo.print_grid(replace(NO_GRID, solution=solution, reply=reply))
        said = capsys.readouterr().out
        assert reply in said
        assert ("right" in said, "no grid" in said) == (solution is not None, solution is None)


def test_givens_are_pinned_where_the_reply_has_them(engine: Engine) -> None:
    layout = grid.reply_slots(engine.tokenizer)
    assert (len(layout.ids), canvas_length(layout)) == (90, 96)
    options = sudoku_task(engine, PUZZLE, 0, SudokuParams()).params
    ids = layout.fill([int(cell) - 1 for cell in SOLUTION])
    assert options.canvas_length == 96
    assert len(options.pins.positions) == 81 - PUZZLE.count("0")
    assert all(
        ids[p] == t for p, t in zip(options.pins.positions, options.pins.tokens, strict=True)
    )
    assert options.pins == givens(PUZZLE, layout)
    free = sudoku_task(engine, PUZZLE, 0, SudokuParams(pinned=False))
    assert free.params.pins.positions == ()


def test_pinned_givens_stand_on_every_canvas(engine: Engine) -> None:
    layout = grid.reply_slots(engine.tokenizer)
    pins = givens(OTHER, layout)
    events = list(engine.follow(solve_program(engine, OTHER, SudokuParams(drafts=True))))
    assert isinstance(events[-1], SudokuResult) and not events[-1].is_right
    for draft in events[:-1]:
        assert isinstance(draft, Draft)
        assert [draft.guess[position] for position in pins.positions] == list(pins.tokens)


def test_only_what_does_not_converge_is_begun_again(engine: Engine) -> None:
    hasty = Engine(engine.model, engine.tokenizer, engine.template, engine.generation_config)
    hasty.sampler = replace(
        engine.sampler, max_denoising_steps=1
    )  # no canvas converges in one step
    [one] = solve(hasty, [PUZZLE], SudokuParams(restarts=3))
    assert (one.converged, one.restarts, one.steps) == (False, 3, 4)
    prompts = [sudoku_task(hasty, PUZZLE, n, SudokuParams()).prompt for n in range(4)]
    assert one.prompt_tokens == sum(len(prompt.ids) for prompt in prompts)
    params = SudokuParams(restarts=3)  # as the server counts them in `usage`
    [done] = hasty.run_all([sudoku_answer(hasty, solve_program(hasty, PUZZLE, params), params)])
    assert done.prompt_tokens == one.prompt_tokens
    [one] = solve(hasty, [PUZZLE])
    assert (one.converged, one.restarts, one.steps) == (False, 0, 1)
    # Converged but wrong, and a restart would be free to find the right one: it is not made.
    easy = replace(engine.sampler.rule, confidence_threshold=1e9, stability_threshold=0)
    hasty.sampler = replace(engine.sampler, rule=easy)
    [one] = solve(hasty, [OTHER], SudokuParams(restarts=3))
    assert (one.converged, one.restarts, one.is_right) == (True, 0, False)


def test_every_attempt_has_noise_of_its_own(engine: Engine) -> None:
    noises = [
        sudoku_task(engine, puzzle, restarts, SudokuParams(seed=seed)).noise
        for puzzle in (PUZZLE, OTHER)
        for restarts in range(3)
        for seed in (0, 1)
    ]
    assert len({(noise.seed, noise.choice) for noise in noises}) == 12


def attempt_done(text: str, *, converged: bool) -> Done:
    """Return the end of an attempt with this reply."""
    return Done(
        reply=Reply(answer=text),
        ids=(),
        prompt_tokens=1,
        blocks=1,
        steps=3,
        seconds=0.5,
        seed=0,
        mode="diffusion",
        unconverged_blocks=int(not converged),
    )


def test_a_new_attempt_asks_in_another_form_and_reads_the_grid_back(engine: Engine) -> None:
    layout, params = grid.reply_slots(engine.tokenizer), SudokuParams(restarts=8)
    forms = []
    for reply in ("grid", "no grid"):
        program = solve_program(engine, PUZZLE, params)
        [first] = next(program)
        [second] = program.send([attempt_done("", converged=False)])
        assert first.prompt.ids != second.prompt.ids
        form = attempt_form(PUZZLE, params.seed, 1)
        assert second.params.pins == givens(form.write(PUZZLE), layout)
        assert form.write(PUZZLE) != PUZZLE and form not in forms
        forms.append(attempt_form(PUZZLE, params.seed, 2))
        with pytest.raises(StopIteration) as stop:
            # A solution of the other form is a solution of the puzzle when it is read back.
            solved = grid.grid_text(form.write(SOLUTION))
            program.send([attempt_done(solved if reply == "grid" else reply, converged=True)])
        result = stop.value.value
        assert (result.restarts, result.steps, result.seconds) == (1, 6, 1.0)
        assert result.solution == (SOLUTION if reply == "grid" else None)
    assert forms[0] == forms[1], "the same seed asks in the same forms"
    program = solve_program(engine, PUZZLE, params)
    next(program)
    prompts = {program.send([attempt_done("", converged=False)])[0].prompt.ids for _ in range(3)}
    assert len(prompts) == 3


def test_only_the_last_attempt_may_take_long(engine: Engine) -> None:
    def max_steps(engine: Engine, restarts: int, params: SudokuParams) -> int:
        sampler = sudoku_task(engine, PUZZLE, restarts, params).params.sampler
        assert sampler is not None
        return sampler.max_denoising_steps

    twice = SudokuParams(restarts=2)
    assert [max_steps(engine, n, twice) for n in range(3)] == [MAX_STEPS, MAX_STEPS, MAX_LAST_STEPS]
    assert max_steps(engine, 0, SudokuParams()) == MAX_LAST_STEPS
    brief = Engine(engine.model, engine.tokenizer, engine.template, engine.generation_config)
    brief.sampler = replace(engine.sampler, max_denoising_steps=5)
    assert max_steps(brief, 0, SudokuParams()) == 5


def test_the_canvas_of_a_new_attempt_is_shown_as_the_puzzle_is_written(engine: Engine) -> None:
    hasty = Engine(engine.model, engine.tokenizer, engine.template, engine.generation_config)
    hasty.sampler = replace(engine.sampler, max_denoising_steps=1)
    layout = grid.reply_slots(engine.tokenizer)
    pins = givens(PUZZLE, layout)
    params = SudokuParams(restarts=2, drafts=True)
    events = list(hasty.follow(solve_program(hasty, PUZZLE, params)))
    drafts = [event for event in events if isinstance(event, Draft)]
    assert len(drafts) >= 3
    for draft in drafts:
        assert [draft.ids[place] for place in pins.positions] == list(pins.tokens)
        cells = [draft.guess_tokens[place].strip() for place in layout.positions]
        assert all(given in ("0", cell) for given, cell in zip(PUZZLE, cells, strict=True))
        held = [place for place, is_pinned in enumerate(draft.pinned) if is_pinned]
        assert held == list(pins.positions)
        said = [engine.tokenizer.decode([draft.guess[place]]).strip() for place in layout.positions]
        pairs = list(zip(said, cells, strict=True))
        assert all(one == other for one, other in pairs if one in grid.DIGITS)


def test_many_puzzles_keep_their_order_and_what_they_give_alone(engine: Engine) -> None:
    few = Engine(
        engine.model, engine.tokenizer, engine.template, engine.generation_config, max_batch_size=2
    )
    puzzles = [OTHER, PUZZLE, "0" * 81, PUZZLE, OTHER]
    together = solve(few, puzzles, SudokuParams(restarts=1, seed=3))
    assert [one.puzzle for one in together] == puzzles
    alone = [solve(engine, [puzzle], SudokuParams(restarts=1, seed=3))[0] for puzzle in puzzles]
    for one, other in zip(together, alone, strict=True):
        assert replace(one, seconds=0) == replace(other, seconds=0)
    assert not few.scheduler.requests


def test_drafts_are_reported_on_request_and_leaving_cancels(engine: Engine) -> None:
    events = engine.follow(solve_program(engine, PUZZLE, SudokuParams(drafts=True)))
    draft = next(events)
    assert isinstance(draft, Draft) and sum(draft.pinned) == 36
    events.close()
    assert not engine.scheduler.requests
    kinds = [type(e) for e in engine.follow(solve_program(engine, PUZZLE, SudokuParams()))]
    assert kinds == [SudokuResult]


def test_a_canvas_too_small_takes_no_pins(checkpoint: Path) -> None:
    small_engine = Engine.load(checkpoint, device="cpu", dtype="float32")
    with pytest.raises(UsageError, match=r"canvas holds 16 tokens.*--no-pin"):
        solve(small_engine, [PUZZLE])
    with pytest.raises(UsageError, match="the context holds 256"):
        solve(small_engine, [PUZZLE], SudokuParams(pinned=False))


# --- the command


def test_the_grid_is_printed(call: Call, solver: Path) -> None:
    result = call(PUZZLE, "-m", solver, *HERE)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "9 8 7 │ 5 1 4 │ 6 3 2" and lines[3] == "──────┼───────┼──────"
    assert "".join(c for line in lines[:11] for c in line if c.isdigit()) == SOLUTION
    assert lines[11].startswith("solved; ") and "steps" in lines[11]


def test_json_has_the_promised_fields(call: Call, solver: Path) -> None:
    result = call(PUZZLE.replace("0", "."), OTHER, "-m", solver, *HERE, "--json")
    assert (result.code, result.err, result.out.count("\n")) == (1, "", 1)
    one, other = json.loads(result.out)
    assert one.keys() == other.keys() == FIELDS
    assert (one["puzzle"], one["solution"], one["solved"]) == (PUZZLE, SOLUTION, True)
    assert (one["mode"], one["pinned"], one["seed"]) == ("diffusion", True, 1)
    assert (one["converged"], one["restarts"], other["solved"]) == (True, 0, False)
    assert one["steps"] > 0 and 0 < one["seconds"] < 60


def test_an_unsolved_puzzle_is_a_result_with_exit_code_one(call: Call, solver: Path) -> None:
    result = call(OTHER, PUZZLE, "-m", solver, *HERE, "--restarts", "1")
    assert (result.code, result.err) == (1, "")
    assert result.out.endswith("1 of 2 solved\n")
    assert "not solved" in result.out or "no grid in the reply" in result.out


@pytest.mark.parametrize(
    ("restarts", "reply", "want"),
    [(0, "5 3 cats\n", "5 3 cats"), (1, "5 3 cats", SHOWN), (0, " ", SHOWN)],
)
def test_a_reply_that_is_no_grid_is_shown_as_it_was_written(
    restarts: int, reply: str, want: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = replace(NO_GRID, restarts=restarts, reply=reply)
    SudokuReport(SudokuParams(), 1, as_json=False).add(0, one)
    said = capsys.readouterr().out
    assert said.startswith(want) and "no grid in the reply" in said


def test_ar_mode_is_there_to_compare(call: Call, solver: Path) -> None:
    result = call(PUZZLE, "-m", solver, *HERE, "--mode", "ar", "--json")
    [one] = json.loads(result.out)
    assert (result.code, one["mode"], one["pinned"], one["steps"]) == (0, "ar", False, 90)


def test_show_without_a_terminal_draws_nothing(call: Call, solver: Path) -> None:
    shown = call(PUZZLE, "-m", solver, *HERE, "--show", "--json", "--no-pin")
    assert (shown.code, shown.err) == (0, "")
    assert json.loads(shown.out)[0]["pinned"] is False


def test_puzzles_come_from_files_and_pipes(call: Call, solver: Path, tmp_path: Path) -> None:
    path = tmp_path / "puzzles.txt"
    path.write_text(f"{PUZZLE} {SOLUTION}\n\n{PUZZLE.replace('0', '.')}\n")
    listed = json.loads(call(path, "-m", solver, *HERE, "--json").out)
    assert [one["puzzle"] for one in listed] == [PUZZLE, PUZZLE]
    piped = call("-", "-m", solver, *HERE, "--json", stdin=f"{PUZZLE}\n".encode())
    assert json.loads(piped.out)[0]["solution"] == SOLUTION


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As Ctrl-C would when so many puzzles are done, in whatever order."""

    whole = Engine.as_completed

    def some(self: Engine, programs: Any) -> Iterator[tuple[int, Any]]:
        for number, result in enumerate(whole(self, programs), start=1):
            yield result
            if number == count:
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "as_completed", some)


def test_an_interrupt_loses_nothing_that_is_solved(
    call: Call, solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, 2)  # the first one takes longest: others are there before it
    args = [OTHER, PUZZLE, PUZZLE, OTHER, "-m", solver, *HERE]
    result = call(*args)
    assert result.code == 130
    assert result.err == "dgemma: interrupted after 2 of 4 puzzles, 2 solved\n"
    assert result.out.count("9 8 7 │ 5 1 4 │ 6 3 2") == 2
    assert "puzzle 2: solved; " in result.out and "puzzle 3: solved; " in result.out
    assert "of 4 solved" not in result.out
    result = call(*args, "--json")
    assert result.code == 130 and result.err.startswith("dgemma: interrupted after 2 of 4")
    assert [one["solution"] for one in json.loads(result.out)] == [SOLUTION, SOLUTION]


def test_an_interrupt_before_anything_is_solved_says_so(
    call: Call, solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: CanvasView, __: Draft) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CanvasView, "draw", interrupt)
    result = call(PUZZLE, "-m", solver, *HERE, "--show")
    assert result == Result(130, "", "dgemma: interrupted after 0 of 1 puzzle, 0 solved\n")


def test_grids_are_printed_as_they_are_solved(solver: Path, tmp_path: Path) -> None:
    path = tmp_path / "puzzles.txt"
    path.write_text(f"{PUZZLE}\n" * 5000)
    # Where the tests run in the background, their children are born deaf to Ctrl-C.
    hear = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{hear}; from dgemma.cli import main; main()"
    command = [sys.executable, "-c", program, "sudoku", str(path), "-m", str(solver), *HERE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "9 8 7 │ 5 1 4 │ 6 3 2\n"
        process.send_signal(signal.SIGINT)
        # Not communicate(): it passes over what came with the first line and is read already.
        out, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    # A grid that was being printed is printed again.
    solved = len(set(re.findall(r"^puzzle (\d+): solved; ", out, flags=re.MULTILINE)))
    assert 0 < solved < 5000
    assert err == f"dgemma: interrupted after {solved} of 5000 puzzles, {solved} solved\n"


@pytest.mark.parametrize(
    ("args", "phrase"),
    [
        ([PUZZLE[:80]], "80 cells"),
        (["x" * 81], "holds 'x'"),
        (["8" + PUZZLE[1:]], "two 8s in row 1"),
        (["nowhere.txt"], "'nowhere.txt' is neither a file nor a puzzle"),
        (["x" * 5000], "neither a file nor a puzzle"),
        ([PUZZLE, "--mode", "hybrid"], "use diffusion or ar"),
        ([PUZZLE, "--mode", "ar", "--pin"], "leave out --pin"),
        ([PUZZLE, "--mode", "ar", "--show", "--restarts", "8"], "out --restarts and --show"),
        ([PUZZLE, "--restarts", "-1"], "0 or more"),
        ([PUZZLE, "--seed", "-1"], "seed is -1"),
        (["-"], "stdin holds no puzzle"),
        ([], "PUZZLE"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_wrong_call_is_refused_in_one_sentence(call: Call, args: list[str], phrase: str) -> None:
    result = call(*args, "-m", "never/loaded")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert result.err.startswith("dgemma: ") and phrase in result.err


def test_a_bad_line_of_a_file_is_named(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "puzzles.txt"
    path.write_text(f"{PUZZLE}\n{PUZZLE[:-1]}\n")
    assert "puzzles.txt, line 2: a puzzle has 80 cells" in call(path).err
    path.write_bytes(b"\xff\xfe")
    assert "is not a text file" in call(path).err


@pytest.mark.skipif(not NANO_DIRECTORY.is_dir(), reason="this build has no built-in model")
def test_the_built_in_model_solves_a_puzzle_it_has_not_seen() -> None:
    [one] = solve(Engine.load("nano", device="cpu"), [PUZZLE], SudokuParams(restarts=8))
    assert one.is_right
