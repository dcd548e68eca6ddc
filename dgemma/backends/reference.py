"""Passes by the model's own modules: the definition, used on a CPU and where kernels do not run.

T tokens of a pass, L of one canvas, D width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dgemma.backends.base import ForwardInput, ForwardOutput, TokenDraw, prefill
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import CanvasState, denoise_step, update_canvas
from dgemma.diffusion.logit_stats import PositionStats, Query, draw_token, position_stats
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import KVCache

# Logits computed at once, [T, V]: on a GPU 64 positions of the released model, whose float32 copies
# fit beside the weights of a small card; on a CPU, what stays in its caches.
LOGIT_ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 22, "mps": 1 << 24}
SCORED_POSITIONS = 512


class ReferenceBackend:
    """Executes passes by the model's own modules."""

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
        step = ReferenceStep(self.model, batch, commits, states)
        if states:
            denoise_step(step)
        else:
            step.forward(step.embed())
        outputs = self._outputs(inputs, step)
        batch.close()  # last: a pass that failed has committed nothing
        return outputs

    def _outputs(
        self, inputs: Sequence[ForwardInput], step: "ReferenceStep"
    ) -> list[ForwardOutput]:
        states, ends = iter(step.states), iter(step.commit_ends())
        outputs = []
        for item in inputs:
            end = next(ends) if item.tokens else 0
            if item.targets:
                hidden_ND = step.hidden_TD[end - len(item.targets) : end]
                outputs.append(score(self.model, hidden_ND, item))
            elif item.state is not None:
                outputs.append(ForwardOutput(state=next(states)))
            elif item.draw is not None:
                logits_V = self.model.logits(step.hidden_TD[end - 1 : end])[0]
                outputs.append(_drawn(logits_V, item.draw, needs_logits=item.needs_logits))
            else:
                outputs.append(ForwardOutput())
        return outputs

    def encode(self, tokens_T: Tensor, batch: ForwardBatch) -> Tensor:
        return self.model.encode(tokens_T, batch)

    def forward(self, embeds_TD: Tensor, batch: ForwardBatch) -> Tensor:
        return self.model.stack(embeds_TD, batch)


def commit_segment(item: ForwardInput) -> Segment:
    """Return the segment of the tokens to commit, with the positions of their pictures."""
    begin = item.cache.length
    images = tuple((begin + image.begin, begin + image.end) for image in item.images)
    return Segment(item.cache, len(item.tokens), commit=True, images=images)


def score(model: Gemma, hidden_ND: Tensor, item: ForwardInput) -> ForwardOutput:
    """Log-probability of each target, and of the likeliest token or one drawn in its place.

    A bounded number of positions at a time.
    """
    target_N1 = torch.tensor(item.targets, device=hidden_ND.device)[:, None]
    split = (torch.split(x, SCORED_POSITIONS) for x in (hidden_ND, target_N1))
    logprobs: list[float] = []
    best: list[tuple[int, float]] = []
    for states_ND, piece_N1 in zip(*split, strict=True):
        logits_NV = model.logits(states_ND)
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


class ReferenceStep:
    """The operations of a step (`StepOps`). Updates `states` and `hidden_TD`."""

    def __init__(
        self,
        model: Gemma,
        batch: ForwardBatch,
        commits: Sequence[ForwardInput],
        states: Sequence[CanvasState],
    ) -> None:
        self.model, self.batch, self.commits, self.states = model, batch, commits, list(states)
        self.hidden_TD = torch.empty(0)

    def commit_ends(self) -> list[int]:
        """Index after the last token of each commit."""
        lengths = [len(item.tokens) for item in self.commits]
        return [sum(lengths[: index + 1]) for index in range(len(lengths))]

    def embed(self) -> Tensor:
        model, embeds = self.model, []
        if self.commits:
            ids = [token for item in self.commits for token in item.tokens]
            embeds.append(model.embed(torch.tensor(ids, device=model.embed_tokens.weight.device)))
            self._put_images(embeds[0])
        if self.states:
            embeds.append(embed_canvases(model, self.states))
        return torch.cat(embeds)

    def _put_images(self, embeds_TD: Tensor) -> None:
        """Replace the embeddings of soft tokens by the features of their pictures."""
        for item, end in zip(self.commits, self.commit_ends(), strict=True):
            begin = end - len(item.tokens)
            for image in item.images:
                rows_SD = embeds_TD[begin + image.begin : begin + image.end]
                rows_SD.copy_(image.features_SD)

    def forward(self, embeds_TD: Tensor) -> Tensor:
        self.hidden_TD = self.model.stack(embeds_TD, self.batch)
        return self.hidden_TD[sum(len(item.tokens) for item in self.commits) :]

    def logit_stats(self, hidden_TD: Tensor) -> tuple[PositionStats, Tensor, Tensor]:
        query = Query(
            temperature_T=_temperatures(self.states),
            uniform_T=torch.cat([s.noise.uniform_NL[s.canvas.num_steps + 1] for s in self.states]),
            held_T=torch.cat([state.canvas.tokens_L for state in self.states]),
            draw_temperature_T=_draw_temperatures(self.states),
        )
        return (*logit_stats(self.model, hidden_TD, query), hidden_TD)

    def advance(self, stats: tuple[PositionStats, Tensor, Tensor]) -> None:
        stats_T, soft_TD, hidden_TD = stats
        end = 0
        for index, state in enumerate(self.states):
            positions = slice(end, end := end + state.canvas.length)

            def logits_at(
                positions: Sequence[int], hidden_LD: Tensor = hidden_TD[positions]
            ) -> Tensor:
                return self.model.logits(hidden_LD[list(positions)])

            canvas = update_canvas(state, stats_T.at(positions), logits_at)
            canvas = self_conditioned(self.model, canvas, soft_TD[positions])
            self.states[index] = replace(state, canvas=canvas)


