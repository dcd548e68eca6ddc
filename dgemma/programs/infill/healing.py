"""Token healing at the boundaries between holes and the text around them.

Tokens do not respect those boundaries. A text that ends with a space ends with a token that hardly
ever precedes a word, since words carry their space; a text that ends inside a word is cut where no
tokenizer would cut it. A *healed* boundary gives the last token before the hole, or the first after
it, to the canvas: what the canvas writes there must agree with the known bytes, which are removed
again. A canvas that does not agree is dropped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dgemma.text.tokenizer import Tokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """A hole on a canvas and the tokens up to the next one."""

    after: Ids
    required_prefix: bytes = b""  # known bytes that the canvas writes before the fill
    required_suffix: bytes = b""  # and after the fill


@dataclass(frozen=True, slots=True, kw_only=True)
class HealingVariant:
    """One way to treat the boundaries of holes that share a canvas."""

    holes: tuple[Hole, ...]
    ids: Ids = ()  # committed after the shared tokens
    written: bytes = b""  # text of the first hole already in those ids
    num_written: int = 0  # number of those tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHealing:
    """All ways to treat the boundaries of holes that share a canvas."""

    shared: Ids  # tokens before the first hole that no variant changes
    edge: bytes  # bytes of the next token, if the variants write it
    none: HealingVariant  # nothing healed
    spaces: HealingVariant  # lone spaces healed
    others: tuple[HealingVariant, ...]


def find_healing(
    tokenizer: Tokenizer, before: Sequence[int], pieces: Sequence[Ids], *, heal: bool = True
) -> TokenHealing:
    """Return the variants for holes after `before`, each followed by one of `pieces`."""
    if not heal:
        plain = HealingVariant(holes=tuple(Hole(after=piece) for piece in pieces))
        return TokenHealing(shared=tuple(before), edge=b"", none=plain, spaces=plain, others=())
    space, word = lone_space(tokenizer, before), open_word(tokenizer, before)
    num_shared = len(before) - bool(space or word)
    last = tuple(before[num_shared:])
    none = HealingVariant(holes=tuple(Hole(after=piece) for piece in pieces), ids=last)
    spaces = _heal_spaces(tokenizer, replace(none, ids=() if space else last), space)
    return TokenHealing(
        shared=tuple(before[:num_shared]),
        edge=space or word,
        none=none,
        spaces=spaces,
        others=_heal_suffix(tokenizer, spaces),
    )


def complete_words(
    tokenizer: Tokenizer, healing: TokenHealing, tokens: Iterable[int]
) -> Iterable[HealingVariant]:
    """Yield variants that complete the open word by a token that begins with it."""
    if not healing.edge or healing.edge.isspace():
        return
    for token in tokens:
        data = tokenizer.token_bytes(token)
        is_longer = len(data) > len(healing.edge) and data.startswith(healing.edge)
        if is_longer and not tokenizer.is_control(token):
            written = data[len(healing.edge) :]
            yield replace(healing.spaces, ids=(token,), written=written, num_written=1)


def _heal_spaces(tokenizer: Tokenizer, variant: HealingVariant, required: bytes) -> HealingVariant:
    """Let each hole write the lone space before it; `required` is for the first hole."""
    holes = []
    for hole in variant.holes[:-1]:
        space = lone_space(tokenizer, hole.after)
        after = hole.after[:-1] if space else hole.after
        holes.append(Hole(after=after, required_prefix=required))
        required = space
    last = replace(variant.holes[-1], required_prefix=required)
    return replace(variant, holes=(*holes, last))


def _heal_suffix(tokenizer: Tokenizer, variant: HealingVariant) -> tuple[HealingVariant, ...]:
    """Let the last hole write the following word, if it starts without its space."""
    hole = variant.holes[-1]
    first = started_word(tokenizer, hole.after)
    if not first:
        return ()
    healed = replace(hole, after=hole.after[1:], required_suffix=first)
    return (replace(variant, holes=(*variant.holes[:-1], healed)),)


def strip_required(data: bytes, hole: Hole) -> bytes | None:
    """Remove the known bytes at a hole's boundaries; None if they do not match."""
    prefix, suffix = hole.required_prefix, hole.required_suffix
    agrees = data.startswith(prefix) and data.endswith(suffix)
    if not agrees or len(data) < len(prefix) + len(suffix):
        return None
    return data[len(prefix) : len(data) - len(suffix)]


def lone_space(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Return the last token's bytes if they are one space after other text, else nothing."""
    if len(ids) < 2:
        return b""
    last, before = tokenizer.token_bytes(ids[-1]), tokenizer.token_bytes(ids[-2])
    return last if last == b" " and not before[-1:].isspace() else b""


def open_word(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Return the last token's bytes if they end inside a word that a hole may continue."""
    if not ids or tokenizer.is_control(ids[-1]):
        return b""
    last = tokenizer.token_bytes(ids[-1])
    return last if is_utf8(last) and is_word(last.decode()[-1:]) else b""


def started_word(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Return the first token's bytes if it starts a word without its space."""
    if not ids or tokenizer.is_control(ids[0]):
        return b""
    first = tokenizer.token_bytes(ids[0])
    return first if is_utf8(first) and is_word(first.decode()[:1]) else b""


def is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
