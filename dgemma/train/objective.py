"""The published objective: name the clean token at every row of noised canvases, and the next token
at every row of the clean text, in one pass over both. Rows without a target are asked for nothing.

    x0 the text, t ~ U(0, 1) for each canvas, x_t each token replaced by a uniform one with chance t
    loss = CE(denoise(x_t, soft), x0) over all canvas rows  +  CE(encode(x0), next)
    soft = for every second sequence the mean token of the model's own guess without soft, a guess
           that has no gradient; else zero

With `rollout`, some canvases that are told a guess are first brought a step further by it; with a
depth of more than one, guess and step are taken so many times, each told of the one before. With
sequences that are carried from step to step (`train/carry.py`), those are told their last guess.

T rows of all packed sequences, D width, V vocabulary, E experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from dgemma.model.gemma import Gemma, Router
from dgemma.train import rollout as rolling
from dgemma.train.context import Batch, PackedContext, contexts
from dgemma.train.distributed import ALONE, Group
from dgemma.train.rows import NOTHING, Tally
from dgemma.train.weighting import Weighting


class Losses(NamedTuple):
    """Means over the rows of the whole batch; `total` is what is minimised.

    A part of a batch, or a process with its share of one, has its share of the means: they add up.
    """

    total: Tensor
    denoise: Tensor
    causal: Tensor
    balance: Tensor


class Counts(NamedTuple):
    """Rows that are asked for something, with their weights, in the whole batch, however many
    processes share it.

    Tensors of no dimension: whole numbers would be compiled in.
    """

    canvas: Tensor
    clean: Tensor
    parts: Tensor  # that the batch is worked through in

    @classmethod
    def of(cls, tally: Tally, device: torch.device, parts: int = 1) -> "Counts":
        three = torch.tensor(
            [max(1, tally.canvas), max(1, tally.clean), parts], dtype=torch.float32
        )
        return cls(*to_device(three, device))

    @classmethod
    def counted(cls, batch: Batch) -> "Counts":
        """Where the batch is put together on the device, which counts it."""
        is_asked, is_canvas = batch.target > NOTHING, batch.is_canvas
        canvas = torch.where(is_asked & is_canvas, batch.weight, 0).sum()
        clean = (is_asked & ~is_canvas).sum()
        three = torch.stack([canvas, clean, torch.ones_like(clean)])
        return cls(*three.clamp(min=1).float())


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    if device.type == "cuda":
        made = made.contiguous().pin_memory()
    return made.to(device, non_blocking=True)


def to_every_second(told_TD: Tensor, sequences: int) -> Tensor:
    """What rows of all sequences are told: those between nothing."""
    told_BTD = told_TD.view(sequences // 2, -1, told_TD.shape[-1])
    return torch.stack([told_BTD, torch.zeros_like(told_BTD)], dim=1).flatten(0, 2)


class Guess(NamedTuple):
    """What the model made of every second sequence."""

    told: Tensor  # as their rows are told it; probabilities where they have a gradient
    token: Tensor | None  # of their rows after a step of the sampler; None: as they are
    top: Tensor | None = None  # the likeliest, where there is a step


Route = tuple[Tensor, Tensor]  # how likely each expert was, and which were chosen


class NotingRouter(Router):
    """A router that notes what it said last: `noted` changes."""

    noted: Route | None = None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        ids_TK, share_TK = super().forward(x_TD)
        # Where activations are recomputed this runs again, when its result is no longer read.
        self.noted = (self.likelihood(x_TD), ids_TK)
        return ids_TK, share_TK


class Objective(nn.Module):
    """The model, whose routers take notes from now on, and what it is asked."""

    def __init__(
        self,
        model: Gemma,
        weighting: Weighting,
        *,
        is_flex: bool = False,
        group: Group = ALONE,
        piece: int | None = None,
    ) -> None:
        """`piece`: rows whose scores of the whole vocabulary exist at once; None: all of them."""
        super().__init__()
        self.model, self.weighting, self.is_flex, self.group = model, weighting, is_flex, group
        self.piece = piece
        self.routers: list[NotingRouter] = []
        for layer in model.layers:
            router = layer.get_submodule("router")
            # Hooks would do as well, but are told apart by numbers that compiled code looks at.
            router.__class__ = NotingRouter
            assert isinstance(router, NotingRouter)
            self.routers.append(router)

    def forward(self, batch: Batch, counts: Counts, depth: int = 1) -> Losses:
        """`depth`: guesses before the one that counts, where a sequence is told any."""
        half, first, second = contexts(self.model.config, batch, is_flex=self.is_flex)
        guess = self.first_pass(half, first, depth)
        del half, first
        losses, _ = self.losses(batch, guess, second, counts)
        return losses

    def carried(self, batch: Batch, carried_TD: Tensor, counts: Counts) -> tuple[Losses, Tensor]:
        """Losses where the last sequences are told what is given, and the hidden states of these.

        Of the others every second one is told a guess, as always.
        """
        rows = len(carried_TD)
        among = len(batch.token) - rows // batch.token.shape[1]
        half, first, second = contexts(self.model.config, batch, is_flex=self.is_flex, among=among)
        guess = self.first_pass(half, first)
        del half, first
        losses, hidden_TD = self.losses(batch, guess, second, counts, carried_TD)
        return losses, hidden_TD[-rows:]

    @torch.no_grad()
    def first_pass(self, half: Batch, context: PackedContext, depth: int = 1) -> Guess:
        """The model's own guess of every second sequence."""
        steps = torch.arange(depth, device=half.token.device)
        guess = self.guess(half, None, context, steps[0])
        for step in steps[1:]:
            half = half if guess.token is None else replace(half, token=guess.token)
            told_TD = guess.told
            if self.weighting.guess_gradient:
                told_TD = self.told(half, self.model.embed_soft(told_TD))
            guess = self.guess(half, told_TD, context, step)
        return guess

    def guess(
        self, half: Batch, told_TD: Tensor | None, context: PackedContext, step: Tensor
    ) -> Guess:
        hidden_TD = self._hidden(half, told_TD, context)
        self._routes()
        return self.read(half, hidden_TD, step, self.weighting.rollout)

    def read(self, half: Batch, hidden_TD: Tensor, step: Tensor, rollout: float) -> Guess:
        """The guess that hidden states are; `rollout`: of the canvases, those it takes a step."""
        size = self.piece or len(hidden_TD)
        lots = rolling.lots(half, rollout, self.model.config.vocab_size, step)
        parts, tokens, tops = [], [], []
        for piece_TD, *own in zip(*(torch.split(x, size) for x in (hidden_TD, *lots)), strict=True):
            lot = rolling.Lots(*own)
            p_TV = (self.model.logits(piece_TD) / lot.heat[:, None]).softmax(-1)
            if rollout:
                tokens.append(rolling.roll(p_TV, lot))
                tops.append(p_TV.argmax(-1))
            if self.weighting.guess_gradient:
                parts.append(p_TV.to(self.model.embed_tokens.weight.dtype))
            else:
                parts.append(self.model.embed_soft(p_TV))
        told = torch.cat(parts)
        if not self.weighting.guess_gradient:
            told = self.told(half, told)
        if not rollout:
            return Guess(told, None)
        return Guess(told, *(torch.cat(x).view_as(half.token) for x in (tokens, tops)))

    def told(self, half: Batch, soft_TD: Tensor) -> Tensor:
        """What rows are told: soft embeddings, or their token where it is given, as sampled."""
        own_TD = self.model.embed(half.token.flatten())
        return torch.where(half.pinned.flatten()[:, None] > 0, own_TD, soft_TD)

    def losses(
        self,
        batch: Batch,
        guess: Guess,
        context: PackedContext,
        counts: Counts,
        carried_TD: Tensor | None = None,
    ) -> tuple[Losses, Tensor]:
        """Losses and, without a gradient, hidden states; see `carried`."""
        told_TD = guess.told
        if self.weighting.guess_gradient:
            told_TD = self.told(batch.every_second(), self.model.embed_soft(told_TD))
        if guess.token is not None:
            token = torch.stack([guess.token, batch.token[1::2]], dim=1).flatten(0, 1)
            batch = replace(batch, token=token)
        told_TD = to_every_second(told_TD, 2 * len(told_TD) // batch.token.shape[1])
        if carried_TD is not None:
            told_TD = torch.cat([told_TD, carried_TD])
        hidden_TD = self._hidden(batch, told_TD, context)
        return self.score(batch, hidden_TD, self._routes(), counts), hidden_TD.detach()

    def score(
        self, batch: Batch, hidden_TD: Tensor, routes: Sequence[Route], counts: Counts
    ) -> Losses:
        """What hidden states lose."""
        loss_T = self._row_losses(hidden_TD, batch.target.flatten()) * batch.weight.flatten()
        is_canvas_T = batch.is_canvas.flatten()
        denoise = torch.where(is_canvas_T, loss_T, 0.0).sum() / counts.canvas
        causal = torch.where(is_canvas_T, 0.0, loss_T).sum() / counts.clean
        balance = self.balance(batch, routes) / counts.parts
        total = denoise + self.weighting.causal * causal + self.weighting.balance * balance
        return Losses(total, denoise, causal, balance)

    def _row_losses(self, hidden_TD: Tensor, target_T: Tensor) -> Tensor:
        if self.piece is None:
            return self._cross_entropy(hidden_TD, target_T)
        pieces = zip(*(torch.split(x, self.piece) for x in (hidden_TD, target_T)), strict=True)
        # Scores are computed again in the backward, a piece at a time.
        return torch.cat([recompute(self._cross_entropy, *p, use_reentrant=False) for p in pieces])

    def _cross_entropy(self, hidden_TD: Tensor, target_T: Tensor) -> Tensor:
        logits_TV = self.model.logits(hidden_TD)
        return F.cross_entropy(logits_TV, target_T, ignore_index=NOTHING, reduction="none")

    def _hidden(self, batch: Batch, soft_TD: Tensor | None, context: PackedContext) -> Tensor:
        return self.model.stack(self.enter(batch, soft_TD), context, context.cos_sin)

    def enter(self, batch: Batch, soft_TD: Tensor | None) -> Tensor:
        """How the rows of a batch enter the stack."""
        tokens_T = batch.token.flatten()
        entered_TD = self.model.enter(tokens_T, soft_TD)
        is_canvas_T1 = batch.is_canvas.flatten()[:, None]
        return torch.where(is_canvas_T1, entered_TD, self.model.embed(tokens_T))

    def _routes(self) -> list[Route]:
        """What the routers have noted in a pass; forgotten, so that the next one finds nothing."""
        found = []
        for router in self.routers:
            assert router.noted is not None, "a layer has not run"
            found.append(router.noted)
            router.noted = None
        return found

    def balance(self, batch: Batch, routes: Sequence[Route]) -> Tensor:
        """How unevenly the experts are used, over all layers: 1 is even, their number the worst.

        For each expert the share of choices times its mean likelihood. The choices of all processes
        count; the likelihood is this one's share of the mean.
        """
        is_real_T1 = (batch.example.flatten() > NOTHING)[:, None]
        likely_LE = torch.stack([torch.where(is_real_T1, p_TE, 0.0).sum(0) for p_TE, _ in routes])
        chosen_LE = torch.stack([_chosen(p_TE, ids_TK, is_real_T1) for p_TE, ids_TK in routes])
        # Every row chooses equally many experts.
        chosen_LE = self.group.sum(chosen_LE)
        choices, (_, ids_TK) = chosen_LE[0].sum(), routes[0]
        real = choices / ids_TK.shape[1]
        return likely_LE.shape[1] * (chosen_LE / choices * likely_LE / real).sum(1).mean()


def _chosen(p_TE: Tensor, ids_TK: Tensor, is_real_T1: Tensor) -> Tensor:
    """How often each expert is chosen."""
    experts_E = torch.arange(p_TE.shape[1], device=ids_TK.device)
    is_chosen_TE = (ids_TK[:, :, None] == experts_E).any(1)
    return (is_chosen_TE & is_real_T1).float().sum(0)
