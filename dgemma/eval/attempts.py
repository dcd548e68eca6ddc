"""One attempt at a case by an arm: timeline, what a user saw, and acceptance."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import SequenceMatcher
from typing import Any

from dgemma.errors import DgemmaError, UsageError
from dgemma.eval.arms import Arm, ArmAnswer, Shown, Updates
from dgemma.eval.checks import CheckedAnswer
from dgemma.eval.machine import Machine, ResourceUse
from dgemma.eval.workload import BenchCase, Workload

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A line of runs.jsonl. Seconds count from the submission of the request."""

    workload: str
    case: int
    arm: str
    round: int
    attempt: int  # from 0; later ones are retries of the same request
    seed: int
    seconds: float = 0.0
    first_visible: float | None = None  # any text on the screen, drafts included
    first_usable: float | None = None  # final text
    longest_gap: float = 0.0  # longest time without a visible change
    burst: int = 0  # most characters that one update added or changed
    taken_back: float | None = None  # share of shown words that were replaced later
    text: str = ""
    tokens: int | None = None  # recounted from the text
    reported_tokens: int | None = None
    steps: int | None = None
    blocks: int | None = None
    finish: str = ""
    fault: str = ""
    reasons: tuple[str, ...] = ()  # reasons of failed checks
    is_accepted: bool = False
    refused: str = ""  # this arm cannot do the task
    error: str = ""  # it failed
    ram_bytes: int | None = None
    vram_bytes: int | None = None
    joules: float | None = None
    celsius: float | None = None
    probe_seconds: float = 0.0  # seconds of a fixed amount of work, right before
    prefill_seconds: float | None = None
    converged_at: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        return self.workload, self.case, self.arm, self.round, self.attempt

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Attempt":
        """Read a line of runs.jsonl; one of another version is refused."""
        unknown = sorted(raw.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise UsageError(f"runs.jsonl has {unknown[0]!r}, which this version does not know")
        lists = {k: tuple(v) for k, v in raw.items() if isinstance(v, list)}
        return cls(**{**raw, **lists})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ScreenUpdate:
    """All text on the screen at a time, and how much of it is promised."""

    seconds: float
    text: str
    num_promised: int  # characters


def make_attempt(
    arm: Arm, workload: Workload, case: BenchCase, first: Attempt, tools: "tuple[Machine, Clock]"
) -> Attempt:
    """Run one attempt. `first` holds its names; an error is recorded, not raised."""
    machine, clock = tools
    first = replace(first, probe_seconds=machine.probe())
    timeline: list[ScreenUpdate] = []
    usage = ResourceUse()
    started = clock()
    try:
        with machine.measuring() as usage:
            updates = arm.answer(workload, case, first.seed, retry=first.attempt > 0)
            answer = _watch(updates, timeline, clock, started)
            seconds = clock() - started
        swapped = _swapped(arm, workload, case, first)
    except UsageError as error:
        return replace(first, refused=str(error))
    except (DgemmaError, RuntimeError, MemoryError) as error:
        return replace(first, seconds=clock() - started, error=f"{type(error).__name__}: {error}")
    checked = CheckedAnswer(text=answer.text, original=case.prompt, swapped=swapped)
    reasons = [f"{check.name}: {why}" for check in case.checks if (why := check.reason(checked))]
    return replace(
        first,
        **asdict(usage),
        **screen_measures(timeline, seconds),
        seconds=seconds,
        text=answer.text,
        tokens=arm.count_tokens(answer.text if answer.written is None else answer.written),
        reported_tokens=answer.reported_tokens,
        steps=answer.steps,
        blocks=answer.blocks,
        finish=answer.finish,
        fault=answer.fault,
        reasons=tuple(reasons),
        is_accepted=not reasons,
        prefill_seconds=answer.prefill_seconds,
        converged_at=answer.converged_at,
    )


def _watch(
    updates: Updates, timeline: list[ScreenUpdate], clock: Clock, started: float
) -> ArmAnswer:
    while True:
        try:
            shown: Shown = next(updates)
        except StopIteration as stop:
            answer: ArmAnswer = stop.value
            return answer
        promised = sum(map(len, shown.pieces[: shown.num_promised]))
        timeline.append(ScreenUpdate(clock() - started, "".join(shown.pieces), promised))


def _swapped(arm: Arm, workload: Workload, case: BenchCase, first: Attempt) -> str | None:
    """Answer the case with its evidence swapped, off the clock."""
    if case.swap is None:
        return None
    other = replace(case, prompt=case.swapped_prompt)
    updates = arm.answer(workload, other, first.seed, retry=first.attempt > 0)
    return _watch(updates, [], time.perf_counter, 0.0).text


def screen_measures(timeline: Sequence[ScreenUpdate], seconds: float) -> dict[str, Any]:
    """Return the measures of a timeline, named as in `Attempt`.

    An answer shown only at its end is visible and usable then.
    """
    visible = usable = None
    gap, last, burst, shown_words, gone_words = 0.0, 0.0, 0, 0, 0
    before = ""
    for update in timeline:
        if update.text == before:
            continue
        gap, last = max(gap, update.seconds - last), update.seconds
        burst = max(burst, _num_changed(before, update.text))
        new, gone = _word_changes(before, update.text)
        shown_words, gone_words = shown_words + new, gone_words + gone
        if visible is None and update.text.strip():
            visible = update.seconds
        before = update.text
    for update in timeline:
        if usable is None and update.text[: update.num_promised].strip():
            usable = update.seconds
    return {
        "first_visible": seconds if visible is None else visible,
        "first_usable": seconds if usable is None else usable,
        "longest_gap": max(gap, seconds - last),
        "burst": burst,
        "taken_back": gone_words / shown_words if shown_words else None,
    }


def _num_changed(before: str, after: str) -> int:
    """Count the characters of `after` that are not where `before` had them."""
    same = sum(a == b for a, b in zip(before, after, strict=False))
    return max(len(before), len(after)) - same


def _word_changes(before: str, after: str) -> tuple[int, int]:
    """Count words that were added, and words that were taken back."""
    old, new = before.split(), after.split()
    if after.startswith(before):  # a word may have grown
        return len(new) - len(old), 0
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    return len(new) - same, len(old) - same
