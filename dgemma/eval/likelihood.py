"""Losses of many texts in few passes: causal ones, and those of noised canvases.

Texts lie in rows of one length, so that attention is one call a layer. A row is a clean text, read
causally, and behind it, where canvases are asked for, the text's blocks as noised canvases: each
sees the clean text before its block and itself. It is the rule of `cache.Pass`, without a cache;
a test compares them.

B rows, S positions of a row, T = B * S, L canvas length, D width, V vocabulary, N/M heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.backends.reference import LOGIT_ELEMENTS
from dgemma.config import ModelConfig
from dgemma.diffusion.canvas import Noise, corrupt
from dgemma.model.gemma import Gemma

# Positions of one pass. A CPU gains nothing from more than its caches hold.
PASS_POSITIONS = {"cuda": 1 << 15, "mps": 1 << 13, "cpu": 1 << 12}
CLEAN = -1  # the owner of a clean position; a canvas owns its own


class Rows:
    """A context of equal rows; `start_S` is where the canvas of a position begins."""

    def __init__(self, config: ModelConfig, rows: int, clean: int, blocks: int) -> None:
        length = config.canvas_length
        self.config, self.rows = config, rows
        canvases = torch.arange(blocks).repeat_interleave(length)
        begin = clean - blocks * length  # what stands before the first canvas
        self.position_S = torch.cat([torch.arange(clean), begin + torch.arange(blocks * length)])
        self.owner_S = torch.cat([torch.full((clean,), CLEAN), canvases])
        self.start_S = torch.cat([torch.arange(1, clean + 1), begin + canvases * length])
        self.positions_T = self.position_S.repeat(rows)
        self.masks: dict[int | None, Tensor] = {}

    def to(self, device: torch.device) -> "Rows":
        self.positions_T = self.positions_T.to(device)
        windows = {self.config.attention(i).window for i in range(self.config.num_hidden_layers)}
        self.masks = {window: self._mask(window).to(device) for window in windows}
        return self

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        groups = q_TNH.shape[1] // k_TMH.shape[1]
        q, k, v = (_split(x, self.rows).transpose(1, 2) for x in (q_TNH, k_TMH, v_TMH))
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mask_SS = self.masks[self.config.attention(layer).window]
        out_BNSH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_SS, scale=1.0)
        return out_BNSH.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """A clean position sees itself and those before it, a canvas itself and those before it."""
        start_S1, key_1S = self.start_S[:, None], self.position_S[None]
        is_past = (self.owner_S[None] == CLEAN) & (key_1S < start_S1)
        if window is not None:
            # A clean position counts itself among its window; a canvas does not.
            reach_S1 = window - (self.owner_S[:, None] != CLEAN).long()
            is_past &= key_1S >= start_S1 - reach_S1
        is_own = (self.owner_S[:, None] != CLEAN) & (self.owner_S[:, None] == self.owner_S[None])
        return is_past | is_own


@torch.inference_mode()
def causal_losses(model: Gemma, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Nats of each token of a text but its first, under those before it."""
    losses: list[list[float]] = [[] for _ in texts]
    for group in _groups(model, [len(text) for text in texts]):
        longest = max(len(texts[i]) for i in group)
        tokens_BS = _padded([texts[i] for i in group], longest, model)
        context = Rows(model.config, len(group), longest, 0).to(tokens_BS.device)
        hidden_TD = model.encode(tokens_BS.flatten(), context)
        target_T = tokens_BS.roll(-1, dims=1).flatten()
        parts = [
            F.cross_entropy(logits_TV, target, reduction="none")
            for logits_TV, target in _logits(model, hidden_TD, target_T)
        ]
        loss_BS = _split(torch.cat(parts), len(group)).tolist()
        for i, row in zip(group, loss_BS, strict=True):
            losses[i] = row[: len(texts[i]) - 1]
    return losses


@dataclass(frozen=True, slots=True)
class Denoised:
    """Losses of one text's canvases at one level, without and with self-conditioning.

    Positions behind the text's first end, which only fill its last canvas, are left out.
    """

    plain: list[float]
    conditioned: list[float]
    is_noised: list[bool]


