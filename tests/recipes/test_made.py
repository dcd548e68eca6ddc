"""Tasks made by program: what each promises about its replies, and what is held out."""

import ast
import json
import re
from random import Random

import pytest

from dgemma.text.chat import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.records import TrainingChat, read_record
from dgemma.train.tokens import Encoder
from dgemma.weights.hub import NANO_DIRECTORY
from recipes.nano.code_drills import OPERATIONS, bug_pairs, drill_pairs, small_function
from recipes.nano.compare import side_by_side
from recipes.nano.extraction import extraction_pairs, markdown_pairs, tool_chats
from recipes.nano.letters import letter_pairs
from recipes.nano.made import HELD_OUT, MAKERS, Texts, unique
from recipes.nano.raw import Function
from recipes.nano.reading import NOT_SAID, cited_pairs, question_pairs, summary_pairs
from recipes.nano.rewriting import (
    correction_pairs,
    negative,
    polite,
    question,
    rewrite_pairs,
    shorter,
    simpler,
    to_future,
    to_past,
    to_present,
)
from recipes.nano.slots import BOYS, CITIES, GIRLS, Draw, is_held_out
from recipes.nano.tales import rename
from recipes.nano.talk import chats
from recipes.nano.verbs import PAST, third

SENTENCES = [
    "Tom bought a red car for Mary.",
    "Mary opened the window.",
    "John kept two coins in the garden.",
    "Anna wrote a long letter to her mother.",
    "Peter lost his key at the station.",
    "Lucy sold the old house.",
    "Adam painted the garden fence.",
    "He goes to school by bus.",
    "Open the window, please.",
    "Close the door.",
    "She is a very good teacher.",
    "I was really tired because I worked all night.",
    "The blue car is in the garage.",
]
CODE = """\
def first_even(values):
    for value in values:
        if value % 2 == 0:
            return value
    return None
"""


def draw(seed: int = 0, *, held_out: bool = False) -> Draw:
    return Draw(Random(seed), held_out=held_out)


def texts() -> Texts:
    functions = [Function(CODE.replace("even", str(i)), "", str(i), True) for i in range(9)]
    return Texts(SENTENCES, [" ".join(SENTENCES)], functions)


@pytest.mark.parametrize("name", list(MAKERS))
def test_the_same_seed_makes_the_same_examples_that_training_can_read(name: str) -> None:
    made = list(unique(MAKERS[name](draw(), texts(), 30)))
    assert made == list(unique(MAKERS[name](draw(), texts(), 30)))
    assert made
    for record in made:
        chat = read_record(record)
        assert isinstance(chat, TrainingChat)
        assert chat.reply


@pytest.mark.parametrize("name", HELD_OUT)
def test_held_out_cases_are_no_training_examples(name: str) -> None:
    train = {json.dumps(one) for one in MAKERS[name](draw(), texts(), 400)}
    held = {json.dumps(one) for one in MAKERS[name](draw(1, held_out=True), texts(), 60)}
    assert not train & held


def test_every_fifth_entry_is_held_out() -> None:
    train, held = draw().side(CITIES), draw(held_out=True).side(CITIES)
    assert not set(train) & set(held)
    assert sorted([*train, *held]) == sorted(CITIES)
    assert draw(held_out=True).side("ab") == "ab"
    people = {draw(i).person()[0] for i in range(200)}
    assert not people & set(draw(held_out=True).side([*GIRLS]))
    assert not people & set(draw(held_out=True).side([*BOYS]))


def test_a_wording_is_on_one_side_and_its_words_on_both() -> None:
    options = ["[Put|Write|Say] [this|it|the text] in the [past|future][.|!|]"]
    train = {draw(i).phrase(options) for i in range(400)}
    held = {draw(i, held_out=True).phrase(options) for i in range(400)}
    assert held and train and not train & held
    assert {w for one in held for w in one.lower().rstrip(".!").split()} <= {
        w for one in train for w in one.lower().rstrip(".!").split()
    }
    assert draw().expand("[a|a] [b [c|c]|b c]!") == "a b c!"
    assert not any(map(is_held_out, ("Past tense.", "past tense.", "Past tense", "past tense")))
    with pytest.raises(ValueError, match="no wording"):
        draw(held_out=True).phrase(["Past tense."])


def test_a_letter_says_what_is_asked_to_the_one_it_is_for() -> None:
    for one in letter_pairs(draw(), 100):
        name = one["reply"].split(",")[0].split()[1]
        assert name in one["prompt"]
        digits = set(re.findall(r"\d+", one["prompt"]))
        assert digits == set(re.findall(r"\d+", one["reply"]))


def test_an_answer_is_a_span_of_the_text_or_says_that_there_is_none() -> None:
    made = list(question_pairs(draw(), SENTENCES, 300))
    assert all(one["reply"] == NOT_SAID or one["reply"] in one["prompt"] for one in made)
    assert 5 < sum(one["reply"] == NOT_SAID for one in made) < 60
    assert any("Who " in one["prompt"] and "coins" in one["prompt"] for one in made)


def test_a_citation_names_the_source_that_holds_the_answer() -> None:
    for one in cited_pairs(draw(), 200):
        [line] = [
            line for line in one["prompt"].splitlines() if line.endswith("]") is False
            and f"[{one['source']}] " in line
        ]  # fmt: skip
        assert one["answer"] in line
        assert one["reply"].endswith(f" [{one['source']}].")


