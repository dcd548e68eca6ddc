"""Prefix reuse against recomputing: whatever a row went through, its logits are its tokens'."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.backends.reference import commit
from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.engine.prefix_cache import Entry, PrefixStore
from dgemma.errors import UsageError
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import MAX_CHECKPOINTS, Capacity, KVCache
from dgemma.weights.load import random_model
from tests.tiny import CPU, TINY

TOLERANCE = 1e-4
CONFIG = replace(
    TINY,
    hidden_size=16,
    intermediate_size=16,
    moe_intermediate_size=8,
    # All experts at once: a choice between near-equal scores would not survive rounding.
    num_experts=2,
    top_k_experts=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    global_head_dim=8,
    sliding_window=6,
)
WINDOW = CONFIG.sliding_window
MODELS = [
    random_model(replace(CONFIG, layer_types=layers, sliding_window=window), seed=window)
    for layers, window in [
        ((SLIDING, FULL), WINDOW),
        ((SLIDING, FULL), 4),
        ((SLIDING, SLIDING, FULL), 8),
        ((FULL,), 5),
    ]
]
MODEL = MODELS[0]
CANVAS = (7, 8, 9)
ROOM = Capacity(tokens=16, segment=8, slack=2)


# --- computing from scratch


class Scratch:
    """Rows side by side, padded behind: a causal text and a canvas that sees it and itself."""

    def __init__(self, config: ModelConfig, lengths: list[int], canvas: int) -> None:
        self.config, self.rows = config, len(lengths)
        width = max(lengths) + canvas
        self.positions_T = torch.arange(width).repeat(self.rows)
        query, key = torch.arange(width)[:, None], torch.arange(width)[None]
        text = torch.tensor(lengths)[:, None, None]
        on_canvas = (query >= text) & (key >= text) & (key < text + canvas)
        # The whole canvas sees what its first position sees of the text.
        sight = torch.minimum(query, text)
        self.masks = {
            window: ((key <= query) & (sight - key < (window or width)) | on_canvas)[:, None]
            for window in (None, config.sliding_window)
        }

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (q_TNH, k_TMH, v_TMH))
        mask = self.masks[self.config.attention(layer).window]
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


@torch.inference_mode()
def scratch_logits(model: Gemma, texts: list[list[int]], canvas: tuple[int, ...]) -> Tensor:
    """Logits of the canvas behind each text, without a cache."""
    lengths = [len(text) for text in texts]
    context = Scratch(model.config, lengths, len(canvas))
    width = max(lengths) + len(canvas)
    padded = [[*text, *canvas, *[0] * (width - len(text) - len(canvas))] for text in texts]
    ids_BL = torch.tensor(padded)
    is_text = torch.arange(width) < torch.tensor(lengths)[:, None]
    x_BLD = torch.where(is_text[..., None], model.embed(ids_BL), model.embed_canvas(ids_BL, None))
    logits_BLV = model.logits(model.stack(x_BLD.flatten(0, 1), context)).unflatten(0, (-1, width))
    at = torch.tensor(lengths)[:, None] + torch.arange(len(canvas))
    return logits_BLV[torch.arange(len(texts))[:, None], at]


@torch.inference_mode()
def cached_logits(model: Gemma, caches: list[KVCache], canvas: tuple[int, ...]) -> Tensor:
    """Logits of the canvas behind each row."""
    # A shared row cannot be written to; a branch shows what is in it.
    caches = [cache.fork(len(canvas)) if cache.is_shared else cache for cache in caches]
    reading = ForwardBatch([Segment(cache, len(canvas), commit=False) for cache in caches])
    hidden = model.denoise(torch.tensor(canvas * len(caches)), None, reading)
    return model.logits(hidden).unflatten(0, (-1, len(canvas)))


def assert_rows_hold(model: Gemma, rows: list[tuple[KVCache, list[int]]]) -> None:
    assert all(cache.length == len(ids) for cache, ids in rows)
    ours = cached_logits(model, [cache for cache, _ in rows], CANVAS)
    theirs = scratch_logits(model, [ids for _, ids in rows], CANVAS)
    difference = (ours - theirs).abs().amax((1, 2))
    worst = int(difference.argmax())
    assert difference[worst] < TOLERANCE, f"row {worst} differs by {difference[worst]}"


def assert_holds(cache: KVCache, ids: list[int]) -> None:
    assert_rows_hold(MODEL, [(cache, ids)])


# --- ten thousand histories


class Work(NamedTuple):
    """Tokens for the model: to be kept behind a row, or a canvas to look at."""

    cache: KVCache
    ids: list[int]
    commit: bool


@dataclass
class Row:
    cache: KVCache
    ids: list[int] = field(default_factory=list)


class History:
    """A client and its store, doing anything in any order."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self.dice = config, random.Random(seed)
        self.store = PrefixStore(self.dice.choice([0, 2_000, 5_000, 20_000]))
        self.row = Row(KVCache(config, self.room(), torch.float32, CPU))
        self.aside: list[Row] = []  # rows left behind, which must stay what they were
        self.texts: list[list[int]] = []  # what earlier requests ended with
        self.places = [0]  # lengths worth going back to

    def room(self) -> Capacity:
        """Little of it: windows slide and buffers grow all the time."""
        return Capacity(
            tokens=self.dice.choice([1, 8, 40]),
            segment=self.dice.choice([1, 4, 9]),
            slack=self.dice.choice([0, 1, 4]),
        )

    def new_ids(self) -> list[int]:
        return self.dice.choices(range(self.config.vocab_size), k=self.dice.randint(1, 12))

    def place(self, length: int) -> int:
        """Somewhere in a text, often at or shortly before a mark or a branch."""
        near = self.dice.choice(self.places) - self.dice.randint(0, 2)
        return near if 0 < near <= length else self.dice.randint(0, length)

    def run(self) -> Iterator[Work]:
        acts = [self.append] * 4 + [
            self.peek,
            self.checkpoint,
            self.checkpoint,
            self.cut,
            self.edit,
        ]
        acts += [self.fork, self.copy, self.request, self.request]
        yield from self.append()
        self.checkpoint()
        for act in self.dice.choices(acts, k=self.dice.randint(4, 9)):
            yield from act() or ()
            assert self.store.num_bytes <= self.store.max_bytes

    def append(self) -> Iterator[Work]:
        yield from self.encode(self.new_ids())

    def encode(self, ids: list[int]) -> Iterator[Work]:
        if ids:
            yield Work(self.row.cache, ids, commit=True)
        self.row.ids += ids

    def peek(self) -> Iterator[Work]:
        yield Work(self.row.cache, self.new_ids(), commit=False)

    def checkpoint(self) -> None:
        self.row.cache.checkpoint()
        self.places.append(len(self.row.ids))

    def cut(self) -> None:
        self.row.cache.truncate(self.max_reusable(self.place(len(self.row.ids))))
        del self.row.ids[self.row.cache.length :]

    def max_reusable(self, wanted: int) -> int:
        cache = self.row.cache
        length = cache.max_reusable(wanted)
        assert length <= wanted and cache.can_truncate(length)
        assert not any(cache.can_truncate(longer) for longer in range(length + 1, wanted + 1))
        return length

    def edit(self) -> Iterator[Work]:
        """Change the text somewhere and encode again only what must be."""
        kept = self.row.ids[: self.place(len(self.row.ids))]
        self.row.cache.truncate(self.max_reusable(len(kept)))
        self.row.ids = kept[: self.row.cache.length]
        yield from self.encode(kept[self.row.cache.length :] + self.new_ids())

    def fork(self) -> None:
        self.aside.append(self.row)
        self.places.append(len(self.row.ids))
        self.row = Row(self.row.cache.fork(self.dice.randint(1, 9)), list(self.row.ids))

    def copy(self) -> None:
        length = self.max_reusable(self.place(len(self.row.ids)))
        room = self.dice.choice([None, self.room()])
        twin = Row(self.row.cache.copy(length, room), self.row.ids[:length])
        self.row, other = self.dice.sample([self.row, twin], k=2)
        self.aside.append(other)

    def request(self) -> Iterator[Work]:
        """Finish this one, and begin one that resembles an earlier one."""
        self.store.keep(self.row.ids, self.row.cache)
        self.texts.append(self.row.ids)
        text = self.dice.choice(self.texts)
        prompt = text[: self.place(len(text))] + self.new_ids()
        room = self.room()
        cache = self.store.take(prompt, room) or KVCache(self.config, room, torch.float32, CPU)
        length = cache.length
        assert length < len(prompt) and cache.capacity == room
        self.row = Row(cache, prompt[:length])
        yield from self.encode(prompt[length:])

    def outcome(self) -> list[tuple[KVCache, list[int]]]:
        """All rows there are, with what each should hold."""
        rows = [(row.cache, row.ids) for row in (self.row, *self.aside)]
        return rows + [(entry.cache, entry.ids.tolist()) for entry in self.store.entries]