@torch.inference_mode()
def denoising_losses(
    model: Gemma, texts: Sequence[Sequence[int]], level: float, fill: int, seed: int
) -> list[Denoised]:
    """Nats of the clean tokens of each text's canvases, noised at `level`.

    The first token of a text is its prompt; the others are cut into canvases, the last of which is
    filled up. Noise depends on the seed, the level and the number of the text.
    """
    length = model.config.canvas_length
    blocks = [-(-(len(text) - 1) // length) for text in texts]
    results: dict[int, Denoised] = {}
    for group in _groups(model, [1 + 2 * length * count for count in blocks], blocks):
        count = blocks[group[0]]
        clean_BS = _padded([texts[i] for i in group], 1 + count * length, model, fill)
        target_BL = clean_BS[:, 1:]
        noised = [_noised(target_BL[row], level, model, (seed, i)) for row, i in enumerate(group)]
        canvas_BL, mask_BL = (torch.stack(parts) for parts in zip(*noised, strict=True))
        context = Rows(model.config, len(group), 1 + count * length, count).to(clean_BS.device)
        plain_BL, soft_TD = _canvas_losses(model, clean_BS, canvas_BL, None, context)
        conditioned_BL, _ = _canvas_losses(model, clean_BS, canvas_BL, soft_TD, context)
        for row, i in enumerate(group):
            own = slice(0, len(texts[i]) - 1)
            results[i] = Denoised(
                *(x_BL[row, own].tolist() for x_BL in (plain_BL, conditioned_BL, mask_BL))
            )
    return [results[i] for i in range(len(texts))]


def _noised(
    target_L: Tensor, level: float, model: Gemma, key: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Canvases at a level, and which of their positions were noised; the key is (seed, text)."""
    seed, number = key
    noise = Noise(seed=seed, choice=number).block(
        round(1000 * level), 0, len(target_L), model.config.vocab_size, target_L.device
    )
    uniform_L, noise_L = noise.uniform_NL[0], noise.tokens_NL[0]
    return corrupt(target_L, noise_L, uniform_L, uniform_L.new_tensor(level)), uniform_L < level


def _canvas_losses(
    model: Gemma, clean_BS: Tensor, canvas_BL: Tensor, soft_TD: Tensor | None, context: Rows
) -> tuple[Tensor, Tensor]:
    """Losses at the canvas positions, and the soft embeddings the next step would be told."""
    rows, clean = clean_BS.shape
    x_BSD = _split(model.embed(clean_BS.flatten()), rows)
    entered_BLD = _split(model.enter(canvas_BL.flatten(), soft_TD), rows)
    hidden_TD = model.stack(torch.cat([x_BSD, entered_BLD], dim=1).flatten(0, 1), context)
    hidden_TD = _split(hidden_TD, rows)[:, clean:].flatten(0, 1)
    losses, softs = [], []
    for logits_TV, target_T in _logits(model, hidden_TD, clean_BS[:, 1:].flatten()):
        losses.append(F.cross_entropy(logits_TV, target_T, reduction="none"))
        softs.append(model.embed_soft(logits_TV.softmax(-1)))
    return _split(torch.cat(losses), rows), torch.cat(softs)


def _logits(model: Gemma, hidden_TD: Tensor, target_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of the vocabulary with their targets, a bounded number of positions at a time."""
    size = max(1, LOGIT_ELEMENTS[hidden_TD.device.type] // model.config.vocab_size)
    pieces = zip(torch.split(hidden_TD, size), torch.split(target_T, size), strict=True)
    for piece_TD, target in pieces:
        yield model.logits(piece_TD), target


def _split(x_T: Tensor, rows: int) -> Tensor:
    """What lies end to end, one row each."""
    return x_T.reshape(rows, -1, *x_T.shape[1:])


def _padded(texts: Sequence[Sequence[int]], length: int, model: Gemma, fill: int = 0) -> Tensor:
    rows = [[*text, *[fill] * (length - len(text))] for text in texts]
    return torch.tensor(rows, device=model.embed_tokens.weight.device)


def _groups(
    model: Gemma, lengths: Sequence[int], kinds: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Numbers of texts that go through the model together: of one kind, and of like length."""
    most = PASS_POSITIONS[model.embed_tokens.weight.device.type]
    kinds = kinds or [0] * len(lengths)
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (kinds[i], lengths[i])):
        is_full = (len(group) + 1) * lengths[i] > most  # the longest so far
        if group and (is_full or kinds[i] != kinds[group[0]]):
            yield group
            group = []
        group.append(i)
    if group:
        yield group
