"""How far kernels and transformers in bfloat16 lie from float32 on the same weights, few layers.

Also: whether a canvas moves alike when kernels and the plain path read the very same logits.
"""

from typing import Any

import torch
from gpu_measure import largest, normal
from gpu_ours import DEVICE, HALF
from gpu_peer import peer_of
from shapes import RELEASED, shallow
from torch import Tensor

from dgemma.cache import KVCache, Pass, Room, Span
from dgemma.canvas import NO_PINS, Noise, fresh
from dgemma.denoise import commit
from dgemma.graph.reading import read_by_kernels
from dgemma.graph.steppers import Fast
from dgemma.model import Gemma
from dgemma.ops.fast import switched
from dgemma.ops.row_stats import Query, row_stats
from dgemma.sampler import Sampler, advance
from dgemma.weights.random import random_model

Tokens = tuple[Tensor, Tensor]  # a prompt and a canvas


def ours(model: Gemma, tokens: Tokens, on: bool) -> Tensor:
    """Logits of a canvas behind its prompt."""
    prompt_T, canvas_L = tokens
    room = Room(tokens=len(prompt_T) + len(canvas_L), span=len(prompt_T))
    cache = KVCache(model.config, room, model.embed_tokens.weight.dtype, DEVICE)
    with switched(on):
        commit(model, cache, prompt_T, chunk=len(prompt_T))
        context = Pass([Span(cache, len(canvas_L), commit=False)])
        return model.logits(model.denoise(canvas_L, None, context))


def theirs(model: Gemma, tokens: Tokens) -> Tensor:
    from transformers import DynamicCache

    peer = peer_of(model)
    prompt_1T, canvas_1L = (each[None] for each in tokens)
    cache = DynamicCache(config=peer.config.get_text_config())
    peer.model.encoder(input_ids=prompt_1T, past_key_values=cache)
    out = peer(decoder_input_ids=canvas_1L, past_key_values=cache)
    logits: Tensor = out.logits[0].float()
    return logits


def entropy_of(logits_LV: Tensor) -> Tensor:
    log_p_LV = logits_LV.double().log_softmax(-1)
    return -(log_p_LV.exp() * log_p_LV).sum(-1)


def agreement(layers: int, prompt: int) -> dict[str, Any]:
    """Errors of logits and entropies against float32."""
    model = random_model(shallow(layers), 0, device=DEVICE, dtype=HALF)
    exact = random_model(shallow(layers), 0, device=DEVICE, dtype=torch.float32)
    exact.load_state_dict({name: w.float() for name, w in model.state_dict().items()})
    generator = torch.Generator(DEVICE).manual_seed(5)
    vocab, length = model.config.vocab_size, model.config.canvas_length
    both = torch.randint(vocab, (prompt + length,), device=DEVICE, generator=generator)
    tokens = (both[:prompt], both[prompt:])
    want = ours(exact, tokens, False)
    found = {"plain": ours(model, tokens, False)}
    try:
        found["transformers"] = theirs(model, tokens)
    except Exception as error:  # another version of it may be called in another way
        print(f"# transformers: {type(error).__name__}: {str(error)[:200]}", flush=True)
    Fast.of(model)
    found["kernels"] = ours(model, tokens, True)
    top_L, entropy_L = want.argmax(-1), entropy_of(want)
    return {
        name: {
            "logit_rms": (got - want).square().mean().sqrt().item(),
            "logit_max": largest(got, want),
            "entropy_max": (entropy_of(got) - entropy_L).abs().max().item(),
            "top_1": (got.argmax(-1) == top_L).float().mean().item(),
        }
        for name, got in found.items()
    }


def accepted(steps: int = 16) -> dict[str, Any]:
    """A canvas moved by the plain statistics and by the kernels', of the same logits and noise."""
    length, vocab = RELEASED.canvas_length, RELEASED.vocab_size
    cap, sampler = RELEASED.final_logit_softcapping, Sampler(max_steps=steps)
    noise = Noise(seed=3).block(0, steps, length, vocab, DEVICE)
    canvas, same, kept = fresh(noise.tokens_NL[0], NO_PINS), 0, 0
    for number in range(steps):
        # From flat to sure, as a canvas becomes.
        raw_LV = normal(length, vocab, scale=1.0 + 2.0 * number)
        query = Query(
            heat_T=torch.full((length,), sampler.heat(steps - number), device=DEVICE),
            uniform_T=noise.uniform_NL[number + 1],
            held_T=canvas.tokens_L,
        )
        with switched(True):
            by_kernels = read_by_kernels(raw_LV.clone(), cap, query).stats
        with switched(False):
            plain, _ = row_stats(raw_LV.clone(), cap, query)
        noise_L = noise.tokens_NL[number + 1]
        one, other = (advance(canvas, s, noise_L, sampler.rule) for s in (by_kernels, plain))
        is_same = torch.equal(one.kept_L, other.kept_L) and torch.equal(
            one.tokens_L, other.tokens_L
        )
        same, kept = same + is_same, kept + int(other.kept_L.sum())
        canvas = other
    return {"steps": steps, "alike": same, "accepted": kept}
