"""The seams between holes and the text around them. Pure, as holes.py is.

Tokens do not respect seams. A text that ends with a space ends with a token that hardly ever stands
before a word, since words carry their space; a text that ends inside a word is cut where no
tokenizer would cut it. A *healed* seam gives the last token before the hole, or the first behind
it, to the canvas: what the canvas writes there must agree with the known bytes, which are then
taken off again. Where it does not agree, nothing of that canvas is used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dgemma.text.tokenizer import Tokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A hole on a canvas and the tokens that stand behind it, up to the next one."""

    after: Ids
    owed: bytes = b""  # known bytes that the canvas writes before the hole's own
    owed_after: bytes = b""  # and behind them


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to treat the seams of holes that share a canvas."""

    gaps: tuple[Gap, ...]
    ids: Ids = ()  # committed behind what all variants share
    given: bytes = b""  # what of the first hole's text those ids stand for already
    given_size: int = 0  # how many of them do


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """The ways to treat them."""

    shared: Ids  # the tokens before the first hole that no variant touches
    edge: bytes  # the bytes of the token behind those, if it is left to the variants
    tight: Variant  # nothing healed
    usual: Variant  # spaces healed
    others: tuple[Variant, ...]  # worth a try


def find_seams(
    tokenizer: Tokenizer, before: Sequence[int], pieces: Sequence[Ids], *, heal: bool = True
) -> Seams:
    """The seams of holes behind `before`, with `pieces` behind each of them."""
    if not heal:
        plain = Variant(gaps=tuple(Gap(after=piece) for piece in pieces))
        return Seams(shared=tuple(before), edge=b"", tight=plain, usual=plain, others=())
    space, word = lone_space(tokenizer, before), open_word(tokenizer, before)
    kept = len(before) - bool(space or word)
    last = tuple(before[kept:])
    tight = Variant(gaps=tuple(Gap(after=piece) for piece in pieces), ids=last)
    usual = _heal_spaces(tokenizer, replace(tight, ids=() if space else last), space)
    return Seams(
        shared=tuple(before[:kept]),
        edge=space or word,
        tight=tight,
        usual=usual,
        others=_heal_right(tokenizer, usual),
    )


def complete_words(tokenizer: Tokenizer, seams: Seams, tokens: Iterable[int]) -> Iterable[Variant]:
    """Variants whose open word is completed by a token that begins with it; other tokens: none."""
    if not seams.edge or seams.edge.isspace():
        return
    for token in tokens:
        data = tokenizer.token_bytes(token)
        longer = len(data) > len(seams.edge) and data.startswith(seams.edge)
        if longer and not tokenizer.is_control(token):
            given = data[len(seams.edge) :]
            yield replace(seams.usual, ids=(token,), given=given, given_size=1)


def _heal_spaces(tokenizer: Tokenizer, variant: Variant, owed: bytes) -> Variant:
    """Let each hole write the lone space before it. `owed`: the first hole's."""
    gaps = []
    for gap in variant.gaps[:-1]:
        space = lone_space(tokenizer, gap.after)
        after = gap.after[:-1] if space else gap.after
        gaps.append(Gap(after=after, owed=owed))
        owed = space
    return replace(variant, gaps=(*gaps, replace(variant.gaps[-1], owed=owed)))


def _heal_right(tokenizer: Tokenizer, variant: Variant) -> tuple[Variant, ...]:
    """Let the last hole write the word behind it, if that begins without its space."""
    gap = variant.gaps[-1]
    first = begun_word(tokenizer, gap.after)
    if not first:
        return ()
    healed = replace(gap, after=gap.after[1:], owed_after=first)
    return (replace(variant, gaps=(*variant.gaps[:-1], healed)),)


def take_off(data: bytes, gap: Gap) -> bytes | None:
    """A hole's bytes without the known ones at its seams; None where they do not agree."""
    begins, ends = data.startswith(gap.owed), data.endswith(gap.owed_after)
    if not begins or not ends or len(data) < len(gap.owed) + len(gap.owed_after):
        return None
    return data[len(gap.owed) : len(data) - len(gap.owed_after)]


def lone_space(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The last token's bytes if they are one space behind other text; else nothing."""
    if len(ids) < 2:
        return b""
    last, before = tokenizer.token_bytes(ids[-1]), tokenizer.token_bytes(ids[-2])
    return last if last == b" " and not before[-1:].isspace() else b""


def open_word(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The last token's bytes if they end within a word that a hole may go on with."""
    if not ids or tokenizer.is_control(ids[-1]):
        return b""
    last = tokenizer.token_bytes(ids[-1])
    return last if is_whole(last) and is_word(last.decode()[-1:]) else b""


def begun_word(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The first token's bytes if a word begins with it, without its space."""
    if not ids or tokenizer.is_control(ids[0]):
        return b""
    first = tokenizer.token_bytes(ids[0])
    return first if is_whole(first) and is_word(first.decode()[:1]) else b""


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def is_whole(data: bytes) -> bool:
    """Whether bytes are text by themselves."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
