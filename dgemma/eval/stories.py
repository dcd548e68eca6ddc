"""Stories to fixed prompts, scored by a story model; and samples of text for a model card.

Low perplexity alone is not a merit (a dull story is likely), so distinct-2 is measured too: the
share of distinct ones among all pairs of adjacent words. Doubled words ("the frog frog") are pairs
of one word twice, typical of a canvas that accepts both in one step. Canvases that the causal mode
verifies write AR's stories, so that of them only the tokens per pass are measured.

The story model is stories15M, a causal model of 15M parameters. Its files have the llama2.c layout
in float16 without the header, and llama2.c's tokenizer. All rows of a batch have the same length so
far, so the KV cache is one tensor and needs no mask. (`recipes/nano/stories15m.py` samples training
stories from the same model.)

B rows, T tokens of a row, L layers, D width, N heads, H head width, V vocabulary.
"""

import lzma
import math
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.config import WHOLE_MODES
from dgemma.engine import Done, Engine, Mode, SamplingParams
from dgemma.engine.speculation import SpeculativeParams, speculative_task
from dgemma.errors import CheckpointError
from dgemma.eval.answers import EvalPrompt, generate_all
from dgemma.eval.data import Data, MissingData
from dgemma.eval.infill import fill_canvases, sample_holes, trim_context
from dgemma.eval.measure import SHARE, Case, Estimate, Measure, ratio

TASK, SAMPLES = "stories", "samples"
COUNT, SAMPLE_COUNT = 100, 10
MAX_TOKENS = 200
AR_TEMPERATURE = 0.8  # greedy AR would be likelier and duller than anything sampled
CONTEXT_CHARACTERS = 400  # shown on either side of a hole
WHO = "cat dog bird boy girl rabbit bear frog mouse duck fox king fish lion baby".split()
WHAT = "ball tree boat cake hat kite garden river house box star flower car book moon spoon".split()
VOCAB, WIDTH, MLP_WIDTH, LAYERS, HEADS = 32000, 288, 768, 6, 6
CONTEXT = 256  # tokens the model was trained on; it is given no more
BOS, FIRST_BYTE = 1, 3  # a story begins with BOS and ends before the next one
EPS = 1e-5
WEIGHTS, TOKENIZER = "stories15M_f16.bin.xz", "stories15M_tokenizer.bin"
# In the file's order. RoPE tables follow, which are computed here instead.
SHAPES = {
    "embedding": (VOCAB, WIDTH),
    "attention_norm": (LAYERS, WIDTH),
    "q": (LAYERS, WIDTH, WIDTH),
    "k": (LAYERS, WIDTH, WIDTH),
    "v": (LAYERS, WIDTH, WIDTH),
    "o": (LAYERS, WIDTH, WIDTH),
    "mlp_norm": (LAYERS, WIDTH),
    "gate": (LAYERS, MLP_WIDTH, WIDTH),
    "down": (LAYERS, WIDTH, MLP_WIDTH),
    "up": (LAYERS, MLP_WIDTH, WIDTH),
    "norm": (WIDTH,),
}


