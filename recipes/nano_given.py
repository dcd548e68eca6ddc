"""Pairs that the data directory holds already: instructions, questions, calls, task collections."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from recipes import nano_raw
from recipes.nano_split import Benchmarks, Call, HeldCode, words

Pair = dict[str, str]

CALL_REQUEST = "Write the function call for this dialogue as JSON."
CALL_REQUESTS = [
    CALL_REQUEST,
    CALL_REQUEST,
    "Give the function call as JSON.",
    "Which function should the assistant call now? Reply with JSON only.",
]
DIALOGUE = 1600  # characters of a dialogue that a prompt shows, the last ones
PER_TASK = 350
LONGEST_DEFINITION = 500


def compact(value: object) -> str:
    """JSON as the model writes it: no spaces between tokens."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def call_pair(call: Call, request: str = CALL_REQUEST) -> Pair:
    lines = call.dialogue.splitlines()
    while len(lines) > 1 and sum(map(len, lines)) > DIALOGUE:
        lines.pop(0)
    return {"prompt": request + "\n\n" + "\n".join(lines), "reply": compact(call.call)}


def json_calls(calls: Sequence[Call], rng: Random) -> Iterator[Pair]:
    for call in calls:
        yield call_pair(call, rng.choice(CALL_REQUESTS))


def instruct(data: Path, benchmarks: Benchmarks, held: HeldCode) -> Iterator[Pair]:
    """The teacher's pairs: code of no benchmark and no held-out problem, JSON without spaces."""
    for record in nano_raw.read_lines(data / "train" / "instruct.jsonl.xz"):
        prompt, reply = record["prompt"].strip(), record["reply"].strip()
        if nano_raw.UNSUITED.search(f"{prompt} {reply}"):
            continue
        if record["kind"] == "code":
            reply = reply.expandtabs(4)
            if benchmarks.hold(reply) or held.named(reply) or not nano_raw.clean_code(reply):
                continue
        if record["kind"] == "json":
            reply = compact(json.loads(reply))
        yield {"prompt": prompt, "reply": nano_raw.plain(reply) if is_prose(record) else reply}


def is_prose(record: dict[str, str]) -> bool:
    return record["kind"] not in ("code", "json") and "\n" not in record["reply"]


def tasks(data: Path, rng: Random) -> Iterator[Pair]:
    """Natural Instructions with a short definition, some of every task."""
    text = (data / "train" / "ni_gen_defs.json").read_text(encoding="utf-8")
    definitions = {name: entry["def"] for name, entry in json.loads(text).items()}
    by_task: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, given, wanted in nano_raw.read_lines(data / "train" / "ni_gen.jsonl.xz"):
        if len(given) + len(wanted) <= 900 and len(wanted.strip()) >= 2 and in_words(given):
            by_task[name].append((given, wanted))
    for name, pairs in by_task.items():
        definition = shorten(" ".join(definitions[name].split()))
        for given, wanted in rng.sample(pairs, min(PER_TASK, len(pairs))):
            if not nano_raw.UNSUITED.search(f"{given} {wanted}"):
                yield {"prompt": f"{definition}\n\n{given.strip()}", "reply": wanted.strip()}


def in_words(text: str) -> bool:
    """Long lists of numbers and letters are no reading for a small language model."""
    letters = sum(map(len, re.findall(r"[A-Za-z]{2,}", text)))
    return letters >= 0.6 * len(re.sub(r"\s", "", text))


def shorten(text: str) -> str:
    """Whole sentences up to the longest definition a small model should read."""
    if len(text) <= LONGEST_DEFINITION:
        return text
    cut = text.rfind(". ", 0, LONGEST_DEFINITION)
    return text[: cut + 1] if cut > 0 else text[:LONGEST_DEFINITION]


def questions(data: Path, texts: Sequence[str], rng: Random) -> Iterator[Pair]:
    """Questions on tales whose answer stands, word for word, in the paragraph most like them."""
    paragraphs = [p for text in texts for p in text.split("\n\n") if 80 <= len(p) <= 1500]
    bags = [set(words(paragraph)) for paragraph in paragraphs]
    where: dict[str, list[int]] = defaultdict(list)
    for index, bag in enumerate(bags):
        for word in bag:
            where[word].append(index)
    for record in nano_raw.read_lines(data / "train" / "fairytaleqa_qa.jsonl.xz"):
        question, answer = nano_raw.plain(record["q"]), nano_raw.plain(record["a"]).strip(" .")
        best = best_paragraph(set(words(f"{question} {answer}")), where, len(bags))
        core = re.sub(r"^(the|a|an|his|her|because) ", "", answer.lower())
        if best is None or len(core) < 3 or core not in paragraphs[best].lower():
            continue
        reply = answer[:1].upper() + answer[1:] + "."
        forms = [f"{paragraphs[best]}\n\n{question}", f"{question}\n\n{paragraphs[best]}"]
        yield {"prompt": rng.choice(forms), "reply": reply}


def best_paragraph(asked: set[str], where: dict[str, list[int]], total: int) -> int | None:
    """The paragraph that shares the rarest words; None where hardly any is shared."""
    scores: Counter[int] = Counter()
    for word in asked:
        places = where.get(word, ())
        if places and len(places) < total / 8:
            for index in places:
                scores[index] += round(100 / len(places) ** 0.5)
    return max(scores, key=lambda index: (scores[index], -index)) if scores else None
