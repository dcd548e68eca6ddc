"""Arms on a tiny model that knows its answers, the rating page, and the command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dgemma.engine import Engine
from dgemma.errors import UsageError
from dgemma.eval.arms import ArmAnswer, EngineArm, Shown, Updates, parse_arm, swept_arms
from dgemma.eval.bench import BenchParams, BenchRun, EngineSource, run_bench
from dgemma.eval.break_even import break_even_json, text_row, time_lengths
from dgemma.eval.checks import CheckSpec
from dgemma.eval.machine import Machine
from dgemma.eval.numbers import cells
from dgemma.eval.rating import answer_pairs, rating_page, read_ratings
from dgemma.eval.report import html_report, markdown_report
from dgemma.eval.workload import BenchCase, ProgramKind, Workload
from tests.eval.conftest import CALL, MIDDLE, PREFIX, SUFFIX, without_denoiser


def task(name: str, prompt: str, to: str, program: ProgramKind = "generate") -> Workload:
    case = BenchCase(prompt=prompt, checks=(CheckSpec.read("exact", {"to": to}, "here"),))
    return Workload(
        name=name, title=name, area="code", program=program, max_tokens=24, cases=(case,)
    )


CALL_TASK = task("call", "call", CALL)
FILL_TASK = replace(
    task("fill", f"{PREFIX}<|fill|>{SUFFIX}", PREFIX + MIDDLE + SUFFIX, "fill"), single_line=True
)


def collect(updates: Updates) -> tuple[list[Shown], ArmAnswer]:
    shown = []
    while True:
        try:
            shown.append(next(updates))
        except StopIteration as stop:
            return shown, stop.value


def run(engine: Engine, *arms: str, out: Path | None = None, workloads: object = None) -> BenchRun:
    params = BenchParams(
        workloads=(CALL_TASK,) if workloads is None else workloads,  # type: ignore[arg-type]
        arms=tuple(map(parse_arm, arms)),
        rounds=2,
        attempts=1,
        warm_up=False,
        out=out,
    )
    machine = Machine(torch.device("cpu"), "float32")
    return run_bench(EngineSource(lambda spec: engine), "knowing", machine, params)


def test_diffusion_and_ar_give_the_known_answer_and_its_true_counts(knowing: Engine) -> None:
    found = {cell.arm: cell for cell in cells(run(knowing, "diffusion", "ar"))}
    for cell in found.values():
        assert cell.accepted is not None and cell.accepted.value == 1.0, cell.reasons
        assert cell.flags == () and cell.ram_bytes is not None and cell.ram_bytes > 1 << 20
    assert found["diffusion"].steps_per_block is not None
    assert found["ar"].blocks_per_second == 0.0


def test_a_diffusion_arm_shows_drafts_and_when_each_position_converged(knowing: Engine) -> None:
    arm = EngineArm(parse_arm("diffusion"), knowing)
    shown, answer = collect(arm.answer(CALL_TASK, CALL_TASK.cases[0], 0, retry=False))
    assert answer.text == CALL and "".join(shown[-1].pieces) == CALL
    assert any(update.num_promised == 0 for update in shown)
    assert answer.steps is not None and answer.converged_at
    assert 1 <= max(answer.converged_at) <= answer.steps
    quiet = EngineArm(parse_arm("diffusion:drafts=off"), knowing)
    shown, same = collect(quiet.answer(CALL_TASK, CALL_TASK.cases[0], 0, retry=False))
    assert same.text == CALL and same.converged_at == ()
    assert all(update.num_promised == len(update.pieces) for update in shown)


def test_settings_of_an_arm_reach_the_sampler(knowing: Engine) -> None:
    arm = EngineArm(parse_arm("diffusion:steps=3,bound=2.5,t_max=0.9,t_min=0.2"), knowing)
    assert arm.sampler is not None
    assert (arm.sampler.max_denoising_steps, arm.sampler.t_max, arm.sampler.t_min) == (3, 0.9, 0.2)
    assert arm.sampler.rule.entropy_bound == 2.5  # type: ignore[attr-defined]
    _, answer = collect(arm.answer(CALL_TASK, CALL_TASK.cases[0], 0, retry=False))
    assert answer.steps is not None and answer.blocks is not None
    assert answer.steps <= 3 * (answer.blocks + 2)  # a failed canvas is done again twice
    with pytest.raises(UsageError, match="entropy or confidence"):
        EngineArm(parse_arm("diffusion:rule=best"), knowing)


def test_both_modes_fill_a_hole_and_count_what_they_wrote(knowing: Engine) -> None:
    for text in ("diffusion", "ar"):
        arm = EngineArm(parse_arm(text), knowing)
        _, answer = collect(arm.answer(FILL_TASK, FILL_TASK.cases[0], 0, retry=False))
        assert answer.text.startswith(PREFIX) and answer.text.endswith(SUFFIX)
        assert answer.written is not None and answer.text == PREFIX + answer.written + SUFFIX


def test_a_greedy_answer_is_drawn_when_it_is_tried_again(knowing: Engine) -> None:
    arm = EngineArm(parse_arm("ar"), knowing)
    assert arm._params(CALL_TASK, 1, retry=False).temperature is None
    assert arm._params(CALL_TASK, 1, retry=True).temperature == 0.8


def test_a_checkpoint_without_a_denoiser_is_refused_and_said_so(knowing: Engine) -> None:
    (cell,) = cells(run(without_denoiser(knowing), "diffusion"))
    assert "no denoiser" in cell.refused


def test_ratings_are_blind_and_come_back_to_their_arms(knowing: Engine, tmp_path: Path) -> None:
    done = run(knowing, "diffusion", "ar")
    changed = [replace(a, text=f"{a.text} {a.arm == 'ar'}") for a in done.attempts]
    done = BenchRun(done.facts, changed)
    page, pairs = rating_page(done), answer_pairs(done)
    assert len(pairs) == 2 and '"diffusion"' not in page and '"arm"' not in page
    path = tmp_path / "ratings.json"
    choices = {n: "a" if pair.a.arm == "diffusion" else "b" for n, pair in enumerate(pairs)}
    path.write_text(json.dumps({"ratings": choices}), encoding="utf-8")
    (found,) = read_ratings(done, path)
    assert (found.arm, found.other, found.wins, found.losses) == ("ar", "diffusion", 0, 2)
    path.write_text('{"ratings": {"7": "a"}}', encoding="utf-8")
    with pytest.raises(UsageError, match="of another run"):
        read_ratings(done, path)


def test_the_command_writes_a_report_and_compares_runs(
    knowing_directory: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    checks = f"checks = [{{ name = 'exact', to = '{CALL}' }}]\n"
    mine.write_text(f'title = "t"\narea = "code"\n[[case]]\nprompt = "call"\n{checks}', "utf-8")
    out = tmp_path / "out"
    options = ["--model", knowing_directory, "--device", "cpu", "--dtype", "float32"]
    options += ["--workloads", mine, "--rounds", "2", "--out", out, "--json"]
    data = json.loads(dgemma("bench", *options))
    assert [cell["accepted"]["value"] for cell in data["cells"]] == [1.0, 1.0]
    names = {"facts.json", "report.html", "report.json", "report.md", "runs.jsonl"}
    assert {path.name for path in out.iterdir()} == names
    lines = dgemma("bench", "compare", out, out).splitlines()
    assert len(lines) == 2 and all("x1.00" in line for line in lines)


def dgemma(*arguments: object) -> str:
    command = [sys.executable, "-c", "from dgemma.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_break_even_times_every_length_in_three_modes(knowing: Engine) -> None:
    found = list(time_lengths(knowing, 1, (1, 4)))
    assert [row.limit for row in found[:2]] == [1, 4] and len(found) > 4
    for row in found:
        better = min(row.seconds["diffusion"], row.seconds["ar"])
        assert row.ratio == row.seconds["auto"] / better > 0
        assert row.tokens["ar"] <= row.limit and text_row(row).startswith(row.name)
    assert max(found[0].tokens.values()) == 1
    assert knowing.break_even is not None
    written = markdown_report(run(knowing, "diffusion", "auto"))
    assert "## Break-even" in written and "| 512 |" in written
    report = break_even_json(knowing.break_even, found)
    assert report["worst"] == max(row.ratio for row in found)
    assert report["measured"] == len(report["rows"]) == len(found)


def test_a_sweep_is_every_combination_and_its_steps_are_drawn(knowing: Engine) -> None:
    arms = swept_arms(["steps=2,12", "bound=0.1,4"])
    assert len(arms) == 4 and arms[1] == "diffusion:steps=2,bound=4"
    assert [parse_arm(arm).settings["steps"] for arm in arms] == [2, 2, 12, 12]
    assert swept_arms([]) == []
    for wrong in ("steps", "steps=", "steps=1,,2"):
        with pytest.raises(UsageError, match="has no values"):
            swept_arms([wrong])
    page = html_report(run(knowing, *arms, "ar"))
    assert "Acceptance against steps" in page and page.count("diffusion:steps=2,bound=4") > 3
    assert "Acceptance against steps" not in html_report(run(knowing, "diffusion", "ar"))
