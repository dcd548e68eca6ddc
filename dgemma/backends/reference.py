"""The reference backend: passes by the model's modules, on CPUs and where kernels do not run.

T tokens of a pass, N targets, S soft tokens of a picture, D width, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from dgemma.backends.base import (
    ForwardInput,
    ForwardOutput,
    TokenDraw,
    prefill,
    score_canvas,
)
from dgemma.diffusion.denoise import CanvasState, denoise_step
from dgemma.diffusion.logit_stats import draw_token
from dgemma.diffusion.reference_step import ReferenceStep, canvas_logits
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache

SCORED_POSITIONS = 512


class ReferenceBackend:
    """Executes passes with the model's modules."""

    name = "reference"
    max_batch_size = 1 << 16

    def __init__(self, model: Gemma) -> None:
        self.model = model

    @torch.inference_mode()
    def run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        commits = [item for item in inputs if item.tokens]
        states = [item.state for item in inputs if item.state is not None]
        segments = [commit_segment(item) for item in commits]
        segments += [
            Segment(item.cache, item.state.canvas.length, commit=False)
            for item in inputs
            if item.state is not None
        ]
        batch = ForwardBatch(segments)
        commits_TD = embed_commits(self.model, commits) if commits else None
        if states:
            step = ReferenceStep(self.model, batch, states, commits_TD)
            states, hidden_TD = denoise_step(step)
        else:
            assert commits_TD is not None, "an input has tokens or a canvas"
            hidden_TD = self.model.stack(commits_TD, batch)
        outputs = self._outputs(inputs, states, hidden_TD)
        batch.close()  # last: a pass that failed has committed nothing
        return outputs

    def _outputs(
        self, inputs: Sequence[ForwardInput], states: Sequence[CanvasState], hidden_TD: Tensor
    ) -> list[ForwardOutput]:
        outputs, stepped, end = [], iter(states), 0
        canvas_end = sum(len(item.tokens) for item in inputs)  # canvases follow all commits
        for item in inputs:
            end += len(item.tokens)
            if item.targets:
                hidden_ND = hidden_TD[end - len(item.targets) : end]
                outputs.append(score(self.model, hidden_ND, item))
            elif item.state is not None:
                here = slice(canvas_end, canvas_end := canvas_end + item.state.canvas.length)
                canvas_score = None
                if item.query is not None:
                    logits_at = partial(canvas_logits, self.model, hidden_TD[here])
                    canvas_score = score_canvas(item.query, logits_at)
                outputs.append(ForwardOutput(state=next(stepped), canvas_score=canvas_score))
            elif item.draw is not None:
                logits_V = self.model.logits(hidden_TD[end - 1 : end])[0]
                outputs.append(_drawn(logits_V, item.draw, needs_logits=item.needs_logits))
            else:
                outputs.append(ForwardOutput())
        return outputs

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        return self.model.encode(tokens_T, batch)

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        return self.model.stack(embeds_TD, batch)


def commit_segment(item: ForwardInput) -> Segment:
    """Return the segment of the tokens to commit, with the positions of pictures."""
    begin = item.cache.length
    images = tuple((begin + image.begin, begin + image.end) for image in item.images)
    return Segment(item.cache, len(item.tokens), commit=True, images=images)


def embed_commits(model: Gemma, commits: Sequence[ForwardInput]) -> Tensor:
    """Embed the tokens to commit; picture features replace their soft tokens."""
    ids = [token for item in commits for token in item.tokens]
    embeds_TD = model.embed(torch.tensor(ids, device=model.embed_tokens.weight.device))
    begin = 0
    for item in commits:
        for image in item.images:
            embeds_TD[begin + image.begin : begin + image.end].copy_(image.features_SD)
        begin += len(item.tokens)
    return embeds_TD


def score(model: Gemma, hidden_ND: Tensor, item: ForwardInput) -> ForwardOutput:
    """Score targets, and return the argmax or a drawn token at each position.

    Works on a limited number of positions at a time.
    """
    target_N1 = torch.tensor(item.targets, device=hidden_ND.device)[:, None]
    split = (torch.split(x, SCORED_POSITIONS) for x in (hidden_ND, target_N1))
    logprobs: list[float] = []
    best: list[tuple[int, float]] = []
    for group_ND, piece_N1 in zip(*split, strict=True):
        logits_NV = model.logits(group_ND)
        logprob_NV = logits_NV.log_softmax(-1)
        logprobs += logprob_NV.gather(-1, piece_N1)[:, 0].tolist()
        if item.draws:
            draws = item.draws[len(best) : len(logprobs)]
            pairs = zip(logits_NV, draws, strict=True)
            best += [draw_token(logits_V, d.temperature, d.uniform) for logits_V, d in pairs]
        else:
            top = logprob_NV.max(-1)
            best += zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return ForwardOutput(logprobs=tuple(logprobs), best=tuple(best), hidden_ND=hidden_ND)


def _drawn(logits_V: Tensor, draw: TokenDraw, *, needs_logits: bool) -> ForwardOutput:
    if needs_logits:
        return ForwardOutput(logits_V=logits_V)
    token, logprob = draw_token(logits_V, draw.temperature, draw.uniform)
    return ForwardOutput(token=token, logprob=logprob)


def commit(model: Gemma, cache: KVCache, tokens_T: Tensor, chunk: int) -> Tensor:
    """Commit tokens with the reference backend, in chunks; return the last hidden state."""
    return prefill(ReferenceBackend(model), cache, tokens_T, chunk)