@torch.inference_mode()
def work_together(model: Gemma, works: list[Work]) -> None:
    """One pass for what many histories ask of the model."""
    works = sorted(works, key=lambda work: not work.commit)
    context = ForwardBatch([Segment(work.cache, len(work.ids), work.commit) for work in works])
    kept = [token for work in works if work.commit for token in work.ids]
    seen = [token for work in works if not work.commit for token in work.ids]
    embedded = model.embed(torch.tensor(kept, dtype=torch.long))
    entered = model.embed_canvas(torch.tensor(seen, dtype=torch.long), None)
    model.stack(torch.cat([embedded, entered]), context)
    context.close()


def test_ten_thousand_random_histories_give_the_logits_of_their_tokens() -> None:
    count, together, num_rows = 10_000, 250, 0
    for first in range(0, count, together):
        model = MODELS[first // together % len(MODELS)]
        histories = [History(model.config, seed) for seed in range(first, first + together)]
        running = [history.run() for history in histories]
        while running:
            asked = [(run, next(run, None)) for run in running]
            running = [run for run, work in asked if work is not None]
            if running:
                work_together(model, [work for _, work in asked if work is not None])
        rows = [row for history in histories for row in history.outcome()]
        for begin in range(0, len(rows), together):
            assert_rows_hold(model, rows[begin : begin + together])
        num_rows += len(rows)
    print(f"{count} histories, {num_rows} rows compared")


# --- small rows, written out


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=count)


