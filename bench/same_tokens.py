"""Check that a request gives the same tokens alone, in a batch, and after a cached prefix.

    python -m bench.same_tokens [--requests 2000] [--seed 0]

Requests are drawn at random (prompt, length, seed, sampler, canvas length, mode) for random tiny
models and for ones that were taught a text and converge; in a batch, others join and leave.
Floating-point order differs with the shape
of a batch, so a request may differ if a decision in its single run was closer than 1e-5: such
exceptions are counted and printed, and must be at most 1 in 1,000. The last line is JSON.
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
from dgemma.backends.reference import ReferenceBackend, commit, embed_canvases
from dgemma.config import FULL, SLIDING, GenerationConfig, ModelConfig
from dgemma.diffusion.canvas import Canvas
from dgemma.diffusion.denoise import Row, start
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.engine import Engine, Options
from dgemma.engine.options import Plan
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.gemma import Gemma
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.text.chat import Prompt
from dgemma.weights.random import random_model
from examples.memorize import memorize
from examples.tiny_model import make_text

CLOSE = 1e-5  # a decision nearer than this may fall either way
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Difference:
    """A request whose tokens differed, and how close its closest decision was."""

    where: str
    margin: float


def make_config(vocab: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=24,
        moe_intermediate_size=16,
        num_experts=4,
        top_k_experts=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        layer_types=(SLIDING, FULL),
        sliding_window=16,
        max_position_embeddings=4096,
        canvas_length=12,
        dtype="float32",
    )


def make_models(text_vocab: int) -> list[tuple[Gemma, list[list[int]]]]:
    """Models and prompts they know: two random ones that never settle, two taught ones that do."""
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


def draw_request(rng: random.Random, known: list[list[int]], vocab: int) -> tuple[Prompt, Options]:
    """A prompt of a few families that share beginnings, and random options."""
    family = random.Random(rng.randrange(3))
    stem = [family.randrange(300, vocab) for _ in range(40)][: rng.randint(1, 40)]
    ids = rng.choice(known) if known and rng.random() < 0.6 else stem
    ids = [*ids, *(rng.randrange(300, vocab) for _ in range(rng.choice([0, 0, 3])))]
    common = Options(seed=rng.randrange(1 << 32), max_tokens=rng.randint(1, 24))
    if rng.random() < 0.15:
        options = replace(common, mode="ar", temperature=rng.choice([0.0, 1.0]))
    else:
        rule = EntropyBound(entropy_bound=rng.choice([0.1, 0.3]))
        options = replace(
            common,
            sampler=Sampler(rule=rule, max_denoising_steps=rng.choice([4, 8, 12])),
            canvas_length=rng.choice([4, 8, 12]),
            retries=rng.choice([0, 2]),
        )
    return Prompt(text="", ids=tuple(ids)), options


def run_together(engine: Engine, plans: list[Plan], rng: random.Random) -> list[tuple[int, ...]]:
    """Let requests join at random moments, among others that are cancelled on the way."""
    waiting, jobs, extras = list(plans), [], []
    while waiting or not all(job.is_done for job in jobs):
        while waiting and (rng.random() < 0.5 or not engine.jobs):
            jobs.append(engine.submit(waiting.pop(0)))
        if rng.random() < 0.2:
            extras.append(engine.submit(rng.choice(plans)))
        engine.step()
        if extras and rng.random() < 0.3:
            engine.cancel(extras.pop())
    for extra in extras:
        engine.cancel(extra)
    return [job.events[-1].ids for job in jobs]


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
        plans = [alone.plan(*request) for request in requests]
        single = [alone.generate(*request).ids for request in requests]
        batch = run_together(Engine(model, text, None, generation, prefix_bytes=0), plans, rng)
        after = [cached.generate(*request).ids for request in requests]
        mixed = run_together(cached, plans, rng)
        for name, others in (("batch", batch), ("prefix", after), ("both", mixed)):
            for plan, mine, other in zip(plans, single, others, strict=True):
                if mine != other:
                    differences.append(Difference(name, margin(model, plan)))
    return differences


@torch.inference_mode()
def margin(model: Gemma, plan: Plan) -> float:
    """Distance of the closest decision of a request's single run."""
    cache = KVCache(model.config, Capacity(tokens=plan.room), torch.float32, CPU)
    hidden = commit(model, cache, torch.tensor(plan.prompt.ids), chunk=512)
    if plan.mode == "ar":
        return _ar_margin(model, cache, hidden, plan)
    backend, closest = ReferenceBackend(model), float("inf")
    for block in range(-(-plan.max_tokens // plan.canvas_length)):
        noise = plan.noise.block(
            block,
            plan.sampler.max_denoising_steps,
            plan.canvas_length,
            model.config.vocab_size,
            CPU,
        )
        row = start(plan.sampler, noise, plan.options.pins)
        while not row.is_done:
            (output,) = backend.run([ForwardInput(cache=cache, row=row)])
            assert output.row is not None
            batch = ForwardBatch([Segment(cache, plan.canvas_length, commit=False)])
            closest = min(closest, _step_margin(model, batch, row, output.row.canvas))
            row = output.row
        commit(model, cache, row.canvas.guess_L, chunk=512)
    return closest


def _step_margin(model: Gemma, batch: ForwardBatch, row: Row, after: Canvas) -> float:
    """Distances of one step: draws from edges, sums from the bound, means from settling."""
    rule = row.sampler.rule
    assert isinstance(rule, EntropyBound)
    left = row.sampler.max_denoising_steps - row.canvas.num_steps
    logits_LV = model.logits(model.stack(embed_canvases(model, [row]), batch)).double()
    p_LV = (logits_LV / row.sampler.temperature_at(left)).softmax(-1)
    uniform_L1 = row.noise.uniform_NL[row.canvas.num_steps + 1][:, None]
    edges_L = (p_LV.cumsum(-1) - uniform_L1).abs().amin(-1)
    entropy_L = torch.special.entr(p_LV).sum(-1)
    ordered_L = entropy_L.sort().values
    accept_L = (ordered_L.cumsum(0) - ordered_L - rule.entropy_bound).abs()
    best_L2 = p_LV.topk(2).values
    distances = [edges_L[after.kept_L], accept_L, best_L2[:, 0] - best_L2[:, 1]]
    settle = (entropy_L.mean() - rule.confidence_threshold).abs()
    return min([float(d.min()) for d in distances if len(d)] + [float(settle)])


def _ar_margin(model: Gemma, cache: KVCache, hidden: Tensor, plan: Plan) -> float:
    from dgemma.engine.job import AR_BLOCK, token_noise

    closest = float("inf")
    for index in range(plan.max_tokens):
        logits_V = model.logits(hidden)[0].double()
        if plan.options.temperature:
            cdf_V = (logits_V / plan.options.temperature).softmax(-1).cumsum(-1)
            noise = token_noise(plan, AR_BLOCK + index // 256, model.config)
            uniform = noise.uniform_NL[0, index % 256]
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
