"""The forward passes: denoising with commits, commits alone, single AR tokens, and eager segments.

The first three are captured. They work on `GraphBuffers` alone: whatever changes from pass to
pass is read from there. `run_segments` serves callers that bring embeddings of their own.

C canvases, K commits, B sequences, T tokens, L tokens of a segment, D width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dgemma.backends.cuda import logits
from dgemma.backends.cuda.buffers import GraphBuffers
from dgemma.backends.cuda.fused import AttnBatch, FusedModel
from dgemma.backends.cuda.gemm import gemm, gemm_gelu_mul, lm_head, use_gemv
from dgemma.backends.cuda.kernels import gemv, sampler_update
from dgemma.backends.cuda.kernels.attention import CANVAS, CAUSAL, MIXED, Segments
from dgemma.backends.cuda.kernels.embed import RopeTables, Table, add_and_norm, embed
from dgemma.backends.cuda.kernels.soft_embed_topk import Into
from dgemma.backends.cuda.logits import LogitStats, TokenQuery
from dgemma.backends.cuda.merge import merge_weights
from dgemma.diffusion.denoise import denoise_step
from dgemma.model.forward_batch import ForwardBatch
from dgemma.model.gemma import Gemma, SelfConditioning, soft_cap
from dgemma.model.rope import CosSin, layer_frequencies, rope_cos_sin
from dgemma.quant.fp8 import Weight

LOGIT_TIERS = (1, 4)  # canvases up to which one logits buffer serves; beyond it, all


class Rope:
    """RoPE tables of a pass, computed by the kernel that embeds its tokens."""

    @torch.inference_mode(False)
    def __init__(self, model: Gemma) -> None:
        device = model.embed_tokens.weight.device
        self.types = layer_frequencies(model.config, device)
        widths = [len(freq_P) for freq_P in self.types.values()]
        starts = [sum(widths[:index]) for index in range(len(widths))]
        self.freq_F = torch.cat(list(self.types.values()))
        pairs = list(zip(starts, widths, strict=True))
        both_2F = torch.tensor([pair for pair in pairs for _ in range(pair[1])]).t()
        self.start_F, self.width_F = both_2F.to(device, torch.int32).contiguous()

    def tables(self, num_tokens: int) -> tuple[RopeTables, CosSin]:
        """Memory for the tables of a pass, and views of it by layer type."""
        cos_TF, sin_TF = (self.freq_F.new_empty(num_tokens * len(self.freq_F)) for _ in range(2))
        found: CosSin = {}
        end = 0
        for layer_type, freq_P in self.types.items():
            part = slice(end, end := end + num_tokens * len(freq_P))
            size = (num_tokens, len(freq_P))
            found[layer_type] = cos_TF[part].view(size), sin_TF[part].view(size)
        tables = RopeTables(
            freq_F=self.freq_F,
            start_F=self.start_F,
            width_F=self.width_F,
            cos_TF=cos_TF,
            sin_TF=sin_TF,
        )
        return tables, found


class PassModel:
    """A model as passes use it: fused layers, embeddings, LM head."""

    def __init__(self, model: Gemma) -> None:
        self.model, self.fused, self.rope = model, FusedModel(model), Rope(model)
        self.softcap = model.config.final_logit_softcapping
        self.self_cond = _self_conditioning(model.self_conditioning)
        self._logits: dict[int, Tensor] = {}

    @property
    def table(self) -> Table:
        tokens = self.model.embed_tokens
        return Table(tokens.weight, tokens.scale)

    @torch.inference_mode(False)
    def logits_buffer(self, rows: int, sizes: Sequence[int]) -> Tensor:
        """Static memory for logits; one buffer serves all batches up to one of the sizes."""
        size = next(size for size in sizes if rows <= size)
        if size not in self._logits:
            weight_VD = self.model.embed_tokens.weight
            self._logits[size] = weight_VD.new_empty(size, len(weight_VD))
        return self._logits[size][:rows]


@dataclass(frozen=True, slots=True)
class SelfCondWeights:
    gate_up: Weight
    down: Weight
    norm: tuple[Tensor, float]
    eps: float


@torch.inference_mode(False)
def _self_conditioning(part: SelfConditioning | None) -> SelfCondWeights | None:
    if part is None or not has_plain_self_conditioning(part):
        return None
    return SelfCondWeights(
        gate_up=merge_weights([part.gate_proj, part.up_proj]),
        down=Weight(part.down_proj.weight),
        norm=(part.pre_norm.weight, part.pre_norm.eps),
        eps=part.eps,
    )


def has_plain_self_conditioning(part: SelfConditioning) -> bool:
    return all(type(p) is nn.Linear for p in (part.gate_proj, part.up_proj, part.down_proj))


class DenoisePass:
    """A step of C canvases in a pass that also commits K segments (`diffusion.denoise.StepOps`)."""

    def __init__(
        self, model: PassModel, buffers: GraphBuffers, canvases: int, commits: int
    ) -> None:
        self.model, self.buffers = model, buffers
        self.canvases, self.commits = canvases, commits
        self.entry_C = buffers.entry_I[:canvases]
        self.cos_sin: CosSin = {}
        self.stats: LogitStats | None = None  # of the last step
        self.is_sparse: bool | None = None  # how the last soft embedding was made or captured
        self.hidden_TD: Tensor | None = None  # of the last pass, if it had no canvases

    def step(self) -> None:
        """The captured work."""
        if self.canvases:
            self.stats = denoise_step(self)
        else:
            self.forward(self.embed())

    def embed(self) -> Tensor:
        model, buffers = self.model, self.buffers
        tokens = buffers.tokens(self.canvases, self.commits)
        tables, self.cos_sin = model.rope.tables((self.canvases + self.commits) * buffers.length)
        if not self.canvases:
            vector_TD, _ = embed(
                tokens, model.table, tables, (model.fused.input_norm_D, model.fused.eps)
            )
            return vector_TD
        weights = model.self_cond
        assert weights is not None
        inputs = buffers.step_inputs()
        vector_TD, normed_TD = embed(tokens, model.table, tables, weights.norm, inputs)
        rows = self.canvases * buffers.length
        hidden = gemm_gelu_mul(normed_TD[:rows], weights.gate_up, vector_TD.dtype)
        part_CD = gemm(hidden, weights.down, vector_TD.dtype)
        return add_and_norm(vector_TD, part_CD, weights.eps)

    def forward(self, embeds_TD: Tensor) -> Tensor:
        segments = self.buffers.segments(self.canvases, self.commits)
        batch = AttnBatch(segments, self.buffers.table_EX6)
        hidden_TD = self.model.fused.forward(embeds_TD, self.cos_sin, batch)
        self.cos_sin = {}  # what is held here no other captured pass can use
        if not self.canvases:
            self.hidden_TD = hidden_TD
        return hidden_TD[: self.canvases * self.buffers.length]

    def logit_stats(self, hidden_TD: Tensor) -> LogitStats:
        model, buffers, rows = self.model, self.buffers, len(hidden_TD)
        length = buffers.length
        sizes = [count * length for count in (*LOGIT_TIERS, buffers.num_rows)]
        raw_TV = model.logits_buffer(rows, sizes)
        lm_head(hidden_TD, logits.lm_head_of(model.model.embed_tokens), raw_TV)
        query = TokenQuery(
            temperature_T=buffers.temperature_T[:rows],
            draw_temperature_T=buffers.draw_temperature_T[:rows],
            uniform_T=buffers.uniform_T[:rows],
            held_T=buffers.held_T[:rows],
        )
        return logits.logit_stats(raw_TV, model.softcap, query, length)

    def advance(self, stats: LogitStats) -> None:
        assert stats.likely is not None
        found = sampler_update.Stats(
            draw_T=stats.stats.draw_T,
            top_T=stats.stats.top_T,
            entropy_T=stats.stats.entropy_T,
            likely=stats.likely,
        )
        sampler_update.update(self.buffers.canvas_states(), found, self.entry_C)

    def soft_embed(self, *, sparse: bool) -> None:
        """Write the self-conditioning of the next step."""
        assert self.stats is not None
        self.is_sparse = sparse
        table, views = self.model.model.embed_tokens, self.buffers.views
        into = Into(
            self.buffers.soft_ELD, views["tokens_L"], views["pinned_L"], self.entry_C, table.scale
        )
        make = logits.soft_embed_sparse if sparse else logits.soft_embed_dense
        make(table, self.stats, into)


class DecodePass:
    """One token of B sequences, and the draw of the next."""

    @torch.inference_mode(False)
    def __init__(self, model: PassModel, buffers: GraphBuffers, count: int) -> None:
        self.model, self.buffers, self.count = model, buffers, count
        device, vocab = buffers.device, model.model.config.vocab_size
        self.logits_BV = torch.zeros(count, vocab, device=device)
        # Temperature and uniform of each sequence; then the token and its log-probability.
        self.draw_2B = torch.zeros(2, count, dtype=torch.float64, device=device)
        self.drawn_2B = torch.zeros(2, count, dtype=torch.float64, device=device)

    def step(self) -> None:
        """The captured work."""
        model, buffers = self.model, self.buffers
        tokens = buffers.tokens(0, self.count)
        tables, cos_sin = model.rope.tables(self.count)
        norm = (model.fused.input_norm_D, model.fused.eps)
        vector_BD, normed_BD = embed(tokens, model.table, tables, norm)
        batch = AttnBatch(buffers.segments(0, self.count), buffers.table_EX6)
        self._draw(model.fused.forward(vector_BD, cos_sin, batch, normed_BD))

    def _draw(self, hidden_BD: Tensor) -> None:
        weight, cap = logits.lm_head_of(self.model.model.embed_tokens), self.model.softcap
        if use_gemv(hidden_BD):
            gemv.scores(hidden_BD, weight, cap, self.logits_BV)
        else:
            raw_BV = hidden_BD.new_empty(self.logits_BV.shape)
            self.logits_BV.copy_(soft_cap(lm_head(hidden_BD, weight, raw_BV), cap))
        temperature_B, uniform_B = self.draw_2B
        top_B = self.logits_BV.argmax(-1)
        query = TokenQuery(
            temperature_T=torch.where(temperature_B > 0, temperature_B, 1.0).float(),
            draw_temperature_T=torch.ones_like(temperature_B, dtype=torch.float32),
            uniform_T=uniform_B,
            held_T=top_B,
        )
        stats = logits.logit_stats(self.logits_BV, None, query, 1, search=False).stats
        token_B = torch.where(temperature_B > 0, stats.draw_T, top_B)
        logit_B = self.logits_BV.gather(1, token_B[:, None])[:, 0]
        logprob_B = logit_B - self.logits_BV.logsumexp(-1)
        self.drawn_2B.copy_(torch.stack([token_B.double(), logprob_B.double()]))


def run_segments(
    model: PassModel, embeds_TD: Tensor, batch: ForwardBatch, table_IX6: NDArray[np.int64]
) -> Tensor:
    """Run the fused stack on a batch; segments shorter than the longest are padded."""
    device = embeds_TD.device
    counts = [segment.count for segment in batch.segments]
    stride = max(counts)
    index_P, back_T = _padding(counts, stride, device)
    is_causal = [int(segment.commit) for segment in batch.segments]
    kind = CAUSAL if all(is_causal) else MIXED if any(is_causal) else CANVAS
    segments = Segments(
        entry_I=torch.arange(len(counts), dtype=torch.int32, device=device),
        count_E=torch.tensor(counts, device=device),
        causal_E=torch.tensor(is_causal, dtype=torch.int32, device=device),
        stride=stride,
        kind=kind,
    )
    table_EX6 = torch.from_numpy(table_IX6).to(device)
    cos_sin = rope_cos_sin(model.model.config, batch.positions_T)
    if index_P is None:
        return model.fused.forward(embeds_TD, cos_sin, AttnBatch(segments, table_EX6))
    padded = {k: (c[index_P], s[index_P]) for k, (c, s) in cos_sin.items()}
    hidden_PD = model.fused.forward(embeds_TD[index_P], padded, AttnBatch(segments, table_EX6))
    return hidden_PD[back_T]


def _padding(
    counts: list[int], stride: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Index of the token each padded row repeats, and of each token; None if nothing is padded."""
    if all(count == stride for count in counts):
        return None, None
    starts = np.cumsum([0, *counts[:-1]])
    pairs = list(zip(starts, counts, strict=True))
    index = np.concatenate([start + np.minimum(np.arange(stride), n - 1) for start, n in pairs])
    back = np.concatenate([i * stride + np.arange(n) for i, (_, n) in enumerate(pairs)])
    return torch.from_numpy(index).to(device), torch.from_numpy(back).to(device)