def new_cache(room: Capacity = ROOM) -> KVCache:
    return KVCache(CONFIG, room, torch.float32, CPU)


def encode(cache: KVCache, ids: list[int]) -> None:
    if ids:
        commit(MODEL, cache, torch.tensor(ids), chunk=5)


def filled(ids: list[int], room: Capacity = ROOM) -> KVCache:
    cache = new_cache(room)
    encode(cache, ids)
    return cache


def answered(prompt: list[int], answer: list[int]) -> KVCache:
    """What the engine leaves behind: a mark at the end of the prompt, the answer after it."""
    cache = filled(prompt)
    cache.checkpoint()
    encode(cache, answer)
    return cache


# --- requests that follow one another


def served(store: PrefixStore, prompt: list[int]) -> tuple[KVCache, int]:
    """Begin a request: take what there is, encode the rest, check the row."""
    room = Capacity(tokens=len(prompt) + 20, segment=8, slack=2)
    cache = store.take(prompt, room) or new_cache(room)
    length = cache.length
    encode(cache, prompt[length:])
    assert_holds(cache, prompt)
    return cache, length


SYSTEM, ASK, THOUGHT, ANSWER, NEXT = (
    tokens(count, seed) for seed, count in enumerate([12, 9, 25, 14, 7])
)


def test_a_following_turn_encodes_nothing_but_itself() -> None:
    store = PrefixStore(10**6)
    store.keep(SYSTEM + ASK + ANSWER, answered(SYSTEM + ASK, ANSWER))
    _, reused = served(store, SYSTEM + ASK + ANSWER + NEXT)
    assert reused == len(SYSTEM + ASK + ANSWER)
    assert len(store) == 0, "the conversation goes on; there are not two of them"


def test_a_turn_whose_history_dropped_the_thought_resumes_before_the_thought() -> None:
    store = PrefixStore(10**6)
    prompt = SYSTEM + ASK
    store.keep(prompt + THOUGHT + ANSWER, answered(prompt, THOUGHT + ANSWER))
    _, reused = served(store, prompt + ANSWER + NEXT)
    assert reused == len(prompt)


