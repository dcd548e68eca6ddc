"""A way through pinned tokens: what may stand between them so that a grammar allows them all."""

from collections.abc import Iterator, Sequence

import numpy as np

from dgemma.constrain.matcher import Matcher

MOST_TRIES = 4000  # tokens tried before a way is given up
BRANCHES = 12  # single bytes tried at a position


def find_route(
    matcher: Matcher, tops: Sequence[int], ahead: Sequence[int | None], old: Sequence[int]
) -> list[int] | None:
    """One token for each position of `ahead`, where None is open; the matcher has consumed them.

    What the model likes best (`tops`) is tried first, then what did before, then forced text, then
    single bytes; a dead end leads back. None: nothing was found, and the matcher is as it was.
    """
    path: list[int] = []
    choices = [_candidates(matcher, 0, tops, ahead, old)]
    for _ in range(MOST_TRIES):
        token = next(choices[-1], None)
        if token is None:
            choices.pop()
            if not choices:
                return None
            path.pop()
            matcher.back(1)
        elif matcher.consume([token]):
            path.append(token)
            if len(path) == len(ahead):
                return path
            choices.append(_candidates(matcher, len(path), tops, ahead, old))
    matcher.back(len(path))
    return None


def _candidates(
    matcher: Matcher,
    index: int,
    tops: Sequence[int],
    ahead: Sequence[int | None],
    old: Sequence[int],
) -> Iterator[int]:
    pin = ahead[index]
    if pin is not None:
        yield pin
        return
    likely = [tops[index], *old[index : index + 1], *matcher.forced()[:1], *matcher.forced_byte()]
    tried = dict.fromkeys(likely)
    yield from tried
    allowed = matcher.allowed()
    single = [token for token in matcher.vocabulary.byte_ids if allowed[token]]
    untried = [token for token in single if token not in tried]
    yield from untried[:BRANCHES]
    yield from untried[BRANCHES:][:: BRANCHES // 2]  # the first bytes of characters among them
    longer = np.flatnonzero(allowed)[:BRANCHES].tolist()
    yield from [token for token in longer if token not in tried and token not in single]
