"""From a recipe to a run: the model, its data and what moves it."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import GenerationConfig, load_config_file, load_generation_config
from dgemma.errors import ConfigError
from dgemma.model.gemma import Gemma
from dgemma.text.chat import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.average import Average
from dgemma.train.carry import Beside
from dgemma.train.distributed import ALONE, Group, shard
from dgemma.train.fill_source import FillSource
from dgemma.train.fresh import fresh_model
from dgemma.train.lines import LineTokens
from dgemma.train.loop import RunSettings, Trainer
from dgemma.train.lora import add_adapter, trained
from dgemma.train.mix import Ingredient, Mixture, Source, StoreSource, room_notes
from dgemma.train.objective import Objective
from dgemma.train.optim import Masters, OptimSettings
from dgemma.train.recipe import DataSource, ModelSource, Recipe, load_recipe
from dgemma.train.rows import Corruption, Layout
from dgemma.train.shards import gathered
from dgemma.train.speed import compiled, compiled_by_kind, compiled_layers, recomputed
from dgemma.train.tokens import Progress, Shelf, load_tokens
from dgemma.weights.adapter import Adapter, save_adapter
from dgemma.weights.download import NANO, find_checkpoint
from dgemma.weights.load import Checkpoint, fill, load_model
from dgemma.weights.names import skeleton
from dgemma.weights.save import save_checkpoint

PIECE = 1024  # rows that are scored at once where memory is short


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run reads, writes and computes."""

    recipe: Path
    out: Path
    device: torch.device
    dtype: torch.dtype
    group: Group = ALONE
    seconds: float | None = None
    workers: int | None = None
    progress: Progress | None = None  # of tokenizing

    def path(self, given: str) -> Path:
        return beside(self.recipe, given)

    def checkpoint(self, given: str) -> Path:
        return find_beside(self.recipe, given)


def beside(recipe: Path, given: str) -> Path:
    """A path of a recipe: relative to it, or to where the command runs if it begins with `./`."""
    return Path(given) if given.startswith("./") else recipe.parent / given