def test_a_dropped_thought_costs_one_answer_in_every_turn() -> None:
    """Each turn thinks; each next one sees the answers alone, and resumes at the last prompt."""
    store, prompt, previous = PrefixStore(10**6), SYSTEM + ASK, 0
    for turn in range(6):
        cache, reused = served(store, prompt)
        assert reused == previous
        cache.checkpoint()
        thought, answer, ask = tokens(21, turn), tokens(8, turn + 50), tokens(5, turn + 90)
        encode(cache, thought + answer)
        store.keep(prompt + thought + answer, cache)
        assert len(store) == 1, "what came before is not kept a second time"
        previous, prompt = len(prompt), prompt + answer + ask


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_edited_answer_resumes_at_the_end_of_its_prompt(at: int) -> None:
    store = PrefixStore(10**6)
    prompt = SYSTEM + ASK
    store.keep(prompt + ANSWER + NEXT, answered(prompt, ANSWER + NEXT))
    edited = [*ANSWER[:at], (ANSWER[at] + 1) % CONFIG.vocab_size, *ANSWER[at + 1 :]]
    _, reused = served(store, prompt + edited + NEXT)
    assert reused == len(prompt)


def test_an_edit_within_the_window_loses_only_what_follows_it() -> None:
    store = PrefixStore(10**6)
    text = SYSTEM + ASK
    store.keep(text, filled(text))
    _, reused = served(store, [*text[:-2], 60, 60, *NEXT])
    assert reused == len(text) - 2


def test_an_edit_before_all_marks_is_encoded_from_the_start() -> None:
    store = PrefixStore(10**6)
    store.keep(SYSTEM + ASK + ANSWER, answered(SYSTEM + ASK, ANSWER))
    _, reused = served(store, SYSTEM[:3] + NEXT + ASK)
    assert reused == 0
    assert len(store) == 1


def test_an_edited_question_of_the_turn_before_resumes_at_that_turn() -> None:
    first, second = SYSTEM + ASK, SYSTEM + ASK + ANSWER + NEXT
    cache = answered(first, ANSWER + NEXT)
    cache.checkpoint()
    encode(cache, THOUGHT)
    store = PrefixStore(10**6)
    store.keep(second + THOUGHT, cache)
    _, reused = served(store, first + ASK + ASK)
    assert reused == len(first)


def test_asking_again_leaves_the_last_token_of_the_prompt() -> None:
    prompt, store = SYSTEM + ASK, PrefixStore(10**6)
    store.keep(prompt, filled(prompt))
    _, reused = served(store, prompt)
    assert reused == len(prompt) - 1


def test_asking_again_after_a_long_answer_resumes_at_the_end_of_the_prompt() -> None:
    store = PrefixStore(10**6)
    store.keep(SYSTEM + ASK + THOUGHT, answered(SYSTEM + ASK, THOUGHT))
    _, reused = served(store, SYSTEM + ASK)
    assert reused == len(SYSTEM + ASK) - 1
    assert len(store) == 0, "an answer is all that is lost"


def test_a_short_question_that_was_changed_is_all_that_is_encoded() -> None:
    """The last words before a mark may change, as far as the slack goes."""
    store = PrefixStore(10**6)
    document, question = SYSTEM + ASK, NEXT[: ROOM.slack]
    store.keep(document + question + THOUGHT, answered(document + question, THOUGHT))
    _, reused = served(store, [*document, 1 + max(NEXT), *NEXT])
    assert reused == len(document)


def test_a_conversation_survives_a_request_that_shares_only_its_system_prompt() -> None:
    store = PrefixStore(10**6)
    text = SYSTEM + ASK + THOUGHT + ANSWER
    cache = answered(SYSTEM, ASK)
    cache.checkpoint()
    encode(cache, THOUGHT + ANSWER)
    store.keep(text, cache)
    other, reused = served(store, SYSTEM + NEXT)
    assert reused == len(SYSTEM) and len(store) == 1
    encode(other, ANSWER)
    store.keep(SYSTEM + NEXT + ANSWER, other)
    assert len(store) == 2
    _, reused = served(store, text + NEXT)
    assert reused == len(text)
    _, reused = served(store, SYSTEM + NEXT + ANSWER + ASK)
    assert reused == len(SYSTEM + NEXT + ANSWER)


def test_the_longest_usable_prefix_wins_and_of_equals_the_one_with_least_to_lose() -> None:
    store = PrefixStore(10**6)
    texts = [SYSTEM[:5] + NEXT, SYSTEM[:8] + NEXT, SYSTEM[:8] + NEXT[::-1] + NEXT]
    for text in texts:
        store.keep(text, filled(text, Capacity(tokens=40, segment=40)))
    cache, reused = served(store, SYSTEM)
    assert reused == 8
    assert [entry.ids.tolist() for entry in store.entries] == [texts[0], texts[2]]
    assert cache.capacity.tokens == len(SYSTEM) + 20


