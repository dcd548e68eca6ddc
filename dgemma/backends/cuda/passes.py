"""Forward passes: denoising with commits, commits only, AR decoding, and eager segments.

All but the last are captured. They work on `GraphBuffers` only: everything that changes between
passes is read from there. `run_segments` is for callers with their own embeddings.

The soft embedding is the mean over a few candidate tokens if these hold nearly all probability at
every position, else over the whole vocabulary. The host decides when it reads the flag; both
variants start from the logit statistics left on the device.

C canvases, K commits, B AR sequences, T tokens, L tokens of a segment, S candidates, D width, V
vocabulary, M numbers of an entry (`graphs`), X layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dgemma.backends.base import ForwardInput, ForwardOutput
from dgemma.backends.cuda.fused import AttnBatch, FusedModel
from dgemma.backends.cuda.gemm import gemm, gemm_gelu_mul, lm_head, use_gemv
from dgemma.backends.cuda.graphs import CANVAS_BUCKETS, GraphBuffers, Graphs, bucket
from dgemma.backends.cuda.kernels import (
    gemv,
    logit_stats,
    sampler_update,
    soft_embed_fp8,
    soft_embed_topk,
)
from dgemma.backends.cuda.kernels.attention import CANVAS, CAUSAL, MIXED, Segments
from dgemma.backends.cuda.kernels.embed import RopeTables, Table, add_and_norm, embed
from dgemma.backends.cuda.kernels.logit_stats import LogitStats, TokenQuery
from dgemma.backends.cuda.kernels.soft_embed_topk import Candidates, SoftEmbedOut
from dgemma.backends.cuda.merge import merge_weights
from dgemma.diffusion.denoise import denoise_step
from dgemma.model.forward_batch import ForwardBatch
from dgemma.model.gemma import Gemma, SelfConditioning, TokenTable, soft_cap
from dgemma.model.kv_cache import KVCache
from dgemma.model.norm_rope import CosSin, layer_frequencies, rope_cos_sin
from dgemma.quant.fp8 import LinearWeight
from dgemma.quant.head import Fp8HeadTable, SoftTable

LOGIT_TIERS = (1, 4)  # sizes of the smaller logits buffers, in canvases


class Rope:
    """RoPE tables of a pass, computed by the embedding kernel."""

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
        """Allocate the tables of a pass; return views by layer type."""
        cos_TF, sin_TF = (self.freq_F.new_empty(num_tokens * len(self.freq_F)) for _ in range(2))
        views: CosSin = {}
        end = 0
        for layer_type, freq_P in self.types.items():
            rows = slice(end, end := end + num_tokens * len(freq_P))
            size = (num_tokens, len(freq_P))
            views[layer_type] = cos_TF[rows].view(size), sin_TF[rows].view(size)
        tables = RopeTables(
            freq_F=self.freq_F,
            start_F=self.start_F,
            width_F=self.width_F,
            cos_TF=cos_TF,
            sin_TF=sin_TF,
        )
        return tables, views


class PassModel:
    """The weights of a model as the passes need them: fused layers, embeddings, LM head."""

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
        """Return a static logits buffer; one buffer serves all batches up to its size."""
        size = next(size for size in sizes if rows <= size)
        if size not in self._logits:
            weight_VD = self.model.embed_tokens.weight
            self._logits[size] = weight_VD.new_empty(size, len(weight_VD))
        return self._logits[size][:rows]


@dataclass(frozen=True, slots=True)
class SelfCondWeights:
    gate_up: LinearWeight
    down: LinearWeight
    norm: tuple[Tensor, float]
    eps: float


@torch.inference_mode(False)
def _self_conditioning(module: SelfConditioning | None) -> SelfCondWeights | None:
    if module is None or not has_plain_self_conditioning(module):
        return None
    return SelfCondWeights(
        gate_up=merge_weights([module.gate_proj, module.up_proj]),
        down=LinearWeight(module.down_proj.weight),
        norm=(module.pre_norm.weight, module.pre_norm.eps),
        eps=module.eps,
    )


def has_plain_self_conditioning(module: SelfConditioning) -> bool:
    linears = (module.gate_proj, module.up_proj, module.down_proj)
    return all(type(linear) is nn.Linear for linear in linears)


class EmbedOutput(NamedTuple):
    """Embeddings of a pass and its RoPE tables, from one kernel."""

    vector_TD: Tensor
    cos_sin: CosSin


class StepStats(NamedTuple):
    """Logit statistics of a step, and the candidates of its soft embeddings."""

    logits: LogitStats
    candidates: Candidates


class DenoisePass:
    """A step of C canvases with commits of K segments (`diffusion.denoise.StepOps`)."""

    def __init__(
        self, model: PassModel, buffers: GraphBuffers, canvases: int, commits: int
    ) -> None:
        self.model, self.buffers = model, buffers
        self.canvases, self.commits = canvases, commits
        self.entry_C = buffers.entry_I[:canvases]

    def step(self) -> StepStats:
        """Run the captured part of a pass."""
        return denoise_step(self)

    def commit(self) -> Tensor:
        """Run a pass without canvases; return its hidden states."""
        return self.forward(self.embed())

    def embed(self) -> EmbedOutput:
        model, buffers = self.model, self.buffers
        tokens = buffers.tokens(self.canvases, self.commits)
        tables, cos_sin = model.rope.tables((self.canvases + self.commits) * buffers.length)
        if not self.canvases:
            vector_TD, _ = embed(
                tokens, model.table, tables, (model.fused.input_norm_D, model.fused.eps)
            )
            return EmbedOutput(vector_TD, cos_sin)
        weights = model.self_cond
        assert weights is not None
        inputs = buffers.step_inputs()
        vector_TD, normed_TD = embed(tokens, model.table, tables, weights.norm, inputs)
        rows = self.canvases * buffers.length
        hidden = gemm_gelu_mul(normed_TD[:rows], weights.gate_up, vector_TD.dtype)
        part_CD = gemm(hidden, weights.down, vector_TD.dtype)
        return EmbedOutput(add_and_norm(vector_TD, part_CD, weights.eps), cos_sin)

    def forward(self, embeds: EmbedOutput) -> Tensor:
        segments = self.buffers.segments(self.canvases, self.commits)
        batch = AttnBatch(segments, self.buffers.table_EX6)
        return self.model.fused.forward(embeds.vector_TD, embeds.cos_sin, batch)

    def logit_stats(self, hidden_TD: Tensor) -> StepStats:
        model, buffers, length = self.model, self.buffers, self.buffers.length
        rows = self.canvases * length
        whole = model.model.config.canvas_length
        most = buffers.num_canvases
        sizes = [min(count, most) * whole for count in (*LOGIT_TIERS, most)]
        raw_TV = model.logits_buffer(rows, sizes)
        lm_head(hidden_TD[:rows], lm_head_of(model.model.embed_tokens), raw_TV)
        query = TokenQuery(
            temperature_T=buffers.temperature_T[:rows],
            draw_temperature_T=buffers.draw_temperature_T[:rows],
            uniform_T=buffers.uniform_T[:rows],
            current_T=buffers.current_T[:rows],
        )
        stats = logit_stats.logit_stats(raw_TV, model.softcap, query, length)
        return StepStats(stats, soft_embed_topk.count_candidates(stats))

    def advance(self, stats: StepStats) -> StepStats:
        merged = stats.logits.merged
        inputs = sampler_update.Stats(
            draw_T=merged.draw_T,
            top_T=merged.top_T,
            entropy_T=merged.entropy_T,
            candidates=stats.candidates,
        )
        sampler_update.update(self.buffers.canvas_states(), inputs, self.entry_C)
        return stats

    def soft_embed(self, stats: StepStats, *, sparse: bool) -> None:
        """Write the self-conditioning of the next step."""
        table, views = self.model.model.embed_tokens, self.buffers.views
        out = SoftEmbedOut(
            self.buffers.soft_ELD, views["tokens_L"], views["pinned_L"], self.entry_C, table.scale
        )
        if sparse:
            soft_embed_sparse(table, stats, out)
        else:
            soft_embed_dense(table, stats.logits, out)


def soft_embed_sparse(table: TokenTable, stats: StepStats, out: SoftEmbedOut) -> None:
    """Write the mean embedding over the candidates of each position."""
    id_TS, p_TS, count_T, _ = soft_embed_topk.gather_candidates(*stats)
    soft_embed_topk.mean_of_candidates(table.weight, id_TS, p_TS, count_T, out)


def soft_embed_dense(table: TokenTable, stats: LogitStats, out: SoftEmbedOut) -> None:
    """Write the mean embedding over the whole vocabulary, in fp8 if the table has a copy in fp8."""
    soft = soft_table_of(table)
    if soft is not None:
        probs = soft_embed_fp8.quantize_probs(stats, soft)
        soft_embed_fp8.mean(probs, soft, table.weight, out)
        return
    p_TV = logit_stats.probabilities_(stats).to(table.weight.dtype)
    soft_embed_topk.store_mean(table.weight, p_TV @ table.weight, out)


def soft_table_of(table: TokenTable) -> SoftTable | None:
    return table.soft if isinstance(table, Fp8HeadTable) else None


def lm_head_of(table: TokenTable) -> LinearWeight:
    return table.head if isinstance(table, Fp8HeadTable) else LinearWeight(table.weight)


def run_segments(
    model: PassModel, embeds_TD: Tensor, batch: ForwardBatch, table_IX6: NDArray[np.int64]
) -> Tensor:
    """Run the fused stack on a batch; shorter segments are padded to the longest."""
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
    has_images = any(segment.images for segment in batch.segments)
    assert not has_images or index_P is None, "segments with pictures are not padded"
    if index_P is None:
        images = batch if has_images else None
        return model.fused.forward(embeds_TD, cos_sin, AttnBatch(segments, table_EX6, images))
    padded = {k: (c[index_P], s[index_P]) for k, (c, s) in cos_sin.items()}
    hidden_PD = model.fused.forward(embeds_TD[index_P], padded, AttnBatch(segments, table_EX6))
    return hidden_PD[back_T]


def _padding(
    counts: list[int], stride: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the token of each padded row and the row of each token; None without padding."""
    if all(count == stride for count in counts):
        return None, None
    starts = np.cumsum([0, *counts[:-1]])
    pairs = list(zip(starts, counts, strict=True))
    index = np.concatenate([start + np.minimum(np.arange(stride), n - 1) for start, n in pairs])
    back = np.concatenate([i * stride + np.arange(n) for i, (_, n) in enumerate(pairs)])
    return torch.from_numpy(index).to(device), torch.from_numpy(back).to(device)


