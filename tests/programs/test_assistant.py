"""A Gemma 4 assistant drafts as in transformers, and the reply stays that of greedy AR."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM
from transformers.models.gemma4 import Gemma4TextConfig

from dgemma.backends.reference import commit
from dgemma.config import config_to_json
from dgemma.engine import Engine, SamplingParams
from dgemma.engine.speculation import SpeculativeParams, speculative
from dgemma.errors import CheckpointError, ConfigError
from dgemma.model.assistant import Assistant
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.text.chat import Prompt
from dgemma.weights.source import load_assistant
from tests.engine.test_modes import CONFIG, TURN, prompt, random_engine
from tests.tiny import CPU, shake

NUM_DRAFTED = 4


def sibling_of(engine: Engine) -> Gemma4ForCausalLM:
    """The target in transformers."""
    text = config_to_json(replace(CONFIG, family="gemma4"))["text_config"]
    sibling = Gemma4ForCausalLM(Gemma4TextConfig(**text)).eval()
    weights, theirs = engine.model.state_dict(), sibling.state_dict()
    for name in theirs:
        theirs[name].copy_(weights[name.removeprefix("model.").replace("lm_head", "embed_tokens")])
    return sibling


def drafter(seed: int) -> Gemma4AssistantForCausalLM:
    """A drafter with random weights for CONFIG."""
    text = config_to_json(replace(CONFIG, family="gemma4"))["text_config"]
    moe = ("num_experts", "top_k_experts", "moe_intermediate_size")
    text = {key: value for key, value in text.items() if key not in moe}
    text |= {"hidden_size": 16, "intermediate_size": 20, "enable_moe_block": False}
    text |= {"num_kv_shared_layers": CONFIG.num_hidden_layers, "vocab_size_per_layer_input": 0}
    text["use_bidirectional_attention"] = None
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text), backbone_hidden_size=CONFIG.hidden_size
    )
    theirs = Gemma4AssistantForCausalLM(config).eval()
    shake(theirs, seed)
    return theirs


@pytest.fixture(scope="module")
def engine() -> Engine:
    return random_engine(3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("assistant")
    drafter(5).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def assistant(engine: Engine, saved: Path) -> Assistant:
    return load_assistant(saved, engine.model)


@pytest.mark.parametrize("length", [3, 11, 30])
def test_drafts_and_states_are_those_of_transformers(
    engine: Engine, assistant: Assistant, length: int
) -> None:
    """Within the window of a sliding layer and beyond it."""
    request, theirs = prompt(length, seed=length), drafter(5)
    cache = KVCache(CONFIG, Capacity(tokens=length + 8), torch.float32, CPU)
    hidden_1D = commit(engine.model, cache, torch.tensor(request.ids), chunk=64)
    keys = assistant.keys(cache)
    shared = {
        kind: tuple(
            torch.cat([getattr(piece, name) for piece in cache.read(layer, 0, length)]).transpose(
                0, 1
            )[None]
            for name in ("k_SMH", "v_SMH")
        )
        for kind, layer in assistant.shared.items()
    }
    token, state = 7, hidden_1D
    with torch.inference_mode():
        for _ in range(NUM_DRAFTED):
            embeds = torch.cat([engine.model.embed(torch.tensor([token])), state], dim=-1)
            ours = assistant(embeds, length, keys)
            output = theirs(
                inputs_embeds=embeds[None],
                position_ids=torch.tensor([[length]]),
                shared_kv_states=shared,
            )
            torch.testing.assert_close(ours[0], output.logits[0], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(ours[1], output.last_hidden_state[0], atol=2e-4, rtol=1e-4)
            token, state = int(ours[0].argmax()), ours[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_drafted_reply_is_that_of_assisted_generation_and_of_greedy_ar(
    engine: Engine, assistant: Assistant, seed: int
) -> None:
    request = prompt(length=5 + 7 * seed, seed=seed)
    params = SamplingParams(mode="ar", max_tokens=20)
    plain = engine.generate(request, params)
    speculation = SpeculativeParams(drafter="assistant", assistant=assistant)
    done = speculative(engine, request, params, speculation)
    assert done.ids == plain.ids and done.finish == plain.finish
    theirs = drafter(5)
    theirs.generation_config.num_assistant_tokens = NUM_DRAFTED
    with torch.no_grad():
        output = sibling_of(engine).generate(
            torch.tensor([request.ids]),
            assistant_model=theirs,
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=TURN,
        )
    assert [t for t in output[0, len(request.ids) :].tolist() if t != TURN] == list(done.ids)


def test_drafts_that_are_right_save_passes(engine: Engine, assistant: Assistant) -> None:
    """A drafter that knows the reply: its tokens are accepted, several in a pass."""
    request = prompt(9, seed=1)
    params = SamplingParams(mode="ar", max_tokens=20)
    plain = engine.generate(request, params)
    known = Knowing(assistant, (*request.ids, *plain.ids))
    speculation = SpeculativeParams(
        drafter="assistant", assistant=known, num_speculative_tokens=NUM_DRAFTED
    )
    done = speculative(engine, request, params, speculation)
    assert done.ids == plain.ids
    assert done.steps == -(-20 // (NUM_DRAFTED + 1)) + 1 < plain.steps
    assert done.tokens_per_step > 3.9


class Knowing(Assistant):
    """Drafts from a list, by the position of the token that is given."""

    def __init__(self, other: Assistant, ids: tuple[int, ...]) -> None:
        super().__init__(other.config, other.target)
        self.ids = ids

    def draft(self, model: Any, cache: KVCache, *given: Any) -> tuple[int, ...]:
        token, hidden_1B, count = given
        assert hidden_1B.shape == (1, CONFIG.hidden_size)
        assert self.ids[cache.length] == token
        return self.ids[cache.length + 1 :][:count]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gemma4"}, "model_type is 'gemma4'"),
        ({"use_ordered_embeddings": True}, "use_ordered_embeddings is true"),
        ({"backbone_hidden_size": 8}, "backbone_hidden_size is 8, the model's 32"),
        ({"text_config": {}}, "vocab_size is missing"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    engine: Engine, saved: Path, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    raw = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(ConfigError, match=complaint):
        load_assistant(tmp_path, engine.model)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="should hold model"):
        load_assistant(tmp_path, engine.model)


def test_the_prompt_of_a_plain_text_is_drafted_too(engine: Engine, assistant: Assistant) -> None:
    request = Prompt(text="", ids=prompt(4, seed=2).ids)
    speculation = SpeculativeParams(
        drafter="assistant", assistant=assistant, num_speculative_tokens=2
    )
    done = speculative(engine, request, SamplingParams(mode="ar", max_tokens=1), speculation)
    assert done.tokens == 1 and done.prefill_seconds > 0
