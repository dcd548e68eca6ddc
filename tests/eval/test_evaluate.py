"""`dgemma eval`: missing data is reported, a failing task stops no other."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dgemma.cli import main
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import UsageError
from dgemma.eval.answers import EvalPrompt, generate_all, show_progress
from dgemma.eval.data import HELDOUT, SHARED, Data
from dgemma.eval.evaluate import TASKS, EvalParams, evaluate, parse_tasks
from tests.eval.conftest import CALL

HERE = ["--device", "cpu", "--dtype", "float32"]


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `dgemma eval`; returns exit code, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dgemma", "eval", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return command


def places(data: Data) -> list[str]:
    return ["--heldout", str(data.heldout), "--data", str(data.shared)]


def test_the_command_writes_its_report(
    knowing_directory: Path, data: Data, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "new" / "report.json", tmp_path / "report.md"
    call = ["--model", str(knowing_directory), "--tasks", "json_calls,sudoku", "--limit", "1"]
    call += [*HERE, *places(data), "--out", str(out), "--markdown", str(page)]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, shown, log = run(*call)
    assert code == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    exact = [m for m in report["measures"] if m["name"] == "name and arguments"]
    assert [(m["mode"], m["value"], m["count"]) for m in exact] == [
        ("diffusion", 1.0, 1),
        ("ar", 1.0, 1),
    ]
    assert report["seed"] == 0 and report["limit"] == 1 and report["dtype"] == "float32"
    assert set(report["seconds"]) == {"json_calls", "sudoku"} and not report["failed"]
    assert "100.0 % [20.7, 100.0]" in shown
    assert "has no sudoku_*.txt" in shown, "a skipped task says why"
    assert "has no sudoku_" in page.read_text(encoding="utf-8")
    assert "json_calls: " in log


def test_a_task_that_fails_stops_no_other(
    knowing_directory: Path, data: Data, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data.shared / "eval" / "BLiMP.zip").write_bytes(b"not a zip")
    out = tmp_path / "report.json"
    call = ["--model", str(knowing_directory), "--tasks", "blimp,fix", *HERE, *places(data)]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, log = run(*call, "--out", str(out))
    assert code == 1
    report = json.loads(out.read_text(encoding="utf-8"))
    assert "BadZipFile" in report["failed"]["blimp"]
    assert any(m["task"] == "fix" and m["value"] == 1.0 for m in report["measures"])
    assert "Traceback" in log


def test_a_run_that_measures_nothing_fails(
    knowing_directory: Path, tmp_path: Path, run: Run
) -> None:
    nowhere = ["--heldout", str(tmp_path / "no"), "--data", str(tmp_path / "nor")]
    call = ["--model", str(knowing_directory), "--tasks", "blimp,fix", *HERE, *nowhere]
    code, out, err = run(*call)
    assert code == 1
    assert f"{tmp_path / 'nor'} has no eval/BLiMP.zip; name" in out
    assert "nothing was measured" in err and "docs/evaluation.md" in err


def test_a_stranger_without_files_is_told_which_and_gets_what_needs_none(
    knowing_directory: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "some" / "place"
    bare.mkdir(parents=True)
    monkeypatch.chdir(bare)
    call = ["--model", str(knowing_directory), "--limit", "1", *HERE]
    code, out, err = run(*call)
    assert (code, err) == (0, "")
    notes = {line.split()[0]: line for line in out.splitlines() if " skipped " in line}
    lacking = {"samples": "infill.jsonl", "blimp": "eval/BLiMP.zip", "fix": "fix_stories.jsonl"}
    assert set(notes) == set(TASKS)
    for task, file in lacking.items():
        option = "--data" if file.startswith("eval/") else "--heldout"
        told = f" {file} is needed; name a directory that has it by {option} (docs/evaluation.md"
        assert told in notes[task]
    assert "out/nano" not in out and "shared" not in out
    assert "--- samples: story, seed 0" in out


def test_the_usual_directories_are_found_where_they_are(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "checkout"
    (place / "out" / "nano").mkdir(parents=True)
    monkeypatch.chdir(place)
    assert Data.find(None, None) == Data(None, None)
    (place / "out" / "nano" / "heldout").symlink_to(data.heldout)  # type: ignore[arg-type]
    (data.shared / "data").mkdir()  # type: ignore[operator]
    assert Data.find(None, None) == Data(HELDOUT, SHARED)
    assert Data.find(None, place) == Data(HELDOUT, place)


def test_json_is_there_before_the_next_task(
    knowing: Engine, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"

    def interrupted(*args: object) -> list[object]:
        raise KeyboardInterrupt

    monkeypatch.setitem(TASKS, "fix", interrupted)  # type: ignore[arg-type]
    settings = EvalParams(data=data, tasks=("json_calls", "fix"), out=out, batch_size=8)
    with pytest.raises(KeyboardInterrupt):
        evaluate(knowing, "tiny", settings)
    assert list(json.loads(out.read_text(encoding="utf-8"))["seconds"]) == ["json_calls"]


WRONG_CALLS = {
    "--tasks poetry": "poetry is not known; use sudoku,",
    "--limit 0": "limit is 0",
    "--batch-size -1": "batch size is -1",
    "--model /no/such/place": "/no/such/place",
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
def test_a_wrong_call_is_refused_before_any_work(wrong: str, run: Run) -> None:
    code, _, err = run(*wrong.split(), *HERE)
    assert code == 2
    assert WRONG_CALLS[wrong] in err


def test_task_names_are_read_with_commas() -> None:
    assert parse_tasks("fix, blimp") == ("fix", "blimp")
    assert parse_tasks("all") == parse_tasks("") == tuple(TASKS)
    with pytest.raises(UsageError):
        EvalParams(data=Data(Path(), Path()), tasks=("fix", "nothing"))


def test_the_command_prints_a_table_or_json_and_is_quiet_beside(
    knowing_directory: Path, data: Data, run: Run
) -> None:
    call = ["--model", str(knowing_directory), "--tasks", "fix,stories", *HERE, *places(data)]
    code, out, err = run(*call)
    assert code == 0 and err == ""
    assert "errors corrected" in out
    assert "has no train/stories15M_f16.bin.xz; name a directory that has it by --data" in out
    code, out, err = run(*call, "--json")
    assert code == 0 and err == ""
    assert json.loads(out)["measures"][0]["task"] == "fix"


def test_the_command_fails_in_one_sentence_or_in_its_table(
    knowing_directory: Path, data: Data, run: Run
) -> None:
    code, _, err = run("--tasks", "poetry")
    assert code == 2 and err.startswith("dgemma: ") and err.count("\n") == 1
    (data.shared / "eval" / "BLiMP.zip").write_bytes(b"not a zip")
    call = ["--model", str(knowing_directory), "--tasks", "blimp", *HERE, *places(data)]
    code, out, err = run(*call)
    assert code == 1 and "BadZipFile" in out and "Traceback" not in err


def test_answers_come_in_order_and_those_that_do_not_fit_are_none(knowing: Engine) -> None:
    options = SamplingParams(mode="ar", max_tokens=20, seed=0)
    prompts = ["x " * 600, *["call"] * 11, "x " * 600]
    done = generate_all(knowing, [EvalPrompt(prompt, options) for prompt in prompts], "test")
    assert [one and one.text for one in done] == [None, *[CALL] * 11, None]
    assert not knowing.scheduler.requests and not len(knowing.prefixes)


def test_the_counter_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_progress("work", 1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_progress("work", 1, 2)
    show_progress("work", 2, 2)
    assert capsys.readouterr().err == "\r  work: 1/2 \r  work: 2/2 \n"
