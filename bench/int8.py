"""What storage in few bits changes in a model's output: logits, divergence, loss against float32.

    python bench/int8.py CHECKPOINT STORIES [--texts 24] [--bits 8,8 4,6]

Bits are those of the experts and of the rest. STORIES is a JSON Lines file with `text`. Each text
is a prompt of up to 256 tokens and a canvas of the next 128, half of whose tokens are noise, seen
with self-conditioning; and there is a Sudoku. Beside it stands bfloat16 arithmetic on the plain
weights, which is what many machines run. The last line is JSON.
"""

import argparse
import json
from collections.abc import Iterator
from copy import deepcopy
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.model import Gemma
from dgemma.text.chat import ChatTemplate, Message
from dgemma.text.sudoku import grid_text, prompt_text
from dgemma.text.tokenizer import Tokenizer
from dgemma.weights.bits import quantize_groups
from dgemma.weights.int8 import EIGHT, Bits, quantize
from dgemma.weights.load import load_model

PROMPT, CANVAS = 256, 128
PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
Case = tuple[Tensor, Tensor]  # prompt and clean canvas


def stories(path: Path, tokenizer: Tokenizer, bos: int, count: int) -> Iterator[Case]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            ids = torch.tensor([bos, *tokenizer.encode(json.loads(line)["text"])])
            if len(ids) >= PROMPT + CANVAS and count > 0:
                count -= 1
                yield ids[:PROMPT], ids[PROMPT : PROMPT + CANVAS]


def sudoku(directory: Path, tokenizer: Tokenizer) -> Case:
    template = ChatTemplate.load(directory, tokenizer)
    prompt = template.prompt([Message(role="user", content=prompt_text(PUZZLE))])
    return torch.tensor(prompt.ids), torch.tensor(tokenizer.encode(grid_text(SOLUTION)))


def stored(model: Gemma, wanted: Bits) -> Gemma:
    """The model that loading its files in so many bits would give."""
    changed = deepcopy(model)
    for name, weight in changed.state_dict().items():
        if weight.dim() > 1:
            bits = wanted.of(name, weight.shape)
            found = quantize(weight) if bits == 8 else quantize_groups(weight, bits)
            weight.copy_(found.whole())
    return changed


def read_bits(text: str) -> Bits:
    experts, rest = map(int, text.split(","))
    return Bits(experts=experts, rest=rest)


@torch.inference_mode()
def passes(model: Gemma, case: Case) -> dict[str, Tensor]:
    """Logits of the prompt and of a half-noised canvas, self-conditioned by its first pass."""
    prompt_T, clean_L = case
    generator = torch.Generator().manual_seed(0)
    is_noise = torch.rand(clean_L.shape, generator=generator) < 0.5
    noise = torch.randint(model.config.vocab_size, clean_L.shape, generator=generator)
    canvas_L = torch.where(is_noise, noise, clean_L)
    dtype = model.embed_tokens.weight.dtype
    cache = KVCache(model.config, Room(tokens=PROMPT), dtype, torch.device("cpu"))
    writing = Pass([Span(cache, len(prompt_T), commit=True)])
    causal = model.logits(model.encode(prompt_T, writing))
    writing.close()
    reading = Pass([Span(cache, len(canvas_L), commit=False)])
    first = model.logits(model.denoise(canvas_L, None, reading))
    soft = model.embed_soft(first.float().softmax(-1))
    later = model.logits(model.denoise(canvas_L, soft, reading))
    return {"causal": causal.float(), "canvas": later.float()}


def compare(plain: Tensor, other: Tensor, target: Tensor) -> dict[str, float]:
    """Per position: difference of logits, divergence in nats, equal guesses, change of loss."""
    p, q = plain.double().log_softmax(-1), other.double().log_softmax(-1)
    gain = (p - q).gather(-1, target[:, None])
    return {
        "logit difference": (plain - other).abs().mean().item(),
        "divergence": (p.exp() * (p - q)).sum(-1).mean().item(),
        "same guess": (plain.argmax(-1) == other.argmax(-1)).double().mean().item(),
        "loss change": gain.mean().item(),
    }


def evaluate(plain: Gemma, other: Gemma, cases: list[Case]) -> dict[str, dict[str, float]]:
    seen: dict[str, list[dict[str, float]]] = {"causal": [], "canvas": []}
    for case in cases:
        a, b = passes(plain, case), passes(other, case)
        seen["causal"].append(compare(a["causal"][:-1], b["causal"][:-1], case[0][1:]))
        seen["canvas"].append(compare(a["canvas"], b["canvas"], case[1]))
    return {
        name: {key: sum(one[key] for one in found) / len(found) for key in found[0]}
        for name, found in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("stories", type=Path)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--bits", nargs="+", type=read_bits, default=[EIGHT], metavar="E,R")
    arguments = parser.parse_args()
    plain = load_model(arguments.checkpoint, dtype=torch.float32).model
    tokenizer = Tokenizer.load(arguments.checkpoint)
    bos = plain.config.bos_token_id
    groups = {
        "stories": list(stories(arguments.stories, tokenizer, bos, arguments.texts)),
        "sudoku": [sudoku(arguments.checkpoint, tokenizer)],
    }
    models = {f"{bits.experts},{bits.rest} bits": stored(plain, bits) for bits in arguments.bits}
    models["bfloat16"] = deepcopy(plain).to(torch.bfloat16)
    results = {
        f"{kind} {group}": evaluate(plain, model, cases)
        for kind, model in models.items()
        for group, cases in groups.items()
    }
    for name, parts in results.items():
        for part, numbers in parts.items():
            shown = ", ".join(f"{key} {value:.2g}" for key, value in numbers.items())
            print(f"{name:16} {part}: {shown}")
    print(json.dumps({"bench": "int8", "date": str(date.today()), "results": results}))


if __name__ == "__main__":
    main()
