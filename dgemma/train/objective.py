"""The published objective: name the clean token at every row of noised canvases, and the next token
at every row of the clean text, in one pass over both.

    x0 the text, t ~ U(0, 1) for each canvas, x_t each token replaced by a uniform one with chance t
    loss = CE(denoise(x_t, soft), x0) over all canvas rows  +  CE(encode(x0), next)
    soft = for every second sequence the model's own guess without soft, no gradient; else zero

T rows of all packed sequences, D width, V vocabulary, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.model import Gemma, Router
from dgemma.train.context import Batch, PackedContext
from dgemma.train.rows import CANVAS, NOTHING, TARGET
from dgemma.train.weighting import Weighting


class Losses(NamedTuple):
    """Means over the rows of the whole batch; `total` is what is minimised."""

    total: Tensor
    denoise: Tensor
    causal: Tensor
    balance: Tensor


class Counts(NamedTuple):
    """Rows that are asked for something, in the whole batch, however many processes share it.

    Tensors of no dimension: whole numbers would be compiled in.
    """

    canvas: Tensor
    clean: Tensor

    @classmethod
    def of(cls, rows: Tensor, device: torch.device | str) -> "Counts":
        is_asked = rows[TARGET] > NOTHING
        canvas = int((is_asked & (rows[CANVAS] > NOTHING)).sum())
        both = torch.tensor([canvas, max(1, int(is_asked.sum()) - canvas)], dtype=torch.float32)
        return cls(*both.to(device, non_blocking=True))


class Objective(nn.Module):
    """The model and what it is asked.

    `routes` holds each layer's router scores and choices of the running pass, for the balance.
    """

    def __init__(self, model: Gemma, weighting: Weighting, *, is_flex: bool = False) -> None:
        super().__init__()
        self.model, self.weighting, self.is_flex = model, weighting, is_flex
        self.routes: dict[int, tuple[Tensor, Tensor]] = {}
        for number, layer in enumerate(model.layers):
            layer.get_submodule("router").register_forward_hook(self._keep(number))

    def _keep(self, number: int) -> Callable[[Router, tuple[Tensor], tuple[Tensor, Tensor]], None]:
        def hook(router: Router, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
            self.routes[number] = (router.likelihood(inputs[0]), output[0])

        return hook

    def forward(self, batch: Batch, counts: Counts) -> Losses:
        soft_TD = self.soft(batch)
        context = PackedContext(self.model.config, batch, is_flex=self.is_flex)
        self.routes.clear()
        return self.losses(batch, soft_TD, context, counts)

    @torch.no_grad()
    def soft(self, batch: Batch) -> Tensor:
        """What every second sequence is told of the model's own guess; zero in the others."""
        half = batch.every_second()
        context = PackedContext(self.model.config, half, is_flex=self.is_flex)
        self.routes.clear()  # here, so that a compiled pass always finds it empty
        return self.guess(half, context)

    def guess(self, half: Batch, context: PackedContext) -> Tensor:
        """Soft embeddings of one half of the sequences, spread over all of them."""
        tokens_T = half.token.flatten()
        p_TV = self.model.logits(self._hidden(half, None, context)).softmax(-1)
        soft_TD = self.model.embed_soft(p_TV)
        # Where a token is given, it is told; as the sampler does.
        own_TD = self.model.embed(tokens_T)
        soft_TD = torch.where(half.pinned.flatten()[:, None] > 0, own_TD, soft_TD)
        soft_BTD = soft_TD.view(*half.token.shape, -1)
        return torch.stack([soft_BTD, torch.zeros_like(soft_BTD)], dim=1).flatten(0, 2)

    def losses(
        self, batch: Batch, soft_TD: Tensor, context: PackedContext, counts: Counts
    ) -> Losses:
        logits_TV = self.model.logits(self._hidden(batch, soft_TD, context))
        target_T, is_canvas_T = batch.target.flatten(), batch.is_canvas.flatten()
        loss_T = F.cross_entropy(logits_TV, target_T, ignore_index=NOTHING, reduction="none")
        denoise = torch.where(is_canvas_T, loss_T, 0.0).sum() / counts.canvas
        causal = torch.where(is_canvas_T, 0.0, loss_T).sum() / counts.clean
        balance = self.balance(batch)
        total = denoise + self.weighting.causal * causal + self.weighting.balance * balance
        return Losses(total, denoise, causal, balance)

    def _hidden(self, batch: Batch, soft_TD: Tensor | None, context: PackedContext) -> Tensor:
        tokens_T = batch.token.flatten()
        entered_TD = self.model.enter(tokens_T, soft_TD)
        is_canvas_T1 = batch.is_canvas.flatten()[:, None]
        x_TD = torch.where(is_canvas_T1, entered_TD, self.model.embed(tokens_T))
        return self.model.stack(x_TD, context)

    def balance(self, batch: Batch) -> Tensor:
        """How unevenly the experts are used, over all layers: 1 is even, their number the worst."""
        is_real_T1 = (batch.example.flatten() > NOTHING)[:, None]
        parts = [self._unevenness(*self.routes[n], is_real_T1) for n in sorted(self.routes)]
        return torch.stack(parts).mean()

    def _unevenness(self, p_TE: Tensor, ids_TK: Tensor, is_real_T1: Tensor) -> Tensor:
        count, real = p_TE.shape[1], is_real_T1.sum()
        experts_E = torch.arange(count, device=ids_TK.device)
        is_chosen_TE = (ids_TK[:, :, None] == experts_E).any(1)
        chosen_E = (is_chosen_TE & is_real_T1).float().sum(0) / (real * ids_TK.shape[1])
        return count * (chosen_E * torch.where(is_real_T1, p_TE, 0.0).sum(0) / real).sum()
