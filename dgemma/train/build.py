"""From a recipe to a run: the model, its data and what moves it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint as recompute

from dgemma.config import GenerationConfig, load_generation_config, read_config
from dgemma.errors import ConfigError
from dgemma.model import Gemma
from dgemma.text.chat import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.average import Average
from dgemma.train.fresh import fresh_model
from dgemma.train.loop import RunSettings, Trainer
from dgemma.train.mix import Ingredient, Mixture, Source, StoreSource
from dgemma.train.objective import Objective
from dgemma.train.optim import Masters
from dgemma.train.recipe import DataSource, Recipe
from dgemma.train.rows import Corruption
from dgemma.train.speed import compiled
from dgemma.train.store import Store
from dgemma.weights.download import find_checkpoint
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.save import save_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run reads, writes and computes."""

    recipe: Path
    out: Path
    device: torch.device
    dtype: torch.dtype
    seconds: float | None = None
    workers: int | None = None

    def path(self, given: str) -> Path:
        return Path(given) if given.startswith("./") else self.recipe.parent / given


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that is ready to start, and what its model is saved with."""

    trainer: Trainer
    model: Gemma
    generation: GenerationConfig
    tokenizer: Path

    def save(self, directory: Path) -> None:
        """Write the trained model as a checkpoint: the mean of the weights where one is kept."""
        masters, average = self.trainer.masters, self.trainer.average
        kept = masters.weights if average is None else average.weights
        with torch.no_grad():
            for rounded, weight in zip(masters.rounded, kept, strict=True):
                rounded.copy_(weight)
        checkpoint = Checkpoint(model=self.model, generation=self.generation)
        save_checkpoint(checkpoint, directory, tokenizer_from=self.tokenizer, overwrite=True)


def build(recipe: Recipe, place: Place) -> Job:
    model, generation, tokenizer = _model(recipe, place)
    model.to(device=place.device, dtype=place.dtype).requires_grad_(True).train()
    on_gpu = place.device.type == "cuda"
    if recipe.run.checkpointing:
        for layer in model.layers:
            layer.forward = partial(recompute, layer.forward, use_reentrant=False)
    objective = Objective(model, recipe.loss, is_flex=on_gpu)
    if on_gpu:
        compiled(objective)
    masters = Masters(model, recipe.optim)
    run = RunSettings(
        directory=place.out,
        save_every=recipe.run.save_every,
        report_every=recipe.run.report_every,
        keep=recipe.run.keep,
        workers=recipe.run.workers if place.workers is None else place.workers,
        accumulate=recipe.batch.accumulate,
        seconds=place.seconds,
        drift=recipe.run.drift,
    )
    average = Average(masters.weights, recipe.run.average) if recipe.run.average else None
    mixture = build_mixture(recipe, place, model, tokenizer)
    trainer = Trainer(objective, masters, mixture, recipe.schedule, run, average)
    return Job(trainer=trainer, model=model, generation=generation, tokenizer=tokenizer)


def _model(recipe: Recipe, place: Place) -> tuple[Gemma, GenerationConfig, Path]:
    """The model to train, the defaults it is saved with, and the directory of its tokenizer."""
    source = recipe.model
    if source.checkpoint is not None:
        directory = find_checkpoint(source.checkpoint)
        found = load_model(directory, dtype=torch.float32)
        tokenizer = directory if source.tokenizer is None else place.path(source.tokenizer)
        return found.model, found.generation, tokenizer
    assert source.config is not None and source.tokenizer is not None
    path = place.path(source.config)
    config = read_config(json.loads(path.read_text(encoding="utf-8")), str(path))
    tokenizer = place.path(source.tokenizer)
    return fresh_model(config, recipe.seed), load_generation_config(path.parent), tokenizer


def build_mixture(recipe: Recipe, place: Place, model: Gemma, tokenizer: Path) -> Mixture:
    corruption = Corruption(vocab_size=model.config.vocab_size, hole_share=recipe.canvas.hole_share)
    ingredients = [
        Ingredient(
            source=_source(data, place, tokenizer),
            weight=data.weight,
            canvas_lengths=_lengths(data.lengths or recipe.canvas.lengths, model),
            copies=recipe.canvas.copies if data.copies is None else data.copies,
            learn_prompt=data.learn_prompt,
            hole_share=data.hole_share,
        )
        for data in recipe.data
    ]
    return Mixture(
        ingredients=ingredients,
        corruption=corruption,
        sequences=recipe.batch.sequences,
        rows=recipe.batch.rows,
        seed=recipe.seed,
    )


def _lengths(given: Mapping[str, float], model: Gemma) -> dict[int, float]:
    lengths = {int(length): share for length, share in given.items()}
    longest = max(lengths)
    if longest > model.config.canvas_length:
        raise ConfigError(
            f"canvases of {longest} tokens are trained, but the model's own are "
            f"{model.config.canvas_length}"
        )
    return lengths


def _source(data: DataSource, place: Place, tokenizer: Path) -> Source:
    if data.file is not None:
        return StoreSource(Store.load(place.path(data.file)))
    assert data.bank is not None
    words = Tokenizer.load(tokenizer)
    template = ChatTemplate.load(tokenizer, words)
    if data.puzzle == "sudoku":
        from dgemma.train.puzzles.sudoku import SudokuBank, SudokuSource

        return SudokuSource(SudokuBank.load(place.path(data.bank)), words, template)
    from dgemma.train.puzzles.colouring import ColouringBank, ColouringSource

    return ColouringSource(ColouringBank.load(place.path(data.bank)), words, template)
