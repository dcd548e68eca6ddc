"""Assistant tasks, with replies checked by rules.

Spans of a given text, citations of numbered sources, rewrites, JSON fields, tool calls, and
conversations that require memory. `python -m recipes.nano.made` writes the held-out cases.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dgemma.config import WHOLE_MODES
from dgemma.engine import Done, Engine, SamplingParams
from dgemma.eval.answers import SPARE_TOKENS, EvalPrompt, generate_all
from dgemma.eval.data import Data
from dgemma.eval.measure import SHARE, Case, Measure
from dgemma.text.messages import Message, ToolCall
from dgemma.train.records import TrainingChat, read_record

LIMIT = 200
CITATION = re.compile(r"\[(\d+)\]")
CALL_TOKENS = 96  # of a call; its length in tokens is not known beforehand


@dataclass(frozen=True, slots=True)
class ChatCase:
    """A conversation, the expected reply, and further data for the check."""

    chat: TrainingChat
    record: dict[str, Any]

    @property
    def text(self) -> str:
        return self.chat.reply if isinstance(self.chat.reply, str) else ""

    @property
    def calls(self) -> Sequence[ToolCall]:
        return self.chat.reply.tool_calls if isinstance(self.chat.reply, Message) else ()


Answered = Sequence[tuple[ChatCase, Done]]
TaskMeasures = Callable[[Case, Answered], list[Measure]]


def assistant_task(name: str, check: TaskMeasures) -> Callable[..., list[Measure]]:
    """Make a task of the held-out file with this name."""

    def task(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
        records = data.records(f"{name}.jsonl", limit or LIMIT)
        cases = [ChatCase(_chat(record), record) for record in records]
        measures = []
        for case, answered, note in _replies(engine, cases, name, seed):
            ended = [done.finish == "stop" for _, done in answered]
            measures += check(case, answered)
            measures.append(case.share("ends by itself", ended, note))
            measures.append(_tokens_per_pass(case, answered))
        return measures

    return task


def _chat(record: dict[str, Any]) -> TrainingChat:
    chat = read_record(record)
    assert isinstance(chat, TrainingChat), "a held-out case is a chat"
    return chat


def _replies(
    engine: Engine, cases: Sequence[ChatCase], task: str, seed: int
) -> Iterator[tuple[Case, Answered, str]]:
    """Reply to all cases in both modes: diffusion with a seed for each, AR greedily."""
    lengths = [
        CALL_TOKENS if one.calls else len(engine.tokenizer.encode(one.text)) for one in cases
    ]
    max_tokens = max(lengths, default=0) + SPARE_TOKENS
    for mode in WHOLE_MODES:
        prompts = [
            EvalPrompt(
                engine.prompt(one.chat.messages, one.chat.tools),
                SamplingParams(mode=mode, max_tokens=max_tokens, seed=seed + number),
            )
            for number, one in enumerate(cases)
        ]
        replies = generate_all(engine, prompts, f"{task}, {mode}")
        answered = [(a, b) for a, b in zip(cases, replies, strict=True) if b is not None]
        missing = len(cases) - len(answered)
        yield Case(task, mode), answered, f"{missing} did not fit the context" if missing else ""


def _tokens_per_pass(case: Case, answered: Answered) -> Measure:
    pairs = [(float(done.tokens), float(done.steps)) for _, done in answered if done.steps]
    return case.rate("tokens per pass", pairs, "tokens")


# --- checks


def normalized(text: str) -> str:
    """Return an answer without case, article and final period."""
    return re.sub(r"^(the|a|an) ", "", text.strip().lower().rstrip("."))


def check_spans(case: Case, answered: Answered) -> list[Measure]:
    """Measure answers with the right span, or that rightly say there is none."""
    exact = [normalized(done.text) == normalized(one.text) for one, done in answered]
    return [case.share("answer exact", exact)]


def check_citations(case: Case, answered: Answered) -> list[Measure]:
    """Measure replies that cite only the right source and contain the answer."""
    cited, answered_right = [], []
    for one, done in answered:
        cited.append(set(CITATION.findall(done.text)) == {one.record["source"]})
        answered_right.append(normalized(one.record["answer"]) in done.text.lower())
    return [
        case.share("right source cited", cited),
        case.share("answer in reply", answered_right),
        case.share("both", [a and b for a, b in zip(cited, answered_right, strict=True)]),
    ]


def check_rewrites(case: Case, answered: Answered) -> list[Measure]:
    """Measure rewrites that follow the rule, in total and by kind."""
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for one, done in answered:
        by_kind[one.record["kind"]].append(done.text.strip() == one.text.strip())
    whole = [is_right for outcomes in by_kind.values() for is_right in outcomes]
    kinds = [case.share(f"{kind}: as asked", by_kind[kind]) for kind in sorted(by_kind)]
    return [case.share("as asked", whole), *kinds]


def check_fields(case: Case, answered: Answered) -> list[Measure]:
    """Measure right JSON fields, fully right replies, and parsable ones."""
    rates, whole, parsed = [], [], []
    for one, done in answered:
        expected, found = json.loads(one.text), parse(done.text)
        hits, total = count_fields(expected, found)
        rates.append((float(hits), float(total)))
        whole.append(found == expected)
        parsed.append(found is not None)
    return [
        case.rate("fields right", rates, SHARE),
        case.share("all fields", whole),
        case.share("parses", parsed),
    ]


def parse(text: str) -> Any:
    """Return the parsed JSON; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def count_fields(expected: Any, found: Any) -> tuple[int, int]:
    """Count fields that are right, and fields: values of objects, entries of lists."""
    if isinstance(expected, dict):
        given = found if isinstance(found, dict) else {}
        pairs = [(value, given.get(key)) for key, value in expected.items()]
    elif isinstance(expected, list):
        entries = found if isinstance(found, list) else []
        pairs = [(v, entries[i] if i < len(entries) else None) for i, v in enumerate(expected)]
    else:
        return int(expected == found and type(expected) is type(found)), 1
    counts = [count_fields(*pair) for pair in pairs]
    return sum(hits for hits, _ in counts), sum(total for _, total in counts)


def check_calls(case: Case, answered: Answered) -> list[Measure]:
    """Measure calls with the right name and arguments, and with the right name."""
    whole, names = [], []
    for one, done in answered:
        made = done.reply.tool_calls
        wanted = [(call.name, dict(call.arguments)) for call in one.calls]
        whole.append([(call.name, dict(call.arguments)) for call in made] == wanted)
        names.append([call.name for call in made] == [call.name for call in one.calls])
    return [case.share("name and arguments", whole), case.share("name", names)]


def check_talk(case: Case, answered: Answered) -> list[Measure]:
    """Measure replies that recall what the user said, and doubled words."""
    recalled = [
        one.record["answer"].lower() in done.text.lower()
        for one, done in answered
        if "answer" in one.record
    ]
    doubled = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)
    clean = [bool(done.text.strip()) and not doubled.search(done.text) for _, done in answered]
    return [case.share("recalls", recalled), case.share("no doubled word", clean)]


ASSISTANT_TASKS = {
    name: assistant_task(name, check)
    for name, check in (
        ("questions", check_spans),
        ("citations", check_citations),
        ("rewrites", check_rewrites),
        ("extraction", check_fields),
        ("tools", check_calls),
        ("talk", check_talk),
    )
}
