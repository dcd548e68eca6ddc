"""Sample simple stories from stories15M, in large batches.

    python -m recipes.nano.stories15m --weights DIR --count N --seed S --out FILE.jsonl.xz

writes one {"text", "whole"} a line; `whole` is true if the story came to its own end. The model is
`dgemma.eval.stories`'s, which evaluation scores stories with.

B rows, T tokens of a row, D width, V vocabulary.
"""

import argparse
import json
import lzma
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dgemma.device import choose_device, choose_dtype
from dgemma.eval.stories import BOS, CONTEXT, TOKENIZER, WEIGHTS, StoryModel, StoryTokenizer

OPENING_TOKENS = 10  # most stories begin with the same words
SENTENCE_END = re.compile(r'[.!?]["\']?(?=\s|$)')


@dataclass(frozen=True, slots=True, kw_only=True)
class StorySampling:
    """Sampling parameters."""

    temperature: float = 0.9
    opening: float | None = None  # temperature of the first OPENING_TOKENS; None: the same
    min_p: float = 0.0  # tokens below this fraction of the likeliest one's probability are excluded
    max_tokens: int = CONTEXT


@dataclass(frozen=True, slots=True)
class Story:
    text: str
    is_whole: bool  # it came to its own end; else it is cut after its last sentence
    num_tokens: int


@torch.inference_mode()
def sample_ids(
    model: StoryModel, count: int, seed: int, sampling: StorySampling
) -> list[list[int]]:
    """Sample a batch of stories; a row that ended by itself ends with BOS."""
    generator = torch.Generator(model.device).manual_seed(seed)
    length = min(sampling.max_tokens, CONTEXT)
    opening = replace(sampling, temperature=sampling.opening or sampling.temperature)
    cache = model.new_cache(count, length)
    tokens_BT = torch.full((count, length + 1), BOS, device=model.device)
    ended_B = torch.zeros(count, dtype=torch.bool, device=model.device)
    for position in range(length):
        hidden_BD = model.hidden(tokens_BT[:, position : position + 1], cache, position)[:, 0]
        is_opening = position < OPENING_TOKENS
        next_B = _sample(model.logits(hidden_BD), opening if is_opening else sampling, generator)
        tokens_BT[:, position + 1] = next_B.masked_fill(ended_B, BOS)
        ended_B |= next_B == BOS
        # Reading the flag synchronizes with the device, so it is read now and then.
        if position % 16 == 15 and bool(ended_B.all()):
            break
    rows = tokens_BT[:, 1:].tolist()
    return [row[: row.index(BOS) + 1] if BOS in row else row for row in rows]


def _sample(logits_BV: Tensor, sampling: StorySampling, generator: torch.Generator) -> Tensor:
    """Sample one token a row: the greatest p / e with e exponential is a sample of p."""
    p_BV = logits_BV.div_(sampling.temperature).softmax(-1)
    if sampling.min_p > 0:
        p_BV.masked_fill_(p_BV < sampling.min_p * p_BV.amax(-1, keepdim=True), 0.0)
    noise_BV = logits_BV.exponential_(generator=generator)
    return p_BV.div_(noise_BV).argmax(-1)


def decode_story(tokenizer: StoryTokenizer, ids: Sequence[int]) -> Story:
    """Decode a sampled row."""
    is_whole = bool(ids) and ids[-1] == BOS
    text = tokenizer.decode(ids[:-1] if is_whole else ids).strip()
    if not is_whole:
        ends = [match.end() for match in SENTENCE_END.finditer(text)]
        text = text[: ends[-1]] if ends else ""
    return Story(text, is_whole, len(ids))


def sample_batches(
    model: StoryModel,
    tokenizer: StoryTokenizer,
    count: int,
    batch: int,
    seed: int,
    sampling: StorySampling,
) -> Iterator[list[Story]]:
    """Sample stories in batches, each seeded by `seed` and the number of the batch."""
    for index, begin in enumerate(range(0, count, batch)):
        batch_seed = int(np.random.SeedSequence([seed, index]).generate_state(1)[0])
        rows = sample_ids(model, min(batch, count - begin), batch_seed, sampling)
        yield [decode_story(tokenizer, ids) for ids in rows]


def write(path: Path, batches: Iterable[list[Story]], count: int) -> None:
    """Write stories as compressed JSON lines, with the rate on stderr."""
    begun, tokens, written = time.perf_counter(), 0, 0
    with lzma.open(path, "wt", preset=1, encoding="utf-8") as file:
        for stories in batches:
            lines = ({"text": story.text, "whole": story.is_whole} for story in stories)
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            tokens += sum(story.num_tokens for story in stories)
            written += len(stories)
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
    parser.add_argument("--opening", type=float, help="temperature of a story's first tokens")
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=CONTEXT)
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    model = StoryModel.load(options.weights, device, choose_dtype(options.dtype, device))
    tokenizer = StoryTokenizer.load(options.weights / TOKENIZER)
    sampling = StorySampling(
        temperature=options.temperature,
        opening=options.opening,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
    )
    batches = sample_batches(model, tokenizer, options.count, options.batch, options.seed, sampling)
    write(options.out, batches, options.count)


if __name__ == "__main__":
    main()
