"""Check that a request gives the same tokens alone, in a batch, and after a cached prefix.

    python -m bench.same_tokens [--requests 2000] [--seed 0]

Requests are drawn at random (prompt, length, seed, sampler, canvas length, mode) for random tiny
models and for ones that were trained on a text and converge; in a batch, others join and leave.
Floating-point order differs with the shape of a batch, so a request may differ if a decision in its
single run was closer than 1e-5: such exceptions are counted and printed, and must be at most 1 in
1,000. The last line is JSON.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass, replace
from datetime import date

import torch
from torch import Tensor

from dgemma.backends.base import ForwardInput
from dgemma.backends.reference import ReferenceBackend, commit
from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import CanvasState, start
from dgemma.diffusion.reference_step import embed_canvases
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.engine import Engine, SamplingParams
from dgemma.engine.generation import AR_BLOCK, AR_BLOCK_LENGTH, Generation
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.text.chat import Prompt
from dgemma.weights.load import random_model
from examples.memorize import memorize
from examples.tiny_model import make_text, tiny_config

CLOSE = 1e-5  # a decision with a smaller margin may go either way
PromptParams = tuple[Prompt, SamplingParams]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Difference:
    """A request whose tokens differed, and the smallest margin of its decisions."""

    where: str
    margin: float


def make_config(vocab: int) -> ModelConfig:
    return tiny_config(
        vocab,
        hidden_size=32,
        moe_intermediate_size=16,
        head_dim=8,
        global_head_dim=16,
        layer_types=(SLIDING, FULL),
        sliding_window=16,
        canvas_length=12,
    )


def make_models(text_vocab: int) -> list[tuple[Gemma, list[list[int]]]]:
    """Return models with prompts they know: two random, two trained ones, which converge."""
    config = make_config(text_vocab)
    generator = torch.Generator().manual_seed(1)
    models: list[tuple[Gemma, list[list[int]]]] = []
    for seed in (0, 1):
        models.append((random_model(config, seed=seed), []))
        pairs = [
            (
                torch.randint(300, text_vocab, (6 + 9 * seed,), generator=generator),
                torch.randint(300, text_vocab, (24,), generator=generator),
            )
            for _ in range(2)
        ]
        taught = random_model(config, seed=seed)
        for _ in memorize(taught, pairs, steps=250):
            pass
        models.append((taught, [prompt.tolist() for prompt, _ in pairs]))
    return models


def draw_request(rng: random.Random, known: list[list[int]], vocab: int) -> PromptParams:
    """Draw a prompt, from families that share their beginning, and random parameters."""
    family = random.Random(rng.randrange(3))
    stem = [family.randrange(300, vocab) for _ in range(40)][: rng.randint(1, 40)]
    ids = rng.choice(known) if known and rng.random() < 0.6 else stem
    ids = [*ids, *(rng.randrange(300, vocab) for _ in range(rng.choice([0, 0, 3])))]
    common = SamplingParams(seed=rng.randrange(1 << 32), max_tokens=rng.randint(1, 24))
    if rng.random() < 0.15:
        params = replace(common, mode="ar", temperature=rng.choice([0.0, 1.0]))
    else:
        rule = EntropyBound(entropy_bound=rng.choice([0.1, 0.3]))
        params = replace(
            common,
            sampler=Sampler(rule=rule, max_denoising_steps=rng.choice([4, 8, 12])),
            canvas_length=rng.choice([4, 8, 12]),
            retries=rng.choice([0, 2]),
        )
    return Prompt(text="", ids=tuple(ids)), params


def run_together(
    engine: Engine, requests: list[PromptParams], rng: random.Random
) -> list[tuple[int, ...]]:
    """Let requests join at random moments, among others that are cancelled on the way."""
    waiting, submitted, extras = list(requests), [], []
    while waiting or not all(request.is_over for request in submitted):
        while waiting and (rng.random() < 0.5 or not engine.scheduler.requests):
            submitted.append(engine.submit(engine.generation(*waiting.pop(0))))
        if rng.random() < 0.2:
            extras.append(engine.submit(engine.generation(*rng.choice(requests))))
        engine.step()
        if extras and rng.random() < 0.3:
            engine.cancel(extras.pop())
    for extra in extras:
        engine.cancel(extra)
    return [request.result.ids for request in submitted]


def compare(
    model: Gemma, known: list[list[int]], count: int, rng: random.Random
) -> list[Difference]:
    """Answer `count` requests alone, together and after cached prefixes; return differences."""
    text = make_text()
    generation = GenerationConfig(stop_ids=(1,))
    alone = Engine(model, text, None, generation, prefix_bytes=0)
    cached = Engine(model, text, None, generation)
    differences = []
    for begin in range(0, count, 8):
        size = min(8, count - begin)
        requests = [draw_request(rng, known, model.config.vocab_size) for _ in range(size)]
        single = [alone.generate(*request).ids for request in requests]
        batch = run_together(Engine(model, text, None, generation, prefix_bytes=0), requests, rng)
        after = [cached.generate(*request).ids for request in requests]
        mixed = run_together(cached, requests, rng)
        for name, others in (("batch", batch), ("prefix", after), ("both", mixed)):
            for request, mine, other in zip(requests, single, others, strict=True):
                if mine != other:
                    task = alone.generation(*request)
                    differences.append(Difference(name, margin(model, task)))
    return differences


@torch.inference_mode()
def margin(model: Gemma, task: Generation) -> float:
    """Return the smallest margin of a decision in a request's single run."""
    cache = KVCache(model.config, Capacity(tokens=task.limits.max_length), torch.float32, CPU)
    hidden = commit(model, cache, torch.tensor(task.prompt.ids), chunk=512)
    if task.params.mode == "ar":
        return _ar_margin(model, cache, hidden, task)
    length, sampler = task.params.canvas_length, task.params.sampler
    assert length is not None and sampler is not None
    steps, vocab = sampler.max_denoising_steps, model.config.vocab_size
    backend, closest = ReferenceBackend(model), float("inf")
    for block in range(-(-task.limits.max_tokens // length)):
        noise = task.noise.block(block, steps, length, vocab, CPU)
        state = start(sampler, noise, task.params.pins)
        while not state.is_done:
            (output,) = backend.run([ForwardInput(cache=cache, state=state)])
            assert output.state is not None
            batch = ForwardBatch([Segment(cache, length, commit=False)])
            closest = min(closest, _step_margin(model, batch, state, output.state.canvas))
            state = output.state
        commit(model, cache, state.canvas.guess_L, chunk=512)
    return closest


def _step_margin(model: Gemma, batch: ForwardBatch, state: CanvasState, after: Canvas) -> float:
    """Return the smallest margin of one step: draws, entropy sums, argmax, convergence."""
    rule = state.sampler.rule
    assert isinstance(rule, EntropyBound)
    left = state.sampler.max_denoising_steps - state.canvas.num_steps
    logits_LV = model.logits(model.stack(embed_canvases(model, [state]), batch)).double()
    p_LV = (logits_LV / state.sampler.temperature_at(left)).softmax(-1)
    uniform_L1 = state.noise.uniform_NL[state.canvas.num_steps + 1][:, None]
    edges_L = (p_LV.cumsum(-1) - uniform_L1).abs().amin(-1)
    entropy_L = torch.special.entr(p_LV).sum(-1)
    ordered_L = entropy_L.sort().values
    accept_L = (ordered_L.cumsum(0) - ordered_L - rule.entropy_bound).abs()
    best_L2 = p_LV.topk(2).values
    distances = [edges_L[after.accepted_L], accept_L, best_L2[:, 0] - best_L2[:, 1]]
    converge = (entropy_L.mean() - rule.confidence_threshold).abs()
    return min([float(d.min()) for d in distances if len(d)] + [float(converge)])


def _ar_margin(model: Gemma, cache: KVCache, hidden: Tensor, task: Generation) -> float:
    closest = float("inf")
    for index in range(task.limits.max_tokens):
        logits_V = model.logits(hidden)[0].double()
        if task.params.temperature:
            cdf_V = (logits_V / task.params.temperature).softmax(-1).cumsum(-1)
            block, position = divmod(index, AR_BLOCK_LENGTH)
            vocab = model.config.vocab_size
            noise = task.noise.block(AR_BLOCK + block, 0, AR_BLOCK_LENGTH, vocab, CPU)
            uniform = noise.uniform_NL[0, position]
            closest = min(closest, float((cdf_V - uniform).abs().min()))
            token = int((cdf_V <= uniform).sum().clamp(max=len(cdf_V) - 1))
        else:
            best = logits_V.topk(2)
            closest = min(closest, float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
        hidden = commit(model, cache, torch.tensor([token]), chunk=1)
    return closest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(arguments.seed)
    models = make_models(make_text().vocab_size)
    each = -(-arguments.requests // len(models))
    differences: list[Difference] = []
    for number, (model, known) in enumerate(models):
        found = compare(model, known, each, rng)
        differences += found
        kind = "taught" if known else "random"
        print(f"model {number} ({kind}): {each} requests, {len(found)} differed", flush=True)
        for difference in found:
            print(f"  {difference.where}: closest decision {difference.margin:.1e}", flush=True)
    wrong = [d for d in differences if d.margin >= CLOSE]
    total = each * len(models)
    print(f"{total} requests, {len(differences)} exceptions, {len(wrong)} without a close decision")
    facts = {"requests": total, "exceptions": len(differences), "unexcused": len(wrong)}
    print(json.dumps({"bench": "same_tokens", "date": str(date.today()), **facts}))
    if wrong or len(differences) > total / 1000:
        sys.exit(1)


if __name__ == "__main__":
    main()
