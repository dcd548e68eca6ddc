"""Checks of an assistant's replies, and the tasks on a model that knows one answer."""

from typing import Any

import pytest

from dgemma.engine import Done, Engine
from dgemma.eval.assistant import (
    ASSISTANT_TASKS,
    ChatCase,
    check_calls,
    check_citations,
    check_fields,
    check_rewrites,
    check_spans,
    check_talk,
    count_fields,
)
from dgemma.eval.data import Data, MissingData
from dgemma.eval.measure import Case, Measure
from dgemma.text.messages import ToolCall
from dgemma.text.reply import Reply
from dgemma.train.records import TrainingChat, read_record
from tests.eval.conftest import CALL, save_lines

CASE = Case("a task", "ar")


def answered(record: dict[str, Any], *replies: str | Reply) -> list[tuple[ChatCase, Done]]:
    chat = read_record(record)
    assert isinstance(chat, TrainingChat)
    done = [
        Done(
            reply=Reply(answer=reply) if isinstance(reply, str) else reply,
            ids=(1,),
            prompt_tokens=1,
            blocks=1,
            steps=1,
            seconds=0.0,
            seed=0,
            mode="diffusion",
        )
        for reply in replies
    ]
    return [(ChatCase(chat, record), one) for one in done]


def values(measures: list[Measure]) -> dict[str, float | None]:
    return {measure.name: measure.value for measure in measures}


def test_a_span_counts_without_article_case_and_period() -> None:
    record = {"prompt": "Where?", "reply": "the park"}
    found = check_spans(CASE, answered(record, "The park.", "park", "in the park", ""))
    assert values(found) == {"answer exact": 0.5}


def test_a_citation_must_name_the_source_and_no_other() -> None:
    record = {"prompt": "Who?", "reply": "Ann [2].", "answer": "Ann", "source": "2"}
    replies = ("Ann [2].", "Ann [1].", "Bob [2].", "Ann [1] [2].")
    found = values(check_citations(CASE, answered(record, *replies)))
    assert found == {"right source cited": 0.5, "answer in reply": 0.75, "both": 0.25}


def test_rewrites_are_counted_by_kind_too() -> None:
    record = {"prompt": "Upper: a", "reply": "A", "kind": "upper"}
    found = values(check_rewrites(CASE, answered(record, "A", "a")))
    assert found == {"as asked": 0.5, "upper: as asked": 0.5}


@pytest.mark.parametrize(
    ("expected", "found", "counts"),
    [
        ({"a": 1, "b": "x"}, {"a": 1, "b": "y"}, (1, 2)),
        ({"a": 1}, {"a": "1"}, (0, 1)),
        ({"a": True}, {"a": 1}, (0, 1)),
        ({"a": 1}, None, (0, 1)),
        ([{"a": 1}, {"a": 2}], [{"a": 1}], (1, 2)),
        (["Ann", "Ben"], ["Ann", "Ben"], (2, 2)),
        ([{"a": 1}], {"a": 1}, (0, 1)),
    ],
)
def test_fields_are_counted_in_objects_and_lists(
    expected: object, found: object, counts: tuple[int, int]
) -> None:
    assert count_fields(expected, found) == counts


def test_a_reply_that_is_no_json_has_no_right_field() -> None:
    record = {"prompt": "JSON", "reply": '{"a":1,"b":2}'}
    found = values(check_fields(CASE, answered(record, '{"b":2,"a":1}', '{"a":1', '{"a":1}')))
    assert found == {"fields right": 0.5, "all fields": 1 / 3, "parses": 2 / 3}


def test_a_call_needs_name_and_arguments() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [{"role": "user", "content": "f"}, reply]}
    right, wrong = (Reply(tool_calls=(ToolCall(name="f", arguments={"x": x}),)) for x in (1, 2))
    found = values(check_calls(CASE, answered(record, right, wrong, "f")))
    assert found == {"name and arguments": 1 / 3, "name": 2 / 3}


def test_talk_is_checked_for_what_it_recalls_and_for_doubled_words() -> None:
    record = {"prompt": "My name?", "reply": "Ann.", "answer": "Ann"}
    found = values(check_talk(CASE, answered(record, "You are Ann.", "You are are Bob.", "")))
    assert found == {"recalls": 1 / 3, "no doubled word": 1 / 3}


def test_a_task_reads_its_file_and_measures_both_modes(knowing: Engine, data: Data) -> None:
    assert data.heldout is not None
    save_lines(data.heldout / "questions.jsonl", {"prompt": "call", "reply": CALL})
    measures = ASSISTANT_TASKS["questions"](knowing, data, None, 0)
    found = {(m.mode, m.name): m.value for m in measures}
    for mode in ("diffusion", "ar"):
        assert found[mode, "answer exact"] == 1.0
        assert found[mode, "ends by itself"] == 1.0
    with pytest.raises(MissingData, match=r"talk\.jsonl"):
        ASSISTANT_TASKS["talk"](knowing, data, None, 0)
