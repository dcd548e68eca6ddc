"""The published objective: predict the clean token at every row of noised canvases, and the next
token at every row of the clean text, in one pass over both. Rows without a target have no loss.

    x0 the text, t ~ U(0, 1) for each canvas, x_t each token replaced by a uniform one with chance t
    loss = CE(denoise(x_t, self_cond), x0) over all canvas rows  +  CE(encode(x0), next)
    self_cond = for every second sequence the soft embedding of a first pass without
                self-conditioning and without gradient; else zero

With `rollout_fraction`, sampler steps change some of the self-conditioned canvases first, and
persistent sequences keep their self-conditioning from step to step (`train/onpolicy.py`).

T rows of all packed sequences, D width, V vocabulary, E experts, K of them per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dgemma.diffusion.denoise import denoise_step
from dgemma.errors import ConfigError
from dgemma.model.gemma import Gemma
from dgemma.train.corruption import NONE
from dgemma.train.distributed import SINGLE_PROCESS, ProcessGroup
from dgemma.train.layers import CompileMode, LayerStack, RouterOutput, compiled
from dgemma.train.masks import PackedContext, make_contexts
from dgemma.train.onpolicy import PackedStepStats, RolloutDraws, rollout_draws, rollout_step
from dgemma.train.packing import Batch, RowCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Weights of the losses, and rollouts."""

    causal_weight: float = 1.0  # weight of the next-token loss; the denoising loss has 1
    balance_weight: float = 0.01  # weight of the experts' load-balancing loss
    # fraction of the self-conditioned canvases that sampler steps change first
    rollout_fraction: float = 0.0
    max_rollout_steps: int = 1  # sampler steps; batches take 1, 2, ... up to this number in turn

    def __post_init__(self) -> None:
        for name in ("causal_weight", "balance_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"[loss] {name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 <= self.rollout_fraction <= 1:
            raise ConfigError(
                f"[loss] rollout_fraction is {self.rollout_fraction}; it must be from 0 to 1"
            )
        if self.max_rollout_steps < 1:
            raise ConfigError(
                f"[loss] max_rollout_steps is {self.max_rollout_steps}; it must be 1 or more"
            )
        if self.max_rollout_steps > 1 and self.rollout_fraction == 0:
            # Repeated self-conditioning of tokens that stay: a sampler never gives such canvases.
            raise ConfigError(
                f"[loss] max_rollout_steps is {self.max_rollout_steps}, but rollout_fraction is 0: "
                "no canvas would take these steps; set rollout_fraction above 0, or leave "
                "max_rollout_steps out"
            )

    def rollout_steps(self, step: int) -> int:
        """Return the self-conditioning passes of a training step."""
        return 1 + step % self.max_rollout_steps


class Losses(NamedTuple):
    """Means over the rows of the whole batch; `total` is minimized.

    Those of micro-batches and processes are partial means that add up.
    """

    total: Tensor
    denoise: Tensor
    causal: Tensor
    balance: Tensor


class LossCounts(NamedTuple):
    """Denominators of the losses: counts of the whole batch over all processes.

    Scalar tensors, since Python numbers would be compiled in.
    """

    canvas: Tensor
    clean: Tensor
    micro_batches: Tensor

    @classmethod
    def of(cls, counts: RowCounts, device: torch.device, micro_batches: int = 1) -> "LossCounts":
        numbers = [max(1, counts.canvas), max(1, counts.clean), micro_batches]
        return cls(*to_device(torch.tensor(numbers, dtype=torch.float32), device))

    @classmethod
    def on_device(cls, batch: Batch) -> "LossCounts":
        """Count on the device, for a batch assembled there."""
        has_target, is_canvas = batch.target > NONE, batch.is_canvas
        canvas = torch.where(has_target & is_canvas, batch.weight, 0).sum()
        clean = (has_target & ~is_canvas).sum()
        numbers = torch.stack([canvas, clean, torch.ones_like(clean)])
        return cls(*numbers.clamp(min=1).float())


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy asynchronously."""
    if device.type == "cuda":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


def interleave_self_cond(self_cond_TD: Tensor, sequences: int) -> Tensor:
    """Spread the even sequences' self-conditioning over all; odd ones get zeros."""
    self_cond_BTD = self_cond_TD.view(sequences // 2, -1, self_cond_TD.shape[-1])
    return torch.stack([self_cond_BTD, torch.zeros_like(self_cond_BTD)], dim=1).flatten(0, 2)


class Objective(nn.Module):
    """The model and its losses. `model` gets routers that record their outputs."""

    def __init__(
        self,
        model: Gemma,
        settings: LossSettings,
        *,
        is_flex: bool = False,
        group: ProcessGroup = SINGLE_PROCESS,
        recompute: bool = False,
        chunk: int | None = None,
    ) -> None:
        """`recompute`: keep only the layers' inputs, and run layers again in the backward.

        `chunk`: rows whose logits exist at once; None: all of them.
        """
        super().__init__()
        self.model, self.settings, self.is_flex, self.group = model, settings, is_flex, group
        self.chunk = chunk
        self.run_layers = LayerStack.of(model, recompute=recompute)
        # `compile_passes` replaces them by compiled functions.
        self.denoise_step, self.losses = denoise_step, self._losses
        self.embed, self.read, self.score = self._embed, self._read, self._score

    def compile_passes(self, mode: CompileMode) -> None:
        """Compile whole passes (minutes) or single layers.

        Layers of one type share code, so then only two layers are compiled.
        """
        if mode == "whole_pass":
            self.denoise_step, self.losses = compiled(denoise_step), compiled(self._losses)
            return
        self.run_layers = self.run_layers.compiled(self.model.config.layer_types)
        self.embed, self.read = compiled(self._embed), compiled(self._read)
        self.score = compiled(self._score)

    def forward(self, batch: Batch, counts: LossCounts, depth: int = 1) -> Losses:
        """Compute the losses of a batch; `depth`: self-conditioning passes before the loss."""
        even, context, whole = make_contexts(self.model.config, batch, is_flex=self.is_flex)
        stats = self.self_cond_pass(even, context, depth)
        del even, context
        losses, _ = self.losses(batch, stats, whole, counts)
        return losses

    def with_persistent(
        self, batch: Batch, self_cond_TD: Tensor, counts: LossCounts
    ) -> tuple[Losses, Tensor]:
        """Compute the losses with given self-conditioning of the last sequences.

        Also returns their hidden states, without gradients. Of the other sequences every second one
        is self-conditioned, as always.
        """
        rows = len(self_cond_TD)
        limit = len(batch.token) - rows // batch.token.shape[1]
        even, context, whole = make_contexts(
            self.model.config, batch, is_flex=self.is_flex, limit=limit
        )
        stats = self.self_cond_pass(even, context)
        del even, context
        losses, hidden_TD = self.losses(batch, stats, whole, counts, self_cond_TD)
        return losses, hidden_TD[-rows:]

    @torch.no_grad()
    def self_cond_pass(
        self, batch: Batch, context: PackedContext, depth: int = 1
    ) -> PackedStepStats:
        """Take `depth` denoising steps with the even sequences; return the last statistics."""
        step = torch.zeros((), dtype=torch.long, device=batch.token.device)
        stats = self.denoise_step(SelfCondPass(self, batch, context, step))
        for _ in range(depth - 1):
            batch = batch if stats.token is None else replace(batch, token=stats.token)
            step = step + 1
            stats = self.denoise_step(SelfCondPass(self, batch, context, step, stats.self_cond_TD))
        return stats

    def _read(
        self, batch: Batch, hidden_TD: Tensor, step: Tensor, rollout_fraction: float
    ) -> PackedStepStats:
        """Compute soft embeddings from the LM head, and a sampler step of some canvases."""
        size = self.chunk or len(hidden_TD)
        draws = rollout_draws(batch, rollout_fraction, self.model.config.vocab_size, step)
        embeds, tokens, argmaxes = [], [], []
        for chunk_TD, *fields in zip(
            *(torch.split(x, size) for x in (hidden_TD, *draws)), strict=True
        ):
            chunk_draws = RolloutDraws(*fields)
            logits_TV = self.model.logits(chunk_TD)
            p_TV = (logits_TV / chunk_draws.temperature_T[:, None]).softmax(-1)
            if rollout_fraction:
                tokens.append(rollout_step(p_TV, chunk_draws))
                argmaxes.append(p_TV.argmax(-1))
            embeds.append(self.model.soft_embed(p_TV))
        # As in the sampler, a pinned position is conditioned on its token.
        is_pinned_T1 = batch.pinned.flatten()[:, None] > 0
        token_embeds_TD = self.model.embed(batch.token.flatten())
        self_cond_TD = torch.where(is_pinned_T1, token_embeds_TD, torch.cat(embeds))
        if not rollout_fraction:
            return PackedStepStats(self_cond_TD)
        token, argmax = (torch.cat(x).view_as(batch.token) for x in (tokens, argmaxes))
        return PackedStepStats(self_cond_TD, token, argmax)

    def _losses(
        self,
        batch: Batch,
        stats: PackedStepStats,
        context: PackedContext,
        counts: LossCounts,
        persistent_TD: Tensor | None = None,
    ) -> tuple[Losses, Tensor]:
        """Compute the losses and, without a gradient, hidden states; see `with_persistent`."""
        if stats.token is not None:
            token = torch.stack([stats.token, batch.token[1::2]], dim=1).flatten(0, 1)
            batch = replace(batch, token=token)
        num_even = len(stats.self_cond_TD) // batch.token.shape[1]
        self_cond_TD = interleave_self_cond(stats.self_cond_TD, 2 * num_even)
        if persistent_TD is not None:
            self_cond_TD = torch.cat([self_cond_TD, persistent_TD])
        hidden_TD, routers = self.run_layers(self.embed(batch, self_cond_TD), context)
        return self.score(batch, hidden_TD, routers, counts), hidden_TD.detach()

    def _score(
        self, batch: Batch, hidden_TD: Tensor, routers: Sequence[RouterOutput], counts: LossCounts
    ) -> Losses:
        """Compute the losses from the hidden states."""
        loss_T = self._row_losses(hidden_TD, batch.target.flatten()) * batch.weight.flatten()
        is_canvas_T = batch.is_canvas.flatten()
        denoise = torch.where(is_canvas_T, loss_T, 0.0).sum() / counts.canvas
        causal = torch.where(is_canvas_T, 0.0, loss_T).sum() / counts.clean
        balance = self.balance(batch, routers) / counts.micro_batches
        weights = self.settings
        total = denoise + weights.causal_weight * causal + weights.balance_weight * balance
        return Losses(total, denoise, causal, balance)

    def _row_losses(self, hidden_TD: Tensor, target_T: Tensor) -> Tensor:
        if self.chunk is None:
            return self._cross_entropy(hidden_TD, target_T)
        chunks = zip(*(torch.split(x, self.chunk) for x in (hidden_TD, target_T)), strict=True)
        # Logits are recomputed in the backward, chunk by chunk.
        return torch.cat([checkpoint(self._cross_entropy, *c, use_reentrant=False) for c in chunks])

    def _cross_entropy(self, hidden_TD: Tensor, target_T: Tensor) -> Tensor:
        logits_TV = self.model.logits(hidden_TD)
        return F.cross_entropy(logits_TV, target_T, ignore_index=NONE, reduction="none")

    def _embed(self, batch: Batch, self_cond_TD: Tensor | None) -> Tensor:
        """Embed the rows of a batch; canvas rows with their self-conditioning."""
        tokens_T = batch.token.flatten()
        canvas_TD = self.model.embed_canvas(tokens_T, self_cond_TD)
        is_canvas_T1 = batch.is_canvas.flatten()[:, None]
        return torch.where(is_canvas_T1, canvas_TD, self.model.embed(tokens_T))

    def balance(self, batch: Batch, routers: Sequence[RouterOutput]) -> Tensor:
        """Compute the load-balancing loss, averaged over layers: 1 is even, E the worst.

        Per expert: the fraction of tokens routed to it times its mean probability. Tokens of all
        processes count; the probability is this process's share of the mean.
        """
        is_real_T1 = (batch.example.flatten() > NONE)[:, None]
        probs_LE = torch.stack([torch.where(is_real_T1, p_TE, 0.0).sum(0) for p_TE, _ in routers])
        routed_LE = torch.stack([_num_routed(*router, is_real_T1) for router in routers])
        routed_LE = self.group.all_reduce(routed_LE)
        # Every row is routed to K experts.
        num_assignments, (_, topk_ids_TK) = routed_LE[0].sum(), routers[0]
        num_real = num_assignments / topk_ids_TK.shape[1]
        return probs_LE.shape[1] * (routed_LE / num_assignments * probs_LE / num_real).sum(1).mean()


def _num_routed(p_TE: Tensor, topk_ids_TK: Tensor, is_real_T1: Tensor) -> Tensor:
    """Count the real tokens routed to each expert."""
    experts_E = torch.arange(p_TE.shape[1], device=topk_ids_TK.device)
    is_routed_TE = (topk_ids_TK[:, :, None] == experts_E).any(1)
    return (is_routed_TE & is_real_T1).float().sum(0)


@dataclass(frozen=True, slots=True, eq=False)
class SelfCondPass:
    """The operations of `denoise_step` over packed rows.

    Uses `Objective.read` instead of `position_stats`, which works in place in float64 and in
    CPU-cache-sized groups: training compiles its own version.
    """

    objective: Objective
    batch: Batch
    context: PackedContext
    step: Tensor
    self_cond_TD: Tensor | None = None

    def embed(self) -> Tensor:
        return self.objective.embed(self.batch, self.self_cond_TD)

    def forward(self, embeds_TD: Tensor) -> Tensor:
        hidden_TD, _ = self.objective.run_layers(embeds_TD, self.context)
        return hidden_TD

    def logit_stats(self, hidden_TD: Tensor) -> PackedStepStats:
        objective = self.objective
        fraction = objective.settings.rollout_fraction
        return objective.read(self.batch, hidden_TD, self.step, fraction)

    def advance(self, stats: PackedStepStats) -> PackedStepStats:
        return stats  # `read` has taken the sampler's step