def test_a_prompt_that_shares_nothing_or_has_one_token_takes_nothing() -> None:
    store = PrefixStore(10**6)
    store.keep(ASK, filled(ASK))
    assert store.take([(ASK[0] + 1) % 61, *ASK[1:]], ROOM) is None
    assert store.take(ASK[:1], ROOM) is None
    assert store.take([], ROOM) is None
    assert len(store) == 1


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    ids = np.arange(100_000)
    entry = Entry(ids, new_cache(), prefilled=len(ids))
    for at in (0, 1, 77_777, 99_999):
        changed = ids.copy()
        changed[at] = -1
        assert entry.common(changed) == at
    assert entry.common(ids) == 100_000
    assert entry.common(np.arange(200_000)) == 100_000
    assert entry.common(ids[:10]) == 10
    assert entry.common(ids[:0]) == 0


# --- what is stored


def test_the_bound_holds_and_what_was_used_longest_ago_goes_first() -> None:
    texts = [[first, *tokens(29, first)] for first in range(5)]
    size = filled(texts[0], Capacity(tokens=30))
    size.trim()
    store = PrefixStore(3 * size.num_bytes)

    def firsts() -> list[int]:
        return [int(entry.ids[0]) for entry in store.entries]

    for text in texts[:4]:
        store.keep(text, filled(text, Capacity(tokens=30)))
        assert store.num_bytes <= store.max_bytes
    assert firsts() == [1, 2, 3]
    assert store.take(texts[1][:7], ROOM) is not None, "a copy counts as use"
    assert firsts() == [2, 3, 1]
    store.keep(texts[4], filled(texts[4], Capacity(tokens=30)))
    assert firsts() == [3, 1, 4]
    store.clear()
    assert len(store) == store.num_bytes == 0


def test_a_row_larger_than_the_bound_is_not_kept_and_costs_no_other_its_place() -> None:
    store = PrefixStore(filled(ASK, Capacity(tokens=len(ASK))).num_bytes)
    store.keep(ASK, filled(ASK))
    store.keep(ASK + THOUGHT, filled(ASK + THOUGHT))
    assert [entry.ids.tolist() for entry in store.entries] == [ASK]


def test_a_row_is_stored_without_the_room_it_did_not_use() -> None:
    store = PrefixStore(10**9)
    store.keep(ASK, filled(ASK, Capacity(tokens=50_000)))
    assert store.num_bytes == filled(ASK, Capacity(tokens=len(ASK))).num_bytes
    served(store, ASK + NEXT)


def test_a_row_that_goes_on_from_a_stored_one_replaces_it() -> None:
    store = PrefixStore(10**6)
    store.keep(ASK, filled(ASK))
    store.keep(ASK, filled(ASK))
    assert len(store) == 1
    text = ASK + NEXT[:2]
    store.keep(text, filled(text, Capacity(tokens=64, segment=64)))
    assert [entry.ids.tolist() for entry in store.entries] == [text]


def test_a_stored_beginning_stays_if_the_longer_row_cannot_be_cut_back_to_it() -> None:
    store = PrefixStore(10**6)
    store.keep(SYSTEM, filled(SYSTEM))
    store.keep(SYSTEM + THOUGHT, filled(SYSTEM + THOUGHT))
    assert len(store) == 2
    _, reused = served(store, SYSTEM + NEXT)
    assert reused == len(SYSTEM)


def test_a_branch_is_stored_with_its_past_and_the_marks_of_its_past() -> None:
    root = filled(SYSTEM + ASK)
    root.checkpoint()
    branch = root.fork(tokens=40)
    encode(branch, THOUGHT)
    store = PrefixStore(10**6)
    store.keep(SYSTEM + ASK + THOUGHT, branch)
    (entry,) = store.entries
    assert entry.cache.shared_prefix is None
    _, reused = served(store, SYSTEM + ASK + NEXT)
    assert reused == len(SYSTEM + ASK)


def test_a_row_with_branches_is_stored_as_a_copy_that_can_be_continued() -> None:
    root = filled(SYSTEM)
    branch = root.fork(tokens=40)
    store = PrefixStore(10**6)
    store.keep(SYSTEM, root)
    served(store, SYSTEM + NEXT)
    encode(branch, ASK)
    assert_holds(branch, SYSTEM + ASK)


