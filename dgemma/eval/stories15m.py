"""stories15M: a small causal model of simple stories, as a judge of stories and a source of them.

Reads the llama2.c layout in float16 without its header, and llama2.c's tokenizer file. All rows of
a batch stand at the same position, so the cache is one tensor and no mask is needed:

    python -m dgemma.eval.stories15m --weights DIR --count N --seed S --out FILE.jsonl.xz

writes one {"text", "whole"} a line; `whole` says that the story came to its own end.

B rows, T tokens of a row, L layers, D width, N heads, H head width, V vocabulary.
"""

import argparse
import json
import lzma
import re
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.device import choose_device, choose_dtype
from dgemma.errors import CheckpointError

VOCAB, WIDTH, INNER, LAYERS, HEADS = 32000, 288, 768, 6, 6
CONTEXT = 256  # tokens the model was trained on; it is not asked for more
BEGIN, FIRST_BYTE = 1, 3  # a story begins with BEGIN and ends before the next one
EPS = 1e-5
WEIGHTS, TOKENIZER = "stories15M_f16.bin.xz", "stories15M_tokenizer.bin"
SENTENCE_END = re.compile(r'[.!?]["\']?(?=\s|$)')
# In the file's order. Behind them lie tables of turns, which are computed here instead.
SHAPES = {
    "table": (VOCAB, WIDTH),
    "attention_norm": (LAYERS, WIDTH),
    "q": (LAYERS, WIDTH, WIDTH),
    "k": (LAYERS, WIDTH, WIDTH),
    "v": (LAYERS, WIDTH, WIDTH),
    "o": (LAYERS, WIDTH, WIDTH),
    "inner_norm": (LAYERS, WIDTH),
    "gate": (LAYERS, INNER, WIDTH),
    "down": (LAYERS, WIDTH, INNER),
    "up": (LAYERS, INNER, WIDTH),
    "norm": (WIDTH,),
}


class StoryTokenizer:
    """SentencePiece BPE: characters, then the best-scored pair is merged until none is left."""

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        self.pieces = list(pieces)
        # The first of two pieces that are spelled alike counts; bytes' own names are not spelled.
        self.ids = {p: i for i, p in reversed(list(enumerate(pieces))) if i >= FIRST_BYTE + 256}
        self.scores = scores
        self._encode_word = lru_cache(maxsize=1 << 16)(self._merge)

    @classmethod
    def load(cls, path: Path) -> "StoryTokenizer":
        data, pieces, scores = path.read_bytes(), [], []
        offset = 4  # behind the longest piece's length
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
        """Ids of a text, without BEGIN. Pieces hold spaces at their front only, so words go alone.

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
            joined = [self.ids.get(self.pieces[a] + self.pieces[b]) for a, b in pairwise(ids)]
            best = max(
                (i for i, token in enumerate(joined) if token is not None),
                key=lambda i: (self.scores[joined[i] or 0], -i),
                default=None,
            )
            if best is None:
                return tuple(ids)
            ids[best : best + 2] = [joined[best] or 0]


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of all layers, for rows that all stand at the same position."""

    k_LBNTH: Tensor
    v_LBNTH: Tensor

    def append(self, layer: int, start: int, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, ...]:
        """Store new keys and values behind the first `start`; returns all up to them."""
        end = start + k_BNTH.shape[2]
        self.k_LBNTH[layer, :, :, start:end] = k_BNTH
        self.v_LBNTH[layer, :, :, start:end] = v_BNTH
        return self.k_LBNTH[layer, :, :, :end], self.v_LBNTH[layer, :, :, :end]


