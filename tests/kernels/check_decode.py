"""Single tokens on the CUDA backend: prefetched KV tables are those of their sequence."""

import pytest
import torch

from dgemma.backends.base import Backend, ForwardInput, TokenDraw
from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.reference import ReferenceBackend, commit
from dgemma.errors import UsageError
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from tests.kernels import small
from tests.kernels.small import CPU, SMALL

pytestmark = pytest.mark.usefixtures("small_configs")


@pytest.fixture(scope="module")
def model() -> Gemma:
    return small.model()


def tight(model: Gemma, prompt: int) -> KVCache:
    """A sequence whose memory moves often."""
    made = KVCache(SMALL, Capacity(tokens=8, segment=4, slack=2), torch.float32, CPU)
    commit(model, made, torch.arange(prompt), chunk=4)
    return made


def next_token(backend: Backend, cache: KVCache, token: int) -> tuple[int, float]:
    (output,) = backend.run([ForwardInput(cache=cache, tokens=(token,), draw=TokenDraw())])
    assert output.token is not None and output.logprob is not None
    return output.token, output.logprob


def same(got: tuple[int, float], want: tuple[int, float]) -> None:
    assert got[0] == want[0]
    assert got[1] == pytest.approx(want[1], abs=1e-4)


def test_tokens_find_their_keys_also_where_memory_moves(model: Gemma) -> None:
    mine, want = CudaBackend(model), ReferenceBackend(model)
    caches, token, known, moves = [tight(model, 3) for _ in range(2)], 5, 0, set[int]()
    for _ in range(12):
        known += mine.decoder._prefetched is not None
        got = next_token(mine, caches[0], token)
        same(got, next_token(want, caches[1], token))
        token = got[0]
        moves.add(caches[0].num_moves)
    assert len(moves) > 2  # windows slid, and full layers grew
    assert known > 3


def test_a_new_sequence_does_not_read_the_keys_of_one_that_is_gone(model: Gemma) -> None:
    """It may have the same length, and be where the other one was."""
    mine, want = CudaBackend(model), ReferenceBackend(model)
    next_token(mine, small.cache(model, 5), 1)
    assert mine.decoder._prefetched is not None
    ((gone, length, _),) = mine.decoder._prefetched[0]
    assert gone() is None
    assert length == 6
    for token in (2, 3):
        caches = [small.cache(model, 6) for _ in range(2)]
        same(next_token(mine, caches[0], token), next_token(want, caches[1], token))
        del caches


def test_a_sequence_that_is_cut_back_is_looked_up_again(model: Gemma) -> None:
    mine, want = CudaBackend(model), ReferenceBackend(model)
    caches = [small.cache(model, 7) for _ in range(2)]
    for backend, cache in zip((mine, want), caches, strict=True):
        next_token(backend, cache, 4)
        cache.truncate(6)
        cache.trim()
    for token in (9, 2):
        same(next_token(mine, caches[0], token), next_token(want, caches[1], token))


def test_a_sequence_that_is_shared_is_refused(model: Gemma) -> None:
    mine, cache = CudaBackend(model), small.cache(model, 5)
    next_token(mine, cache, 4)
    cache.fork(4)
    with pytest.raises(UsageError):
        next_token(mine, cache, 4)