# --- marks


@pytest.mark.parametrize("marked", [1, WINDOW - 2, WINDOW - 1, WINDOW, 20])
@pytest.mark.parametrize("after", [1, 9, 90])
@pytest.mark.parametrize("back", [0, 1, ROOM.slack])
def test_a_row_can_be_cut_back_to_a_mark_however_far_its_window_moved(
    marked: int, after: int, back: int
) -> None:
    ids, length = tokens(marked + after, seed=after), max(0, marked - back)
    cache = answered(ids[:marked], ids[marked:])
    assert cache.max_reusable(length) == length
    cache.truncate(marked)
    assert_holds(cache, ids[:marked])
    encode(cache, ids[marked:])
    assert_holds(cache, ids)
    cache.truncate(length)
    assert_holds(cache, ids[:length])
    encode(cache, ids[length:])
    assert_holds(cache, ids)


def test_only_lengths_near_the_end_or_a_mark_can_be_restored() -> None:
    cache = answered(tokens(20, 1), tokens(40, 2))
    lengths = [length for length in range(61) if cache.can_truncate(length)]
    recent = lengths[4:]
    assert lengths[:4] == [0, 18, 19, 20] and ROOM.slack == 2
    assert recent == list(range(recent[0], 61)) and recent[0] <= 60 - ROOM.slack
    assert [cache.max_reusable(length) for length in (17, 19, 40, 60, 99)] == [0, 19, 20, 60, 60]


def test_the_newest_marks_are_kept_and_those_behind_a_cut_are_dropped() -> None:
    cache, ids = new_cache(), tokens(80, 1)
    for at in range(0, 80, 20):
        encode(cache, ids[at : at + 20])
        cache.checkpoint()
    cache.checkpoint()
    assert list(cache.checkpoints) == [60, 80] and len(cache.checkpoints) == MAX_CHECKPOINTS
    cache.truncate(60)
    assert list(cache.checkpoints) == [60]
    encode(cache, ids[:30])
    assert not cache.can_truncate(70) and cache.can_truncate(60)
    cache.truncate(60)
    assert_holds(cache, ids[:60])


def test_a_mark_costs_nothing_until_the_window_moves_and_then_one_window() -> None:
    cache = filled(tokens(20, 1), Capacity(tokens=200, segment=8, slack=2))
    before = cache.num_bytes
    cache.checkpoint()
    assert cache.num_bytes == before
    encode(cache, tokens(30, 2))
    assert cache.num_bytes == before + 2 * (WINDOW - 1 + 2) * CONFIG.head_dim * 4
    cache.truncate(0)
    assert cache.num_bytes == before


def test_a_row_cut_back_to_nothing_is_a_new_row() -> None:
    cache = filled(tokens(50, 1))
    cache.checkpoint()
    cache.truncate(0)
    assert_holds(cache, [])
    encode(cache, ASK)
    assert_holds(cache, ASK)


# --- branches


def test_a_branch_can_be_cut_back_to_where_it_began_after_its_window_moved() -> None:
    root = filled(SYSTEM)
    branch = root.fork(tokens=8)
    encode(branch, THOUGHT)
    assert branch.max_reusable(len(SYSTEM) + 1) == len(SYSTEM)
    branch.truncate(len(SYSTEM))
    assert_holds(branch, SYSTEM)
    encode(branch, ANSWER)
    assert_holds(branch, SYSTEM + ANSWER)


def test_a_branch_can_be_cut_back_to_a_mark_of_its_past_which_stays_as_it_is() -> None:
    root = answered(SYSTEM, THOUGHT)
    branch, other = root.fork(tokens=8), root.fork(tokens=8)
    encode(branch, ASK)
    branch.truncate(len(SYSTEM))
    assert_holds(branch, SYSTEM)
    for part in range(3):
        encode(branch, ANSWER[part::3])
    assert_holds(branch, SYSTEM + ANSWER[0::3] + ANSWER[1::3] + ANSWER[2::3])
    assert_holds(other, SYSTEM + THOUGHT)


