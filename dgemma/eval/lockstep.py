"""Requests of one shape, all in one batch: the fast path of large evaluations.

The engine takes requests as they come and attends to each row by itself; a thousand puzzles of one
length need neither. Here their keys lie in one tensor a layer, a step is one call a layer, and
rows that settle leave. The rule that moves a canvas is the sampler's own, mapped over rows. Given
the same plans the tokens are the engine's; a test compares them.

B rows, L canvas length, T = B * L, S keys, N/M query/key heads, G = N / M, H head width, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.canvas import Canvas, fresh
from dgemma.denoise import read_out
from dgemma.engine.options import Plan
from dgemma.model import Gemma
from dgemma.ops.row_stats import Query, RowStats
from dgemma.sampler import Sampler, advance
from dgemma.text.reply import parse_reply
from dgemma.text.tokenizer import StopIds, Tokenizer

# Positions of a pass of canvases, and rows of a pass of single tokens.
CANVAS_POSITIONS = {"cuda": 1 << 16, "cpu": 1 << 11}
AR_ROWS = {"cuda": 1024, "cpu": 32}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan: all ids of its canvas, or those that AR wrote up to a stop."""

    ids: tuple[int, ...]
    is_settled: bool  # AR: a stop was written
    steps: int


class Lanes:
    """Keys and values of rows that have committed equally many tokens."""

    def __init__(self, model: Gemma, rows: int, room: int) -> None:
        config, table = model.config, model.embed_tokens.weight
        shapes = [config.attention(layer) for layer in range(config.num_hidden_layers)]
        sizes = [(rows, room, shape.num_kv_heads, shape.head_dim) for shape in shapes]
        self.k = [table.new_empty(size) for size in sizes]
        self.v = [table.new_empty(size) for size in sizes]
        self.windows = [shape.window for shape in shapes]
        self.rows, self.length = rows, 0

    def select(self, rows: Tensor) -> None:
        """Keep some of the rows."""
        self.k, self.v = [k[rows] for k in self.k], [v[rows] for v in self.v]
        self.rows = len(rows)


class LanePass:
    """A context: the same number of new tokens in every lane, causal or as canvases."""

    def __init__(self, lanes: Lanes, count: int, *, is_canvas: bool) -> None:
        self.lanes, self.count = lanes, count
        self.is_causal = not is_canvas and count > 1
        self.device = lanes.k[0].device
        new = torch.arange(lanes.length, lanes.length + count, device=self.device)
        self.positions_T = new.repeat(lanes.rows)

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        lanes, start, end = self.lanes, self.lanes.length, self.lanes.length + self.count
        window = lanes.windows[layer]
        first = 0 if window is None else max(0, start - (window - 1))
        shape = (lanes.rows, self.count, *k_TMH.shape[1:])
        lanes.k[layer][:, start:end], lanes.v[layer][:, start:end] = (
            k_TMH.view(shape),
            v_TMH.view(shape),
        )
        k_BMSH, v_BMSH = (x[layer][:, first:end].transpose(1, 2) for x in (lanes.k, lanes.v))
        # The G queries of a key head go behind one another, so that keys are not repeated.
        q_BLMGH = q_TNH.view(*shape[:3], -1, shape[3])
        q_BMXH = q_BLMGH.permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask_XS = self._mask(first, window, q_BLMGH.shape[3]) if self.is_causal else None
        out = F.scaled_dot_product_attention(q_BMXH, k_BMSH, v_BMSH, attn_mask=mask_XS, scale=1.0)
        out = out.view(lanes.rows, shape[2], -1, self.count, shape[3])
        return out.permute(0, 3, 1, 2, 4).reshape(q_TNH.shape)

    def _mask(self, first: int, window: int | None, groups: int) -> Tensor:
        start, end = self.lanes.length, self.lanes.length + self.count
        query = torch.arange(start, end, device=self.device)[:, None]
        key = torch.arange(first, end, device=self.device)[None]
        sees = key <= query
        if window is not None:
            sees &= query - key < window
        return sees.repeat(groups, 1)


@dataclass(frozen=True, slots=True)
class Block:
    """Canvases of many rows on their way; `member_B` are the numbers of their plans."""

    member_B: Tensor
    uniform_BNL: Tensor
    noise_BNL: Tensor
    canvas: Canvas  # each field with a row dimension in front

    def select(self, rows: Tensor) -> "Block":
        return Block(
            self.member_B[rows], self.uniform_BNL[rows], self.noise_BNL[rows], self.only(rows)
        )

    def only(self, rows: Tensor) -> Canvas:
        fields = {name: getattr(self.canvas, name)[rows] for name in ROW_FIELDS}
        return replace(self.canvas, **fields)


