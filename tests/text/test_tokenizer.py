"""Ids and text: exact both ways, and nobody spells a control id."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers

from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.text.tokenizer import StopIds, Tokenizer
from tests.text.small import CONTROL, make_backend
from tests.text.strategies import any_text, plain_text, quick


@quick
@given(text=any_text)
def test_any_text_comes_back_and_never_as_control_ids(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not any(tokenizer.is_control(token) for token in ids)


def test_every_character_of_the_first_planes_comes_back(tokenizer: Tokenizer) -> None:
    codes = [*range(0xD800), *range(0xE000, 0x11000), *range(0x1F000, 0x20000), 0x10FFFF]
    text = "".join(map(chr, codes))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_control_tokens_are_the_twenty_four(tokenizer: Tokenizer) -> None:
    assert set(tokenizer.control_ids) == set(CONTROL)
    assert [tokenizer.decode([token]) for token in tokenizer.control_ids.values()] == list(
        tokenizer.control_ids
    )


def test_each_spelled_control_token_is_text(tokenizer: Tokenizer) -> None:
    for name in CONTROL:
        ids = tokenizer.encode(f"a{name} {name}{name}\n")
        assert not any(map(tokenizer.is_control, ids)), name
        assert tokenizer.decode(ids, skip_control=True) == f"a{name} {name}{name}\n"


def test_our_own_text_gives_control_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_control("<bos><|turn>user\nhi<turn|>")
    assert [i for i in ids if tokenizer.is_control(i)] == [
        tokenizer.control_ids[name] for name in ("<bos>", "<|turn>", "<turn|>")
    ]
    assert tokenizer.decode(ids) == "<bos><|turn>user\nhi<turn|>"
    assert tokenizer.decode(ids, skip_control=True) == "user\nhi"


def test_a_control_token_without_its_mark_is_text(small: Tokenizer) -> None:
    ids = small.encode_control("#<|turn>a<|turn>#<turn|>", mark="#")
    assert small.decode(ids) == "<|turn>a<|turn><turn|>"
    assert sum(map(small.is_control, ids)) == 2


def test_the_released_check_vector_holds(released: Tokenizer) -> None:
    text = (
        "<bos><|turn>user\nWhy is the sky blue?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    )
    expected = [2, 105, 2364, 107, 11355, 563, 506, 7217, 3730, 236881, 106, 107]
    assert released.encode_control(text) == [*expected, 105, 4368, 107, 100, 45518, 107, 101]
    assert released.vocab_size == 262144


@quick
@given(text=plain_text)
def test_plain_ids_are_those_of_the_library(
    released_files: Path, released: Tokenizer, text: str
) -> None:
    assert released.encode(text) == released._backend.encode(text, add_special_tokens=False).ids


@quick
@given(data=st.data())
def test_decoding_agrees_with_the_library_on_valid_bytes(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    ids += tokenizer.encode(data.draw(any_text))
    for skip in (False, True):
        ours = tokenizer.decode(ids, skip_control=skip)
        if "\ufffd" not in ours:
            assert ours == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_token_bytes_are_bytes_and_spaces(tokenizer: Tokenizer) -> None:
    newline, space = tokenizer.encode("\n"), tokenizer.encode(" ")
    assert tokenizer.token_bytes(newline[0]) == b"\n"
    assert tokenizer.token_bytes(space[0]) == b" "
    byte = tokenizer._backend.token_to_id("<0xE2>")
    assert tokenizer.token_bytes(byte) == b"\xe2"


def test_each_id_alone_decodes_as_the_library_decodes_it(tokenizer: Tokenizer) -> None:
    for token in range(tokenizer.vocab_size):
        ours = tokenizer.decode([token])
        assert ours == tokenizer._backend.decode([token], skip_special_tokens=False), token


def test_the_longest_control_token_wins_as_in_the_library() -> None:
    backend = make_backend()
    backend.add_special_tokens([AddedToken("<eos>s", normalized=False)])
    text = "a<eos><eos>s<eos>s<eos>"
    expected = backend.encode(text, add_special_tokens=False).ids
    assert Tokenizer(backend).encode_control(text) == expected


def test_limits_saved_with_a_tokenizer_do_not_apply() -> None:
    backend = make_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"


def test_the_space_mark_itself_is_not_a_space(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a▁b c")
    assert tokenizer.decode(ids) == "a▁b c"
    assert tokenizer._backend.decode(ids) == "a▁b c"


def test_half_a_surrogate_pair_is_refused_with_its_place(small: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"U\+D83D, at character 2"):
        small.encode("ab\ud83d")
    assert small.decode(small.encode("ab\U0001f600")) == "ab\U0001f600"


@pytest.mark.parametrize("token", [-1, 10**6, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(small: Tokenizer, token: int) -> None:
    with pytest.raises(CheckpointError, match=f"token id {token} is not in the tokenizer"):
        small.decode([token])


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json in"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{}", b"not json", b'{"version": "1.0"}', b"\xff"])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        Tokenizer.load(tmp_path)


def test_a_saved_tokenizer_loads(tmp_path: Path) -> None:
    make_backend().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("the") == Tokenizer(make_backend()).encode("the")


def test_a_vocabulary_without_byte_tokens_is_refused() -> None:
    with pytest.raises(CheckpointError, match="<0xFF>"):
        Tokenizer(make_backend(byte_tokens=255))


def test_a_tokenizer_that_changes_text_is_refused() -> None:
    backend = make_backend()
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
    with pytest.raises(CheckpointError, match="does not give text back"):
        Tokenizer(backend)


def test_a_tokenizer_that_spells_control_tokens_is_refused() -> None:
    backend = make_backend()
    backend.add_special_tokens([AddedToken("|>", normalized=False)])
    with pytest.raises(CheckpointError, match="makes control tokens from plain text"):
        Tokenizer(backend)


def test_decoding_does_not_depend_on_the_library_decoder() -> None:
    backend = make_backend()
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_stop_ids_come_as_one_or_as_a_list() -> None:
    assert StopIds.read(1) == StopIds(ids=(1,))
    assert StopIds.read([1, 106, 50]) == StopIds(ids=(1, 106, 50))
    for wrong in ([], [-1], -3):
        with pytest.raises(ConfigError, match="eos_token_id"):
            StopIds.read(wrong)


def test_a_block_is_cut_before_its_first_stop_id() -> None:
    stops = StopIds.read([1, 106])
    assert stops.cut([5, 6, 106, 1, 7]) == ([5, 6], 106)
    assert stops.cut([1]) == ([], 1)
    assert stops.cut([5, 6]) == ([5, 6], None)


def test_importing_text_brings_in_nothing_heavy() -> None:
    modules = "chat control_tokens detokenizer messages reply tokenizer tool_calls".split()
    code = f"import sys; {'; '.join(f'import dgemma.text.{name}' for name in modules)}; "
    code += "print({'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
