"""Token stores, and JSONL files tokenized into them."""

import json
from pathlib import Path

import numpy as np
import pytest

from dgemma.errors import CheckpointError, UsageError
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.tokens import TokenStore, tokenize_file
from recipes.nano.tokenizer import TEMPLATE, learn, write

STORY = (
    'Once a fox met a bear. "Who are you?" asked Mr. Fox. The bear was very tired and slept under '
    "the tree. They went to the river together, and the whole village was happy. Then it was "
    "night.\n\nThe fox said good night to the bear. In the morning Anna came to the river with a "
    "basket. She gave the bear an apple, and Anna laughed. The fox wanted to know where she lived."
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer small enough to be learned from a paragraph."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write(learn([STORY] * 2, vocab_size=540), TEMPLATE.read_text(encoding="utf-8"), folder)
    return folder


@pytest.fixture(scope="module")
def small(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def test_store_comes_back(tmp_path: Path) -> None:
    examples = [([2, 5, 6], [7, 1]), ([], [2, 9, 1]), ([3], [])]
    store = TokenStore.build(examples, vocab_size=8192)
    assert store.tokens_N.dtype == np.uint16
    store.save(tmp_path / "a.npz")
    store.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    loaded = TokenStore.load(tmp_path / "a.npz")
    assert [(list(prompt), list(reply)) for prompt, reply in map(loaded.__getitem__, range(3))] == [
        (list(prompt), list(reply)) for prompt, reply in examples
    ]
    assert len(loaded) == 3 and list(loaded[-1][0]) == [3]
    assert loaded.starts_E.dtype == np.int64 and loaded.prompts_E.dtype == np.int32
    with pytest.raises(IndexError):
        loaded[3]
    assert TokenStore.build(examples, vocab_size=1 << 17).tokens_N.dtype == np.uint32


def test_store_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vocabulary has 8"):
        TokenStore.build([([], [8])], vocab_size=8)
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a token store"):
        TokenStore.load(tmp_path / "bad.npz")
    with pytest.raises(UsageError, match="tokenize its source"):
        TokenStore.load(tmp_path / "none.npz")
    with pytest.raises(CheckpointError, match="do not fit"):
        TokenStore(
            tokens_N=np.zeros(2, np.uint16),
            starts_E=np.array([0, 3]),
            prompts_E=np.zeros(1, np.int32),
        )


def test_empty_store(tmp_path: Path) -> None:
    TokenStore.build([], vocab_size=8).save(tmp_path / "e.npz")
    assert len(TokenStore.load(tmp_path / "e.npz")) == 0


def write_records(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_lines_become_examples(tmp_path: Path, directory: Path, small: Tokenizer) -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The fox."},
    ]
    records: list[object] = [
        {"text": "The fox."},
        {"prompt": "Who?", "reply": "The fox."},
        {"messages": chat},
    ]
    path = write_records(tmp_path / "three.jsonl", records)
    store = tokenize_file(path, directory, workers=1).store
    fox = small.encode("The fox.")
    turn, end = small.control_ids["<|turn>"], small.control_ids["<turn|>"]
    assert [list(part) for part in store[0]] == [[], [2, *fox, 1]]
    prompt, reply = store[1]
    assert small.decode(prompt) == "<bos><|turn>user\nWho?<turn|>\n<|turn>model\n"
    assert prompt[1] == turn and list(reply) == [*fox, end]
    prompt, reply = store[2]
    assert small.decode(prompt).endswith(
        "model\nYes?<turn|>\n<|turn>user\nWho?<turn|>\n<|turn>model\n"
    )
    assert list(reply) == [*fox, end]


TURNS = [("system", "Be kind."), ("human", "Who?"), ("gpt", "The fox.")]


@pytest.mark.parametrize(
    ("record", "question"),
    [
        ({"instruction": "Who?", "input": "", "output": "The fox.", "id": 7}, "Who?"),
        ({"instruction": "Who?", "output": "The fox."}, "Who?"),
        ({"instruction": "Who?", "input": "A bear.", "output": "The fox."}, "Who?\n\nA bear."),
        ({"conversations": [{"from": who, "value": text} for who, text in TURNS]}, "Who?"),
        ({"prompt": "Who?", "completion": "The fox."}, "Who?"),
        (
            {
                "prompt": [{"role": "user", "content": "Who?"}],
                "completion": [{"role": "assistant", "content": "The fox."}],
            },
            "Who?",
        ),
    ],
)
def test_other_formats_are_the_same_chats(
    tmp_path: Path, directory: Path, small: Tokenizer, record: object, question: str
) -> None:
    lines = write_records(tmp_path / "a.jsonl", [record])
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps([record], indent=1), encoding="utf-8")
    stores = [tokenize_file(path, directory, workers=1).store for path in (lines, whole)]
    assert np.array_equal(stores[0].tokens_N, stores[1].tokens_N)
    prompt, reply = stores[0][0]
    assert small.decode(prompt).endswith(f"user\n{question}<turn|>\n<|turn>model\n")
    assert small.decode(reply) == "The fox.<turn|>"
    assert ("Be kind." in small.decode(prompt)) == ("conversations" in str(record))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"text": "a"}', "bad.json holds one dict; a .json file must hold a list"),
        ('[{"text": "a"},\n{"text" "b"}]', "bad.json, line 2: no JSON"),
        ('[{"text": "a"}, {"text": 3}]', 'bad.json, entry 2: "text" is 3'),
    ],
)
def test_a_json_file_must_be_a_list_of_records(
    tmp_path: Path, directory: Path, text: str, reason: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as error:
        tokenize_file(path, directory, workers=1)
    assert reason in str(error.value)


def test_tools_of_a_conversation_are_in_the_prompt(tmp_path: Path, directory: Path) -> None:
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    tool = {"type": "function", "function": {"name": "look_around"}}
    records: list[object] = [{"messages": chat}, {"messages": chat, "tools": [tool]}]
    store = tokenize_file(write_records(tmp_path / "a.jsonl", records), directory, workers=1).store
    plain, with_tools = (Tokenizer.load(directory).decode(store[index][0]) for index in range(2))
    assert "look_around" in with_tools and "look_around" not in plain


def test_a_mark_at_the_beginning_of_a_file_is_no_text(tmp_path: Path, directory: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"text": "The fox."}])
    plain = tokenize_file(path, directory, workers=1).store
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    marked = tokenize_file(path, directory, workers=1).store
    assert np.array_equal(plain.tokens_N, marked.tokens_N)