ROW_FIELDS = tuple(name for name in Canvas.__slots__ if name != "num_steps")
STAT_FIELDS = tuple(RowStats.__slots__)


def settle(model: Gemma, plans: Sequence[Plan]) -> list[Outcome]:
    """Denoise one canvas for each plan; their samplers must be one and the same."""
    outcomes: dict[int, Outcome] = {}
    most = CANVAS_POSITIONS[_type(model)] // plans[0].canvas_length if plans else 1
    for numbers in _groups(plans, most):
        group = [plans[number] for number in numbers]
        for place, outcome in _settle(model, group):
            outcomes[numbers[place]] = outcome
    return [outcomes[number] for number in range(len(plans))]


@torch.inference_mode()
def _settle(model: Gemma, plans: Sequence[Plan]) -> Iterator[tuple[int, Outcome]]:
    sampler, length = plans[0].sampler, plans[0].canvas_length
    lanes, _ = _commit(model, plans, length)
    block = _fresh(model, plans)
    while True:
        block = _step(model, lanes, block, sampler)
        done_B = block.canvas.settled | (block.canvas.num_steps >= sampler.max_steps)
        ended = done_B.nonzero()[:, 0]
        if len(ended):
            canvas, numbers = block.only(ended), block.member_B[ended].tolist()
            ids, settled = canvas.guess_L.tolist(), canvas.settled.tolist()
            for number, own, is_settled in zip(numbers, ids, settled, strict=True):
                yield number, Outcome(tuple(own), is_settled, canvas.num_steps)
            going = (~done_B).nonzero()[:, 0]
            if not len(going):
                return
            block = block.select(going)
            lanes.select(going)


def _fresh(model: Gemma, plans: Sequence[Plan]) -> Block:
    device, first = model.embed_tokens.weight.device, plans[0]
    steps, length, vocab = first.sampler.max_steps, first.canvas_length, model.config.vocab_size
    noises = [plan.noise.block(0, steps, length, vocab, device) for plan in plans]
    rows = [fresh(n.tokens_NL[0], p.options.pins) for n, p in zip(noises, plans, strict=True)]
    fields: dict[str, Any] = {
        n: torch.stack([getattr(row, n) for row in rows]) for n in ROW_FIELDS if n != "soft_LD"
    }
    soft_BLD = model.embed_tokens.weight.new_zeros(len(plans), length, model.config.hidden_size)
    return Block(
        torch.arange(len(plans), device=device),
        torch.stack([noise.uniform_NL for noise in noises]),
        torch.stack([noise.tokens_NL for noise in noises]),
        Canvas(**fields, soft_LD=soft_BLD),
    )


def _step(model: Gemma, lanes: Lanes, block: Block, sampler: Sampler) -> Block:
    """One step of every row."""
    canvas = block.canvas
    rows, length = canvas.tokens_L.shape
    tokens_T, number = canvas.tokens_L.flatten(), canvas.num_steps
    assert canvas.soft_LD is not None
    # Before the first step it is zero, which says nothing.
    soft_TD = canvas.soft_LD.flatten(0, 1) if number else None
    hidden_TD = model.denoise(tokens_T, soft_TD, LanePass(lanes, length, is_canvas=True))
    heat = sampler.heat(sampler.max_steps - number)
    query = Query(
        heat_T=canvas.entropy_L.new_full((rows * length,), heat),
        uniform_T=block.uniform_BNL[:, number + 1].flatten(),
        held_T=tokens_T,
        temperature_T=None
        if sampler.temperature == 1
        else canvas.entropy_L.new_full((rows * length,), sampler.temperature),
    )
    stats, soft_TD = read_out(model, hidden_TD, query)
    moved = _advance(canvas, stats, block.noise_BNL[:, number + 1], sampler)
    # A pinned position is told its own token, as a converged one would be.
    own_BLD = model.embed(tokens_T).view(rows, length, -1)
    soft_BLD = torch.where(canvas.pinned_L[..., None], own_BLD, soft_TD.view(rows, length, -1))
    return replace(block, canvas=replace(moved, soft_LD=soft_BLD))