def test_a_summary_of_a_text_is_its_first_sentence() -> None:
    made = list(summary_pairs(draw(), ["One fox ran. It was red."], 30))
    assert {one["reply"] for one in made if "fox" in one["prompt"]} == {"One fox ran."}


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        (to_past, "He goes home by bus.", "He went home by bus."),
        (to_past, "They are happy.", "They were happy."),
        (to_past, "I think we'll go.", None),
        (to_past, "She went home.", None),
        (to_present, "Mary opened the window.", "Mary opens the window."),
        (to_future, "The dog is hungry.", "The dog will be hungry."),
        (polite, "Close the door.", "Could you please close the door?"),
        (polite, "Thank you for the soup.", None),
        (shorter, "I was really tired because I ran.", "I was tired."),
        (simpler, "He purchased numerous books.", "He bought many books."),
        (simpler, "He made an error.", None),
        (negative, "She is a teacher.", "She is not a teacher."),
        (negative, "It was not red.", None),
        (question, "The car is in the garage.", "Is the car in the garage?"),
        (question, "Tom was here.", "Was Tom here?"),
    ],
)
def test_a_rewrite_follows_its_rule(rule, text: str, expected: str | None) -> None:  # type: ignore[no-untyped-def]
    result = rule(text, draw())
    assert (result and result[1]) == expected


def test_rewrites_change_their_text_and_corrections_restore_it() -> None:
    for one in rewrite_pairs(draw(), SENTENCES, 100):
        assert one["reply"] not in one["prompt"] or one["kind"] == "shorter"
    for one in correction_pairs(draw(), SENTENCES, 12):
        assert one["reply"] in SENTENCES
        assert one["reply"] not in one["prompt"]


def test_verbs_have_their_forms() -> None:
    assert [third(verb) for verb in ("go", "carry", "play", "watch")] == [
        *("goes", "carries", "plays", "watches"),
    ]
    assert [PAST[verb] for verb in ("stop", "carry", "bake", "bring")] == [
        *("stopped", "carried", "baked", "brought"),
    ]


def test_extracted_values_are_in_the_text_and_in_the_order_asked_for() -> None:
    for one in extraction_pairs(draw(), SENTENCES, 200):
        values = json.loads(one["reply"])
        for record in values if isinstance(values, list) else [values]:
            leaves = record.values() if isinstance(record, dict) else [record]
            strings = [value for value in leaves if isinstance(value, str)]
            # A sentence may begin with it.
            assert all(value.lower() in one["prompt"].lower() for value in strings), one


def test_a_table_has_a_cell_for_every_column() -> None:
    for one in markdown_pairs(draw(), 100):
        lines = one["reply"].splitlines()
        assert len(lines) >= 2
        if lines[0].startswith("|"):
            assert len({line.count("|") for line in lines}) == 1


def test_a_call_is_encoded_up_to_the_answer_of_the_tool() -> None:
    tokenizer = Tokenizer.load(NANO_DIRECTORY)
    encoder = Encoder.load(NANO_DIRECTORY)
    [record] = tool_chats(draw(), 1)
    [(prompt, reply)] = encoder.examples(record)
    call = record["messages"][1]["tool_calls"][0]["function"]  # type: ignore[index]
    text = tokenizer.decode(list(reply))
    assert text.startswith(f"<|tool_call>call:{call['name']}{{")
    assert text.endswith("<tool_call|><|tool_response>")
    chat = read_record(record)
    assert isinstance(chat, TrainingChat)
    template = ChatTemplate.load(NANO_DIRECTORY, tokenizer)
    assert tuple(prompt) == template.prompt(chat.messages, chat.tools).ids


def test_talk_recalls_what_was_told_before() -> None:
    recalled = 0
    for record in chats(draw(), 300):
        messages = record["messages"]
        assert isinstance(messages, list)
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        if "answer" in record:
            recalled += 1
            value = str(record["answer"]).lower()
            assert value in messages[-1]["content"].lower()
            assert any(value in message["content"].lower() for message in messages[:-2])
    assert recalled > 20


def test_small_functions_pass_their_tests() -> None:
    for seed in range(100):
        made = small_function(draw(seed))
        scope: dict[str, object] = {}
        exec(f"{made.code}\n" + "\n".join(made.tests), scope)
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)
    assert all("{" not in one["reply"] or "dict" in one["reply"] or "= {}" in one["reply"]
               or "assert" in one["reply"] for one in drill_pairs(draw(), 50))  # fmt: skip


def test_a_bug_changes_one_line_and_the_reply_restores_it() -> None:
    for seed in range(20):
        for one in bug_pairs(draw(seed), [Function(CODE, "", "f", True)], 1):
            wrong = one["prompt"].partition("\n\n")[2].splitlines()
            right = one["reply"].splitlines()
            assert sum(a != b for a, b in zip(wrong, right, strict=True)) == 1
            ast.parse(one["reply"])


def test_people_of_a_tale_get_other_names_everywhere() -> None:
    renamed = rename("Lily saw Max. Max gave Lily a ball.", Random(0))
    match = re.fullmatch(r"(\w+) saw (\w+)\. \2 gave \1 a ball\.", renamed)
    assert match
    assert match[1] in GIRLS
    assert match[2] in BOYS


def test_files_of_a_comparison_are_printed_side_by_side(tmp_path) -> None:  # type: ignore[no-untyped-def]
    measure = {"task": "talk", "name": "ends", "mode": "ar", "value": 0.5, "unit": "share"}
    for name, value in (("old", 0.5), ("new", 0.75)):
        (tmp_path / name).write_text(json.dumps([{**measure, "value": value}]))
    table = side_by_side({"old": tmp_path / "old", "new": tmp_path / "new"})
    assert table.splitlines()[-1] == "| talk | ends |  |  | 50.0 % | 75.0 % |"
