"""On-policy canvases: training on canvases that sampler steps have changed.

Uniform noise gives canvases whose tokens are clean or random. A sampler's canvases hold tokens that
it drew, some of them wrong, among fresh noise, with self-conditioning at its temperature. Two ways
to train on such canvases, both for texts with a single right answer such as a puzzle's solution
(for open-ended text a drawn token rarely matches the reference, so training on it teaches the model
to distrust its own samples; such sources set `on_policy = false`):

- Rollout: the self-conditioning pass also takes a sampler step. Where its entropy is below a bound
  it accepts the drawn token, elsewhere it draws new noise. Targets stay the clean text.
- Persistent canvases: a sequence stays for many training steps. Each pass over it gives both the
  loss and the sampler step that makes the next pass's canvas and self-conditioning, so there is no
  extra pass, and canvases get to where the sampler is stuck: solved ones restart from noise, the
  others go on. (Deep supervision with a carry: arXiv:2506.21734, arXiv:2510.04871.)

Temperature, entropy bound and all draws follow from a canvas's rng key and the number of the step,
so that a batch gives the same canvases on any machine.

B packed sequences, T rows of all of them, D width, V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dgemma.diffusion.canvas import Words, philox
from dgemma.diffusion.logit_stats import draw
from dgemma.train.corruption import NONE, RowArray
from dgemma.train.packing import FIELDS, Batch, count_real_rows

PHILOX_KEY = (0x5EED, 0)
TEMPERATURES = (0.4, 1.0)  # from the released sampler's t_min to 1
ENTROPY_BOUNDS = (0.005, 0.7)  # nats; the upper is about that of two equally likely tokens


class PackedStepStats(NamedTuple):
    """The output of a denoising step in training."""

    self_cond_TD: Tensor  # self-conditioning for the next pass
    token: Tensor | None = None  # [B, T] after the sampler step; None: no step was taken
    argmax: Tensor | None = None  # [B, T], where a step was taken


class RolloutDraws(NamedTuple):
    """Random choices of a sampler step, for each row."""

    is_rolled_T: Tensor  # whether the step may change it
    temperature_T: Tensor
    entropy_bound_T: Tensor  # entropy below which a drawn token is accepted
    uniform_T: Tensor  # decides the draw, in [0, 1)
    noise_T: Tensor  # token where the draw is not accepted
    token_T: Tensor  # token before the step


def rollout_draws(batch: Batch, fraction: float, vocab_size: int, step: Tensor) -> RolloutDraws:
    """Draw for a step; `fraction` of the canvases are rolled out. `step` is a scalar tensor."""
    has_key_T = batch.rng_key.flatten() > NONE
    key_T, position_T = batch.rng_key.flatten().clamp(min=0), batch.position.flatten()
    zero_T = torch.zeros_like(key_T)
    # Once per canvas, then once per position and step.
    per_canvas = philox((key_T, zero_T, zero_T, zero_T), PHILOX_KEY)
    per_row = philox((key_T, position_T, zero_T + 1, zero_T + step), PHILOX_KEY)
    chosen_T, temperature_T, bound_T, _ = _uniform(per_canvas)
    uniform_T, noise_T, _, _ = _uniform(per_row)
    is_free_T = (batch.is_canvas & (batch.pinned == 0)).flatten()
    is_rolled_T = is_free_T & has_key_T & (chosen_T < fraction)
    t_min, t_max = TEMPERATURES
    low, high = (math.log(bound) for bound in ENTROPY_BOUNDS)
    return RolloutDraws(
        is_rolled_T=is_rolled_T,
        temperature_T=torch.where(is_rolled_T, t_min + (t_max - t_min) * temperature_T, 1.0),
        entropy_bound_T=(low + (high - low) * bound_T).exp(),
        uniform_T=uniform_T,
        noise_T=(noise_T * vocab_size).long(),
        token_T=batch.token.flatten(),
    )


def rollout_step(p_TV: Tensor, draws: RolloutDraws) -> Tensor:
    """Take a sampler step; return the new tokens."""
    entropy_T = -(p_TV * p_TV.clamp(min=1e-30).log()).sum(-1)
    is_accepted_T = entropy_T < draws.entropy_bound_T
    token_T = torch.where(is_accepted_T, draw(p_TV, draws.uniform_T), draws.noise_T)
    return torch.where(draws.is_rolled_T, token_T, draws.token_T)


def restart_noise(batch: Batch, vocab_size: int, step: Tensor) -> Tensor:
    """Draw tokens for canvases that restart."""
    key_T = batch.rng_key.flatten().clamp(min=0)
    zero_T = torch.zeros_like(key_T)
    counter = (key_T, batch.position.flatten(), zero_T + 2, zero_T + step)
    return (_uniform(philox(counter, PHILOX_KEY))[0] * vocab_size).long()


def _uniform(words: Words) -> list[Tensor]:
    """Convert to uniform numbers in [0, 1), with the 24 bits that float32 holds."""
    return [(word >> 8).float() / (1 << 24) for word in words]


class PersistentCanvases:
    """Sequences that stay for several training steps."""

    def __init__(self, rows: RowArray, num_evicted: int, like: Tensor) -> None:
        """`rows`: the first sequences; `num_evicted` are replaced in each step.

        `like`: a weight of the model's width, for device and dtype of the self-conditioning.
        """
        self.batch = Batch.of(torch.from_numpy(rows), like.device)
        self.num_evicted = num_evicted
        self.oldest = 0  # index of the first sequence to be evicted next
        num_rows, width = self.batch.token.numel(), like.shape[-1]
        self.self_cond_TD = like.new_zeros(num_rows, width)  # self-conditioning of the next pass
        # Of rows: whether their canvas was solved in the last step.
        self.solved_T = like.new_zeros(num_rows, dtype=torch.bool)
        self.real_rows = count_real_rows(rows)

    def replace_oldest(self, new: Batch, real_rows: Sequence[int]) -> None:
        """Replace the oldest sequences by new ones without self-conditioning."""
        window = slice(self.oldest, self.oldest + self.num_evicted)
        for name in FIELDS:
            getattr(self.batch, name)[window] = getattr(new, name)
        for state in (self.self_cond_TD, self.solved_T):
            state.view(len(self.real_rows), -1)[window] = 0
        self.real_rows[window] = real_rows
        self.oldest = window.stop % len(self.real_rows)

    def advance(self, stats: PackedStepStats, noise_T: Tensor) -> None:
        """Take the sampler step; a canvas that is solved for the second time restarts."""
        assert stats.argmax is not None and stats.token is not None, "no sampler step was taken"
        solved_T = is_solved(self.batch, stats.argmax)
        restart_T = solved_T & self.solved_T
        is_free_T = (self.batch.pinned == 0).flatten()
        token_T = torch.where(restart_T & is_free_T, noise_T, stats.token.flatten())
        self.self_cond_TD = torch.where(restart_T[:, None], 0, stats.self_cond_TD)
        self.batch = replace(self.batch, token=token_T.view_as(self.batch.token))
        self.solved_T = solved_T & ~self.solved_T

    def state(self) -> dict[str, Any]:
        rows = torch.stack([getattr(self.batch, name) for name in FIELDS]).int()
        return {
            "rows": rows.cpu(),
            "self_cond": self.self_cond_TD.cpu(),
            "solved": self.solved_T.cpu(),
            "oldest": self.oldest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.batch = Batch.of(state["rows"], self.self_cond_TD.device)
        self.self_cond_TD = state["self_cond"].to(self.self_cond_TD)
        self.solved_T = state["solved"].to(self.solved_T)
        self.oldest = int(state["oldest"])
        self.real_rows = count_real_rows(state["rows"].numpy())


def is_solved(batch: Batch, token: Tensor) -> Tensor:
    """Return per row whether `token` equals all targets of its canvas; False for clean rows."""
    is_wrong_T = ((token != batch.target) & (batch.target > NONE)).flatten()
    key_T = batch.rng_key.flatten()
    # Canvases are contiguous, and each has its own rng key.
    number_T = (key_T != key_T.roll(1)).cumsum(0)
    num_wrong = torch.zeros(len(key_T) + 1, dtype=torch.long, device=key_T.device)
    num_wrong = num_wrong.index_add(0, number_T, is_wrong_T.long())
    return (num_wrong[number_T] == 0) & batch.is_canvas.flatten()