def _advance(canvas: Canvas, stats: RowStats, noise_BL: Tensor, sampler: Sampler) -> Canvas:
    """The sampler's step, mapped over rows."""
    names = tuple(name for name in ROW_FIELDS if name != "soft_LD")

    def one(
        fields: tuple[Tensor, ...], own: tuple[Tensor, ...], noise_L: Tensor
    ) -> tuple[Tensor, ...]:
        values: dict[str, Any] = dict(zip(names, fields, strict=True))
        row = replace(canvas, soft_LD=None, **values)
        own_stats = RowStats(**dict(zip(STAT_FIELDS, own, strict=True)))
        moved = advance(row, own_stats, noise_L, sampler.rule)
        return tuple(getattr(moved, name) for name in names)

    rows = len(noise_BL)
    fields = tuple(getattr(canvas, name) for name in names)
    own = tuple(getattr(stats, name).view(rows, -1) for name in STAT_FIELDS)
    moved = torch.vmap(one)(fields, own, noise_BL)
    new: dict[str, Any] = dict(zip(names, moved, strict=True))
    return replace(canvas, **new, num_steps=canvas.num_steps + 1)


def greedy(model: Gemma, plans: Sequence[Plan], stops: StopIds) -> list[Outcome]:
    """Write each plan's reply token by token, the likeliest each time."""
    outcomes: dict[int, Outcome] = {}
    for numbers in _groups(plans, AR_ROWS[_type(model)]):
        rows = _greedy(model, [plans[number] for number in numbers], stops)
        for number, ids in zip(numbers, rows, strict=True):
            kept, stop = stops.cut(ids)
            steps = len(kept) + (stop is not None)
            outcomes[number] = Outcome(tuple(kept), stop is not None, steps)
    return [outcomes[number] for number in range(len(plans))]


@torch.inference_mode()
def _greedy(model: Gemma, plans: Sequence[Plan], stops: StopIds) -> list[list[int]]:
    most = max(plan.max_tokens for plan in plans)
    lanes, hidden_BD = _commit(model, plans, most)
    stop_ids = torch.tensor(stops.ids, device=hidden_BD.device)
    ended_B = torch.zeros(len(plans), dtype=torch.bool, device=hidden_BD.device)
    written: list[Tensor] = []
    for _ in range(most):
        written.append(model.logits(hidden_BD).argmax(-1))
        ended_B |= torch.isin(written[-1], stop_ids)
        if bool(ended_B.all()):
            break
        context = LanePass(lanes, 1, is_canvas=False)
        hidden_BD = model.encode(written[-1], context)
        lanes.length += 1
    rows = torch.stack(written, dim=1).tolist()
    return [row[: plan.max_tokens] for row, plan in zip(rows, plans, strict=True)]


def text_of(plan: Plan, outcome: Outcome, tokenizer: Tokenizer, stops: StopIds) -> str:
    """The reply as the engine promises it: up to a stop, which cannot stand before pinned text."""
    pins = plan.options.pins
    pinned = zip(pins.positions, pins.tokens, strict=True)
    after = 1 + max((place for place, token in pinned if token not in stops.ids), default=-1)
    before = [token for token in outcome.ids[:after] if token not in stops.ids]
    kept, _ = stops.cut(outcome.ids[after:])
    return parse_reply(tokenizer, [*before, *kept][: plan.max_tokens]).answer


def _commit(model: Gemma, plans: Sequence[Plan], room: int) -> tuple[Lanes, Tensor]:
    """Lanes that hold the prompts, with room for more, and the prompts' last hidden states."""
    tokens_BS = torch.tensor(
        [plan.prompt.ids for plan in plans], device=model.embed_tokens.weight.device
    )
    rows, length = tokens_BS.shape
    lanes = Lanes(model, rows, length + room)
    hidden_TD = model.encode(tokens_BS.flatten(), LanePass(lanes, length, is_canvas=False))
    lanes.length = length
    return lanes, hidden_TD.view(rows, length, -1)[:, -1]


def _groups(plans: Sequence[Plan], most: int) -> Iterator[list[int]]:
    """Numbers of plans with prompts of one length, not too many at a time."""

    def length(number: int) -> int:
        return len(plans[number].prompt.ids)

    for _, same in groupby(sorted(range(len(plans)), key=length), key=length):
        numbers = list(same)
        size = max(1, most)
        for begin in range(0, len(numbers), size):
            yield numbers[begin : begin + size]


def _type(model: Gemma) -> str:
    return model.embed_tokens.weight.device.type
