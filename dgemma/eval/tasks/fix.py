"""Planted errors in a story, to be corrected: word by word, and the whole text.

Words are aligned by difflib. A stretch of words in which the given text and the original differ is
one planted error. It is corrected if the original's words stand there in the answer.
"""

from dataclasses import dataclass
from difflib import SequenceMatcher

from dgemma.engine import Engine
from dgemma.eval.data import Data
from dgemma.eval.measure import SHARE, Measure
from dgemma.eval.tasks.replies import answer, read_pairs

TASK = "fix"
LIMIT = 200


@dataclass(frozen=True, slots=True)
class Checked:
    """One answer against the original."""

    errors: list[bool]  # of each planted error, whether it is corrected
    kept: int  # words that were right and still are
    right: int  # words that were right


def fix(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Share of errors corrected, of right words left alone, and of texts restored exactly."""
    pairs = read_pairs(data, "fix_stories.jsonl", limit or LIMIT)
    measures = []
    for given in answer(engine, pairs, TASK, seed):
        both = list(zip(pairs, given.answers, strict=True))
        checked = [check(text_of(pair.prompt), pair.reply, text) for pair, text in both]
        case = given.case
        kept = [(float(one.kept), float(one.right)) for one in checked]
        measures += [
            case.share("errors corrected", [hit for one in checked for hit in one.errors]),
            case.rate("right words kept", kept, SHARE),
            case.share(
                "text exact",
                [pair.reply.strip() == text.strip() for pair, text in both],
                given.note,
            ),
        ]
    return measures


def text_of(prompt: str) -> str:
    """The text of an edit prompt: what follows the instruction and an empty line."""
    instruction, _, text = prompt.partition("\n\n")
    return text or instruction


def check(given: str, original: str, answer: str) -> Checked:
    words, right, found = given.split(), original.split(), answer.split()
    # Where each of the original's words stands in the answer; the edges stand at the edges.
    places = {-1: -1, len(right): len(found)}
    for a, b, size in _matcher(right, found).get_matching_blocks():
        places.update({a + i: b + i for i in range(size)})
    errors, kept, total = [], 0, 0
    for kind, first, last, begin, end in _matcher(words, right).get_opcodes():
        if kind == "equal":
            total += end - begin
            kept += sum(i in places for i in range(begin, end))
        else:
            span = range(begin, end) or _gap(right, begin, words[first:last])
            errors.append(_is_there(places, span))
    return Checked(errors, kept, total)


def _gap(right: list[str], place: int, extra: list[str]) -> range:
    """The words around a place where `extra` stood too much, in the original.

    Of a word said twice either may be the one too many, so its like are within.
    """
    before, after = place - 1, place
    while before >= 0 and right[before] in extra:
        before -= 1
    while after < len(right) and right[after] in extra:
        after += 1
    return range(before, after + 1)


def _is_there(places: dict[int, int], span: range) -> bool:
    """Whether these words of the original stand in the answer, one after the other."""
    found = [places.get(i) for i in span]
    first = found[0]
    return first is not None and found == [first + i for i in range(len(found))]


def _matcher(a: list[str], b: list[str]) -> SequenceMatcher[str]:
    return SequenceMatcher(None, a, b, autojunk=False)