def stories(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Measure perplexity under stories15M and distinct-2, in both modes, and their ratio."""
    directory, pieces = data.training(WEIGHTS).parent, data.training(TOKENIZER)
    scorer = StoryModel.load(directory, engine.device, torch.float32)
    tokenizer = StoryTokenizer.load(pieces)
    losses: dict[Mode, list[tuple[float, float]]] = {}
    measures: list[Measure] = []
    for mode in WHOLE_MODES:
        replies = _write_stories(engine, mode, limit or COUNT, seed)
        texts = [done.text for done in replies]
        written = [text.strip() for text in texts if text.strip()]
        losses[mode] = [(nats, float(n)) for nats, n in likelihood(scorer, tokenizer, written)]
        note = f"temperature {AR_TEMPERATURE}" if mode == "ar" else "the model's sampler"
        case = Case(TASK, mode)
        measures += [
            perplexity(case, losses[mode], note),
            distinct_2(case, texts),
            doubled_words(case, texts),
            case.share("not empty", [bool(text.strip()) for text in texts]),
            _tokens_per_pass(case, "tokens per pass", replies),
        ]
    verified = _verify_stories(engine, limit or COUNT, seed)
    case, name = Case(TASK, "diffusion"), "tokens per pass, verified"
    measures.append(_tokens_per_pass(case, name, verified, f"temperature {AR_TEMPERATURE}"))
    return [*measures, _ratio(losses["diffusion"], losses["ar"])]


def story_prompt(number: int) -> str:
    """Return the prompt of a seed; all pairs of words come before one is repeated."""
    who, what = WHO[number % len(WHO)], WHAT[number % len(WHAT)]
    return f"Write a short story about a {who} and a {what}."


def write_stories(engine: Engine, mode: Mode, count: int, seed: int) -> list[str]:
    """Write stories with seeds `seed`, `seed + 1`, ..."""
    return [done.text for done in _write_stories(engine, mode, count, seed)]


def _write_stories(engine: Engine, mode: Mode, count: int, seed: int) -> list[Done]:
    prompts = [EvalPrompt(story_prompt(i), _params(mode, seed + i)) for i in range(count)]
    replies = [done for done in generate_all(engine, prompts, f"{TASK}, {mode}") if done]
    if len(replies) < count:
        raise MissingData(f"the model's context does not hold a prompt and {MAX_TOKENS} tokens")
    return replies


def _params(mode: Mode, seed: int) -> SamplingParams:
    temperature = AR_TEMPERATURE if mode == "ar" else None
    return SamplingParams(mode=mode, temperature=temperature, seed=seed, max_tokens=MAX_TOKENS)


def _verify_stories(engine: Engine, count: int, seed: int) -> list[Done]:
    """Write stories on canvases that the causal mode verifies."""
    speculation = SpeculativeParams(drafter="canvas")
    tasks = [
        speculative_task(engine, story_prompt(i), _params("ar", seed + i), speculation)
        for i in range(count)
    ]
    return engine.run_all(tasks)


def _tokens_per_pass(case: Case, name: str, replies: Sequence[Done], note: str = "") -> Measure:
    """Measure tokens per pass, without passes that only commit."""
    pairs = [(float(done.tokens), float(done.steps)) for done in replies]
    return case.rate(name, pairs, "tokens", note)


def perplexity(case: Case, losses: Sequence[tuple[float, float]], note: str) -> Measure:
    if not losses:
        return case.nothing("perplexity", note)
    estimate = Estimate.around(*ratio(losses), len(losses)).exp()
    return case.estimate("perplexity", estimate, "perplexity", note)


def _ratio(diffusion: Sequence[tuple[float, float]], ar: Sequence[tuple[float, float]]) -> Measure:
    """Divide diffusion's perplexity by AR's."""
    case, name = Case(TASK), "perplexity, diffusion / AR"
    if not diffusion or not ar:
        return case.nothing(name, "a mode wrote nothing")
    (first, first_error), (second, second_error) = ratio(diffusion), ratio(ar)
    error = math.hypot(first_error, second_error)
    estimate = Estimate.around(first - second, error, min(len(diffusion), len(ar))).exp()
    return case.estimate(name, estimate, "times")


def doubled_words(case: Case, texts: Sequence[str]) -> Measure:
    """Measure how often a word repeats the one before it; punctuation between them is ignored."""
    words = [re.findall(r"[a-z']+", text.lower()) for text in texts]
    return case.share("doubled words", [a == b for text in words for a, b in pairwise(text)])


def distinct_2(case: Case, texts: Sequence[str]) -> Measure:
    """Measure distinct-2 of all texts together, with a jackknife interval over texts.

    A bootstrap would take texts twice, and so count too few distinct pairs.
    """
    pairs = [list(pairwise(text.lower().split())) for text in texts]
    total, count = sum(map(len, pairs)), len(texts)
    if not total:
        return case.nothing("distinct-2", "no words")
    num_texts = Counter(pair for text in pairs for pair in set(text))  # that hold a pair
    without = [
        (len(num_texts) - sum(num_texts[pair] == 1 for pair in set(text)))
        / max(1, total - len(text))
        for text in pairs
    ]
    mean = sum(without) / count
    error = math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in without))
    estimate = Estimate.around(len(num_texts) / total, error, count)
    return case.estimate("distinct-2", estimate.within(), SHARE)


def samples(engine: Engine, data: Data, limit: int | None, seed: int) -> list[Measure]:
    """Return ten stories and ten infills as they come, seeds 0 to 9: nothing is selected."""
    case, count = Case(SAMPLES, "diffusion"), min(limit or SAMPLE_COUNT, SAMPLE_COUNT)
    texts = write_stories(engine, "diffusion", count, seed)
    measures = [
        case.text(f"story, seed {seed + i}", f"{story_prompt(i)}\n\n{text.strip()}")
        for i, text in enumerate(texts)
    ]
    try:
        holes = sample_holes(engine, data, count)
    except MissingData as reason:
        return [*measures, Case(SAMPLES, prefix="infill: ").skipped(str(reason))]
    filled = fill_canvases(engine, holes, seed, f"{SAMPLES}, infill")
    for i, (hole, answer) in enumerate(zip(holes, filled, strict=True)):
        written = "" if answer is None else answer.text
        shown = trim_context(hole, CONTEXT_CHARACTERS).with_text(f"[[{written}]]")
        text = f"{shown}\n\n(the original: {hole.middle.strip()})"
        measures.append(case.text(f"infill, seed {seed + i}", text))
    return measures


# --- stories15M


class StoryTokenizer:
    """SentencePiece BPE: characters, then the best-scored pair is merged until none is left."""

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        self.pieces = list(pieces)
        # Of two equal pieces the first counts; the names of single bytes never match text.
        self.ids = {p: i for i, p in reversed(list(enumerate(pieces))) if i >= FIRST_BYTE + 256}
        self.scores = scores
        self._encode_word = lru_cache(maxsize=1 << 16)(self._merge)

    @classmethod
    def load(cls, path: Path) -> "StoryTokenizer":
        data, pieces, scores = path.read_bytes(), [], []
        offset = 4  # the file begins with the length of its longest piece
        while offset < len(data):
            score, length = struct.unpack_from("<fi", data, offset)
            offset += 8
            pieces.append(data[offset : offset + length])
            scores.append(score)
            offset += length
        if len(pieces) != VOCAB or offset != len(data):
            raise CheckpointError(f"{path} holds {len(pieces)} pieces, not {VOCAB}; fetch it again")
        return cls(pieces, scores)

    def encode(self, text: str) -> list[int]:
        """Encode a text without BOS, word by word: pieces hold spaces at their front only.

        As in training, a space is put before the text.
        """
        words = re.findall(r" *[^ ]+| +", " " + text)
        return [token for word in words for token in self._encode_word(word)]

    def decode(self, ids: Sequence[int]) -> str:
        data = b"".join(
            bytes([i - FIRST_BYTE]) if FIRST_BYTE <= i < FIRST_BYTE + 256 else self.pieces[i]
            for i in ids
        )
        return data.decode("utf-8", "replace").removeprefix(" ")

    def _merge(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for character in word:
            known = self.ids.get(character.encode())
            ids += [FIRST_BYTE + b for b in character.encode()] if known is None else [known]
        while True:
            merged = [self.ids.get(self.pieces[a] + self.pieces[b]) for a, b in pairwise(ids)]
            best = max(
                (i for i, token in enumerate(merged) if token is not None),
                key=lambda i: (self.scores[merged[i] or 0], -i),
                default=None,
            )
            if best is None:
                return tuple(ids)
            ids[best : best + 2] = [merged[best] or 0]


@dataclass(frozen=True, slots=True)
class StoryCache:
    """Keys and values of all layers, for rows of equal length."""

    k_LBNTH: Tensor
    v_LBNTH: Tensor

    def append(self, layer: int, start: int, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, ...]:
        """Store keys and values from position `start` on; return all up to their end."""
        end = start + k_BNTH.shape[2]
        self.k_LBNTH[layer, :, :, start:end] = k_BNTH
        self.v_LBNTH[layer, :, :, start:end] = v_BNTH
        return self.k_LBNTH[layer, :, :, :end], self.v_LBNTH[layer, :, :, :end]


class StoryModel:
    """The causal network, over whole texts or one token of each row at a time."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.embedding_VD, self.norm = weights["embedding"], weights["norm"]
        per_layer = {n: w for n, w in weights.items() if n not in ("embedding", "norm")}
        self.layers = [{n: w[i] for n, w in per_layer.items()} for i in range(LAYERS)]
        self.device = self.embedding_VD.device
        self.cos_TH, self.sin_TH = _cos_sin(self.device)

    @classmethod
    def load(cls, directory: Path, device: torch.device, dtype: torch.dtype) -> "StoryModel":
        path = directory / WEIGHTS
        if not path.is_file():
            raise CheckpointError(f"no {WEIGHTS} in {directory}; give the directory that holds it")
        flat = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.float16)
        sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
        if len(flat) < sum(sizes):
            raise CheckpointError(f"{path} holds {len(flat)} numbers, not {sum(sizes)} or more")
        chunks = np.split(flat[: sum(sizes)], np.cumsum(sizes)[:-1])
        weights = {
            name: torch.tensor(chunk).to(device=device, dtype=dtype).view(shape)
            for (name, shape), chunk in zip(SHAPES.items(), chunks, strict=True)
        }
        return cls(weights)

    def new_cache(self, rows: int, length: int = CONTEXT) -> StoryCache:
        shape = (LAYERS, rows, HEADS, length, WIDTH // HEADS)
        return StoryCache(self.embedding_VD.new_empty(shape), self.embedding_VD.new_empty(shape))

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, cache: StoryCache | None = None, start: int = 0) -> Tensor:
        """Return final states [B, T, D]; with a cache, of one token at position `start`."""
        count = tokens_BT.shape[1]
        assert start == 0 or count == 1, "with a cache, one token at a time"
        cos_sin = (self.cos_TH[start : start + count], self.sin_TH[start : start + count])
        x_BTD = F.embedding(tokens_BT, self.embedding_VD)
        for layer, w in enumerate(self.layers):
            n_BTD = F.rms_norm(x_BTD, (WIDTH,), w["attention_norm"], EPS)
            q, k, v = (_heads(F.linear(n_BTD, w[name])) for name in "qkv")
            q, k = _rotate(q, *cos_sin), _rotate(k, *cos_sin)
            if cache is not None:
                k, v = cache.append(layer, start, k, v)
            out_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=count > 1)
            x_BTD = x_BTD + F.linear(out_BNTH.transpose(1, 2).flatten(2), w["o"])
            n_BTD = F.rms_norm(x_BTD, (WIDTH,), w["mlp_norm"], EPS)
            gated = F.silu(F.linear(n_BTD, w["gate"])) * F.linear(n_BTD, w["up"])
            x_BTD = x_BTD + F.linear(gated, w["down"])
        return F.rms_norm(x_BTD, (WIDTH,), self.norm, EPS)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding_VD).float()