def find_beside(recipe: Path, given: str) -> Path:
    """The directory of a checkpoint, or of a model that this machine has by that name."""
    path = beside(recipe, given)
    return path if given != NANO and path.is_dir() else find_checkpoint(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model a run begins with, and what it is saved with."""

    model: Gemma
    generation: GenerationConfig
    tokenizer: Path  # a directory
    vision: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run that is ready to start."""

    recipe: Recipe
    place: Place
    base: Base
    trainer: Trainer
    adapter: Adapter | None
    notes: tuple[str, ...]  # what a person should know of the data

    def save(self) -> Path:
        """Write what was trained, an adapter or a checkpoint, and return where.

        It is the running mean of the weights where one is kept. All processes take part.
        """
        masters, average = self.trainer.masters, self.trainer.average
        kept = masters.weights if average is None else average.weights
        writes = self.place.group.is_first
        weights = gathered(list(kept), keep=writes)
        if self.adapter is not None:
            directory = self.place.out / "adapter"
            if writes:
                adapter = trained(self.adapter, masters.names, weights)
                save_adapter(adapter, directory, overwrite=True)
            return directory
        directory = self.place.out / "checkpoint"
        still = gathered(dict(self.base.model.state_dict()), keep=writes)
        if writes:
            self._save_checkpoint({**still, **dict(zip(masters.names, weights, strict=True))})
        return directory

    def _save_checkpoint(self, weights: dict[str, Tensor]) -> None:
        dtype = self.place.dtype
        config = replace(self.base.model.config, dtype=str(dtype).removeprefix("torch."))
        model = fill(skeleton(config), {name: w.to(dtype) for name, w in weights.items()})
        save_checkpoint(
            Checkpoint(model=model, generation=self.base.generation, vision=self.base.vision),
            self.place.out / "checkpoint",
            tokenizer_from=self.base.tokenizer,
            overwrite=True,
        )


def build(recipe: Recipe, place: Place) -> Job:
    base, adapter = load_base(recipe, place), None
    model, on_gpu = base.model, place.device.type == "cuda"
    if recipe.lora is not None:
        adapter = add_adapter(model, recipe.lora, recipe.seed, str(recipe.model.checkpoint))
    else:
        _release(model, recipe.model)
    if recipe.run.checkpointing:
        recomputed(model)
    objective = Objective(
        model.train(),
        recipe.loss,
        is_flex=on_gpu,
        group=place.group,
        piece=PIECE if recipe.run.checkpointing else None,
    )
    # An adapter's matrices are no maps between streams, and too thin to be orthogonalised.
    optim = recipe.optim if recipe.lora is None else replace(recipe.optim, muon=False)
    masters = _masters(objective, optim, place)
    if on_gpu and place.group.size == 1:
        # What recomputes a layer belongs to that layer alone, so such layers share no code.
        is_whole = recipe.run.checkpointing or recipe.run.compile == "whole"
        (compiled if is_whole else compiled_by_kind)(objective)
    mixture, notes = build_mixture(recipe, place, base)
    trainer = Trainer(
        objective,
        masters,
        mixture,
        recipe.schedule,
        _run(recipe, place),
        Average(masters.weights, recipe.run.average) if recipe.run.average else None,
    )
    return Job(
        recipe=recipe, place=place, base=base, trainer=trainer, adapter=adapter, notes=tuple(notes)
    )


def load_base(recipe: Recipe, place: Place) -> Base:
    """The model a recipe begins with."""
    source = recipe.model
    if source.checkpoint is not None:
        directory = place.checkpoint(source.checkpoint)
        # Frozen weights are only read, trained ones want their exact values; several processes
        # map the file and take up a layer at a time.
        if place.group.size > 1:
            found = load_model(directory)
        else:
            dtype = torch.float32 if recipe.lora is None else place.dtype
            found = load_model(directory, device=place.device, dtype=dtype)
        return Base(
            model=found.model,
            generation=found.generation,
            tokenizer=directory if source.tokenizer is None else place.path(source.tokenizer),
            vision=found.vision,
        )
    assert source.config is not None and source.tokenizer is not None
    path = place.path(source.config)
    if not path.is_file():
        raise ConfigError(f"[model] config: no file {path}")
    return Base(
        model=fresh_model(load_config_file(path), recipe.seed),
        generation=load_generation_config(path.parent),
        tokenizer=place.path(source.tokenizer),
    )


def _release(model: Gemma, source: ModelSource) -> None:
    """Let all weights be trained but those whose names hold a frozen part."""
    names = [name for name, _ in model.named_parameters()]
    for part in source.frozen:
        if not any(part in name for name in names):
            raise ConfigError(f"[model] frozen: no weight has {part!r} in its name")
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in source.frozen))


def _masters(objective: Objective, optim: OptimSettings, place: Place) -> Masters:
    """Put the weights where they are trained, and make what moves them."""
    model = objective.model
    if place.group.size > 1:
        if place.device.type == "cuda":
            compiled_layers(model)
        shard(objective, model.layers, place.device.type, place.dtype)
        return Masters(model, optim)
    return Masters(model.to(place.device), optim, place.dtype)


def _run(recipe: Recipe, place: Place) -> RunSettings:
    return RunSettings(
        directory=place.out,
        save_every=recipe.run.save_every,
        report_every=recipe.run.report_every,
        keep=recipe.run.keep,
        workers=recipe.run.workers if place.workers is None else place.workers,
        accumulate=recipe.batch.accumulate,
        seconds=place.seconds,
        drift=recipe.run.drift,
    )


def build_mixture(recipe: Recipe, place: Place, base: Base) -> tuple[Mixture | Beside, list[str]]:
    """The data, and what a person should know of it."""
    # The first process tokenizes what is not tokenized yet, the others find it done.
    if not place.group.is_first:
        place.group.wait(place.device)
    notes: list[str] = []
    ingredients = [_ingredient(data, recipe, place, base, notes) for data in recipe.data]
    if place.group.is_first:
        place.group.wait(place.device)
    return _mixture(ingredients, recipe), notes


