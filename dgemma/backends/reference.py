"""Passes over the modules as they are: the definition, and the way on a CPU and other devices.

T tokens of a pass, L of one canvas, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dgemma.backends.base import ForwardInput, ForwardOutput, TokenDraw, prefill
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import Row, denoise_step, update_canvas
from dgemma.diffusion.logit_stats import Query, RowStats, draw_token, row_stats
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache

# Most [T, V] numbers alive at once. A GPU takes one canvas of the released model; a CPU takes what
# stays in its caches.
LOGIT_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22, "mps": 1 << 24}


class ReferenceBackend:
    """Executes passes by the model's own modules."""

    name = "reference"
    max_rows = 1 << 16

    def __init__(self, model: Gemma) -> None:
        self.model = model

    @torch.inference_mode()
    def run(self, inputs: Sequence[ForwardInput]) -> list[ForwardOutput]:
        commits = [given for given in inputs if given.tokens]
        rows = [given.row for given in inputs if given.row is not None]
        segments = [Segment(given.cache, len(given.tokens), commit=True) for given in commits]
        segments += [
            Segment(given.cache, given.row.canvas.length, commit=False)
            for given in inputs
            if given.row is not None
        ]
        batch = ForwardBatch(segments)
        step = ReferenceStep(self.model, batch, [given.tokens for given in commits], rows)
        if rows:
            denoise_step(step)
        else:
            step.forward(step.embed())
        outputs = self._outputs(inputs, step)
        batch.close()  # last: a pass that failed has committed nothing
        return outputs

    def _outputs(
        self, inputs: Sequence[ForwardInput], step: "ReferenceStep"
    ) -> list[ForwardOutput]:
        rows, ends = iter(step.rows), iter(step.commit_ends())
        outputs = []
        for given in inputs:
            end = next(ends) if given.tokens else 0
            if given.row is not None:
                outputs.append(ForwardOutput(row=next(rows)))
            elif given.draw is not None:
                logits_V = self.model.logits(step.hidden_TD[end - 1 : end])[0]
                outputs.append(_drawn(logits_V, given.draw, needs_logits=given.needs_logits))
            else:
                outputs.append(ForwardOutput())
        return outputs

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        return self.model.encode(tokens_T, batch)

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        return self.model.stack(embeds_TD, batch)


def _drawn(logits_V: Tensor, draw: TokenDraw, *, needs_logits: bool) -> ForwardOutput:
    if needs_logits:
        return ForwardOutput(logits_V=logits_V)
    token, logprob = draw_token(logits_V, draw.temperature, draw.uniform)
    return ForwardOutput(token=token, logprob=logprob)


class ReferenceStep:
    """A step by definition. `rows` and `hidden_TD` are what it leaves."""

    def __init__(
        self,
        model: Gemma,
        batch: ForwardBatch,
        commits: Sequence[Sequence[int]],
        rows: Sequence[Row],
    ) -> None:
        self.model, self.batch, self.commits, self.rows = model, batch, commits, list(rows)
        self.hidden_TD = torch.empty(0)

    def commit_ends(self) -> list[int]:
        """Index after the last token of each commit."""
        lengths = [len(tokens) for tokens in self.commits]
        return [sum(lengths[: index + 1]) for index in range(len(lengths))]

    def embed(self) -> Tensor:
        model, embeds = self.model, []
        if self.commits:
            ids = [token for tokens in self.commits for token in tokens]
            embeds.append(model.embed(torch.tensor(ids, device=model.embed_tokens.weight.device)))
        if self.rows:
            embeds.append(embed_canvases(model, self.rows))
        return torch.cat(embeds)

    def forward(self, embeds_TD: Tensor) -> Tensor:
        self.hidden_TD = self.model.stack(embeds_TD, self.batch)
        return self.hidden_TD[sum(len(tokens) for tokens in self.commits) :]

    def logit_stats(self, hidden_TD: Tensor) -> tuple[RowStats, Tensor, Tensor]:
        query = Query(
            temperature_T=_temperatures(self.rows),
            uniform_T=torch.cat([r.noise.uniform_NL[r.canvas.num_steps + 1] for r in self.rows]),
            held_T=torch.cat([row.canvas.tokens_L for row in self.rows]),
            draw_temperature_T=_draw_temperatures(self.rows),
        )
        return (*logit_stats(self.model, hidden_TD, query), hidden_TD)

    def advance(self, stats: tuple[RowStats, Tensor, Tensor]) -> None:
        found, soft_TD, hidden_TD = stats
        end = 0
        for index, row in enumerate(self.rows):
            own = slice(end, end := end + row.canvas.length)

            def look(positions: Sequence[int], hidden_LD: Tensor = hidden_TD[own]) -> Tensor:
                return self.model.logits(hidden_LD[list(positions)])

            canvas = update_canvas(row, found.rows(own), look)
            canvas = conditioned(self.model, canvas, soft_TD[own])
            self.rows[index] = replace(row, canvas=canvas)


