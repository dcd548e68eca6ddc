"""Whole texts in many languages survive encoding, decoding and streaming in any cut."""

from dgemma.text.detokenizer import Detokenizer
from dgemma.text.tokenizer import Tokenizer
from tests.text.languages import texts_by_language
from tests.text.strategies import cut


def stream(tokenizer: Tokenizer, blocks: list[list[int]]) -> list[str]:
    texts = Detokenizer(tokenizer)
    return [*map(texts.feed, blocks), texts.finish()]


def test_there_are_at_least_140_languages_in_their_own_words() -> None:
    texts = texts_by_language()
    assert len(texts) >= 140
    assert len(set(texts.values())) == len(texts)


def test_texts_of_all_languages_come_back(tokenizer: Tokenizer) -> None:
    for language, text in texts_by_language().items():
        assert tokenizer.decode(tokenizer.encode(text)) == text, language


def test_texts_of_all_languages_stream_id_by_id(tokenizer: Tokenizer) -> None:
    for language, text in texts_by_language().items():
        deltas = stream(tokenizer, [[token] for token in tokenizer.encode(text)])
        assert "".join(deltas) == text, language
        assert not any("\ufffd" in delta for delta in deltas), language
        assert deltas[-1] == "", language


def test_texts_of_all_languages_stream_in_any_blocks(tokenizer: Tokenizer) -> None:
    for seed, (language, text) in enumerate(texts_by_language().items()):
        deltas = stream(tokenizer, cut(tokenizer.encode(text), seed))
        assert "".join(deltas) == text, language
        assert not any("\ufffd" in delta for delta in deltas), language