@contextmanager
def opened(
    path: Path, settings: Sequence[str] = ()
) -> Iterator[tuple[Recipe, Base, Mixture | Beside]]:
    """A recipe with its model and data on the CPU, to be looked at and not trained."""
    recipe = load_recipe(path, settings)
    with tempfile.TemporaryDirectory() as out:
        cpu, dtype = torch.device("cpu"), torch.float32
        place = Place(recipe=path, out=Path(out), device=cpu, dtype=dtype)
        base = load_base(recipe, place)
        mixture, _ = build_mixture(recipe, place, base)
        yield recipe, base, mixture


def _mixture(ingredients: Sequence[Ingredient], recipe: Recipe) -> Mixture | Beside:
    shape = recipe.batch
    whole = Mixture(
        ingredients=ingredients, sequences=shape.sequences, rows=shape.rows, seed=recipe.seed
    )
    if not shape.carried:
        return whole
    rolled, others = ([i for i in ingredients if i.corruption.rolls is r] for r in (True, False))
    return Beside(
        fresh=replace(whole, ingredients=others, sequences=shape.sequences - shape.carried),
        newcomers=replace(
            whole, ingredients=rolled, sequences=shape.carried // shape.carried_steps
        ),
        steps=shape.carried_steps,
    )


def _ingredient(
    data: DataSource, recipe: Recipe, place: Place, base: Base, notes: list[str]
) -> Ingredient:
    canvas, config = recipe.canvas, base.model.config
    given = canvas.lengths if data.lengths is None else data.lengths
    lengths = _lengths(given, config.canvas_length)
    copies = canvas.copies if data.copies is None else data.copies
    source = _source(data, recipe, place, base, notes)
    if isinstance(source, StoreSource):
        room = Layout(canvas_length=min(lengths), max_rows=recipe.batch.rows, copies=copies)
        notes += [f"{data.file}: {note}" for note in room_notes(source.store, room)]
    return Ingredient(
        source=source,
        weight=data.weight,
        canvas_lengths=lengths,
        copies=copies,
        learn_prompt=data.learn_prompt,
        causal_share=data.causal_share,
        corruption=Corruption(
            vocab_size=config.vocab_size,
            hole_share=canvas.hole_share if data.hole_share is None else data.hole_share,
            fill_share=canvas.fill_share if data.fill_share is None else data.fill_share,
            level_power=data.level_power,
            echo_share=data.echo_share,
            line_share=data.line_share,
            canvas_weight=data.canvas_weight,
            hole_weight=data.hole_weight,
            lines=LineTokens.of(Tokenizer.load(base.tokenizer)) if data.line_share else None,
            rolls=data.rollout,
        ),
    )


def _lengths(given: Mapping[str, float], longest: int) -> dict[int, float]:
    wrong = [name for name in given if not name.isdecimal() or not 0 < int(name) <= longest]
    if wrong or not given or min(given.values()) <= 0:
        raise ConfigError(
            f"lengths is {dict(given)}; it must give canvas lengths of 1 to {longest} tokens, the "
            "model's own, each with a frequency above 0"
        )
    return {int(length): share for length, share in given.items()}


def _source(data: DataSource, recipe: Recipe, place: Place, base: Base, notes: list[str]) -> Source:
    if data.file is not None:
        shelf = Shelf(
            directory=place.out / "tokens", tokenizer=base.tokenizer, progress=place.progress
        )
        limit = recipe.batch.rows if data.max_tokens is None else data.max_tokens
        store, dropped = load_tokens(place.path(data.file), limit, shelf)
        if dropped:
            notes.append(f"{data.file}: {dropped} examples over {limit} tokens were left out")
        if not data.as_fill:
            return StoreSource(store)
    words = Tokenizer.load(base.tokenizer)
    template = ChatTemplate.load(base.tokenizer, words)
    if data.as_fill:
        return FillSource(store, words, template)
    assert data.bank is not None
    if data.puzzle == "sudoku":
        from dgemma.train.puzzles.sudoku import SudokuBank, SudokuSource

        return SudokuSource(SudokuBank.load(place.path(data.bank)), words, template)
    from dgemma.train.puzzles.colouring import ColouringBank, ColouringSource

    return ColouringSource(ColouringBank.load(place.path(data.bank)), words, template)