class StoryModel:
    """The causal network, over whole texts or one token a row at a time."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.table_VD, self.norm = weights["table"], weights["norm"]
        per_layer = {n: w for n, w in weights.items() if n not in ("table", "norm")}
        self.layers = [{n: w[i] for n, w in per_layer.items()} for i in range(LAYERS)]
        self.device = self.table_VD.device
        self.cos_TH, self.sin_TH = _turns(self.device)

    @classmethod
    def load(cls, directory: Path, device: torch.device, dtype: torch.dtype) -> "StoryModel":
        path = directory / WEIGHTS
        if not path.is_file():
            raise CheckpointError(f"no {WEIGHTS} in {directory}; give the directory that holds it")
        flat = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.float16)
        sizes = [int(np.prod(shape)) for shape in SHAPES.values()]
        if len(flat) < sum(sizes):
            raise CheckpointError(f"{path} holds {len(flat)} numbers, not {sum(sizes)} or more")
        parts = np.split(flat[: sum(sizes)], np.cumsum(sizes)[:-1])
        weights = {
            name: torch.tensor(part).to(device=device, dtype=dtype).view(shape)
            for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
        }
        return cls(weights)

    def new_cache(self, rows: int, length: int = CONTEXT) -> Cache:
        shape = (LAYERS, rows, HEADS, length, WIDTH // HEADS)
        return Cache(self.table_VD.new_empty(shape), self.table_VD.new_empty(shape))

    @torch.inference_mode()
    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None, start: int = 0) -> Tensor:
        """Final states [B, T, D]; with a cache, of one token behind its first `start`."""
        count = tokens_BT.shape[1]
        assert start == 0 or count == 1, "behind what is cached goes one token at a time"
        turns = (self.cos_TH[start : start + count], self.sin_TH[start : start + count])
        x_BTD = F.embedding(tokens_BT, self.table_VD)
        for layer, w in enumerate(self.layers):
            n_BTD = F.rms_norm(x_BTD, (WIDTH,), w["attention_norm"], EPS)
            q, k, v = (_heads(F.linear(n_BTD, w[name])) for name in "qkv")
            q, k = _rotate(q, *turns), _rotate(k, *turns)
            if cache is not None:
                k, v = cache.append(layer, start, k, v)
            out_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=count > 1)
            x_BTD = x_BTD + F.linear(out_BNTH.transpose(1, 2).flatten(2), w["o"])
            n_BTD = F.rms_norm(x_BTD, (WIDTH,), w["inner_norm"], EPS)
            inner = F.silu(F.linear(n_BTD, w["gate"])) * F.linear(n_BTD, w["up"])
            x_BTD = x_BTD + F.linear(inner, w["down"])
        return F.rms_norm(x_BTD, (WIDTH,), self.norm, EPS)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.table_VD).float()


def _turns(device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position for each pair of neighbours in a head."""
    width = WIDTH // HEADS
    rate_H = 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angle_TH = torch.arange(CONTEXT, device=device)[:, None] * rate_H
    return angle_TH.cos(), angle_TH.sin()


def _heads(x_BTD: Tensor) -> Tensor:
    return x_BTD.view(*x_BTD.shape[:2], HEADS, -1).transpose(1, 2)


def _rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    even, odd = x_BNTH[..., ::2], x_BNTH[..., 1::2]
    turned = torch.stack([even * cos_TH - odd * sin_TH, even * sin_TH + odd * cos_TH], dim=-1)
    return turned.flatten(-2).to(x_BNTH.dtype)


