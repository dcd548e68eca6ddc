"""The bench's numbers against arms whose latency, acceptance and retries are known exactly."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from dgemma.errors import DgemmaError, UsageError
from dgemma.eval.arms import ArmAnswer, ArmSpec, Shown, Updates, parse_arm
from dgemma.eval.attempts import Attempt, ScreenUpdate, screen_measures
from dgemma.eval.bench import BenchParams, BenchRun, EngineSource, read_run, run_bench
from dgemma.eval.charts import Point, pareto_front, seconds
from dgemma.eval.checks import CheckSpec
from dgemma.eval.decision import advise, decision_rule, fit_matrix, preset_findings, warnings_of
from dgemma.eval.machine import Machine
from dgemma.eval.numbers import cells, quantile, repeats_itself
from dgemma.eval.report import html_report, markdown_report, report_json
from dgemma.eval.workload import BenchCase, ProgramKind, Workload

WORDS = " ".join(f"w{n}" for n in range(20))


@dataclass
class FakeArm:
    """Answers `answers` in turn, each after `latency` seconds of a clock that it moves itself."""

    spec: ArmSpec
    clock: "FakeClock"
    latency: float
    answers: Sequence[str]
    factor: float = 1.0  # of the token count that it reports
    error: Exception | None = None
    steps: int = 8
    seeds: list[int] = field(default_factory=list)

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def answer(self, workload: Workload, case: BenchCase, seed: int, *, retry: bool) -> Updates:
        text = self.answers[len(self.seeds) % len(self.answers)]
        self.seeds.append(seed)
        if self.error is not None:
            raise self.error
        self.clock.now += self.latency / 4
        yield Shown(("draft",), 0)
        self.clock.now += self.latency / 2
        yield Shown((text,), 1)
        self.clock.now += self.latency / 4
        tokens = round(self.factor * len(text.split()))
        return ArmAnswer(text=text, reported_tokens=tokens, steps=self.steps, blocks=2)


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class FakeSource(EngineSource):
    """Hands out arms that are made already."""

    def __init__(self, made: Sequence[FakeArm]) -> None:
        super().__init__(load=lambda spec: pytest.fail("no engine is needed"))
        self.made = {arm.spec.text: arm for arm in made}

    def arms(self, group: Sequence[ArmSpec]) -> list[FakeArm]:  # type: ignore[override]
        return [self.made[spec.text] for spec in group]


def workload(
    name: str = "w", area: str = "code", program: ProgramKind = "generate", to: str = WORDS
) -> Workload:
    check = CheckSpec.read("exact", {"to": to}, "here")
    case = BenchCase(prompt="p", checks=(check,))
    return Workload(name=name, title=name.title(), area=area, program=program, cases=(case,))


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine(torch.device("cpu"), "float32")
    yield made
    made.close()


def arm(
    text: str,
    clock: FakeClock,
    latency: float,
    answers: Sequence[str] = (WORDS,),
    factor: float = 1.0,
) -> FakeArm:
    return FakeArm(parse_arm(text), clock, latency, answers, factor)


def bench(
    machine: Machine, arms: Sequence[FakeArm], *, out: Path | None = None, **changes: object
) -> BenchRun:
    params = BenchParams(
        workloads=(workload(),),
        arms=tuple(a.spec for a in arms),
        rounds=5,
        attempts=3,
        warm_up=False,
        out=out,
    )
    for made in arms:  # the warm-up takes one answer
        made.answers = ("", *made.answers) if len(made.answers) == 1 else made.answers
    return run_bench(
        FakeSource(arms),
        "fake",
        machine,
        replace(params, **changes),
        arms[0].clock,  # type: ignore[arg-type]
    )


def test_known_latency_and_acceptance_give_the_known_numbers(machine: Machine) -> None:
    """Attempts of 2 s, of which every third is accepted: 6 s to an accepted answer, exactly."""
    clock = FakeClock()
    slow = arm("diffusion", clock, 2.0, (WORDS, "no", "no"))  # the warm-up takes the first
    params = BenchParams(
        workloads=(workload(),), arms=(slow.spec,), rounds=4, attempts=3, warm_up=True
    )
    (cell,) = cells(run_bench(FakeSource([slow]), "fake", machine, params, clock))
    assert (cell.num_requests, cell.num_attempts, cell.retries_per_request) == (4, 12, 2.0)
    assert cell.accepted is not None and cell.accepted.value == pytest.approx(1 / 3)
    accepted = cell.seconds_to_accepted
    assert accepted is not None
    assert (accepted.value, accepted.low, accepted.high) == pytest.approx((6.0, 6.0, 6.0))
    assert cell.seconds_p50 is not None and cell.seconds_p50.value == pytest.approx(2.0)
    assert cell.seconds_p95 == pytest.approx(2.0)
    assert (cell.visible_p50, cell.usable_p50, cell.gap_p50) == pytest.approx((0.5, 1.5, 1.0))
    assert cell.steps_per_block == 4.0 and cell.blocks_per_second == pytest.approx(1.0)
    assert cell.tokens_per_pass == pytest.approx(22 / 24)
    # Each 2 s: 1, 1 and 20 words.
    assert cell.tokens_per_second == pytest.approx(22 / 6)
    assert slow.seeds[1:] == [100 * r + n for r in range(4) for n in range(3)]
    assert cell.reasons == {"exact": 8}


def test_an_arm_that_is_never_accepted_takes_for_ever(machine: Machine) -> None:
    clock = FakeClock()
    (cell,) = cells(bench(machine, [arm("ar", clock, 1.0, ("no", "no"))], rounds=3, attempts=2))
    assert cell.num_attempts == 6
    assert cell.seconds_to_accepted is not None and math.isinf(cell.seconds_to_accepted.value)


def test_a_text_that_repeats_itself_is_flagged(machine: Machine) -> None:
    clock = FakeClock()
    loop = arm("diffusion", clock, 1.0, ("the frog sat " * 20, "the frog sat " * 20))
    run = bench(machine, [loop], rounds=2, attempts=1)
    (cell,) = cells(run)
    assert cell.flags == ("repetition collapse in 2 of 2 answers",)
    assert any("repetition collapse" in warning for warning in warnings_of(run))
    assert not repeats_itself(WORDS)


@pytest.mark.parametrize(("factor", "is_caught"), [(3.0, True), (0.5, True), (1.1, False)])
def test_a_wrong_token_count_is_caught_by_recounting(
    machine: Machine, factor: float, is_caught: bool
) -> None:
    clock = FakeClock()
    cheat = arm("diffusion", clock, 2.0, (WORDS, WORDS), factor)
    (cell,) = cells(bench(machine, [cheat], rounds=2, attempts=1))
    assert cell.tokens_per_second == pytest.approx(10.0)  # of 20 words, whatever is reported
    assert bool(cell.flags) is is_caught


def test_arms_take_turns_and_the_order_rotates(machine: Machine) -> None:
    clock = FakeClock()
    arms = [arm("diffusion", clock, 1.0), arm("ar", clock, 1.0)]
    run = bench(machine, arms, rounds=3, attempts=1)
    order = [attempt.arm for attempt in run.attempts]
    assert order == ["diffusion", "ar", "ar", "diffusion", "diffusion", "ar"]


def test_an_error_is_a_failure_and_a_refusal_is_none(machine: Machine) -> None:
    clock = FakeClock()
    fails, refuses = arm("diffusion", clock, 1.0), arm("ar", clock, 1.0)
    fails.error, refuses.error = DgemmaError("it broke"), UsageError("AR cannot do it")
    run = bench(machine, [fails, refuses], rounds=2, attempts=2)
    broken, impossible = cells(run)
    assert broken.failures == ("DgemmaError: it broke",) and broken.num_attempts == 4
    assert impossible.refused == "AR cannot do it" and impossible.num_attempts == 0
    assert "not possible" in html_report(run)


def test_a_run_is_resumed_where_it_was_cut(machine: Machine, tmp_path: Path) -> None:
    clock = FakeClock()
    first = bench(machine, [arm("ar", clock, 1.0)], out=tmp_path, rounds=9, attempts=1, seconds=3.0)
    assert first.facts["was_cut"] and 0 < len(first.attempts) < 9
    with (tmp_path / "runs.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"workload": "w", "ca')  # the interrupt came while a line was written
    params = {"out": tmp_path, "rounds": 9, "attempts": 1}
    again = arm("ar", clock, 1.0, (WORDS, WORDS))
    second = bench(machine, [again], **params)  # type: ignore[arg-type]
    assert len(second.attempts) == 9 and second.attempts[: len(first.attempts)] == first.attempts
    assert len(again.seeds) == 1 + 9 - len(first.attempts)  # the warm-up, and what was missing
    assert read_run(tmp_path).attempts == second.attempts
    with pytest.raises(UsageError, match="give another --out"):
        bench(machine, [arm("diffusion", clock, 1.0)], **params)  # type: ignore[arg-type]


def test_the_verdict_names_the_faster_mode_where_it_is_clear(machine: Machine) -> None:
    clock = FakeClock()
    arms = [arm("diffusion", clock, 1.0, (WORDS, WORDS)), arm("ar", clock, 3.0, (WORDS, WORDS))]
    run = bench(machine, arms, rounds=6, attempts=1)
    rows = {row.area: row for row in fit_matrix(run)}
    assert rows["code"].winner == "diffusion" and rows["code"].ratio == pytest.approx(3.0)
    assert rows["code"].probability == 1.0
    assert rows["chat"].winner == "not measured"
    (rule,) = decision_rule(list(rows.values()))["rules"]
    assert (rule["area"], rule["use"]) == ("code", "diffusion")
    sentences = advise(run)
    assert len(sentences) == 3
    assert "worth it for code infill and function bodies (1 s against 3 s" in sentences[0]


def test_too_few_requests_are_no_verdict(machine: Machine) -> None:
    clock = FakeClock()
    arms = [arm("diffusion", clock, 1.0, (WORDS, WORDS)), arm("ar", clock, 3.0, (WORDS, WORDS))]
    run = bench(machine, arms, rounds=2, attempts=1)
    assert {row.winner for row in fit_matrix(run)} == {"too few", "not measured"}
    assert "Fewer than 3 requests decide nothing" in advise(run)[2]


def test_a_preset_is_judged_beside_quality(machine: Machine) -> None:
    """Half of the steps with the same answers; an eighth of the steps with wrong ones."""
    clock, names = FakeClock(), ("quality", "balanced", "fast")
    answers = {"quality": WORDS, "balanced": WORDS, "fast": "no"}
    arms = [arm(f"diffusion:preset={name}", clock, 1.0, (answers[name],) * 2) for name in names]
    for made, steps in zip(arms, (8, 4, 1), strict=True):
        made.steps = steps
    run = bench(machine, arms, rounds=8, attempts=1)
    balanced, fast = preset_findings(run)
    assert "balanced takes 2.00 times fewer steps" in balanced
    assert "accepts 100% of 8 attempts, quality 100% of 8: within the noise" in balanced
    assert "fast takes 8.00 times fewer" in fast and "worse, beyond the noise" in fast
    for text in (html_report(run), markdown_report(run)):
        assert balanced in text
    arms[1].steps = 7
    (slow, _) = preset_findings(bench(machine, arms, rounds=8, attempts=1))
    assert "1.14 times fewer steps per block than quality, less than the 1.5 wanted" in slow
    without = bench(machine, [arm("diffusion", clock, 1.0)])
    assert preset_findings(without) == []


def test_no_difference_is_no_verdict(machine: Machine) -> None:
    clock = FakeClock()
    arms = [arm("diffusion", clock, 1.0, (WORDS, WORDS)), arm("ar", clock, 1.05, (WORDS, WORDS))]
    rows = fit_matrix(bench(machine, arms, rounds=6, attempts=1))
    assert {row.winner for row in rows} == {"either", "not measured"}


def test_a_higher_rate_of_tokens_that_is_slower_to_the_answer_is_warned_of(
    machine: Machine,
) -> None:
    clock = FakeClock()
    wordy = arm("diffusion", clock, 4.0, (WORDS * 8, WORDS * 8))
    brief = arm("ar", clock, 1.0, (WORDS, WORDS))
    warnings = warnings_of(bench(machine, [wordy, brief], rounds=5, attempts=1))
    assert any("diffusion has the most tokens per second, but ar is first" in w for w in warnings)


def test_the_reports_are_whole_and_load_nothing(machine: Machine, tmp_path: Path) -> None:
    clock = FakeClock()
    arms = [arm("diffusion", clock, 1.0), arm("ar", clock, 3.0, ("<b>no</b>", "no"))]
    run = bench(machine, arms, rounds=2, attempts=1, out=tmp_path)
    page, text = html_report(run), markdown_report(run)
    assert "http" not in page.replace("http://www.w3.org", "") and "<script" not in page
    assert page.count("<svg") >= 2 and "not measured" in page and "Before you believe" in page
    assert "| code infill and function bodies |" in text
    data = json.loads(json.dumps(report_json(run), allow_nan=False))
    assert (
        len(data["fit_matrix"]) == 12 and data["cells"][1]["seconds_to_accepted"]["value"] is None
    )


# --- parts


def test_a_time_line_gives_its_measures() -> None:
    line = [
        ScreenUpdate(1.0, "the cat", 0),
        ScreenUpdate(2.0, "the cat", 0),  # nothing changed
        ScreenUpdate(5.0, "the dog sat", 0),
        ScreenUpdate(6.0, "the dog sat down", 16),
    ]
    found = screen_measures(line, 8.0)
    assert found["first_visible"] == 1.0 and found["first_usable"] == 6.0
    assert found["longest_gap"] == 4.0 and found["burst"] == 7
    assert found["taken_back"] == pytest.approx(1 / 5)  # "cat" of the, cat, dog, sat, down
    grown = screen_measures([ScreenUpdate(1.0, "Hel", 3), ScreenUpdate(2.0, "Hello you", 9)], 2.0)
    assert grown["taken_back"] == 0.0
    assert (
        screen_measures([], 3.0)["first_usable"] == 3.0 == screen_measures([], 3.0)["longest_gap"]
    )


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(map(float, range(1, 101))), 0.95) == 95.0
    assert quantile([], 0.95) is None


def test_only_points_that_none_beats_are_on_the_front() -> None:
    points = [Point(n, x, y, 0, 1, 0) for n, x, y in (("a", 1, 0.5), ("b", 2, 0.4), ("c", 3, 0.9))]
    assert [point.label for point in pareto_front(points)] == ["a", "c"]


def test_seconds_are_written_for_people() -> None:
    assert [seconds(v) for v in (0.0123, 1.5, 250.0, math.inf, None)] == [
        *("12.3 ms", "1.5 s", "250 s", "never", "–")
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", "'fast' is not known; use diffusion"),
        ("diffusion:speed=3", "'speed=3' is not known"),
        ("diffusion:steps=x", "steps is 'x'; it must be of int"),
        ("ar:steps=3", "'steps=3' is not known; use draft"),
        ("endpoint:model=a", "lacks url="),
    ],
)
def test_a_wrong_arm_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_arm(text)
    assert words in str(refusal.value)


def test_an_attempt_of_another_version_is_refused() -> None:
    known = Attempt(workload="w", case=0, arm="ar", round=0, attempt=0, seed=0)
    assert Attempt.from_json(json.loads(json.dumps(known.to_json()))) == known
    with pytest.raises(UsageError, match="'color'"):
        Attempt.from_json({**known.to_json(), "color": 1})