def test_long_text_is_cut_and_long_pairs_are_counted(tmp_path: Path, directory: Path) -> None:
    records: list[object] = [{"text": STORY}, {"prompt": STORY, "reply": "No."}]
    made = tokenize_file(
        write_records(tmp_path / "a.jsonl", records), directory, max_tokens=40, workers=1
    )
    lengths = np.diff(made.store.starts_E)
    assert made.dropped == 1 and lengths.max() == 40 and len(lengths) > 2
    firsts = [int(made.store[index][1][0]) for index in range(len(lengths))]
    lasts = [int(made.store[index][1][-1]) for index in range(len(lengths))]
    assert set(firsts) == {2} and lasts[-1] == 1 and 1 not in lasts[:-1]


def test_workers_do_not_change_the_result(tmp_path: Path, directory: Path) -> None:
    records: list[object] = [{"text": f"The fox number {index}."} for index in range(1100)]
    path = write_records(tmp_path / "many.jsonl", records)
    seen: list[tuple[int, int]] = []
    alone = tokenize_file(path, directory, workers=1).store
    shared = tokenize_file(
        path, directory, workers=2, progress=lambda done, total: seen.append((done, total))
    ).store
    assert np.array_equal(alone.tokens_N, shared.tokens_N)
    assert np.array_equal(alone.starts_E, shared.starts_E)
    assert seen[-1] == (1100, 1100) and len(seen) == 3


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON at character 3"),
        ('{"text": 3}', '"text" is 3'),
        ('{"prompt": "a"}', "the keys are 'prompt'"),
        ("[1]", "a list"),
        ('{"instruction": "a"}', "the keys are 'instruction'; give"),
        ('{"prompt": "a", "reply": "b", "completion": "c"}', "the keys are"),
        ('{"conversations": [{"from": "human"}]}', '"from" and "value"'),
        (
            '{"conversations": [{"from": "cat", "value": "a"}, {"from": "gpt", "value": "b"}]}',
            "\"from\" is 'cat'; it must be one of human",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "at least a question"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
            "assistant's",
        ),
        ('{"text": "a", "prompt": "b", "reply": "c"}', "of several forms"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
            ', "tools": [{"name": "look"}]}',
            "a tool",
        ),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, directory: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"bad\.jsonl, line 2: ") as error:
        tokenize_file(path, directory, workers=1)
    assert reason in str(error.value)


def test_a_line_that_is_no_text_is_named(tmp_path: Path, directory: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "good"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UsageError, match=r"latin\.jsonl, line 2: no UTF-8"):
        tokenize_file(path, directory, workers=1)
