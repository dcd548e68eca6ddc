"""nano's data: the tokenizer, tasks made by program, and the held-out split."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgemma.errors import UsageError
from dgemma.eval.spans import body_lines, parses, split_function
from dgemma.text.chat import ChatTemplate, Message, Tool, ToolCall
from dgemma.text.control_tokens import FILL_MARK
from dgemma.text.tokenizer import Tokenizer
from recipes.nano import code_tasks, prose_tasks, raw, rewrite, tokenizer
from recipes.nano.raw import Call, Document, Function
from recipes.nano.split import (
    WINDOW,
    Benchmarks,
    Solutions,
    choose_groups,
    chunks,
    clean_prose,
    code_tokens,
    windows,
)
from recipes.nano.tokenizer import TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
RELEASED = ROOT.parent / "shared" / "checkpoint" / "chat_template.jinja"
MADE = ROOT / "out" / "nano"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data directory at {DATA}")
needs_made = pytest.mark.skipif(
    not (MADE / "heldout" / "fix_stories.jsonl").is_file() or not (MADE / "raw").is_dir(),
    reason="run python -m recipes.nano.data first",
)

STORY = (
    'Once a fox met a bear. "Who are you?" asked Mr. Fox. The bear was very tired and slept under '
    "the tree. They went to the river together, and the whole village was happy. Then it was "
    "night.\n\nThe fox said good night to the bear. In the morning Anna came to the river with a "
    "basket. She gave the bear an apple, and Anna laughed. The fox wanted to know where she lived."
)
CODE = '''\
def total_of(values, start=0):
    """Add the values to a start.

    >>> total_of([1, 2])
    3
    """
    # Begin where the caller says.
    total = start
    for value in values:
        if value is not None:
            total += value
    return total
'''
SENTENCES = [
    f"The {noun} is in the {place}." for noun in ("fox", "cat") for place in ("tree", "box")
]
TEXTS = [STORY, CODE, '{"name":"FindMovies","arguments":{"day":"Monday","n":12}}', *SENTENCES]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of the same making, small enough to be learned from a page."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizer.learn(TEXTS * 2, vocab_size=620)
    tokenizer.write(made, TEMPLATE.read_text(encoding="utf-8"), folder)
    return folder


@pytest.fixture(scope="module")
def small(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def random_texts(count: int) -> Iterator[str]:
    rng = random.Random(0)
    letters = "abc thef  \n\n\t0123_.,()'\"é—中😀{}[]<>|=▁"
    yield from TEXTS
    for _ in range(count):
        yield "".join(rng.choice(letters) for _ in range(rng.randint(0, 60)))


def pieces(found: Tokenizer, text: str) -> list[str]:
    return [found.decode([token]) for token in found.encode(text)]


def test_vocabulary_has_the_requested_size(small: Tokenizer) -> None:
    assert small.vocab_size == 620
    names = "<pad> <eos> <bos> <unk> <mask>".split()
    assert [small.control_ids[name] for name in names] == [0, 1, 2, 3, 4]
    assert {"<|turn>", "<turn|>", "<|think|>", "<|image|>"} <= set(small.control_ids)


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UsageError, match="give more text"):
        tokenizer.learn(["a b"], vocab_size=9000)
    with pytest.raises(UsageError, match="tokens are fixed"):
        tokenizer.learn(["a b"], vocab_size=200)


def test_text_comes_back(small: Tokenizer) -> None:
    for text in random_texts(200):
        assert small.decode(small.encode(text)) == text


def test_digits_stay_single(small: Tokenizer) -> None:
    assert pieces(small, "5 3 0 12\n40 x1") == [
        *("5", " 3", " 0", " 1", "2", "\n", "4", "0"),
        *pieces(small, " x"),
        "1",
    ]
    vocabulary = [small.decode([token]) for token in range(small.vocab_size)]
    several = [
        piece
        for piece in vocabulary
        if any(map(str.isdigit, piece)) and len(piece.strip()) > 1 and not piece.startswith("<")
    ]
    assert several == []


def test_runs_are_one_token(small: Tokenizer) -> None:
    assert pieces(small, "\n        if")[:2] == ["\n", "        "]
    assert pieces(small, "   the")[0] == "   "  # not "  " and " the", as in the middle of a line
    assert pieces(small, "\n\n") == ["\n\n"]


def test_no_token_crosses_words_or_lines(small: Tokenizer) -> None:
    """Words separated in learning stay separate, though the saved file has no such rule."""
    whole = small.encode(STORY)
    words = [small.encode(part) for part in parts_of(STORY)]
    assert whole == [token for part in words for token in part]


def parts_of(text: str) -> list[str]:
    return re.findall(r" ?[A-Za-z]+| ?[^\w\s]+|\n+| ?\d| ", text)


def test_learning_is_deterministic(small: Tokenizer, directory: Path) -> None:
    again = tokenizer.learn(TEXTS * 2, vocab_size=620)
    assert json.loads(again.to_str()) == json.loads(
        (directory / "tokenizer.json").read_text("utf8")
    )


def test_transformers_reads_the_same(small: Tokenizer, directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in random_texts(200):
        if "▁" not in text:  # ours spells the mark in bytes, so that it comes back
            assert theirs(text).input_ids == small.encode(text)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi fox"}]
    ours = ChatTemplate.load(directory, small).prompt([Message.from_dict(turn) for turn in chat])
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert rendered == list(ours.ids)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (2, 1, 0)


@pytest.mark.skipif(not RELEASED.is_file(), reason=f"no released template at {RELEASED}")
@pytest.mark.parametrize("thinking", [False, True])
def test_template_writes_what_the_released_one_does(small: Tokenizer, thinking: bool) -> None:
    ours = ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), small)
    released = ChatTemplate(RELEASED.read_text(encoding="utf-8"), small)
    call = ToolCall(name="look", arguments={"at": "fox", "n": 1}, id="1")
    schema = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
    tool = Tool(name="look", description="Looks.", parameters=schema)
    system, user = Message(role="system", content=" Be kind. "), Message(role="user", content="Hi")
    answer = Message(role="assistant", content="<|channel>thought\nso<channel|>Yes?", thought="m")
    calling = [user, Message(role="assistant", tool_calls=(call,))]
    result = Message(role="tool", content="42", tool_call_id="1")
    for messages in ([user], [system, user], [system, user, answer, user], [*calling, result]):
        for tools in ([], [tool]):
            prompt = ours.prompt(messages, tools, enable_thinking=thinking)
            assert prompt.text == released.prompt(messages, tools, enable_thinking=thinking).text


@pytest.mark.parametrize("seed", range(20))
def test_planted_errors_differ_and_repeat(seed: int) -> None:
    wrong = rewrite.plant_errors(STORY, random.Random(seed), 4)
    assert wrong is not None and wrong != STORY
    assert wrong == rewrite.plant_errors(STORY, random.Random(seed), 4)
    assert rewrite.plant_errors("Hi.", random.Random(seed), 3) is None


def test_fix_pairs_hold_the_right_text() -> None:
    made = list(prose_tasks.corrections([STORY] * 60, random.Random(0), 12))
    assert all(record["reply"] == STORY for record in made)
    changed = [record for record in made if not record["prompt"].endswith(STORY)]
    assert len(made) >= 50 and len(changed) >= 0.9 * len(made)


@pytest.mark.parametrize("seed", range(20))
def test_holes_complete_to_the_document(seed: int) -> None:
    rng = random.Random(seed)
    made = [
        *prose_tasks.fills([STORY], rng),
        *code_tasks.fills([Function(CODE, "p", "total_of", True)], rng),
    ]
    assert made
    for record in made:
        document = record["prompt"].split("\n\n", 1)[1]
        before, hole, after = document.partition(FILL_MARK)
        assert hole and record["reply"].startswith(before) and record["reply"].endswith(after)
        assert len(record["reply"]) > len(before) + len(after)


def test_sentences_join_to_the_text() -> None:
    found = rewrite.split_sentences(STORY)
    assert found[1] == '"Who are you?" asked Mr. Fox.'
    assert " ".join(found) == STORY.replace("\n\n", " ")


def test_function_parts_join_to_the_code() -> None:
    parts = split_function(CODE)
    assert parts is not None and "".join(parts) == CODE
    assert parts[0] == "def total_of(values, start=0):\n" and parts[2].startswith("    # Begin")
    lines = [CODE[slice(*span)] for span in body_lines(CODE)]
    assert lines == [
        *("total = start", "for value in values:", "if value is not None:"),
        *("total += value", "return total"),
    ]


def test_rename_touches_the_name_only() -> None:
    changed = rewrite.rename_variable(CODE, "total", "result")
    assert changed is not None and "result += value" in changed and "total_of" in changed
    assert rewrite.rename_variable(CODE, "values", "total") is None  # taken
    assert rewrite.rename_variable(CODE, "start", "first") is None  # a caller may write start=


def test_edits_change_something() -> None:
    nouns = "fox bear tree river apple basket village night dog cat owl egg house lamp".split()
    rng = random.Random(0)
    for record in prose_tasks.edits([STORY, *SENTENCES] * 30, nouns + nouns, rng):
        text = record["prompt"].split("\n\n", 1)[1]
        assert (record["reply"] and text != record["reply"]) or "alphabetical" in record["prompt"]


def test_calls_are_compact_json() -> None:
    call = Call("A: Hello.\n" * 300 + "U: Book it.", {"name": "Book", "arguments": {"n": 1}}, "d")
    record = raw.call_pair(call)
    assert record["reply"] == '{"name":"Book","arguments":{"n":1}}'
    assert record["prompt"].endswith("U: Book it.") and len(record["prompt"]) < 2000


def test_records_may_hold_every_separator_of_lines(tmp_path: Path) -> None:
    records = [{"text": "a\u2028b\x85c"}, {"text": "d"}]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    assert list(raw.read_lines(tmp_path / "lines.jsonl")) == records


def test_chunks_keep_whole_paragraphs() -> None:
    assert chunks(STORY, 5000) == [STORY]
    assert all(len(piece) <= 200 for piece in chunks(STORY, 200))
    assert "".join("".join(chunks(STORY, 200)).split()) == "".join(STORY.split())


def test_copies_of_held_out_text_leave_training() -> None:
    kept, lost = clean_prose(
        [Document(STORY, "a"), Document("Nothing like it is written here, not at all, " * 3, "b")],
        [Document(STORY, "c")],
    )
    assert [document.group for document in kept] == ["b"] and lost == 1
    renamed = CODE.replace("total_of", "sum_up")
    assert Solutions([CODE]).contain(windows(code_tokens(renamed)))
    assert not Solutions([CODE]).contain(windows(code_tokens("def f(x):\n    return x + 1\n" * 3)))
    assert len(next(iter(windows(code_tokens(CODE))))) == WINDOW


def test_split_of_code_is_by_group() -> None:
    packages = [Function(f"{p}{n}", f"p{p}", f"f{n}", True) for p in range(100) for n in range(5)]
    lessons = [
        Function(f"{school}{n}", f"{school}/g{n}", f"g{n}", True)
        for school in ("one", "two")
        for n in range(200)
    ]
    found = [*packages, *lessons]
    held = choose_groups(found, random.Random(1))
    assert held == choose_groups(found, random.Random(1)) != choose_groups(found, random.Random(2))
    assert sum("/" not in group for group in held) == 6
    names = {function.name for function in lessons if function.group in held}
    assert len(names) == 5
    # A name is held out in every teaching collection at once.
    assert {f.group for f in lessons if f.name in names} == {g for g in held if "/" in g}


def test_held_out_lines_of_problems_are_of_problems_alone() -> None:
    groups = ("pip", "stdlib/total_of", "keon/total_of", "geek/total_of")
    functions = [Function(CODE, group, "total_of", True) for group in groups]

    def made(seed: int) -> list[dict[str, str]]:
        # By words: `return total` is too short, which leaves four of the five lines.
        found = code_tasks.problem_lines(functions, lambda t: len(t.split()), random.Random(seed))
        return list(found)

    holes = made(0)
    assert [hole["group"] for hole in holes] == 4 * [groups[2]] + 4 * [groups[3]]
    assert all(hole["prefix"] + hole["middle"] + hole["suffix"] == CODE for hole in holes)
    middles = ["total = start", "for value in values:", "if value is not None:", "total += value"]
    assert [hole["middle"] for hole in holes] == 2 * middles
    longer = CODE.replace("return total", "return total + start")
    functions = [Function(longer, "keon/total_of", "total_of", True)]
    assert len(made(0)) == 4
    assert made(0) == made(0) and any(made(0) != made(seed) for seed in range(1, 9))


@needs_data
def test_benchmarks_are_recognised() -> None:
    benchmarks = Benchmarks(DATA)
    assert benchmarks.contain("def hasCloseElements(a):\n    return a\n")
    assert not benchmarks.contain(CODE)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@needs_made
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("stories", 300),
        ("code", 300),
        ("dialogue", 300),
        ("infill", 1000),
        ("problems", 700),
        ("json_calls", 500),
        ("fix_stories", 300),
    ],
)
def test_held_out_files_are_large_enough(name: str, least: int) -> None:
    assert len(read(MADE / "heldout" / f"{name}.jsonl")) >= least


@needs_made
def test_held_out_text_is_not_trained_on() -> None:
    held = {
        record["text"]
        for name in ("stories", "code", "dialogue")
        for record in read(MADE / "heldout" / f"{name}.jsonl")
    }
    held |= {
        r["prefix"] + r["middle"] + r["suffix"]
        for name in ("infill", "problems")
        for r in read(MADE / "heldout" / f"{name}.jsonl")
    }
    for name in ("stories", "books", "dialogues", "code"):
        texts = {record["text"] for record in read(MADE / "raw" / f"{name}.jsonl")}
        assert texts and not texts & held
    for name in ("code_tasks", "fill_doc", "edits"):
        replies = {record["reply"] for record in read(MADE / "raw" / f"{name}.jsonl")}
        assert not replies & {text.rstrip("\n") for text in held}


@needs_made
def test_held_out_pairs_are_what_they_say() -> None:
    for record in read(MADE / "heldout" / "fix_stories.jsonl"):
        assert record["prompt"].split("\n\n", 1)[1] != record["reply"]
    for record in read(MADE / "heldout" / "json_calls.jsonl"):
        assert set(json.loads(record["reply"])) == {"name", "arguments"}
    for name in ("infill", "problems"):
        for record in read(MADE / "heldout" / f"{name}.jsonl"):
            assert parses(record["prefix"] + record["middle"] + record["suffix"])
