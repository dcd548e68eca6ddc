"""Presets of the sampler: from a checkpoint's file to the canvases of a request."""

from dataclasses import replace
from typing import Any

import pytest

from dgemma.config import (
    PRESETS,
    GenerationConfig,
    LongReply,
    generation_config_to_json,
    read_generation_config,
)
from dgemma.diffusion.rules import Confidence, SpacedEntropyBound
from dgemma.diffusion.sampler import EntropyBound, Sampler
from dgemma.engine import Engine, SamplingParams
from dgemma.errors import ConfigError, UsageError
from dgemma.text.chat import ChatTemplate
from dgemma.weights.load import random_model
from tests.taught import CANVAS, GENERATION, taught_config
from tests.text.small import TEMPLATE, small_tokenizer

LONG = {
    "canvas_length": 8,
    "entropy_bound": 4.0,
    "t_max": 0.9,
    "t_min": 0.3,
    "max_denoising_steps": 5,
    "reach": 3,
    "num_speculative_tokens": 0,
}
PRESET: dict[str, Any] = {"max_denoising_steps": 7, "entropy_bound": 0.25, "long_reply": LONG}
RAW: dict[str, Any] = {**generation_config_to_json(GENERATION), "presets": {"fast": PRESET}}


@pytest.fixture
def engine() -> Engine:
    """An untaught model with a preset of its own."""
    tokenizer, generation = small_tokenizer(), read_generation_config(RAW)
    model = random_model(taught_config(), seed=3)
    return Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), generation)


def twin(engine: Engine, **settings: Any) -> Engine:
    """Make an engine of the same model with settings of its own."""
    parts = (engine.model, engine.tokenizer, engine.template, engine.generation_config)
    return Engine(*parts, **settings)


def usual(engine: Engine, params: SamplingParams) -> Sampler:
    return engine.generation("x", params).policy.usual.sampler


def test_presets_of_a_file_are_read_and_written_again() -> None:
    config = read_generation_config(RAW)
    assert generation_config_to_json(config) == RAW
    fast = config.with_preset("fast")
    assert (fast.max_denoising_steps, fast.entropy_bound) == (7, 0.25)
    assert fast.long_reply == LongReply(**LONG) and fast.t_max == config.t_max


def test_a_checkpoint_without_presets_has_multiples_of_its_own_values() -> None:
    config = GenerationConfig(max_denoising_steps=48, entropy_bound=0.1)
    found = [config.with_preset(name) for name in PRESETS]
    assert [c.max_denoising_steps for c in found] == [48, 24, 12]
    assert [c.entropy_bound for c in found] == pytest.approx([0.1, 0.2, 0.4])
    assert found[0] == config


@pytest.mark.parametrize(
    ("presets", "complaint"),
    [
        ({"best": PRESET}, "does not know best"),
        ({"fast": {}}, "preset fast is empty"),
        ({"fast": {"heat": 1}}, "does not know heat"),
        ({"fast": {"max_denoising_steps": 0}}, "max_denoising_steps is 0"),
        ({"fast": {"long_reply": {**LONG, "reach": -1}}}, "reach is -1"),
        ([1], "presets must be an object"),
    ],
)
def test_a_preset_that_is_none_is_refused(presets: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_generation_config({**RAW, "presets": presets})


def test_a_request_gets_the_values_of_its_preset(engine: Engine) -> None:
    policy = engine.generation("x", SamplingParams(preset="fast")).policy
    assert policy.usual.sampler.max_denoising_steps == 7
    assert policy.usual.sampler.rule == replace(_bound(engine), entropy_bound=0.25)
    assert policy.long is not None and policy.long.length == 8 < CANVAS
    assert isinstance(policy.long.sampler.rule, SpacedEntropyBound)
    assert usual(engine, SamplingParams()) == engine.sampler
    assert engine.generation("x", SamplingParams()).policy.long is None
    own = Sampler(max_denoising_steps=2)
    assert usual(engine, SamplingParams(preset="fast", sampler=own)) == own


def test_an_engine_of_a_preset_keeps_its_rule(engine: Engine) -> None:
    fast = twin(engine, preset="fast")
    assert fast.sampler.max_denoising_steps == 7
    assert fast.generation("x", SamplingParams()).policy.long is not None
    ruled = twin(engine, preset="fast", rule=Confidence())
    assert usual(ruled, SamplingParams(preset="balanced")).rule == Confidence()


def test_the_preset_of_a_request_is_not_of_what_the_engine_has(engine: Engine) -> None:
    quality = usual(engine, SamplingParams(preset="quality"))
    other = twin(engine, preset="balanced")
    assert usual(other, SamplingParams(preset="quality")) == quality, "not of what was set"
    both = twin(engine, preset="balanced", rule=Confidence())
    assert both.sampler == replace(other.sampler, rule=Confidence()) != quality
    assert both.sampler.rule == Confidence()


def test_a_preset_that_is_not_defined_changes_long_replies_too() -> None:
    long = LongReply(**LONG)
    model = random_model(replace(taught_config(), long_reply=long), seed=3)
    tokenizer = small_tokenizer()
    engine = Engine(model, tokenizer, ChatTemplate(TEMPLATE, tokenizer), GENERATION)

    def sampler(params: SamplingParams) -> Sampler:
        policy = engine.generation("x", params).policy
        assert policy.long is not None and policy.long.length == 8
        return policy.long.sampler

    assert sampler(SamplingParams(preset="quality")) == sampler(SamplingParams())
    halved = sampler(SamplingParams(preset="balanced"))
    assert halved.max_denoising_steps == long.max_denoising_steps // 2
    assert halved.rule == SpacedEntropyBound(entropy_bound=8.0, reach=3)
    engine = twin(engine, preset="balanced")
    assert sampler(SamplingParams()) == halved


def test_an_unknown_preset_and_one_without_a_canvas_are_refused(engine: Engine) -> None:
    wrong: Any = "best"
    for call in (
        lambda p: twin(engine, preset=p),
        lambda p: Engine.load("nano", preset=p),
        engine.sampler_of,
        lambda p: SamplingParams(preset=p),
    ):
        with pytest.raises(UsageError, match="preset 'best' is not known; use quality, balanced"):
            made: Any = call(wrong)
            engine.generation("x", made)
    with pytest.raises(UsageError, match="cannot honour a preset"):
        engine.generation("x", SamplingParams(mode="ar", preset="fast"))


def _bound(engine: Engine) -> EntropyBound:
    rule = engine.sampler.rule
    assert isinstance(rule, EntropyBound)
    return rule
