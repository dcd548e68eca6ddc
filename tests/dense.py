"""Logits of a text and the canvas after it from scratch: no cache, one mask per layer."""

import torch
from torch import Tensor

from dgemma.config import ModelConfig
from dgemma.model.attention import KVSegment, attention_reference
from dgemma.model.gemma import Gemma


class DenseContext:
    """A causal text, and after it a canvas that sees the text's last window and itself."""

    def __init__(self, config: ModelConfig, text: int, canvas: int) -> None:
        self.config, self.text = config, text
        self.positions_T = torch.arange(text + canvas)

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        query, key = self.positions_T[:, None], self.positions_T[None]
        window = self.config.attention(layer).window or len(self.positions_T)
        # The whole canvas sees what its first position sees of the text.
        last_seen_from = query.clamp(max=self.text)
        seen = (key <= query) & (last_seen_from - key < window)
        mask = torch.where(query < self.text, seen, seen | (key >= self.text))
        return attention_reference(q_TNH, [KVSegment(k_TMH, v_TMH, mask)])


@torch.inference_mode()
def scratch_logits(model: Gemma, text: list[int], canvas: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of every token of the text, and of a canvas in its first step."""
    x_TD = model.embed(torch.tensor(text, dtype=torch.long))
    if canvas:
        x_TD = torch.cat([x_TD, model.embed_canvas(torch.tensor(canvas), None)])
    logits = model.logits(model.stack(x_TD, DenseContext(model.config, len(text), len(canvas))))
    return logits[: len(text)], logits[len(text) :]
