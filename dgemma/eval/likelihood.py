"""Losses of texts: cross-entropy of held-out text, causal and denoising, and BLiMP.

Texts are padded to rows of one length, so that attention is one call per layer. A row is a clean
text with causal attention, followed, for denoising losses, by its blocks as noised canvases: each
attends to the clean text before its block and to itself. `ForwardBatch` has the same rule with a KV
cache; a test compares them.

B rows, S positions of a row, T = B * S, L canvas length, D width, V vocabulary, N/M heads.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.diffusion.canvas import Noise, corrupt
from dgemma.diffusion.reference_step import LOGIT_ELEMENTS
from dgemma.engine import Engine
from dgemma.eval.answers import show_progress
from dgemma.eval.data import Data, MissingData, read_zip
from dgemma.eval.measure import Case, Measure
from dgemma.model.gemma import Gemma
from dgemma.programs.infill.infill import end_id

TASK = "cross_entropy"
SETS = ("stories", "code", "dialogue")
LEVELS = tuple(round(0.1 * i, 1) for i in range(1, 10))
LIMIT = 200
MAX_TOKENS = 512  # of a text, in whole canvases; the rest is not read
NATS, NATS_A_BYTE = "nats/token", "nats/byte"
BLIMP = "blimp"
BLIMP_LIMIT = 1000  # pairs of each of the 67 paradigms, which is all of them
# Positions of one pass. More would not fit the caches of a CPU.
PASS_POSITIONS = {"cuda": 1 << 15, "mps": 1 << 13, "cpu": 1 << 12}
CLEAN = -1  # the canvas index of a clean position


class PaddedRows:
    """Attention inputs of equal rows; `start_S` is the first position of each one's canvas."""

    def __init__(self, model: Gemma, rows: int, clean: int, blocks: int) -> None:
        config, device = model.config, model.embed_tokens.weight.device
        length = config.canvas_length
        self.config, self.rows = config, rows
        canvases = torch.arange(blocks).repeat_interleave(length)
        begin = clean - blocks * length  # tokens before the first canvas
        self.position_S = torch.cat([torch.arange(clean), begin + torch.arange(blocks * length)])
        self.canvas_S = torch.cat([torch.full((clean,), CLEAN), canvases])
        self.start_S = torch.cat([torch.arange(1, clean + 1), begin + canvases * length])
        self.positions_T = self.position_S.repeat(rows).to(device)
        windows = {config.attention(i).window for i in range(config.num_hidden_layers)}
        self.masks = {window: self._mask(window).to(device) for window in windows}

    def attend(self, layer: int, q_TNH: Tensor, k_TMH: Tensor, v_TMH: Tensor) -> Tensor:
        groups = q_TNH.shape[1] // k_TMH.shape[1]
        q, k, v = (_split(x, self.rows).transpose(1, 2) for x in (q_TNH, k_TMH, v_TMH))
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mask_SS = self.masks[self.config.attention(layer).window]
        out_BNSH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_SS, scale=1.0)
        return out_BNSH.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        """A clean position sees itself and those before it; a canvas, itself and those before."""
        start_S1, key_1S = self.start_S[:, None], self.position_S[None]
        is_past = (self.canvas_S[None] == CLEAN) & (key_1S < start_S1)
        if window is not None:
            # The window of a clean position includes itself; that of a canvas does not.
            distance_S1 = window - (self.canvas_S[:, None] != CLEAN).long()
            is_past &= key_1S >= start_S1 - distance_S1
        is_same = (self.canvas_S[:, None] != CLEAN) & (
            self.canvas_S[:, None] == self.canvas_S[None]
        )
        return is_past | is_same


