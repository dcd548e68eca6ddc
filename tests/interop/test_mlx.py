"""mlx-vlm on its Linux CPU build gives our logits on the exported model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dgemma.model.gemma import Gemma
from dgemma.weights.hub import NANO_DIRECTORY
from tests.interop.sample import Case, cases, our_passes

pytest.importorskip("mlx.core", reason="mlx is not a dependency of the tests; see make interop")
pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 5e-4  # of logits that reach 30


@pytest.fixture(scope="module")
def theirs(exported: Path) -> Any:
    from mlx_vlm.utils import load_model

    return load_model(exported)


def their_passes(model: Any, case: Case) -> dict[str, Tensor]:
    import mlx.core as mx

    prompt, canvas = (mx.array(ids.numpy()[None]) for ids in (case.prompt_T, case.canvas_L))
    cache = model.make_cache()

    def encode(ids: Any) -> Any:
        hidden, _ = model.model.encoder(ids, cache=cache)
        return model._softcap(model.model.decoder.embed_tokens.as_linear(hidden))

    def denoise(soft: Any = None) -> Any:
        return model.diffusion_decoder_logits(canvas, cache=cache, self_conditioning=soft)

    prefill, first = encode(prompt), denoise()
    table = model.diffusion_prepare_self_conditioning()
    logits = {
        "prefill": prefill,
        "first step": first,
        "later step": denoise(model.diffusion_self_conditioning(first, table)),
        "commit": encode(canvas),
        "next block": denoise(),
    }
    return {name: torch.from_numpy(np.array(value)[0]) for name, value in logits.items()}


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_logits_agree(case: Case, theirs: Any, model: Gemma) -> None:
    mine, others = our_passes(model, case), their_passes(theirs, case)
    worst = {name: (mine[name] - others[name]).abs().max().item() for name in mine}
    print(case.name, {name: f"{value:.1e}" for name, value in worst.items()})
    assert max(worst.values()) < TOLERANCE, worst


def test_the_eight_bits_are_not_taken_for_weights() -> None:
    from mlx_vlm.utils import load_model

    with pytest.raises(ValueError, match=r"row_scale"):
        load_model(NANO_DIRECTORY)
