"""Ways to take a single token through the layers, each of which can be switched on and off.

They change when memory is read and how many kernels are launched, not what is computed. Found by
`bench/gpu_token.py`, which tries them one after the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    attention: bool = True  # attention and the merge of its parts are launched early
    ahead: bool = True  # what never changes is read before a kernel over rows waits
    ranks: bool = True  # experts are chosen by counting who is better, not one after the other
    joint: bool = False  # the dense part and the experts share their two launches
    fetch: bool = False  # while attention runs, the weight of the product behind it is asked for
    keys: bool = False  # keys and values are asked for while the heads are normed
    heads: bool = False  # heads are normed and turned by attention itself
    dense: bool = False  # behind attention's product, the dense part's first weight is asked for
    entrance: bool = True  # the token's vector, its norm and its turns in one launch

    lookahead: bool = True  # where the next token's keys lie is found while the device works


NAMES = tuple(field.name for field in fields(Ways))
_state = {"ways": Ways()}


def ways() -> Ways:
    return _state["ways"]


@contextmanager
def trying(chosen: Ways | None = None, **changes: bool) -> Iterator[Ways]:
    """Other ways for a while, to compare."""
    before = _state["ways"]
    try:
        _state["ways"] = replace(chosen or before, **changes)
        yield _state["ways"]
    finally:
        _state["ways"] = before
