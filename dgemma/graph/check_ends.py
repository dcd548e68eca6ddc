"""A short check of the kernels at both ends of a captured pass: how a canvas enters, and moves.

Also how a single token enters. Each runs once by definition and once by kernel on memory of its
own, with the model's own weights and the length of its canvas. Part of the check of row
statistics; see `check.py`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dgemma.graph.entrance import Entrance
from dgemma.graph.memory import MOVED, Memory, Shape
from dgemma.graph.moving import move, move_by_rule
from dgemma.graph.reading import Reading
from dgemma.graph.token import Committer, Teller
from dgemma.model import Gemma
from dgemma.ops.dense import Weight, scores
from dgemma.ops.fast import switched
from dgemma.ops.norm import rms_norm
from dgemma.ops.row_stats import RowStats
from dgemma.sampler import EntropyBound
from dgemma.stack import Stack

NEAR = 0.02  # of what enters, relative
NEAR_8 = 0.06  # of scores: by definition a single row is rounded too, by a kernel it is not
LAST = 4096  # tokens of the vocabulary
STEPS = 3
SURE = 0.02  # mean nats of the drawn positions: some are decided, some are not


def ends_off(model: Gemma, stack: Stack) -> str:
    """What is wrong at the ends of a pass; nothing if nothing is."""
    return next((wrong for off in end_checks(model, stack) if (wrong := off())), "")


def end_checks(model: Gemma, stack: Stack) -> list[Callable[[], str]]:
    """The check of each end; it says what is wrong there."""
    token = partial(_token_off, model, stack)
    if model.self_conditioning is None:
        return [token]  # there is no canvas
    return [token, partial(_entrance_off, model), partial(_moves_off, model)]


def _token_off(model: Gemma, stack: Stack) -> str:
    """The vocabulary's last token, as far behind as any."""
    config, device = model.config, model.embed_tokens.weight.device
    ends = (config.max_position_embeddings - 1, config.vocab_size - 1)
    start_1, token_1 = (torch.tensor([end], device=device) for end in ends)
    with switched({"row_stats"}):
        x_1D, turns, normed_1D = Teller(model, stack).enter(start_1, token_1)
    with switched(()):
        want_1D, want_turns, _ = Committer(model, stack, 1).enter(start_1, token_1)
        pairs = [(x_1D, want_1D), (normed_1D, rms_norm(want_1D, stack.first_D, stack.eps))]
    pairs += [pair for kind in turns for pair in zip(turns[kind], want_turns[kind], strict=True)]
    offs = [(got - want).norm() / want.norm().clamp(min=1e-6) for got, want in pairs]
    off = float(torch.stack([off.float() for off in offs]).max())  # no number, if any is none
    return "" if off <= NEAR else f"wrong: how a token enters, by {off:.2g}"


def head_off(model: Gemma) -> str:
    """A head in 8 bits, by the vocabulary's last tokens: for a canvas and for a single token."""
    head = model.embed_tokens.head
    if head.factor_O is None:
        return ""  # torch's own product
    length, width = model.config.canvas_length, model.config.hidden_size
    hidden_LD = _drawn(model.embed_tokens.weight.new_empty(length, width), 2)
    last = Weight(head.numbers_OI[-LAST:], head.factor_O[-LAST:])
    for rows_TD in (hidden_LD, hidden_LD[:1]):
        with switched({"layer"}):
            got_TV = scores(rows_TD, head)[:, -LAST:].float()
        with switched(()):
            want_TV = scores(rows_TD, last).float()
        off = float((got_TV - want_TV).norm() / want_TV.norm())
        if not off <= NEAR_8:  # nor if it is no number
            return f"wrong: the head in 8 bits, by {off:.2g}, {len(rows_TD)} rows"
    return ""


def _entrance_off(model: Gemma) -> str:
    mine, want = _memory(model), _memory(model)
    entrance = Entrance(model)
    found = []
    for memory, by_kernels in ((mine, True), (want, False)):
        with switched({"row_stats"} if by_kernels else ()):
            conditioned_LD = entrance.enter(memory, by_kernels=by_kernels)
            behind_TD = entrance.enter_behind(memory, by_kernels=by_kernels)
        found.append(torch.cat([conditioned_LD, behind_TD]).float())
    off = float((found[0] - found[1]).norm() / found[1].norm())
    is_same = torch.equal(mine.heat_L, want.heat_L) and torch.equal(mine.uniform_L, want.uniform_L)
    return "" if off <= NEAR and is_same else f"wrong: how a canvas enters, by {off:.2g}"


def _moves_off(model: Gemma) -> str:
    mine, want = _memory(model), _memory(model)
    rule = EntropyBound()
    for number in range(STEPS):
        reading = _reading(mine, model.config.vocab_size, number)
        move(mine, reading, rule)
        move_by_rule(want, reading, rule)
        if mine.tokens_L.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        names = (*MOVED, "index_1", "seen_2")
        other = [n for n in names if not torch.equal(getattr(mine, n), getattr(want, n))]
        if other:
            return f"wrong: how a canvas moves ({', '.join(other)})"
    return ""


def _memory(model: Gemma) -> Memory:
    """Of a canvas like any, always the same."""
    memory = Memory(model, Shape(model.config.canvas_length, STEPS, EntropyBound()))
    length, vocab, device = len(memory.tokens_L), model.config.vocab_size, memory.tokens_L.device
    at_L = torch.arange(length, device=device)
    memory.tokens_L.copy_(at_L * 7919 % vocab)
    memory.block_L.copy_(at_L * 104729 % vocab)
    memory.guess_L.fill_(-1)
    memory.pinned_L.copy_(at_L % 5 == 1)
    memory.noise_NL.copy_(
        (at_L + torch.arange(len(memory.noise_NL), device=device)[:, None]) % vocab
    )
    memory.uniform_NL.copy_(at_L / length)
    memory.heat_N.copy_(0.8 - 0.1 * torch.arange(len(memory.heat_N), device=device))
    memory.soft_LD.copy_(_drawn(memory.soft_LD, 0))
    return memory


def _reading(memory: Memory, vocab: int, number: int) -> Reading:
    """Drawn: the entropies of a first step, of a later one, and of one that settles."""
    from dgemma.ops.kernels.sparse import Likely

    length, device = len(memory.tokens_L), memory.tokens_L.device
    at_L = torch.arange(length, device=device)
    sure_L = _drawn(memory.entropy_L, 1).square() * SURE * 10.0 ** (1 - 2 * number)
    stats = RowStats(
        draw_T=(at_L + number) % vocab,
        top_T=(at_L + number // 2) % vocab,
        entropy_T=sure_L,
        top_p_T=torch.ones_like(sure_L),
        held_p_T=torch.ones_like(sure_L),
    )
    count_LG = torch.full((length, 3), number, dtype=torch.int32, device=device)
    mass_LG = torch.full((length, 3), 0.333 + 0.0001 * number, device=device)
    return Reading(stats, lambda: sure_L, Likely(count_LG, mass_LG))


def _drawn(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    drawn = torch.randn(like.shape, generator=generator, device=like.device)
    return drawn.to(like.dtype)
