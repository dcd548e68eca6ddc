"""A reply read block by block is the reply read token by token, stop strings and all."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from dgemma.text.reply import ReplyReader
from tests.text.small import small_tokenizer
from tests.text.strategies import quick

TOKENIZER = small_tokenizer()
NAMES = TOKENIZER.control_ids
CONTROL = [NAMES[name] for name in ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")]
ENDS = [NAMES["<turn|>"], NAMES["<eos>"], NAMES["<|think|>"]]
# Two bytes of each character's three or two stand at the ends of pieces.
BYTES = [token for byte in "é中".encode() for token in TOKENIZER._byte_ids[byte : byte + 1]]
LETTERS = TOKENIZER.encode("ab \nthought")
STOPS = [(), ("ab",), ("b\n", "aba"), ("é",), ("中a", "ab"), ("\ufffd",), ("zz",)]

pieces = st.lists(st.sampled_from([*LETTERS * 3, *BYTES * 3, *CONTROL, *ENDS]), max_size=30)


def read(ids: list[int], cuts: list[int], stop: tuple[str, ...], in_thought: bool) -> object:
    reader = ReplyReader(TOKENIZER, stop, in_thought=in_thought)
    texts = [text for a, b in pairwise(cuts) for text in reader.feed(ids[a:b])]
    state = (reader.has_stopped, reader.parser.has_ended, list(reader.ids))
    texts += reader.close()
    assert all(text.text for text in texts)
    kinds = {kind: "".join(t.text for t in texts if t.is_thought == kind) for kind in (True, False)}
    return state, kinds, reader.reply


@quick
@given(
    ids=pieces,
    cuts=st.lists(st.integers(0, 30), max_size=3),
    stop=st.sampled_from(STOPS),
    in_thought=st.booleans(),
)
@example(ids=BYTES[:2], cuts=[1], stop=("é",), in_thought=False)
@example(ids=[*BYTES[:1], *LETTERS], cuts=[1], stop=("\ufffd",), in_thought=False)
@example(ids=[*LETTERS, ENDS[0], *LETTERS], cuts=[2], stop=(), in_thought=True)
def test_any_split_reads_as_token_by_token(
    ids: list[int], cuts: list[int], stop: tuple[str, ...], in_thought: bool
) -> None:
    ends = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    singly = list(range(len(ids) + 1))
    assert read(ids, ends, stop, in_thought) == read(ids, singly, stop, in_thought)


def test_a_block_without_a_stop_string_is_read_at_once() -> None:
    reader, calls = ReplyReader(TOKENIZER, ("###",), in_thought=False), []
    feed = reader.parser.feed
    reader.parser.feed = lambda ids: calls.append(list(ids)) or feed(ids)  # type: ignore
    plain, stopping = TOKENIZER.encode("ab##"), TOKENIZER.encode("#ab")
    assert "".join(text.text for text in reader.feed(plain)) == "ab"
    assert calls == [plain] and not reader.has_stopped
    assert reader.feed(stopping) == [] and reader.has_stopped
    assert reader.ids == [*plain, stopping[0]]  # up to the token that completes it
