"""A blind A/B page for the human judgement, and the shares that its ratings give.

The page holds pairs of answers to the same request and nothing that tells the arms apart; which one
is A is drawn from the run's seed, so that it can be found again when the ratings are read.
"""

import json
from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import combinations
from pathlib import Path
from random import Random

from dgemma.errors import UsageError
from dgemma.eval.attempts import Attempt
from dgemma.eval.bench import BenchRun
from dgemma.eval.measure import wilson
from dgemma.eval.workload import find_workloads

CHOICES = ("a", "b", "tie")
MAX_PAIRS = 40


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one request, in the order in which they are shown."""

    a: Attempt
    b: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Ratings of one arm beside another; ties count for neither."""

    arm: str
    other: str
    wins: int
    losses: int
    ties: int

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.wins, self.wins + self.losses)


def answer_pairs(run: BenchRun) -> list[AnswerPair]:
    """Return pairs of first attempts of two arms, shuffled by the run's seed."""
    rng = Random(f"rate {run.facts['seed']}")
    firsts = [a for a in run.attempts if a.attempt == 0 and a.text and not a.error]
    requests: dict[tuple[object, ...], list[Attempt]] = {}
    for attempt in sorted(firsts, key=lambda a: a.key):
        requests.setdefault((attempt.workload, attempt.case, attempt.round), []).append(attempt)
    pairs = [
        AnswerPair(*rng.sample(pair, 2))
        for group in requests.values()
        for pair in combinations(group, 2)
        if pair[0].text != pair[1].text
    ]
    rng.shuffle(pairs)
    return pairs[:MAX_PAIRS]


def rating_page(run: BenchRun) -> str:
    """Return the page; it loads nothing and sends nothing."""
    pairs = answer_pairs(run)
    if not pairs:
        raise UsageError("the run has no two arms with different answers to one request")
    prompts = {w.name: w for w in find_workloads([])}
    shown = []
    for pair in pairs:
        workload = prompts.get(pair.a.workload)
        case = workload.cases[pair.a.case] if workload else None
        task = pair.a.workload if case is None else f"{case.instruction}\n{case.prompt}".strip()
        shown.append({"task": task, "a": pair.a.text, "b": pair.b.text})
    data = json.dumps(shown, ensure_ascii=False).replace("</", "<\\/")
    title = escape(f"{run.facts['model']}, {run.facts['date']}")
    return PAGE.replace("TITLE", title).replace("PAIRS", data)


def read_ratings(run: BenchRun, path: Path) -> list[Preference]:
    """Read what the page saved, and count it for each pair of arms."""
    try:
        ratings = json.loads(path.read_text(encoding="utf-8"))["ratings"]
        choices = {int(number): str(choice) for number, choice in ratings.items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} holds no ratings: {error}; save them on the page") from None
    pairs, counts = answer_pairs(run), Counter[tuple[str, str, str]]()
    for number, choice in choices.items():
        if choice not in CHOICES or not 0 <= number < len(pairs):
            raise UsageError(f"{path} rates pair {number} with {choice!r}; it is of another run")
        pair = pairs[number]
        arm, other = sorted((pair.a.arm, pair.b.arm))
        better = {"a": pair.a.arm, "b": pair.b.arm, "tie": ""}[choice]
        counts[arm, other, "ties" if not better else "wins" if better == arm else "losses"] += 1
    return [
        Preference(
            arm=arm,
            other=other,
            wins=counts[arm, other, "wins"],
            losses=counts[arm, other, "losses"],
            ties=counts[arm, other, "ties"],
        )
        for arm, other in sorted({key[:2] for key in counts})
    ]


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<title>Which answer is better?</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root{color-scheme:light dark;--line:#8885;--a:#4453d6}
body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:0 auto;padding:30px 20px}
pre{white-space:pre-wrap;font:inherit;margin:0}.task{opacity:.75;border-left:3px solid var(--line);
padding-left:14px;max-height:30vh;overflow:auto}.pair{display:grid;grid-template-columns:1fr 1fr;
gap:18px;margin:18px 0}.pair button{text-align:left;padding:16px;border:1px solid var(--line);
border-radius:12px;background:none;color:inherit;font:inherit;cursor:pointer;min-height:140px}
button:hover,button:focus{border-color:var(--a);outline:none}nav button{padding:8px 16px;
border-radius:9px;border:1px solid var(--line);background:none;color:inherit;cursor:pointer}
@media(max-width:700px){.pair{grid-template-columns:1fr}}
</style>
<h1>Which answer is better?</h1><p>TITLE. Keys: a, b, t for a tie, z to go back.</p>
<p id="count"></p><pre class="task" id="task"></pre>
<div class="pair"><button id="a"><pre></pre></button><button id="b"><pre></pre></button></div>
<nav><button id="tie">No difference</button> <button id="back">Back</button>
<button id="save">Save ratings.json</button></nav>
<script>
const pairs = PAIRS, ratings = {}; let at = 0;
const $ = id => document.getElementById(id);
function show() {
  const done = at >= pairs.length;
  $("count").textContent = done ? "Done. Save the ratings." : `${at + 1} of ${pairs.length}`;
  const pair = done ? {task: "", a: "", b: ""} : pairs[at];
  $("task").textContent = pair.task;
  $("a").firstChild.textContent = pair.a; $("b").firstChild.textContent = pair.b;
}
function rate(choice) { if (at < pairs.length) { ratings[at] = choice; at++; show(); } }
function back() { if (at > 0) { at--; show(); } }
$("a").onclick = () => rate("a"); $("b").onclick = () => rate("b");
$("tie").onclick = () => rate("tie"); $("back").onclick = back;
$("save").onclick = () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ratings})]));
  link.download = "ratings.json"; link.click();
};
addEventListener("keydown", event => {
  const choice = {a: "a", b: "b", t: "tie"}[event.key];
  if (choice) rate(choice); else if (event.key === "z") back();
});
show();
</script></html>
"""