def likelihood(
    model: StoryModel, tokenizer: StoryTokenizer, texts: Sequence[str], batch: int = 32
) -> list[tuple[float, int]]:
    """Negative log-likelihood in nats and token count of each text, its first 255 tokens at most.

    The end of the story is not scored: a text that was cut at a length has none.
    """
    ids = [[BEGIN, *tokenizer.encode(text)][:CONTEXT] for text in texts]
    results: list[tuple[float, int]] = []
    for begin in range(0, len(ids), batch):
        group = ids[begin : begin + batch]
        longest = max(map(len, group))
        padded = [row + [BEGIN] * (longest - len(row)) for row in group]
        tokens_BT = torch.tensor(padded, device=model.device)
        for row_T, states_TD, own in zip(tokens_BT, model.hidden(tokens_BT), group, strict=True):
            count = len(own) - 1
            loss = F.cross_entropy(
                model.logits(states_TD[:count]), row_T[1 : count + 1], reduction="sum"
            )
            results.append((float(loss), count))
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How tokens are drawn."""

    temperature: float = 0.9
    min_p: float = 0.0  # tokens less likely than this share of the likeliest are not drawn
    max_tokens: int = CONTEXT


@torch.inference_mode()
def sample_ids(model: StoryModel, count: int, seed: int, draw: Draw) -> list[list[int]]:
    """Draw stories side by side; each row holds ids up to, and with, BEGIN if it ended."""
    generator = torch.Generator(model.device).manual_seed(seed)
    length = min(draw.max_tokens, CONTEXT)
    cache = model.new_cache(count, length)
    tokens_BT = torch.full((count, length + 1), BEGIN, device=model.device)
    ended_B = torch.zeros(count, dtype=torch.bool, device=model.device)
    for position in range(length):
        hidden_BD = model.hidden(tokens_BT[:, position : position + 1], cache, position)[:, 0]
        next_B = _draw(model.logits(hidden_BD), draw, generator)
        tokens_BT[:, position + 1] = next_B.masked_fill(ended_B, BEGIN)
        ended_B |= next_B == BEGIN
        # Asking waits for the device, so it is asked now and then.
        if position % 16 == 15 and bool(ended_B.all()):
            break
    rows = tokens_BT[:, 1:].tolist()
    return [row[: row.index(BEGIN) + 1] if BEGIN in row else row for row in rows]


def _draw(logits_BV: Tensor, draw: Draw, generator: torch.Generator) -> Tensor:
    """One token a row: the greatest p / e with e exponential is a draw from p."""
    p_BV = logits_BV.div_(draw.temperature).softmax(-1)
    if draw.min_p > 0:
        p_BV.masked_fill_(p_BV < draw.min_p * p_BV.amax(-1, keepdim=True), 0.0)
    noise_BV = logits_BV.exponential_(generator=generator)
    return p_BV.div_(noise_BV).argmax(-1)


@dataclass(frozen=True, slots=True)
class Story:
    text: str
    is_whole: bool  # it came to its own end; else it is cut after its last sentence
    tokens: int


def tell(tokenizer: StoryTokenizer, ids: Sequence[int]) -> Story:
    """A drawn row as a story."""
    is_whole = bool(ids) and ids[-1] == BEGIN
    text = tokenizer.decode(ids[:-1] if is_whole else ids).strip()
    if not is_whole:
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        text = text[: ends[-1]] if ends else ""
    return Story(text, is_whole, len(ids))


def sample(
    model: StoryModel, tokenizer: StoryTokenizer, count: int, seed: int, draw: Draw
) -> list[str]:
    """Stories as texts; those that did not come to an end are cut after their last sentence."""
    return [tell(tokenizer, ids).text for ids in sample_ids(model, count, seed, draw)]


def sample_batches(
    model: StoryModel, tokenizer: StoryTokenizer, count: int, batch: int, seed: int, draw: Draw
) -> Iterator[list[Story]]:
    """Stories in batches, each with a seed of its own: `seed` and the number of the batch."""
    for index, begin in enumerate(range(0, count, batch)):
        own = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
        rows = sample_ids(model, min(batch, count - begin), own, draw)
        yield [tell(tokenizer, ids) for ids in rows]


def write(path: Path, batches: Iterable[list[Story]], count: int) -> None:
    """Write stories as JSON lines, compressed, and say how fast they come."""
    begun, tokens, written = time.perf_counter(), 0, 0
    with lzma.open(path, "wt", preset=1, encoding="utf-8") as file:
        for stories in batches:
            lines = ({"text": story.text, "whole": story.is_whole} for story in stories)
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.write(text)
            tokens, written = tokens + sum(s.tokens for s in stories), written + len(stories)
            rate = tokens / (time.perf_counter() - begun)
            print(f"{written}/{count} stories, {rate:,.0f} tokens/s", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help=f"holds {WEIGHTS}")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="FILE.jsonl.xz")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=CONTEXT)
    given = parser.parse_args(arguments)
    device = choose_device(given.device)
    model = StoryModel.load(given.weights, device, choose_dtype(given.dtype, device))
    tokenizer = StoryTokenizer.load(given.weights / TOKENIZER)
    draw = Draw(temperature=given.temperature, min_p=given.min_p, max_tokens=given.max_tokens)
    batches = sample_batches(model, tokenizer, given.count, given.batch, given.seed, draw)
    write(given.out, batches, given.count)


if __name__ == "__main__":
    main()