MAX_SEQUENCES = CANVAS_BUCKETS[-1]  # of one pass

# A sequence and the state its KV table depends on. A weak reference, since ids are reused.
CacheState = tuple["ref[KVCache]", int, int]


class DecodePass:
    """One token of B sequences, and the draw of the next."""

    @torch.inference_mode(False)
    def __init__(self, model: PassModel, buffers: GraphBuffers, count: int) -> None:
        self.model, self.buffers, self.count = model, buffers, count
        device, vocab = buffers.device, model.model.config.vocab_size
        self.logits_BV = torch.zeros(count, vocab, device=device)
        # In: random number and temperature per sequence; out: token and log-probability.
        self.draw_2B = torch.zeros(2, count, dtype=torch.float64, device=device)
        self.drawn_2B = torch.zeros(2, count, dtype=torch.float64, device=device)
        self.ones_B = torch.ones(count, device=device)
        # A kernel argument whose result is not used.
        self.current_B = torch.zeros(count, dtype=torch.long, device=device)

    def step(self) -> None:
        """Run the captured part of a pass."""
        model, buffers = self.model, self.buffers
        tokens = buffers.tokens(0, self.count)
        tables, cos_sin = model.rope.tables(self.count)
        norm = (model.fused.input_norm_D, model.fused.eps)
        vector_BD, normed_BD = embed(tokens, model.table, tables, norm)
        batch = AttnBatch(buffers.segments(0, self.count), buffers.table_EX6)
        self._draw(model.fused.forward(vector_BD, cos_sin, batch, normed_BD))

    def _draw(self, hidden_BD: Tensor) -> None:
        weight, cap = lm_head_of(self.model.model.embed_tokens), self.model.softcap
        if use_gemv(hidden_BD):
            gemv.logits(hidden_BD, weight, cap, self.logits_BV)
        else:
            raw_BV = hidden_BD.new_empty(self.logits_BV.shape)
            self.logits_BV.copy_(soft_cap(lm_head(hidden_BD, weight, raw_BV), cap))
        uniform_B, temperature_B = self.draw_2B
        # Statistics at temperature 1, as needed for the log-probability.
        query = TokenQuery(
            temperature_T=self.ones_B,
            draw_temperature_T=temperature_B.float(),
            uniform_T=uniform_B,
            current_T=self.current_B,
        )
        merged = logit_stats.logit_stats(self.logits_BV, None, query, 1).merged
        token_B = merged.draw_T  # argmax at temperature 0
        logit_B = self.logits_BV.gather(1, token_B[:, None])[:, 0]
        self.drawn_2B[0] = token_B
        self.drawn_2B[1] = logit_B - merged.peak_T - merged.total_T.log()


