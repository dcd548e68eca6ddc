"""PEFT itself, with a saved adapter on transformers' model, computes what we compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from dgemma.model.gemma import Gemma
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.lora import Adapter, attach, new_adapter
from dgemma.weights.lora_files import load_adapter, save_adapter
from dgemma.weights.save import export
from tests.interop.sample import Case, cases, our_passes

pytest.importorskip("peft", reason="peft is not a dependency of the tests; see make interop")
pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = ["q_proj", "o_proj", "mlp.gate_proj", "mlp.down_proj", "self_conditioning.up_proj"]
TOLERANCE = 5e-4  # of logits that reach 30


def some_adapter(model: Gemma) -> Adapter:
    """One that changes much."""
    adapter = new_adapter(model, TARGETS, rank=4, alpha=8, seed=0)
    generator = torch.Generator().manual_seed(1)
    for pair in adapter.pairs.values():
        pair.b_OR.copy_(0.05 * torch.randn(pair.b_OR.shape, generator=generator))
    return adapter


@torch.inference_mode()
def their_passes(model: Any, case: Case) -> dict[str, Tensor]:
    past = DynamicCache(config=model.config.get_text_config())
    hidden = model.model.encoder(input_ids=case.prompt_T[None], past_key_values=past)
    cap = model.final_logit_softcapping
    prefill = cap * torch.tanh(model.lm_head(hidden.last_hidden_state) / cap)
    first = model(decoder_input_ids=case.canvas_L[None], past_key_values=past).logits
    later = model(
        decoder_input_ids=case.canvas_L[None], past_key_values=past, self_conditioning_logits=first
    ).logits
    return {"prefill": prefill[0], "first step": first[0], "later step": later[0]}


def test_peft_computes_what_we_do(exported: Path, model: Gemma, tmp_path: Path) -> None:
    from peft import PeftModel

    save_adapter(some_adapter(model), tmp_path / "adapter")
    export(NANO_DIRECTORY, tmp_path / "merged", adapter=tmp_path / "adapter")
    case = next(cases())
    plain = our_passes(model, case)
    mine = our_passes(attach(model, load_adapter(tmp_path / "adapter")), case)
    base = DiffusionGemmaForBlockDiffusion.from_pretrained(exported).eval()
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").base_model.model
    merged = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "merged").eval()
    for others in (their_passes(adapted, case), their_passes(merged, case)):
        for name, logits in others.items():
            assert (mine[name] - plain[name]).abs().max() > 0.3  # far beyond the tolerance
            assert (mine[name] - logits).abs().max() < TOLERANCE, name
