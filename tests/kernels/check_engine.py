"""Whole requests on the CUDA backend under the interpreter: the reference's answers, in a batch."""

from dataclasses import replace

import pytest

from dgemma.backends.cuda.backend import CudaBackend
from dgemma.backends.reference import ReferenceBackend
from dgemma.config import GenerationConfig
from dgemma.diffusion.canvas import Pins
from dgemma.engine import Done, Engine, SamplingParams
from dgemma.text.chat import ChatTemplate
from dgemma.weights.load import random_model
from tests.constrain.random_engine import EOS, RESPONSE, TOKENIZER, TURN, random_prompt
from tests.kernels.small import SMALL
from tests.text.small import TEMPLATE

pytestmark = pytest.mark.usefixtures("small_configs")
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}


def make_engine(*, fused: bool) -> Engine:
    config = replace(SMALL, vocab_size=TOKENIZER.vocab_size, canvas_length=8, sliding_window=12)
    model = random_model(config, seed=1).requires_grad_(False)
    model.embed_tokens.weight.mul_(6.0)
    generation = GenerationConfig(
        stop_ids=(EOS, TURN, RESPONSE), max_new_tokens=10, max_denoising_steps=2
    )
    engine = Engine(model, TOKENIZER, ChatTemplate(TEMPLATE, TOKENIZER), generation)
    engine.backend = CudaBackend(model) if fused else ReferenceBackend(model)
    return engine


def requests(engine: Engine) -> list[SamplingParams]:
    constraint = engine.constraint(schema=SCHEMA)
    return [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.5, drafts=True),
        SamplingParams(seed=3, pins=Pins((0, 3), (300, 301)), canvas_length=6),
        SamplingParams(seed=4, constraint=constraint, max_tokens=12),
        SamplingParams(seed=5, mode="ar", max_tokens=3),
        SamplingParams(seed=6, mode="ar", temperature=0.9, max_tokens=3),
        SamplingParams(seed=7, mode="ar", constraint=constraint, max_tokens=12),
        SamplingParams(seed=8, initial_canvas=(300, -1, 302)),
    ]


def test_a_mixed_batch_gives_the_answers_of_the_reference_alone() -> None:
    plain, fused = make_engine(fused=False), make_engine(fused=True)
    options = requests(plain)
    prompts = [random_prompt(seed) for seed in range(len(options))]
    want = [plain.generate(p, o) for p, o in zip(prompts, options, strict=True)]
    got: list[Done] = fused.generate_all(prompts, requests(fused))
    for a, b in zip(got, want, strict=True):
        assert (a.ids, a.finish, a.steps) == (b.ids, b.finish, b.steps)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
    texts = ["a", "bc", "the end of a longer text"]
    scored = [engine.score(prompts[0], texts) for engine in (fused, plain)]
    for a, b in zip(*scored, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)