def _cos_sin(device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute RoPE's cosine and sine of each position, for pairs of adjacent dimensions."""
    width = WIDTH // HEADS
    frequency_H = 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angle_TH = torch.arange(CONTEXT, device=device)[:, None] * frequency_H
    return angle_TH.cos(), angle_TH.sin()


def _heads(x_BTD: Tensor) -> Tensor:
    return x_BTD.view(*x_BTD.shape[:2], HEADS, -1).transpose(1, 2)


def _rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    even, odd = x_BNTH[..., ::2], x_BNTH[..., 1::2]
    rotated = torch.stack([even * cos_TH - odd * sin_TH, even * sin_TH + odd * cos_TH], dim=-1)
    return rotated.flatten(-2).to(x_BNTH.dtype)


def likelihood(
    model: StoryModel, tokenizer: StoryTokenizer, texts: Sequence[str], batch: int = 32
) -> list[tuple[float, int]]:
    """Return negative log-likelihood in nats and token count of each text's first 255 tokens.

    The end of the story is not scored: a text that was cut at a length has none.
    """
    ids = [[BOS, *tokenizer.encode(text)][:CONTEXT] for text in texts]
    results: list[tuple[float, int]] = []
    for begin in range(0, len(ids), batch):
        group = ids[begin : begin + batch]
        max_length = max(map(len, group))
        padded = [row + [BOS] * (max_length - len(row)) for row in group]
        tokens_BT = torch.tensor(padded, device=model.device)
        for row_T, states_TD, row in zip(tokens_BT, model.hidden(tokens_BT), group, strict=True):
            count = len(row) - 1
            loss = F.cross_entropy(
                model.logits(states_TD[:count]), row_T[1 : count + 1], reduction="sum"
            )
            results.append((float(loss), count))
    return results
