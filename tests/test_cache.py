"""The cache against recomputing: whatever happened to a row, its logits are those of its tokens."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dgemma.backends.reference import commit
from dgemma.config import FULL, SLIDING
from dgemma.errors import UsageError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import MAX_CHECKPOINTS, Capacity, KVCache
from dgemma.weights.load import random_model
from tests.dense import scratch_logits
from tests.tiny import CPU, TINY

TOLERANCE = 1e-4
WINDOW = 6
CONFIG = replace(TINY, layer_types=(SLIDING, FULL, SLIDING, FULL), sliding_window=WINDOW)
MODEL = random_model(CONFIG, seed=5)
SLIDING_LAYERS = [i for i, kind in enumerate(CONFIG.layer_types) if kind == SLIDING]
QUICK = settings(
    deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (count,), generator=generator).tolist()


def new_cache(tokens: int = 64, segment: int = 16, slack: int = 4) -> KVCache:
    return KVCache(
        CONFIG, Capacity(tokens=tokens, segment=segment, slack=slack), torch.float32, CPU
    )


@torch.inference_mode()
def append(cache: KVCache, ids: list[int]) -> Tensor:
    """Commit tokens in one pass; their logits."""
    writing = ForwardBatch([Segment(cache, len(ids), commit=True)])
    logits = MODEL.logits(MODEL.encode(torch.tensor(ids), writing))
    writing.close()
    return logits


@torch.inference_mode()
def peek(cache: KVCache, canvas: list[int]) -> Tensor:
    """Denoise a canvas once; its logits."""
    reading = ForwardBatch([Segment(cache, len(canvas), commit=False)])
    return MODEL.logits(MODEL.denoise(torch.tensor(canvas), None, reading))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    difference = (ours - theirs).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference}"


def filled(count: int, **room: int) -> tuple[KVCache, list[int]]:
    cache, ids = new_cache(**room), tokens(count, seed=count)
    commit(MODEL, cache, torch.tensor(ids), chunk=5)
    return cache, ids


# --- any history


@dataclass
class History:
    """A cache and the tokens it should hold."""

    cache: KVCache
    ids: list[int] = field(default_factory=list)
    longest: int = 0  # that it or its past ever was

    def take(self, action: str, size: int, seed: int) -> "History":
        """Do one thing to the row, and compare where there is something to compare."""
        if action == "branch":
            return History(self.cache.fork(size), list(self.ids), self.longest)
        if action == "copy":
            length = self.cache.max_reusable(max(0, len(self.ids) - size // 2))
            return History(self.cache.copy(length), self.ids[:length], self.longest)
        if action == "mark":
            self.cache.checkpoint()
        if action == "trim":
            self.cache.trim()
        if action == "truncate":
            self.truncate(max(0, len(self.ids) - size))
        if action == "peek":
            canvas = tokens(size, seed)
            assert_near(peek(self.cache, canvas), scratch_logits(MODEL, self.ids, canvas)[1])
        if action == "append":
            new = tokens(size, seed)
            logits = append(self.cache, new)
            self.ids += new
            self.longest = max(self.longest, len(self.ids))
            assert_near(logits, scratch_logits(MODEL, self.ids, [])[0][-size:])
        assert self.cache.length == len(self.ids)
        return self

    def truncate(self, length: int) -> None:
        if self.cache.can_truncate(length):
            self.cache.truncate(length)
            del self.ids[length:]
        else:
            assert length < self.longest - self.cache.capacity.slack, "the slack must suffice"
            assert length > 0 and length not in self.cache.checkpoints
            with pytest.raises(UsageError, match=f"to {length}: .*encode the tokens again"):
                self.cache.truncate(length)


@st.composite
def rooms(draw: Any) -> Capacity:
    """Little room on purpose: windows slide and buffers grow all the time."""
    return Capacity(
        tokens=draw(st.sampled_from([1, 10, 40, 100])),
        segment=draw(st.sampled_from([1, 7, 16])),
        slack=draw(st.sampled_from([0, 3, 20])),
    )


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "append", "append", "peek", "truncate", "branch", "copy", "mark", "trim"]
        ),
        st.integers(1, 12),
    ),
    min_size=3,
    max_size=14,
)


@settings(QUICK, max_examples=100)
@given(room=rooms(), actions=ACTIONS, seed=st.integers(0, 999))
def test_a_row_with_any_history_gives_the_logits_of_its_tokens(
    room: Capacity, actions: list[tuple[str, int]], seed: int
) -> None:
    row = History(KVCache(CONFIG, room, torch.float32, CPU))
    for turn, (action, size) in enumerate(actions):
        row = row.take(action, size, seed + turn)
    row.take("peek", 5, seed)


@settings(QUICK, max_examples=40)
@given(
    room=rooms(),
    actions=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["append", "append", "peek", "truncate", "branch"]),
            st.integers(1, 9),
        ),
        min_size=4,
        max_size=14,
    ),
)
def test_branches_of_branches_do_not_disturb_each_other(
    room: Capacity, actions: list[tuple[int, str, int]]
) -> None:
    """Many rows grow from one; the ones they grow from stay as they are, and can still be read."""
    rows = [History(KVCache(CONFIG, room, torch.float32, CPU))]
    rows[0].take("append", 9, 1)
    for turn, (which, action, size) in enumerate(actions):
        row = rows[which % len(rows)]
        if action == "branch":
            rows.append(row.take("branch", size, turn))
        elif row.cache.is_shared:
            # A shared row can be neither written nor cut: its branches stand on it.
            with pytest.raises(UsageError, match="shared by forks"):
                row.cache.truncate(0) if action == "truncate" else peek(row.cache, [1])
        else:
            row.take(action, size, turn)
    for row in rows:
        if not row.cache.is_shared:
            row.take("peek", 4, seed=99)


def test_a_branch_can_be_cut_back_into_its_shared_past() -> None:
    root, ids = filled(9)
    branch = root.fork(tokens=20)
    append(branch, tokens(5, 1))
    branch.truncate(7)
    assert_near(append(branch, [3, 4]), scratch_logits(MODEL, [*ids[:7], 3, 4], [])[0][-2:])
    assert root.length == 9
    again = root.fork(tokens=20)
    assert_near(peek(again, [5, 6]), scratch_logits(MODEL, ids, [5, 6])[1])


def test_cutting_a_shared_row_is_refused_since_its_branches_read_it() -> None:
    root, ids = filled(9)
    middle = root.fork(tokens=20)
    append(middle, [1, 2, 3])
    leaf = middle.fork(tokens=20)
    with pytest.raises(UsageError, match="shared by forks"):
        middle.truncate(4)
    assert_near(peek(leaf, [5, 6]), scratch_logits(MODEL, [*ids, 1, 2, 3], [5, 6])[1])


def test_writing_to_a_shared_row_is_refused_with_what_to_do() -> None:
    root, _ = filled(9)
    root.fork(tokens=8)
    for is_commit in (True, False):
        with pytest.raises(UsageError, match="change a fork instead"):
            ForwardBatch([Segment(root, 3, commit=is_commit)])
    assert root.length == 9


def test_a_fork_has_memory_for_its_own_tokens_alone() -> None:
    root, _ = filled(40, tokens=64)
    branch = root.fork(tokens=8)
    assert branch.shared_prefix is root and branch.length == 40
    assert branch.num_bytes < root.num_bytes / 3


# --- what a denoise pass may not do


def pointers(cache: KVCache) -> list[tuple[int, int]]:
    return [(b.k_SMH.data_ptr(), b.v_SMH.data_ptr()) for b in cache.buffers]


def test_denoising_changes_no_length_and_no_buffer() -> None:
    cache, ids = filled(30, tokens=30 + 8)
    before, shapes = pointers(cache), [b.k_SMH.shape for b in cache.buffers]
    committed = [b.read(b.base, 30).k_SMH.clone() for b in cache.buffers]
    over_canvas = ForwardBatch([Segment(cache, 8, commit=False)])
    first = None
    for step in range(4):
        canvas = torch.tensor(tokens(8, seed=step % 2))
        with torch.inference_mode():
            logits = MODEL.logits(MODEL.denoise(canvas, None, over_canvas))
        over_canvas.close()
        assert pointers(cache) == before and cache.length == 30
        assert [b.k_SMH.shape for b in cache.buffers] == shapes
        if step == 0:
            first = logits
        elif step == 2:
            assert torch.equal(first, logits), "a step left something behind"
    for buffer, keys in zip(cache.buffers, committed, strict=True):
        assert torch.equal(buffer.read(buffer.base, 30).k_SMH, keys)
    assert_near(first, scratch_logits(MODEL, ids, tokens(8, seed=0))[1])


def test_room_for_the_whole_answer_is_never_allocated_again() -> None:
    cache = new_cache(tokens=100, segment=16, slack=0)
    before = pointers(cache)
    for block in range(11):
        peek(cache, tokens(8, seed=block))
        append(cache, tokens(8, seed=block))
    peek(cache, tokens(8, seed=99))
    assert pointers(cache) == before


# --- sizes


def test_sliding_buffers_do_not_grow_with_the_context() -> None:
    room = Capacity(tokens=8, segment=8, slack=3)
    cache = KVCache(CONFIG, room, torch.float32, CPU)
    sizes = []
    for turn in range(40):
        append(cache, tokens(8, turn))
        sizes.append([cache.buffers[layer].slots for layer in SLIDING_LAYERS])
    bound = WINDOW - 1 + room.slack + room.segment
    assert max(map(max, sizes)) <= bound
    assert cache.buffers[1].slots >= 320 and cache.buffers[1].base == 0
    assert all(cache.buffers[layer].base > 290 for layer in SLIDING_LAYERS)


def test_a_long_room_costs_sliding_layers_no_more_than_their_window() -> None:
    short, long = new_cache(tokens=1000), new_cache(tokens=100_000)
    for layer in SLIDING_LAYERS:
        assert short.buffers[layer].slots == long.buffers[layer].slots == WINDOW - 1 + 4 + 16
    assert long.buffers[1].slots == 100_000
    per_token = 2 * 4 * (CONFIG.num_global_key_value_heads * CONFIG.global_head_dim) * 2
    assert long.num_bytes - short.num_bytes == 99_000 * per_token


def test_full_buffers_grow_by_doubling_and_keep_what_they_hold() -> None:
    cache = new_cache(tokens=1)
    ids: list[int] = []
    allocations = set()
    for turn in range(60):
        ids += tokens(1, turn)
        logits = append(cache, ids[-1:])
        allocations.add(cache.buffers[1].slots)
    assert len(allocations) <= 8
    assert_near(logits, scratch_logits(MODEL, ids, [])[0][-1:])


def test_a_window_slides_only_when_its_buffer_is_full() -> None:
    cache = new_cache(tokens=1000, segment=16, slack=4)
    bases = []
    for turn in range(60):
        append(cache, tokens(1, turn))
        bases.append(cache.buffers[0].base)
    moves = sum(now != before for before, now in pairwise(bases))
    assert bases[0] == 0 and 1 <= moves <= 4


# --- truncation


def test_truncating_beyond_the_window_that_is_kept_is_refused_with_a_sentence() -> None:
    cache, _ = filled(60, tokens=64, slack=4)
    assert not cache.can_truncate(10)
    with pytest.raises(UsageError, match=r"a sequence of 60 tokens to 10: its sliding window"):
        cache.truncate(10)
    assert cache.length == 60


@pytest.mark.parametrize("length", [61, -1])
def test_truncating_to_a_length_that_never_was_is_refused(length: int) -> None:
    cache, _ = filled(60)
    with pytest.raises(UsageError, match=f"60 tokens cannot be truncated to {length}"):
        cache.truncate(length)
    assert cache.length == 60


@pytest.mark.parametrize("back", [0, 1, 4])
def test_truncating_within_the_slack_is_always_possible(back: int) -> None:
    cache, ids = filled(60, tokens=64, slack=4)
    cache.truncate(60 - back)
    kept = ids[: 60 - back]
    assert_near(peek(cache, [1, 2, 3]), scratch_logits(MODEL, kept, [1, 2, 3])[1])


@pytest.mark.parametrize("slack", [0, 4])
def test_a_marked_length_can_be_cut_back_to_however_far_the_row_went_on(slack: int) -> None:
    cache, ids = filled(20, tokens=20, slack=slack)
    cache.checkpoint()
    for turn in range(12):
        append(cache, tokens(7, turn))
    assert cache.can_truncate(20 - slack) and not cache.can_truncate(19 - slack)
    assert not cache.can_truncate(21)
    assert cache.max_reusable(50) == 20 and cache.max_reusable(19 - slack) == 0
    cache.truncate(20)
    assert_near(peek(cache, [1, 2]), scratch_logits(MODEL, ids, [1, 2])[1])
    assert_near(append(cache, [3, 4]), scratch_logits(MODEL, [*ids, 3, 4], [])[0][-2:])


def test_only_the_newest_marks_are_kept() -> None:
    cache, _ = filled(10, tokens=10, slack=0)
    for turn in range(MAX_CHECKPOINTS + 2):
        cache.checkpoint()
        append(cache, tokens(20, turn))
    newest = [10 + 20 * turn for turn in range(2, MAX_CHECKPOINTS + 2)]
    assert [cache.can_truncate(length) for length in newest] == [True] * MAX_CHECKPOINTS
    assert not cache.can_truncate(10) and not cache.can_truncate(30)


def test_a_copy_has_memory_of_its_own() -> None:
    row, ids = filled(30, tokens=40)
    branch = row.fork(tokens=8)
    append(branch, [1, 2, 3])
    twin = branch.copy(32)
    assert twin.shared_prefix is None and twin.length == 32
    append(twin, [9, 9, 9])
    branch.truncate(31)
    append(branch, [4])
    assert_near(peek(twin, [5]), scratch_logits(MODEL, [*ids, 1, 2, 9, 9, 9], [5])[1])
    assert_near(peek(branch, [5]), scratch_logits(MODEL, [*ids, 1, 4], [5])[1])


def test_trimming_gives_memory_back_until_it_is_needed() -> None:
    cache, ids = filled(10, tokens=1000)
    before = cache.num_bytes
    cache.trim()
    assert cache.num_bytes < before / 20
    assert_near(peek(cache, [5, 6]), scratch_logits(MODEL, ids, [5, 6])[1])
    assert cache.num_bytes == before


# --- several spans in one pass


def enter_all(model: Gemma, spans: list[Segment], ids: list[list[int]]) -> list[Tensor]:
    """Send the tokens of several spans through the model in one pass; the logits of each."""
    with torch.inference_mode():
        together = ForwardBatch(spans)
        parts = [
            model.embed(torch.tensor(part))
            if span.commit
            else model.embed_canvas(torch.tensor(part), None)
            for span, part in zip(spans, ids, strict=True)
        ]
        logits = model.logits(model.stack(torch.cat(parts), together))
        together.close()
    return list(torch.split(logits, [len(part) for part in ids]))


@pytest.mark.parametrize("prompt", [0, 3, 20])
def test_a_block_is_committed_and_the_next_denoised_in_one_pass(prompt: int) -> None:
    block, canvas = tokens(7, 1), tokens(5, 2)
    one, ids = new_cache(), tokens(prompt, 3)
    two = new_cache()
    for cache in (one, two):
        if ids:
            append(cache, ids)
    both = enter_all(MODEL, [Segment(one, 7, True), Segment(one, 5, False)], [block, canvas])
    assert one.length == prompt + 7
    assert_near(both[0], append(two, block))
    assert_near(both[1], peek(two, canvas))
    assert_near(peek(one, canvas), peek(two, canvas))


@settings(QUICK, max_examples=25)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 9), st.booleans()), min_size=2, max_size=4
    ),
    seed=st.integers(0, 99),
)
def test_rows_of_any_length_share_a_pass_as_if_alone(
    rows: list[tuple[int, int, bool]], seed: int
) -> None:
    spans, new, expected = [], [], []
    for index, (past, count, is_commit) in enumerate(rows):
        cache, ids = new_cache(), tokens(past, seed + index)
        if ids:
            append(cache, ids)
        part = tokens(count, seed + 50 + index)
        spans.append(Segment(cache, count, is_commit))
        new.append(part)
        if is_commit:
            expected.append(scratch_logits(MODEL, [*ids, *part], [])[0][-count:])
        else:
            expected.append(scratch_logits(MODEL, ids, part)[1])
    for ours, theirs in zip(enter_all(MODEL, spans, new), expected, strict=True):
        assert_near(ours, theirs)
    for span, (past, count, is_commit) in zip(spans, rows, strict=True):
        assert span.cache.length == past + count * is_commit


def test_branches_of_one_prompt_share_a_pass() -> None:
    root, ids = filled(25)
    branches = [root.fork(tokens=16) for _ in range(3)]
    canvases = [tokens(4, seed) for seed in range(3)]
    spans = [Segment(branch, 4, commit=False) for branch in branches]
    for ours, canvas in zip(enter_all(MODEL, spans, canvases), canvases, strict=True):
        assert_near(ours, scratch_logits(MODEL, ids, canvas)[1])


def test_positions_follow_the_rows_and_not_the_pass() -> None:
    first, _ = filled(10)
    second, _ = filled(3)
    together = ForwardBatch(
        [Segment(first, 2, True), Segment(second, 3, False), Segment(first, 2, False)]
    )
    assert together.positions_T.tolist() == [10, 11, 3, 4, 5, 12, 13]
