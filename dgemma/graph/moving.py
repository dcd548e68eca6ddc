"""How a captured step moves the canvas in memory: by one kernel, or as the rule defines it."""

import torch

from dgemma.graph.memory import Memory
from dgemma.graph.reading import Reading
from dgemma.sampler import EntropyBound, Rule, advance


def move(memory: Memory, reading: Reading, rule: Rule) -> None:
    """Take the canvas one step on, and tell the host: settled; the sparse soft embedding will do.

    The kernel knows the released rule alone, and canvases of some length.
    """
    if reading.likely is not None and type(rule) is EntropyBound:
        from dgemma.ops.kernels.move import LONGEST

        if len(memory.tokens_L) <= LONGEST:
            move_by_kernel(memory, reading, rule)
            return
    move_by_rule(memory, reading, rule)


def move_by_kernel(memory: Memory, reading: Reading, rule: EntropyBound) -> None:
    from dgemma.ops.kernels.move import Found, Limits, move

    stats, likely = reading.stats, reading.likely
    assert likely is not None, "the kernel also says whether the likely tokens suffice"
    found = Found(draw_L=stats.draw_T, top_L=stats.top_T, entropy_L=stats.entropy_T, likely=likely)
    move(memory.held(), found, Limits(rule.bound, rule.settle_entropy, rule.settle_steps))


def move_by_rule(memory: Memory, reading: Reading, rule: Rule) -> None:
    noise_L = memory.noise_NL.index_select(0, memory.index_1 + 1)[0]
    memory.keep(advance(memory.canvas(0), reading.stats, noise_L, rule))
    memory.index_1.add_(1)
    flags_2 = torch.stack([memory.settled, reading.is_sparse()])
    memory.seen_2.copy_(flags_2, non_blocking=True)