class DecodeRunner:
    """Runs decode passes on its own static buffers."""

    def __init__(self, model: PassModel, graphs: Graphs) -> None:
        self.model, self.graphs = model, graphs
        self.buffers = GraphBuffers(
            model.model, length=1, num_canvases=0, num_commits=MAX_SEQUENCES, max_steps=1
        )
        self.passes: dict[int, DecodePass] = {}
        self._prefetched: tuple[list[CacheState], NDArray[np.int64]] | None = None

    def run(self, inputs: Sequence[ForwardInput]) -> Iterator[ForwardOutput]:
        """Commit the last token of each sequence and draw the next."""
        for begin in range(0, len(inputs), MAX_SEQUENCES):
            yield from self._run(inputs[begin : begin + MAX_SEQUENCES])

    def _run(self, inputs: Sequence[ForwardInput]) -> Iterator[ForwardOutput]:
        buffers, count = self.buffers, bucket(len(inputs), CANVAS_BUCKETS)
        if count not in self.passes:
            self.passes[count] = DecodePass(self.model, buffers, count)
        decode = self.passes[count]
        meta_KM = self._meta([item.cache for item in inputs])
        meta_KM[:, -1] = [item.tokens[-1] for item in inputs]
        buffers.write_commits(meta_KM)
        draws = [item.draw for item in inputs if item.draw is not None]
        pairs = torch.tensor(
            [[d.uniform for d in draws], [d.temperature for d in draws]], dtype=torch.float64
        )
        decode.draw_2B[:, : len(draws)].copy_(pairs, non_blocking=True)
        first = buffers.first_commit
        padding = [buffers.padding] * (count - len(inputs))
        buffers.set_entries([*range(first, first + len(inputs)), *padding])
        self.graphs.run(("decode", count), decode.step)
        for item in inputs:
            item.cache.length += 1
        self._prefetch([item.cache for item in inputs])
        tokens, logprobs = decode.drawn_2B.tolist()
        for index, item in enumerate(inputs):
            if item.needs_logits:
                yield ForwardOutput(logits_V=decode.logits_BV[index].clone())
            else:
                yield ForwardOutput(token=int(tokens[index]), logprob=logprobs[index])

    def _meta(self, caches: Sequence[KVCache]) -> NDArray[np.int64]:
        """Return the entries of the next tokens, usually prefetched."""
        key = [_state_of(cache) for cache in caches]
        if self._prefetched is not None and self._prefetched[0] == key:
            return self._prefetched[1]
        for cache in caches:
            cache.reserve(1)
        return _token_meta(caches)

    def _prefetch(self, caches: Sequence[KVCache]) -> None:
        """Compute the KV tables of the next tokens while the device runs this pass."""
        self._prefetched = None
        if all(cache.has_slots(1) and not cache.is_shared for cache in caches):
            key = [_state_of(cache) for cache in caches]
            self._prefetched = (key, _token_meta(caches))


def _token_meta(caches: Sequence[KVCache]) -> NDArray[np.int64]:
    rows = []
    for cache in caches:
        table_X6 = cache.kv_table(cache.length, 1)
        assert table_X6 is not None
        rows.append(np.concatenate([table_X6.ravel(), (cache.length, 1, 0)]))
    return np.stack(rows)


def _state_of(cache: KVCache) -> CacheState:
    return ref(cache), cache.length, cache.num_moves
