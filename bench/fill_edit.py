"""Measure `fill` and `edit`: quality, locality and cost, compared with AR.

    python bench/fill_edit.py [--sets humaneval prose fix rename warm correct] [--limit 20]
        [--model DIR] [--prompt-style base] [--effort fast thorough] [--lengths known searched]
        [--max-tokens 64] [--strength 0.5] [--heldout DIR] [--data DIR] [--seed 0] [--device cpu]
        [--threads 1] [--samples 3]

humaneval  HumanEval single-line infilling: exact match, and the problems' own tests. Generated code
           runs in `dgemma.eval.infill`; see there what that does not hold off
prose      words and sentences taken out of held-out stories: exact match, and likeness to the
           original (difflib's ratio over words)
           For both: known length (the hole has as many tokens as the original), searched length
           (nothing is told but the longest a hole may be, `--max-tokens`; 0 tells not even that),
           each with every effort in turn, and AR, which writes greedily after the prefix: to the
           end of the line, or as many tokens as the original had
fix        stories with planted errors (fix_stories.jsonl), as much of them as one canvas holds, and
           `edit` with the file's own instruction, beside whole answers of both modes
rename     sentences of held-out stories in which a name or a noun is to be replaced: likewise
           For both: edits made, texts exactly as the original, right words kept. Locality, against
           the spans in which the text and its original differ: how much of the text was opened, how
           much would have been enough, and what share of the changed characters is near those spans
warm       the same renames answered from noise, and from the old text as the first canvas: steps,
           only where both made the change
correct    plain stories converged from noise; then 5 % of their tokens are flipped, at random, or
           words to their opposites (not/now, he/she, ...). Repaired by further steps from that
           canvas, and by `edit` without an instruction. AR cannot take a token back: of the
           eight tokens it writes greedily after the error, the share that it would have written
           without it

The table goes to stdout, progress to stderr.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

import torch

from dgemma import (
    EditParams,
    EditResult,
    Engine,
    FillParams,
    FillResult,
    SamplingParams,
    edit,
    fill,
    rewrite,
)
from dgemma.device import describe_device
from dgemma.eval.answers import set_batch_size
from dgemma.eval.data import HELDOUT, SHARED, Data
from dgemma.eval.infill import HoleCase, continue_prefixes, is_exact, read_humaneval, run_tests
from dgemma.eval.measure import SHARE, Case, Measure, table
from dgemma.eval.replies import check_fix, text_of
from dgemma.eval.spans import draw_hole, rename_word, sentence_spans
from dgemma.programs.infill.candidates import finished_canvas
from dgemma.programs.infill.infill import EFFORTS, PROMPT_STYLES, PromptStyle
from dgemma.programs.infill.search import FillEffort
from dgemma.text.chat import Prompt

MAX_STORY = 800  # characters of a story
MAX_PROSE_HOLE = 32  # tokens
MAX_TOKENS = 64  # of a hole whose length is searched
LENGTHS = ("known", "searched")
MAX_DISTANCE = 12  # characters around a differing span that still count as near it
FLIPPED = 0.05
AFTER_ERROR = 8  # tokens that AR writes after an error
PREFIX = 40  # tokens before the converged canvas
OPPOSITES = [
    *[("not", "now"), ("he", "she"), ("his", "her"), ("is", "was"), ("up", "down")],
    *[("good", "bad"), ("big", "little"), ("can", "could"), ("all", "no"), ("had", "has")],
]
NAMES = "Anna Ben Clara David Emma Finn Grace Henry Iris Jack Kate Leo Mia Nora Oscar".split()
NOUNS = "house river table garden bread horse window bridge mountain letter".split()


@dataclass(frozen=True, slots=True)
class Settings:
    data: Data
    limit: int
    seed: int
    prompt_style: PromptStyle | None
    efforts: tuple[FillEffort, ...]
    lengths: tuple[str, ...]
    max_tokens: int | None
    strength: float | None
    samples: int


# --- holes


def humaneval(engine: Engine, settings: Settings) -> list[Measure]:
    holes, tests = read_humaneval(settings.data, settings.limit)
    measures = []
    for name, lines, filled in every_way(engine, holes, settings, "humaneval"):
        case = Case("humaneval", "ar" if name == "ar" else "diffusion", f"{name}: ")
        both = zip(lines, holes, strict=True)
        measures += [
            case.share("exact", [is_exact(line, hole) for line, hole in both]),
            case.share("tests pass", run_tests(holes, lines, tests)),
            *costs(case, filled),
        ]
    return measures


def prose(engine: Engine, settings: Settings) -> list[Measure]:
    rng, holes = Random(settings.seed), list[HoleCase]()
    for record in settings.data.records("stories.jsonl", None):
        text = record["text"][:MAX_STORY]
        span = draw_hole(text, rng)
        if span is None or len(holes) == settings.limit:
            continue
        hole = HoleCase(text[: span[0]], text[span[0] : span[1]], text[span[1] :])
        if len(engine.tokenizer.encode(hole.middle)) <= MAX_PROSE_HOLE:
            holes.append(hole)
    measures = []
    for name, texts, filled in every_way(engine, holes, settings, "prose"):
        both = list(zip(texts, holes, strict=True))
        case = Case("prose", "ar" if name == "ar" else "diffusion", f"{name}: ")
        measures += [
            case.share("exact", [is_exact(text, hole) for text, hole in both]),
            case.mean("likeness", [likeness(text, hole.middle) for text, hole in both], "ratio"),
            *costs(case, filled),
        ]
        measures += [
            case.text(f"sample {i + 1}", f"{hole.middle!r}\n{text!r}")
            for i, (text, hole) in enumerate(both[: settings.samples])
        ]
    return measures


def every_way(
    engine: Engine, holes: Sequence[HoleCase], settings: Settings, label: str
) -> list[tuple[str, list[str], list[FillResult]]]:
    """Fill the holes with known and searched length, each with every effort, and by AR."""
    filled: dict[str, list[FillResult]] = {}
    for number, hole in enumerate(holes):
        size = len(engine.tokenizer.encode(hole.middle))
        for length, effort in product(settings.lengths, settings.efforts):
            options = FillParams(
                lengths=(size,) if length == "known" else None,
                max_tokens=settings.max_tokens,
                single_line=label == "humaneval",
                effort=effort,
                prompt_style=settings.prompt_style,
                seed=settings.seed + number,
            )
            engine.prefixes.clear()  # each pays for its own prefill
            one = fill(engine, [hole.prefix, hole.suffix], options)
            name = f"{length} length, {effort}"
            filled.setdefault(name, []).append(one)
            progress = f"{number + 1}/{len(holes)}, {one.seconds:.2f} s"
            print(f"{label}, {name}: {progress}", file=sys.stderr)
    ways = [(name, [one.holes[0].text for one in many], many) for name, many in filled.items()]
    for name, texts, many in ways:
        print(f"{label}, {name}: {summary(texts, holes, many)}")
    return [
        *ways,
        ("ar", [text or "" for text in continue_prefixes(engine, holes, f"{label}, ar")], []),
    ]


def summary(texts: Sequence[str], holes: Sequence[HoleCase], filled: Sequence[FillResult]) -> str:
    """Median seconds and exact matches of one way, to be read below those of another."""
    exact = sum(is_exact(text, hole) for text, hole in zip(texts, holes, strict=True))
    seconds = median(one.seconds for one in filled)
    return f"median {seconds:.2f} s, {exact} of {len(holes)} exact"


def costs(case: Case, filled: Sequence[FillResult]) -> list[Measure]:
    if not filled:
        return []
    return [
        case.mean("steps of all canvases", [float(one.steps) for one in filled], "steps"),
        case.mean("canvases", [float(one.canvases) for one in filled], "canvases"),
        case.mean("seconds", [one.seconds for one in filled], "seconds"),
    ]


def likeness(text: str, original: str) -> float:
    return SequenceMatcher(None, text.split(), original.split(), autojunk=False).ratio()


# --- edits


@dataclass(frozen=True, slots=True)
class Task:
    instruction: str
    text: str
    original: str

    @property
    def prompt(self) -> str:
        return f"{self.instruction}\n\n{self.text}"


def say(label: str, number: int, count: int) -> None:
    print(f"{label}: {number + 1}/{count}", file=sys.stderr)


# --- tasks


def fixes(engine: Engine, settings: Settings) -> list[Task]:
    """Texts with planted errors: whole sentences of them, as many as a canvas holds."""
    tasks = list[Task]()
    for record in settings.data.records("fix_stories.jsonl", None):
        text, wanted = text_of(record["prompt"]), record["reply"]
        instruction = record["prompt"][: -len(text)].strip()
        cut = shorten(engine, text, wanted)
        if cut is not None and cut[0] != cut[1] and len(tasks) < settings.limit:
            tasks.append(Task(instruction, *cut))
    return tasks


def shorten(engine: Engine, text: str, wanted: str) -> tuple[str, str] | None:
    """The beginnings of a text and its original, to the end of a sentence that both have."""
    room = engine.model.config.canvas_length - 8
    best = None
    for _, stop in sentence_spans(wanted):
        for _, other in sentence_spans(text):
            is_same = text[max(0, other - 20) : other] == wanted[max(0, stop - 20) : stop]
            if is_same and len(engine.tokenizer.encode(wanted[:stop])) <= room:
                best = text[:other], wanted[:stop]
    return best


def renames(engine: Engine, settings: Settings) -> list[Task]:
    rng, tasks = Random(settings.seed), list[Task]()
    for record in settings.data.records("stories.jsonl", None):
        text = " ".join(record["text"][a:b] for a, b in sentence_spans(record["text"])[1:4])
        if not 8 <= len(engine.tokenizer.encode(text)) <= engine.model.config.canvas_length - 16:
            continue
        names = sorted(set(re.findall(r"(?<=[a-z] )[A-Z][a-z]{2,}\b", text)))
        nouns = [noun for noun in NOUNS if re.search(rf"\b{noun}\b", text)]
        old = (names or nouns or [""])[0]
        new = rng.choice([w for w in (NAMES if names else NOUNS) if w not in text])
        if old and len(tasks) < settings.limit:
            tasks.append(Task(f"Change {old} to {new}.", text, rename_word(text, old, new)))
    return tasks


# --- edits


def edits(engine: Engine, settings: Settings, name: str, tasks: Sequence[Task]) -> list[Measure]:
    options = EditParams(strength=settings.strength, seed=settings.seed)
    done = []
    for number, task in enumerate(tasks):
        done.append(edit(engine, task.text, task.instruction, options))
        say(f"{name}, edit", number, len(tasks))
    case = Case(name, "diffusion", "edit: ")
    measures = [
        *quality(case, tasks, [one.text for one in done]),
        *locality(case, tasks, done),
        case.mean("steps of all canvases", [float(one.steps) for one in done], "steps"),
        case.mean("seconds", [one.seconds for one in done], "seconds"),
    ]
    for mode in ("diffusion", "ar"):
        answers = []
        for number, task in enumerate(tasks):
            limit = engine.model.config.canvas_length
            chosen = SamplingParams(mode=mode, seed=settings.seed, max_tokens=limit)
            answers.append(engine.generate(task.prompt, chosen))
            say(f"{name}, {mode}", number, len(tasks))
        case = Case(name, mode, "whole answer: ")
        measures += quality(case, tasks, [one.text for one in answers])
        measures.append(case.mean("steps", [float(one.steps) for one in answers], "steps"))
    measures += [
        Case(name).text(f"sample {i + 1}: {task.instruction}", one.diff() or "(unchanged)")
        for i, (task, one) in enumerate(zip(tasks[: settings.samples], done, strict=False))
    ]
    return measures


def quality(case: Case, tasks: Sequence[Task], texts: Sequence[str]) -> list[Measure]:
    checked = [check_fix(t.text, t.original, text) for t, text in zip(tasks, texts, strict=True)]
    both = zip(texts, tasks, strict=True)
    return [
        case.share("edits made", [hit for one in checked for hit in one.corrected]),
        case.rate(
            "right words kept",
            [(float(c.num_unchanged), float(c.num_right)) for c in checked],
            SHARE,
        ),
        case.share("text exact", [text.strip() == task.original.strip() for text, task in both]),
    ]


def locality(case: Case, tasks: Sequence[Task], done: Sequence[EditResult]) -> list[Measure]:
    opened, enough, near = [], [], []
    for task, one in zip(tasks, done, strict=True):
        gold = differing(task.text, task.original)
        size = float(len(task.text))
        opened.append((float(sum(b - a for a, b in one.opened)), size))
        enough.append((float(sum(b - a for a, b in gold)), size))
        changed = [
            position
            for change in one.changed
            for position in range(change.old_start, max(change.old_end, change.old_start + 1))
        ]
        hits = sum(any(a - MAX_DISTANCE <= p < b + MAX_DISTANCE for a, b in gold) for p in changed)
        near.append((float(hits), float(len(changed))))
    return [
        case.rate("text opened", opened, SHARE),
        case.rate("text that differs from the original", enough, SHARE),
        case.rate(
            "changed characters near those", near, SHARE, f"within {MAX_DISTANCE} characters"
        ),
    ]


def differing(text: str, wanted: str) -> list[tuple[int, int]]:
    matcher = SequenceMatcher(None, text, wanted, autojunk=False)
    return [(a, max(b, a + 1)) for kind, a, b, _, _ in matcher.get_opcodes() if kind != "equal"]


# --- warm starts


def warm(engine: Engine, settings: Settings) -> list[Measure]:
    """Steps to an answer from noise and from the old text, where both made the change."""
    runs = list[Started]()
    tasks = renames(engine, settings)
    for number, task in enumerate(tasks):
        options = SamplingParams(seed=settings.seed, max_tokens=engine.model.config.canvas_length)
        cold = engine.generate(task.prompt, options)
        hot = rewrite(engine, task.prompt, task.text, options)
        sizes = {len(engine.tokenizer.encode(text)) for text in (task.text, task.original)}
        made = is_made(task, cold.text), is_made(task, hot.text)
        exact = tuple(one.text.strip() == task.original.strip() for one in (cold, hot))
        runs.append(Started(len(sizes) == 1, *made, *exact, cold.steps, hot.steps))
        say("warm", number, len(tasks))
    same = [run for run in runs if run.is_same_size]
    return [*started("all: ", runs), *started("as many tokens as before: ", same)]


@dataclass(frozen=True, slots=True)
class Started:
    """A change asked for twice: answered from noise, and from the old text."""

    is_same_size: bool
    cold_made: bool
    warm_made: bool
    cold_exact: bool
    warm_exact: bool
    cold_steps: int
    warm_steps: int


def started(name: str, runs: Sequence[Started]) -> list[Measure]:
    both = [run for run in runs if run.cold_made and run.warm_made]
    pairs = [(float(run.cold_steps), float(run.warm_steps)) for run in both]
    case = Case("warm", "diffusion", name)
    return [
        case.share("changes made from noise", [run.cold_made for run in runs]),
        case.share("changes made from the old text", [run.warm_made for run in runs]),
        case.share("text exact from noise", [run.cold_exact for run in runs]),
        case.share("text exact from the old text", [run.warm_exact for run in runs]),
        case.mean("steps from noise", [cold for cold, _ in pairs], "steps", "both made it"),
        case.mean("steps from the old text", [hot for _, hot in pairs], "steps", "both made it"),
        case.rate("steps from noise / from the old text", pairs, "ratio", "both made it"),
    ]


def is_made(task: Task, text: str) -> bool:
    """True if all that was to change has changed; other words may differ."""
    return all(check_fix(task.text, task.original, text).corrected)


# --- self-correction


def converged(engine: Engine, settings: Settings) -> Iterator[tuple[Prompt, list[int]]]:
    """Yield beginnings of stories, and the canvas that the model converges to after each."""
    length, bos = engine.model.config.canvas_length, engine.model.config.bos_token_id
    count = 0
    for record in settings.data.records("stories.jsonl", 4 * settings.limit):
        ids = engine.tokenizer.encode(record["text"])
        if len(ids) < PREFIX or count == settings.limit:
            continue
        prompt = Prompt(text="", ids=(bos, *ids[:PREFIX]))
        options = SamplingParams(seed=settings.seed, max_tokens=length, retries=0)
        canvas = one_canvas(engine, prompt, options)
        if not any(map(engine.tokenizer.is_control, canvas)):
            count += 1
            yield prompt, canvas


def one_canvas(engine: Engine, prompt: Prompt, options: SamplingParams) -> list[int]:
    """Denoise one canvas; return its tokens."""
    task = engine.generation(prompt, replace(options, max_blocks=1))
    engine.run_all([task])
    return finished_canvas(task)[0]


def correct(engine: Engine, settings: Settings) -> list[Measure]:
    outcomes: dict[str, list[tuple[float, float]]] = {}
    for number, (prompt, right) in enumerate(converged(engine, settings)):
        rng = Random(settings.seed + number)
        for kind, flips in (
            ("random", at_random(engine, right, rng)),
            ("opposite", to_opposites(engine, right)),
        ):
            if flips:
                for name, part in repaired(engine, prompt, right, flips, settings).items():
                    outcomes.setdefault(f"{kind}: {name}", []).append(part)
        say("correct", number, settings.limit)
    return [
        Case("correct", "ar" if "AR" in name else "diffusion").rate(name, parts, SHARE)
        for name, parts in outcomes.items()
    ]


def at_random(engine: Engine, tokens: Sequence[int], rng: Random) -> dict[int, int]:
    positions = rng.sample(range(len(tokens)), max(1, round(FLIPPED * len(tokens))))
    first = len(engine.tokenizer.control_ids) + 256  # text pieces, no single bytes
    return {position: rng.randrange(first, engine.tokenizer.vocab_size) for position in positions}


def to_opposites(engine: Engine, tokens: Sequence[int]) -> dict[int, int]:
    """Every third word that has an opposite of one token, so that the rest still tells."""
    table: dict[int, int] = {}
    for a, b in OPPOSITES:
        pair = [engine.tokenizer.encode(f" {word}") for word in (a, b)]
        if all(len(ids) == 1 for ids in pair):
            table |= {pair[0][0]: pair[1][0], pair[1][0]: pair[0][0]}
    candidates = [position for position, token in enumerate(tokens) if token in table]
    return {position: table[tokens[position]] for position in candidates[::3]}


def repaired(
    engine: Engine, prompt: Prompt, right: Sequence[int], flips: dict[int, int], settings: Settings
) -> dict[str, tuple[float, float]]:
    wrong = [flips.get(position, token) for position, token in enumerate(right)]
    options = SamplingParams(
        seed=settings.seed + 1, max_tokens=len(right), retries=0, initial_canvas=tuple(wrong)
    )
    denoised = one_canvas(engine, prompt, options)
    unflipped = [position for position in range(len(right)) if position not in flips]
    result = {
        "repaired by further steps": share(denoised, right, list(flips)),
        "other tokens unchanged by them": share(denoised, right, unflipped),
    }
    before, text = engine.tokenizer.decode(prompt.ids[1:]), engine.tokenizer.decode(wrong)
    if "\ufffd" not in before + text:
        chosen = EditParams(
            selection=((len(before), len(before + text)),),
            strength=0.5 if settings.strength is None else settings.strength,
            seed=settings.seed,
        )
        corrected = edit(engine, before + text, None, chosen).text[len(before) :]
        edited = engine.tokenizer.encode(corrected)
        aligned_positions = aligned(right, edited)
        hits = sum(p in aligned_positions for p in flips)
        result["repaired by edit"] = (float(hits), float(len(flips)))
        same = sum(p in aligned_positions for p in unflipped)
        result["other tokens unchanged by edit"] = (float(same), float(len(unflipped)))
    position = min(flips)
    continued = [
        write_on(engine, prompt, [*right[:position], token])
        for token in (right[position], flips[position])
    ]
    hits = sum(a == b for a, b in zip(*continued, strict=False))
    result["AR: next tokens as without the error"] = (float(hits), float(AFTER_ERROR))
    result["AR: repaired"] = (0.0, float(len(flips)))
    return result


def share(
    found: Sequence[int], right: Sequence[int], positions: Sequence[int]
) -> tuple[float, float]:
    return float(sum(found[p] == right[p] for p in positions)), float(len(positions))


def aligned(right: Sequence[int], found: Sequence[int]) -> set[int]:
    blocks = SequenceMatcher(None, right, found, autojunk=False).get_matching_blocks()
    return {block.a + i for block in blocks for i in range(block.size)}


def write_on(engine: Engine, prompt: Prompt, ids: Sequence[int]) -> tuple[int, ...]:
    options = SamplingParams(mode="ar", max_tokens=AFTER_ERROR, seed=0)
    return engine.generate(replace(prompt, ids=(*prompt.ids, *ids)), options).ids


SETS: dict[str, Callable[[Engine, Settings], list[Measure]]] = {
    "humaneval": humaneval,
    "prose": prose,
    "fix": lambda engine, given: edits(engine, given, "fix", fixes(engine, given)),
    "rename": lambda engine, given: edits(engine, given, "rename", renames(engine, given)),
    "warm": warm,
    "correct": correct,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--prompt-style", choices=PROMPT_STYLES, help="style of a fill's prompt")
    parser.add_argument("--effort", choices=EFFORTS, nargs="+", default=["thorough"])
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=list(LENGTHS))
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="0: no limit")
    parser.add_argument("--strength", type=float, help="of an edit")
    parser.add_argument("--heldout", type=Path, default=HELDOUT)
    parser.add_argument("--data", type=Path, default=SHARED)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--samples", type=int, default=3)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    engine = Engine.load(given.model, device=given.device, dtype=given.dtype)
    set_batch_size(engine, engine.max_batch_size)
    settings = Settings(
        data=Data(given.heldout, given.data),
        limit=given.limit,
        seed=given.seed,
        prompt_style=given.prompt_style,
        efforts=tuple(given.effort),
        lengths=tuple(given.lengths),
        max_tokens=given.max_tokens or None,
        strength=given.strength,
        samples=given.samples,
    )
    measures = [m for name in given.sets for m in SETS[name](engine, settings)]
    where = describe_device(engine.device)
    print(f"{given.model}, {where}, seed {given.seed}, {given.limit} cases a set")
    print(table(measures))


if __name__ == "__main__":
    main()