def embed_canvases(model: Gemma, states: Sequence[CanvasState]) -> Tensor:
    """Embed the canvases, one after the other, with their self-conditioning."""
    tokens_T = torch.cat([state.canvas.tokens_L for state in states])
    softs = [state.canvas.soft_LD for state in states]
    if all(soft is None for soft in softs):
        return model.embed_canvas(tokens_T, None)
    table_VD = model.embed_tokens.weight
    # A canvas before its first step has none, which is exactly zero.
    filled = [
        table_VD.new_zeros(state.canvas.length, table_VD.shape[1]) if soft is None else soft
        for state, soft in zip(states, softs, strict=True)
    ]
    return model.embed_canvas(tokens_T, torch.cat(filled))


def logit_stats(model: Gemma, hidden_TD: Tensor, query: Query) -> tuple[PositionStats, Tensor]:
    """Statistics and soft embedding of every position, a bounded number of positions at a time."""
    softcap = model.config.final_logit_softcapping
    size = max(1, LOGIT_ELEMENTS[hidden_TD.device.type] // model.config.vocab_size)
    stats, softs = [], []
    for begin in range(0, len(hidden_TD), size):
        group = slice(begin, begin + size)
        group_stats, p_TV = position_stats(
            model.raw_logits(hidden_TD[group]), softcap, query.at(group)
        )
        stats.append(group_stats)
        softs.append(model.soft_embed(p_TV))
    return PositionStats.join(stats), torch.cat(softs)


def self_conditioned(model: Gemma, canvas: Canvas, soft_LD: Tensor) -> Canvas:
    """Set self-conditioning: that of a pinned position is its own token, as if converged."""
    if canvas.reopened_L is not None:
        soft_LD = soft_LD.masked_fill(canvas.reopened_L[:, None], 0.0)
    token_LD = model.embed(canvas.tokens_L)
    soft_LD = torch.where(canvas.pinned_L[:, None], token_LD, soft_LD)
    return replace(canvas, soft_LD=soft_LD, reopened_L=None)


def _temperatures(states: Sequence[CanvasState]) -> Tensor:
    temperatures = []
    for state in states:
        steps_left = state.sampler.max_denoising_steps - state.canvas.num_steps
        temperature = state.sampler.temperature_at(steps_left)
        temperatures.append(torch.full_like(state.canvas.entropy_L, temperature))
    return torch.cat(temperatures)


def _draw_temperatures(states: Sequence[CanvasState]) -> Tensor | None:
    if all(state.sampler.temperature == 1 for state in states):
        return None
    return torch.cat(
        [torch.full_like(state.canvas.entropy_L, state.sampler.temperature) for state in states]
    )


def denoise(
    model: Gemma, caches: Sequence[KVCache], states: Sequence[CanvasState]
) -> Iterator[list[CanvasState]]:
    """Yield the states after each step, until each has converged or is out of steps.

    Rows that are done leave the pass and stay as they are. The caches' lengths do not change.
    """
    backend, states = ReferenceBackend(model), list(states)
    while moving := [index for index, state in enumerate(states) if not state.is_done]:
        outputs = backend.run([ForwardInput(cache=caches[i], state=states[i]) for i in moving])
        for index, output in zip(moving, outputs, strict=True):
            assert output.state is not None
            states[index] = output.state
        yield list(states)


def commit(model: Gemma, cache: KVCache, tokens_T: Tensor, chunk: int) -> Tensor:
    """Commit tokens by definition, `chunk` at a time; returns the last hidden state."""
    return prefill(ReferenceBackend(model), cache, tokens_T, chunk)