def embed_canvases(model: Gemma, rows: Sequence[Row]) -> Tensor:
    """Embed the canvases of all rows, one after the other, with their self-conditioning."""
    tokens_T = torch.cat([row.canvas.tokens_L for row in rows])
    softs = [row.canvas.soft_LD for row in rows]
    if all(soft is None for soft in softs):
        return model.enter(tokens_T, None)
    table_VD = model.embed_tokens.weight
    # A canvas before its first step has none, which is exactly zero.
    filled = [
        table_VD.new_zeros(row.canvas.length, table_VD.shape[1]) if soft is None else soft
        for row, soft in zip(rows, softs, strict=True)
    ]
    return model.enter(tokens_T, torch.cat(filled))


def logit_stats(model: Gemma, hidden_TD: Tensor, query: Query) -> tuple[RowStats, Tensor]:
    """Statistics and soft embedding of every position, a bounded number of positions at a time."""
    softcap = model.config.final_logit_softcapping
    size = max(1, LOGIT_ELEMENTS[hidden_TD.device.type] // model.config.vocab_size)
    stats, softs = [], []
    for begin in range(0, len(hidden_TD), size):
        group = slice(begin, begin + size)
        part, p_TV = row_stats(model.head(hidden_TD[group]), softcap, query.rows(group))
        stats.append(part)
        softs.append(model.embed_soft(p_TV))
    return RowStats.join(stats), torch.cat(softs)


def conditioned(model: Gemma, canvas: Canvas, soft_LD: Tensor) -> Canvas:
    """Set self-conditioning: a pinned position has its own token's, as if converged."""
    if canvas.reopened_L is not None:
        soft_LD = soft_LD.masked_fill(canvas.reopened_L[:, None], 0.0)
    own_LD = model.embed(canvas.tokens_L)
    soft_LD = torch.where(canvas.pinned_L[:, None], own_LD, soft_LD)
    return replace(canvas, soft_LD=soft_LD, reopened_L=None)


def _temperatures(rows: Sequence[Row]) -> Tensor:
    found = []
    for row in rows:
        temperature = row.sampler.temperature_at(
            row.sampler.max_denoising_steps - row.canvas.num_steps
        )
        found.append(torch.full_like(row.canvas.entropy_L, temperature))
    return torch.cat(found)


def _draw_temperatures(rows: Sequence[Row]) -> Tensor | None:
    if all(row.sampler.temperature == 1 for row in rows):
        return None
    found = [torch.full_like(row.canvas.entropy_L, row.sampler.temperature) for row in rows]
    return torch.cat(found)


def denoise(model: Gemma, caches: Sequence[KVCache], rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows after each step, until each has converged or is out of steps.

    Rows that are done leave the pass and stay as they are. The caches' lengths do not change.
    """
    backend, rows = ReferenceBackend(model), list(rows)
    while moving := [index for index, row in enumerate(rows) if not row.is_done]:
        outputs = backend.run([ForwardInput(cache=caches[i], row=rows[i]) for i in moving])
        for index, output in zip(moving, outputs, strict=True):
            assert output.row is not None
            rows[index] = output.row
        yield list(rows)


def commit(model: Gemma, cache: KVCache, tokens_T: Tensor, chunk: int) -> Tensor:
    """Commit tokens by definition, `chunk` at a time; returns the last hidden state."""
    return prefill(ReferenceBackend(model), cache, tokens_T, chunk)
