"""Lines of code in tokens, and texts that are shown with some of them open."""

from pathlib import Path

import numpy as np
import pytest

from dgemma.errors import UsageError
from dgemma.programs.infill.document import REQUEST
from dgemma.text.chat import ChatTemplate
from dgemma.text.control_tokens import FILL_MARK
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.corruption import LineTokens
from dgemma.train.sources import InfillSource, choose_holes
from dgemma.train.tokens import Encoder, TokenStore
from dgemma.weights.hub import NANO_DIRECTORY

CODE = '''\
@cache
def mean(values: list[float], weight=1.0):
    """The mean of values.

    total = sum(values) is what it begins with.
    """
    # total = sum(values)
    total = sum(values)
    if not values:
        return None
    text = """
    return total
    """
    try:

        return weight * total / len(values)
    except TypeError:
        raise ValueError("no numbers") from None
'''
WANTED = [
    "total = sum(values)",
    "if not values:",
    "return weight * total / len(values)",
    "except TypeError:",
    'raise ValueError("no numbers") from None',
]


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.load(NANO_DIRECTORY)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.load(NANO_DIRECTORY, 640)


def found(words: Tokenizer, text: str) -> list[str]:
    ids = np.array(words.encode(text), int)
    spans = LineTokens.of(words).spans(ids)
    return [words.decode(ids[start:stop].tolist()) for start, stop in spans]


def test_lines_of_code_are_found_and_no_docstrings_comments_or_heads(words: Tokenizer) -> None:
    assert found(words, CODE) == WANTED
    assert found(words, "") == found(words, "\n\n  \n") == []
    assert found(words, "    x = y + 1") == []  # no break ends it: the text was cut there
    assert found(words, "\n\n\tx = y + 1\n\n\n") == ["x = y + 1"]


def source(encoder: Encoder, words: Tokenizer, *texts: str) -> InfillSource:
    pairs = [pair for text in texts for pair in encoder.examples({"text": text})]
    store = TokenStore.build(pairs, words.vocab_size)
    return InfillSource(store, words, ChatTemplate.load(NANO_DIRECTORY, words))


def test_an_opened_text_has_the_tokens_that_fill_would_send(
    encoder: Encoder, words: Tokenizer
) -> None:
    drawn = source(encoder, words, CODE, "a = b(c)\nprint(a)").draw(np.random.default_rng(0), 60)
    shown = set()
    for prompt, reply in drawn:
        text = words.decode(prompt.tolist()).partition(f"{REQUEST}\n\n")[2].partition("<turn|>")[0]
        whole = words.decode(reply[:-1].tolist())
        assert whole in (CODE.rstrip(), "a = b(c)\nprint(a)")
        expected = encoder.examples({"prompt": f"{REQUEST}\n\n{text}", "reply": whole})[0]
        assert (prompt.tolist(), reply.tolist()) == (list(expected[0]), list(expected[1]))
        pieces = text.split(FILL_MARK)
        assert len(pieces) > 1 and whole.startswith(pieces[0]) and whole.endswith(pieces[-1])
        shown.add(text)
    assert f"{FILL_MARK}\nprint(a)" in shown and f"a = b(c)\n{FILL_MARK}" in shown
    assert any(text.count(FILL_MARK) == 2 for text in shown)


def test_up_to_half_of_the_lines_are_opened() -> None:
    rng, lines = np.random.default_rng(1), [(10 * n, 10 * n + 5) for n in range(12)]
    drawn = [choose_holes(lines, rng) for _ in range(400)]
    counts = [len(holes) for holes in drawn]
    assert all(holes == sorted(set(holes)) for holes in drawn)
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    # Four of ten by the rule, and a sixth of the others.
    assert counts.count(1) / 400 == pytest.approx(0.4 + 0.6 / 6, abs=0.08)
    assert {line for holes in drawn for line in holes} == set(lines)


def test_what_has_no_lines_or_is_no_plain_text_is_refused(
    encoder: Encoder, words: Tokenizer
) -> None:
    with pytest.raises(UsageError, match="no line of code"):
        source(encoder, words, "# Hm.\n\nx").draw(np.random.default_rng(0), 1)
    template = ChatTemplate.load(NANO_DIRECTORY, words)
    for pairs in ([], [*encoder.examples({"prompt": "Why?", "reply": "Because."})]):
        with pytest.raises(UsageError, match="plain texts"):
            InfillSource(TokenStore.build(pairs, words.vocab_size), words, template)


def test_a_template_that_hides_the_mark_is_refused(
    encoder: Encoder, words: Tokenizer, tmp_path: Path
) -> None:
    store = TokenStore.build(encoder.examples({"text": CODE}), words.vocab_size)
    silent = ChatTemplate("{{ messages[0]['content'] | length }}", words)
    with pytest.raises(UsageError, match="changes <"):
        InfillSource(store, words, silent)