def test_a_branch_can_be_cut_back_into_its_past_again_and_again() -> None:
    ids = tokens(30, 1)
    root = filled(ids, Capacity(tokens=64, segment=64, slack=2))
    branch = root.fork(tokens=8)
    commit(MODEL, branch, torch.tensor(THOUGHT), chunk=1)
    # Each cut lets part of the window lie in the branch and part in its past.
    for length in (30, 28, 24, 21, 3):
        branch.truncate(length)
        assert_holds(branch, ids[:length])
        assert_holds(branch.copy(length), ids[:length])


# --- copies


def test_a_copy_and_its_original_do_not_disturb_each_other() -> None:
    cache = answered(SYSTEM, THOUGHT)
    twin, short = cache.copy(cache.length), cache.copy(len(SYSTEM))
    pointers = [
        {tensor.data_ptr() for b in row.buffers for tensor in (b.k_SMH, b.v_SMH)}
        for row in (cache, twin, short)
    ]
    assert len(set.union(*pointers)) == sum(map(len, pointers))
    encode(twin, ASK)
    encode(short, ASK)
    cache.truncate(len(SYSTEM))
    encode(cache, ANSWER)
    assert_holds(cache, SYSTEM + ANSWER)
    assert_holds(short, SYSTEM + ASK)
    assert_holds(twin, SYSTEM + THOUGHT + ASK)
    twin.truncate(len(SYSTEM))
    assert_holds(twin, SYSTEM)


def test_a_copy_joins_a_chain_of_branches() -> None:
    root = answered(SYSTEM, ASK)
    middle = root.fork(tokens=30)
    encode(middle, ANSWER[:3])
    leaf = middle.fork(tokens=30)
    encode(leaf, NEXT[:2])
    twin = leaf.copy(leaf.length, Capacity(tokens=1, segment=1, slack=0))
    assert twin.shared_prefix is None and not twin.is_shared
    encode(twin, THOUGHT)
    assert_holds(twin, SYSTEM + ASK + ANSWER[:3] + NEXT[:2] + THOUGHT)
    twin.truncate(len(SYSTEM))
    assert_holds(twin, SYSTEM)


def test_copying_what_is_gone_is_refused_with_a_sentence() -> None:
    cache = filled(tokens(60, 1))
    with pytest.raises(UsageError, match="60 tokens to 10: its sliding window has moved on"):
        cache.copy(10)


# --- room


def test_a_taken_row_grows_to_the_room_of_its_request_and_no_further() -> None:
    store = PrefixStore(10**6)
    store.keep(SYSTEM, filled(SYSTEM, Capacity(tokens=len(SYSTEM), segment=2, slack=0)))
    room = Capacity(tokens=500, segment=40, slack=9)
    cache = store.take(SYSTEM + ASK, room) or new_cache()
    encode(cache, (SYSTEM + ASK)[cache.length :])
    assert [b.slots for b in cache.buffers] == [b.slots for b in new_cache(room).buffers]
    pointers = [b.k_SMH.data_ptr() for b in cache.buffers]
    answer = tokens(450, 1)
    commit(MODEL, cache, torch.tensor(answer), chunk=40)
    assert [b.k_SMH.data_ptr() for b in cache.buffers] == pointers
    assert_holds(cache, SYSTEM + ASK + answer)
    assert cache.can_truncate(cache.length - room.slack)


@pytest.mark.parametrize(
    "room", [Capacity(tokens=2, segment=2, slack=0), Capacity(tokens=200, segment=2)]
)
def test_rows_made_in_inference_mode_can_be_changed_outside_of_it(room: Capacity) -> None:
    """A prompt is encoded in inference mode; canvases are laid out, and rows cut, outside."""
    with torch.inference_mode():
        cache = new_cache(replace(room, slack=1))
        branch = filled(SYSTEM).fork(room.tokens)
    for row in (cache, branch):
        encode(row, SYSTEM)
        row.checkpoint()
        encode(row, THOUGHT)
        for count in range(1, 12):
            ForwardBatch([Segment(row, count, commit=False)])
        row.truncate(row.length - len(THOUGHT))
        ForwardBatch([Segment(row, 20, commit=False)])
    assert_holds(cache, SYSTEM)
    assert_holds(branch, SYSTEM + SYSTEM)


def test_no_more_entries_are_kept_than_a_request_can_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dgemma.engine.prefix_cache.MAX_ENTRIES", 3)
    store = PrefixStore(1 << 30)
    for first in range(5):
        store.keep([first, 7], filled([first, 7]))
    assert [entry.ids[0] for entry in store.entries] == [2, 3, 4]
