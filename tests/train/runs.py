"""Small runs to test with: packed batches of random text, and a recipe with all its files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgemma.config import ModelConfig, config_to_json, generation_config_to_json
from dgemma.model.gemma import Gemma
from dgemma.train.batches import Mixture, MixtureComponent
from dgemma.train.build import initialize
from dgemma.train.corruption import Corruption, RowArray
from dgemma.train.loop import RunOptions, Trainer
from dgemma.train.objective import LossCounts, Losses, LossSettings, Objective
from dgemma.train.optim import MixedPrecisionOptimizer, OptimSettings, Schedule
from dgemma.train.packing import Batch, Example, RowCounts
from dgemma.train.recipe import RunSettings
from dgemma.train.sources import Source
from dgemma.weights.load import Checkpoint, random_model
from dgemma.weights.save import save_checkpoint
from tests.taught import ANSWERS, GENERATION, taught_config
from tests.text.small import TEMPLATE, make_backend
from tests.tiny import TINY


@dataclass(frozen=True)
class RandomTexts:
    """Pairs of random tokens, or texts without a prompt."""

    vocab: int = TINY.vocab_size
    has_prompt: bool = True
    lengths: tuple[int, int] = (2, 20)

    def draw(self, rng: np.random.Generator, count: int) -> list[Example]:
        sizes = rng.integers(*self.lengths, size=(count, 2))
        pairs = [[rng.integers(3, self.vocab, size=n, dtype=np.int32) for n in s] for s in sizes]
        return [Example(p if self.has_prompt else p[:0], r) for p, r in pairs]


def component(source: Source, **changes: Any) -> MixtureComponent:
    """A source whose canvases have 8 tokens, all of them the tiny model's."""
    given = {"weight": 1.0, "canvas_lengths": {8: 1.0}}
    corruption = Corruption(vocab_size=TINY.vocab_size)
    return MixtureComponent(**{"source": source, "corruption": corruption, **given, **changes})


def mixture(**changes: Any) -> Mixture:
    """Two kinds of texts, canvases of two lengths, two copies of each."""
    components = [
        component(RandomTexts(), weight=2.0, canvas_lengths={8: 1.0, 5: 1.0}, copies=2),
        component(RandomTexts(has_prompt=False), canvas_lengths={4: 1.0}),
    ]
    given = {"components": components, "sequences": 4, "rows": 96, "seed": 0}
    return Mixture(**{**given, **changes})


def shaken(config: ModelConfig = TINY, seed: int = 0) -> Gemma:
    """A model that is not as even as a fresh one: every weight has a say."""
    model = initialize(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def counts_of(rows: Tensor, parts: int = 1) -> LossCounts:
    return LossCounts.of(RowCounts.of(rows.numpy()), torch.device("cpu"), parts)


def losses_of(
    objective: Objective, rows: RowArray | Tensor, parts: int = 1, depth: int = 1
) -> Losses:
    """Losses of a whole batch, and their gradients in the model."""
    rows = torch.as_tensor(rows)
    counts = counts_of(rows, parts)
    found = []
    for part in rows.chunk(parts, dim=1):
        losses = objective(Batch.of(part, "cpu"), counts, depth)
        losses.total.backward()
        found.append(torch.stack([loss.detach() for loss in losses]))
    return Losses(*torch.stack(found).sum(0))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """By every name that a weight has."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def run_options(directory: Path, **changes: Any) -> RunOptions:
    own = {k: changes.pop(k) for k in ("grad_accum_steps", "seconds") if k in changes}
    return RunOptions(directory=directory, settings=RunSettings(**changes), **own)


def trainer(directory: Path, **changes: Any) -> Trainer:
    """A run of a few steps; `changes` are those of its settings, or its optimizer's or schedule."""
    optim = OptimSettings(**{k: changes.pop(k) for k in ("muon_lr", "adam_lr") if k in changes})
    schedule = changes.pop("schedule", Schedule(steps=12, warmup=2))
    model = initialize(TINY, 0)
    optimizer = MixedPrecisionOptimizer(model, optim)
    run = run_options(directory, **{"report_every": 1, "save_every": 6, **changes})
    return Trainer(Objective(model, LossSettings()), optimizer, mixture(), schedule, run)


def save_shape(directory: Path) -> Path:
    """The shape of a model that knows nothing, with a tokenizer and a template."""
    directory.mkdir(parents=True, exist_ok=True)
    shape, defaults = config_to_json(taught_config()), generation_config_to_json(GENERATION)
    (directory / "config.json").write_text(json.dumps(shape))
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    make_backend().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


def save_random(directory: Path) -> Path:
    """A whole checkpoint that knows nothing."""
    shape = save_shape(directory.with_name("shape"))
    made = Checkpoint(model=random_model(taught_config(), seed=1), generation=GENERATION)
    save_checkpoint(made, directory, tokenizer_from=shape)
    return directory


def chats() -> Iterator[dict[str, str]]:
    for question, answer in ANSWERS.items():
        yield {"prompt": question, "reply": answer}


RECIPE = """\
name = "small"
[model]
config = "shape/config.json"
tokenizer = "shape"
[batch]
sequences = 4
rows = 164
[canvas]
lengths = { 16 = 1.0 }
copies = 2
hole_fraction = 0.0
[schedule]
steps = 8
warmup = 2
[run]
save_every = 4
report_every = 1
[[data]]
file = "chats.jsonl"
"""


def save_recipe(directory: Path, text: str = RECIPE) -> Path:
    """A recipe and the files it names."""
    save_shape(directory / "shape")
    lines = "".join(json.dumps(chat) + "\n" for chat in chats())
    (directory / "chats.jsonl").write_text(lines, encoding="utf-8")
    path = directory / "small.toml"
    path.write_text(text, encoding="utf-8")
    return path
