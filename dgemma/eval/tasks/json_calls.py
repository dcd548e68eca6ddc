"""JSON calls from a dialogue: compared as parsed values, so spelling and order do not matter."""

import json
from typing import Any

from dgemma.engine import Engine
from dgemma.eval.data import Data
from dgemma.eval.measure import Measure
from dgemma.eval.tasks.replies import answer, read_pairs

TASK = "json_calls"
LIMIT = 500
NOTHING = object()  # equal to no parsed value


def json_calls(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Exact match of name and arguments, of the name alone, and share that is JSON at all."""
    pairs = read_pairs(data, "json_calls.jsonl", limit or LIMIT)
    wanted = [parsed(pair.reply) for pair in pairs]
    measures = []
    for given in answer(engine, pairs, TASK, seed):
        found = [parsed(text) for text in given.answers]
        both = list(zip(wanted, found, strict=True))
        case = given.case
        measures += [
            case.share("name and arguments", [a == b for a, b in both], given.note),
            case.share("name", [name_of(a) == name_of(b) for a, b in both]),
            case.share("parses", [value is not NOTHING for value in found]),
        ]
    return measures


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return NOTHING


def name_of(call: Any) -> Any:
    return call.get("name", NOTHING) if isinstance(call, dict) else NOTHING
