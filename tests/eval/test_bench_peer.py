"""`bench/_step_peer.py`: transformers in a process of its own, on tiny shapes and the CPU."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dgemma.backends.reference import commit
from dgemma.model.forward_batch import ForwardBatch, Segment
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.weights.load import random_model

BENCH = Path(__file__).resolve().parents[2] / "bench"
HERE = "--device cpu --shapes tiny --layers 2 --prompt 20".split()


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])


def test_a_peer_answers_in_turn_with_ours() -> None:
    asked: list[float] = []

    def ours() -> float:
        asked.append(2.0)
        return 2.0

    facts = import_module("_step_peer").compare(ours, ["dynamic"], HERE, rounds=2)["dynamic"]
    assert "failed" not in facts, facts["failed"]
    (one, _), (other, _) = facts["rounds"]
    assert 0 < one < 1000 and 0 < other < 1000 and one != other
    assert facts["ratio_min"] == min(one, other) / 2 and facts["ratio_max"] == max(one, other) / 2
    assert (facts["prompt"], facts["experts_hit"]) == (20, 1.0)
    assert facts["warm_s"] > 0 and facts["transformers"]
    assert len(asked) == 3  # once to warm up


def test_a_peer_that_ends_is_reported_with_what_it_said() -> None:
    module = import_module("_step_peer")
    wrong = [*HERE[2:], "--device", "nowhere"]
    facts = module.compare(lambda: pytest.fail("measured"), ["dynamic"], wrong)
    first, *_, last = facts["dynamic"]["failed"].splitlines()
    assert first == "it ended with 1" and "device 'nowhere' is not known" in last


def test_a_peer_that_takes_too_long_is_ended() -> None:
    module = import_module("_step_peer")
    with module.started(HERE) as peer:
        with pytest.raises(module.PeerError, match="no answer in 0 s"):
            peer.answer(0.1)
        assert peer.process.returncode is not None
        with pytest.raises(module.PeerError, match="it ended"):
            peer.ms("dynamic")


@torch.inference_mode()
def test_their_model_on_our_weights_computes_what_ours_does() -> None:
    transformers_model = import_module("_step_peer").transformers_model
    model: Any = random_model(import_module("common").shape("tiny", 2), 0)
    generator = torch.Generator().manual_seed(1)
    prompt_T, canvas_L = torch.randint(512, (36,), generator=generator).split([20, 16])
    cache = KVCache(
        model.config, Capacity(tokens=36, segment=20), torch.float32, torch.device("cpu")
    )
    commit(model, cache, prompt_T, chunk=20)
    want_LV = model.logits(
        model.denoise(canvas_L, None, ForwardBatch([Segment(cache, 16, commit=False)]))
    )
    out = transformers_model(model)(input_ids=prompt_T[None], decoder_input_ids=canvas_L[None])
    torch.testing.assert_close(out.logits[0], want_LV, rtol=1e-4, atol=1e-4)