@torch.inference_mode()
def causal_losses(model: Gemma, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the loss in nats of each token of a text but its first."""
    losses: list[list[float]] = [[] for _ in texts]
    for group in _groups(model, [len(text) for text in texts]):
        longest = max(len(texts[i]) for i in group)
        tokens_BS = _padded([texts[i] for i in group], longest, model)
        context = PaddedRows(model, len(group), longest, 0)
        hidden_TD = model.encode(tokens_BS.flatten(), context)
        target_T = tokens_BS.roll(-1, dims=1).flatten()
        chunks = [
            F.cross_entropy(logits_TV, target, reduction="none")
            for logits_TV, target in _logits(model, hidden_TD, target_T)
        ]
        loss_BS = _split(torch.cat(chunks), len(group)).tolist()
        for i, row in zip(group, loss_BS, strict=True):
            losses[i] = row[: len(texts[i]) - 1]
    return losses


@dataclass(frozen=True, slots=True)
class DenoisingLosses:
    """Losses of one text's canvases at one level, without and with self-conditioning.

    Padding after the text's end, in its last canvas, is left out.
    """

    plain: list[float]
    self_conditioned: list[float]
    is_noised: list[bool]


@torch.inference_mode()
def denoising_losses(
    model: Gemma, texts: Sequence[Sequence[int]], level: float, padding: int, seed: int
) -> list[DenoisingLosses]:
    """Return the losses of the clean tokens of each text's canvases, noised at `level`.

    The first token of a text is its prompt; the others are split into canvases, the last one
    padded. Noise depends on the seed, the level and the index of the text.
    """
    length = model.config.canvas_length
    blocks = [-(-(len(text) - 1) // length) for text in texts]
    results: dict[int, DenoisingLosses] = {}
    for group in _groups(model, [1 + 2 * length * count for count in blocks], blocks):
        count = blocks[group[0]]
        clean_BS = _padded([texts[i] for i in group], 1 + count * length, model, padding)
        target_BL = clean_BS[:, 1:]
        noised = [_noised(target_BL[row], level, model, (seed, i)) for row, i in enumerate(group)]
        canvas_BL, mask_BL = (torch.stack(tensors) for tensors in zip(*noised, strict=True))
        context = PaddedRows(model, len(group), 1 + count * length, count)
        plain_BL, soft_TD = _canvas_losses(model, clean_BS, canvas_BL, None, context)
        self_cond_BL, _ = _canvas_losses(model, clean_BS, canvas_BL, soft_TD, context)
        for row, i in enumerate(group):
            end = len(texts[i]) - 1
            results[i] = DenoisingLosses(
                *(x_BL[row, :end].tolist() for x_BL in (plain_BL, self_cond_BL, mask_BL))
            )
    return [results[i] for i in range(len(texts))]


def _noised(
    target_L: Tensor, level: float, model: Gemma, key: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Noise canvases at a level; return them and a mask. The key is (seed, index of the text)."""
    seed, number = key
    noise = Noise(seed=seed, choice=number).block(
        round(1000 * level), 0, len(target_L), model.config.vocab_size, target_L.device
    )
    uniform_L, noise_L = noise.uniform_NL[0], noise.tokens_NL[0]
    return corrupt(target_L, noise_L, uniform_L, uniform_L.new_tensor(level)), uniform_L < level


def _canvas_losses(
    model: Gemma, clean_BS: Tensor, canvas_BL: Tensor, soft_TD: Tensor | None, context: PaddedRows
) -> tuple[Tensor, Tensor]:
    """Return losses at the canvas positions, and soft embeddings for the next step."""
    rows, clean = clean_BS.shape
    x_BSD = _split(model.embed(clean_BS.flatten()), rows)
    entered_BLD = _split(model.embed_canvas(canvas_BL.flatten(), soft_TD), rows)
    hidden_TD = model.stack(torch.cat([x_BSD, entered_BLD], dim=1).flatten(0, 1), context)
    hidden_TD = _split(hidden_TD, rows)[:, clean:].flatten(0, 1)
    losses, softs = [], []
    for logits_TV, target_T in _logits(model, hidden_TD, clean_BS[:, 1:].flatten()):
        losses.append(F.cross_entropy(logits_TV, target_T, reduction="none"))
        softs.append(model.soft_embed(logits_TV.softmax(-1)))
    return _split(torch.cat(losses), rows), torch.cat(softs)


def _logits(model: Gemma, hidden_TD: Tensor, target_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits with their targets, for a bounded number of positions at a time."""
    size = max(1, LOGIT_ELEMENTS[hidden_TD.device.type] // model.config.vocab_size)
    chunks = zip(torch.split(hidden_TD, size), torch.split(target_T, size), strict=True)
    for chunk_TD, target in chunks:
        yield model.logits(chunk_TD), target


def _split(x_T: Tensor, rows: int) -> Tensor:
    """Reshape concatenated rows to one row each."""
    return x_T.reshape(rows, -1, *x_T.shape[1:])


def _padded(texts: Sequence[Sequence[int]], length: int, model: Gemma, padding: int = 0) -> Tensor:
    rows = [[*text, *[padding] * (length - len(text))] for text in texts]
    return torch.tensor(rows, device=model.embed_tokens.weight.device)


def _groups(
    model: Gemma, lengths: Sequence[int], num_blocks: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Yield indices of texts for one pass: of as many blocks, and of similar length."""
    max_positions = PASS_POSITIONS[model.embed_tokens.weight.device.type]
    num_blocks = num_blocks or [0] * len(lengths)
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (num_blocks[i], lengths[i])):
        is_full = (len(group) + 1) * lengths[i] > max_positions  # the longest so far
        if group and (is_full or num_blocks[i] != num_blocks[group[0]]):
            yield group
            group = []
        group.append(i)
    if group:
        yield group


# --- tasks


def cross_entropy(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure causal and denoising losses on stories, code and dialogue."""
    measures = []
    for name in SETS:
        try:
            texts = data.texts(f"{name}.jsonl", limit or LIMIT)
        except MissingData as reason:
            measures.append(Case(TASK, prefix=f"{name}: ").skipped(str(reason)))
            continue
        ids = [_ids(engine, text) for text in texts]
        measures += _causal(engine, name, ids)
        if engine.model.config.can_denoise:
            measures += _denoising(engine, name, ids, seed)
    return measures


def _ids(engine: Engine, text: str) -> list[int]:
    """Return bos, the text and its end token, up to MAX_TOKENS."""
    config = engine.model.config
    ids = [config.bos_token_id, *engine.tokenizer.encode(text), end_id(engine)]
    return ids[: 1 + max(1, MAX_TOKENS // config.canvas_length) * config.canvas_length]


def _causal(engine: Engine, name: str, texts: Sequence[list[int]]) -> list[Measure]:
    losses = [sum(loss) for loss in causal_losses(engine.model, texts)]
    case = Case(TASK, "ar", f"{name}: ")
    # The end token is predicted like the others, but has no bytes.
    sizes = [len(engine.tokenizer.decode_bytes(ids[1:], skip_control=True)) for ids in texts]
    per_token = [(loss, float(len(ids) - 1)) for loss, ids in zip(losses, texts, strict=True)]
    per_byte = [(loss, float(size)) for loss, size in zip(losses, sizes, strict=True)]
    return [
        case.rate("next token", per_token, NATS),
        case.rate("next token, per byte", per_byte, NATS_A_BYTE),
    ]


def _denoising(engine: Engine, name: str, texts: Sequence[list[int]], seed: int) -> list[Measure]:
    by_level: dict[float, list[DenoisingLosses]] = {}
    for number, level in enumerate(LEVELS, start=1):
        padding = end_id(engine)
        by_level[level] = denoising_losses(engine.model, texts, level, padding, seed)
        show_progress(f"{TASK}, {name}", number, len(LEVELS))
    case = Case(TASK, "diffusion", f"{name}: ")
    per_text = list(zip(*by_level.values(), strict=True))
    measures = [
        case.rate(
            f"denoising, {which}, {'with' if self_cond else 'without'} self-conditioning",
            [_total(losses, self_cond, which == "noised") for losses in per_text],
            NATS,
            "levels 0.1 to 0.9 together",
        )
        for which in ("all", "noised")
        for self_cond in (True, False)
    ]
    for level, losses in by_level.items():
        totals = [_total([one], True, False) for one in losses]
        measures.append(case.rate(f"denoising at {level}", totals, NATS, "with self-conditioning"))
    return measures


def _total(
    levels: Sequence[DenoisingLosses], self_cond: bool, only_noised: bool
) -> tuple[float, float]:
    """Return the summed losses of one text, at all or at noised positions, and their number."""
    chosen = [
        loss
        for one in levels
        for loss, is_noised in zip(
            one.self_conditioned if self_cond else one.plain, one.is_noised, strict=True
        )
        if is_noised or not only_noised
    ]
    return sum(chosen), float(len(chosen))


def blimp(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure accuracy, over all paradigms and by field; nothing here is random.

    Of two sentences, the grammatical one should be likelier under the causal pass.
    """
    fields: dict[str, list[bool]] = defaultdict(list)
    paradigms = list(read_zip(data.evaluation("BLiMP.zip"), limit or BLIMP_LIMIT))
    bos = engine.model.config.bos_token_id
    for number, records in enumerate(paradigms, start=1):
        sentences = [r[key] for key in ("sentence_good", "sentence_bad") for r in records]
        texts = [(bos, *engine.tokenizer.encode(sentence)) for sentence in sentences]
        losses = [sum(loss) for loss in causal_losses(engine.model, texts)]
        for index, record in enumerate(records):
            field = record["field"].replace("_", "/")  # the files spell one of them both ways
            fields[field].append(losses[index] < losses[len(records) + index])
        show_progress(BLIMP, number, len(paradigms))
    case = Case(BLIMP, "ar")
    every = [hit for hits in fields.values() for hit in hits]
    measures = [case.share("all", every, f"{len(paradigms)} paradigms, causal likelihood")]
    return measures + [case.share(name, hits) for name, hits in sorted(fields.items())]
