"""Build a run from a recipe: model, adapter, data mixture, optimizer and trainer."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from dgemma.config import (
    GenerationConfig,
    ModelConfig,
    load_config_file,
    load_generation_config,
)
from dgemma.errors import ConfigError
from dgemma.model.gemma import Gemma
from dgemma.text.chat import ChatTemplate
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.batches import MixedBatches, Mixture, MixtureComponent
from dgemma.train.corruption import Corruption, LineTokens, NoiseSettings
from dgemma.train.distributed import SINGLE_PROCESS, ProcessGroup, gather_to_cpu, shard_model
from dgemma.train.layers import compile_sharded_layers
from dgemma.train.loop import RunOptions, Trainer
from dgemma.train.objective import Objective
from dgemma.train.optim import MixedPrecisionOptimizer, OptimSettings
from dgemma.train.packing import PackingLayout
from dgemma.train.recipe import (
    DataSource,
    LoRASettings,
    ModelSource,
    Recipe,
    load_recipe,
    recipe_checkpoint,
    recipe_path,
)
from dgemma.train.sources import InfillSource, Source, StoreSource, puzzle_source
from dgemma.train.tokens import TokenCache, TokenStore, eos_id_of
from dgemma.weights.files import OnProgress
from dgemma.weights.load import Checkpoint, draw, fill, load_model, name_seed
from dgemma.weights.lora import Adapter, LoRAPair, attach, new_adapter
from dgemma.weights.lora_files import save_adapter
from dgemma.weights.names import LAYER_SCALAR, skeleton
from dgemma.weights.save import save_checkpoint

CLOSING_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
ADAPTER_PARAMETERS = ("a_RI", "b_OR")  # trained parameters of an adapted module
MIN_SPLIT = 10  # smallest file of which examples are held out
LOGIT_ROWS = 1024  # rows whose logits exist at once, with activation checkpointing


# --- the base model


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The model a run starts from, and the files saved with it."""

    model: Gemma
    generation: GenerationConfig
    tokenizer: Path  # a directory
    vision: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path, device: torch.device | None, dtype: torch.dtype) -> "BaseModel":
        """Load a checkpoint; without a device its files are mapped, as several processes need."""
        if device is None:
            loaded = load_model(directory)
        else:
            loaded = load_model(directory, device=device, dtype=dtype)
        return cls(
            model=loaded.model,
            generation=loaded.generation,
            tokenizer=directory,
            vision=loaded.vision,
        )

    @classmethod
    def new(cls, config: Path, tokenizer: Path, seed: int) -> "BaseModel":
        if not config.is_file():
            raise ConfigError(f"[model] config: no file {config}")
        return cls(
            model=initialize(load_config_file(config), seed),
            generation=load_generation_config(config.parent),
            tokenizer=tokenizer,
        )

    def save(self, weights: Mapping[str, Tensor], dtype: torch.dtype, directory: Path) -> None:
        """Write a checkpoint in the released layout with these weights."""
        config = replace(self.model.config, dtype=str(dtype).removeprefix("torch."))
        model = fill(skeleton(config), {name: w.to(dtype) for name, w in weights.items()})
        save_checkpoint(
            Checkpoint(model=model, generation=self.generation, vision=self.vision),
            directory,
            tokenizer_from=self.tokenizer,
            overwrite=True,
        )


def freeze_weights(model: Gemma, source: ModelSource) -> None:
    """Train all weights but those whose names contain a part of `frozen`."""
    names = [name for name, _ in model.named_parameters()]
    for part in source.frozen:
        if not any(part in name for name in names):
            raise ConfigError(f"[model] frozen: no weight has {part!r} in its name")
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in source.frozen))


def initialize(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Gemma:
    """Make a float32 model with random weights.

    Every block is between norms, so its output scale is the weight of the closing norm: small, so
    that initially the residual is the embedding and each layer adds a little. Each weight is drawn
    from a seed of its name.
    """
    model = skeleton(config)
    weights = {}
    for name, weight in model.state_dict().items():
        generator = torch.Generator().manual_seed(name_seed(seed, name))
        mean, deviation = _mean_and_deviation(name, tuple(weight.shape), config)
        weights[name] = draw(torch.empty(weight.shape), mean, deviation, generator).to(device)
    return fill(model, weights).requires_grad_(True)


def _mean_and_deviation(
    name: str, shape: tuple[int, ...], config: ModelConfig
) -> tuple[float, float]:
    fan_in = shape[-1]
    if name.endswith(LAYER_SCALAR):
        return 1.0, 0.0
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return fan_in**-0.25, 0.0  # attention has no other scale: logits have unit variance
    if name.endswith(CLOSING_NORMS):
        return (2 * config.num_hidden_layers) ** -0.5, 0.0
    if len(shape) == 1:
        return 1.0, 0.0
    return 0.0, fan_in**-0.5


def add_adapter(model: Gemma, settings: LoRASettings, seed: int, base: str) -> Adapter:
    """Attach a new zero adapter, and train nothing else."""
    adapter = new_adapter(model, settings.targets, settings.rank, settings.alpha, seed)
    model.requires_grad_(False)
    attach(model, adapter)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.rpartition(".")[2] in ADAPTER_PARAMETERS)
    return replace(adapter, base_model=base)


def trained_adapter(adapter: Adapter, names: Sequence[str], weights: Sequence[Tensor]) -> Adapter:
    """Return the trained adapter in float32; the model's copy may be rounded."""
    by_name = dict(zip(names, weights, strict=True))
    pairs = {
        module: LoRAPair(
            *(by_name[f"{module}.{name}"].detach().float().cpu() for name in ADAPTER_PARAMETERS)
        )
        for module in adapter.targets
    }
    return replace(adapter, pairs=pairs)


# --- the run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """Paths, device and processes of a run."""

    recipe: Path
    out: Path
    device: torch.device
    dtype: torch.dtype
    group: ProcessGroup = SINGLE_PROCESS
    seconds: float | None = None
    workers: int | None = None
    progress: OnProgress | None = None  # of tokenizing

    def path(self, name: str) -> Path:
        return recipe_path(self.recipe, name)

    def checkpoint(self, name: str) -> Path:
        return recipe_checkpoint(self.recipe, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """A run ready to start."""

    recipe: Recipe
    environment: RunEnvironment
    base: BaseModel
    trainer: Trainer
    adapter: Adapter | None
    warnings: tuple[str, ...]  # about the data
    heldout_prompts: tuple[tuple[int, ...], ...] = ()  # prompts of held-out chats

    def save(self) -> Path:
        """Write the trained adapter or checkpoint and return its directory.

        All processes take part.
        """
        optimizer, is_main = self.trainer.optimizer, self.environment.group.is_main
        weights = gather_to_cpu(list(optimizer.weights), keep=is_main)
        if self.adapter is not None:
            directory = self.environment.out / "adapter"
            if is_main:
                adapter = trained_adapter(self.adapter, optimizer.names, weights)
                lora, generation = self.recipe.lora, None
                if lora is not None and lora.entropy_bound is not None:
                    generation = replace(self.base.generation, entropy_bound=lora.entropy_bound)
                save_adapter(adapter, directory, overwrite=True, generation=generation)
            return directory
        directory = self.environment.out / "checkpoint"
        untrained = gather_to_cpu(dict(self.base.model.state_dict()), keep=is_main)
        if is_main:
            trained = dict(zip(optimizer.names, weights, strict=True))
            self.base.save({**untrained, **trained}, self.environment.dtype, directory)
        return directory


def build(recipe: Recipe, environment: RunEnvironment) -> TrainingJob:
    base, adapter = load_base_model(recipe, environment), None
    model, on_gpu = base.model, environment.device.type == "cuda"
    if recipe.lora is not None:
        adapter = add_adapter(model, recipe.lora, recipe.seed, str(recipe.model.checkpoint))
    else:
        freeze_weights(model, recipe.model)
    recompute = recipe.run.activation_checkpointing
    objective = Objective(
        model.train(),
        recipe.loss,
        is_flex=on_gpu,
        group=environment.group,
        recompute=recompute,
        chunk=LOGIT_ROWS if recompute else None,
    )
    # An adapter's matrices are too thin to be orthogonalized.
    optim = recipe.optim if recipe.lora is None else replace(recipe.optim, muon=False)
    optimizer = _make_optimizer(objective, optim, environment)
    if on_gpu and environment.group.size == 1:
        # A recomputed layer is compiled for that layer alone, so such layers share no code.
        objective.compile_passes("whole_pass" if recompute else recipe.run.compile)
    builder = MixtureBuilder(recipe, environment, base)
    mixture, warnings = builder.build(), builder.warnings
    workers = recipe.run.workers if environment.workers is None else environment.workers
    run = RunOptions(
        directory=environment.out,
        settings=replace(recipe.run, workers=workers),
        grad_accum_steps=recipe.batch.grad_accum_steps,
        seconds=environment.seconds,
        heldout=builder.heldout_mixture(),
    )
    return TrainingJob(
        recipe=recipe,
        environment=environment,
        base=base,
        trainer=Trainer(objective, optimizer, mixture, recipe.schedule, run),
        adapter=adapter,
        warnings=tuple(warnings),
        heldout_prompts=tuple(builder.heldout_prompts()),
    )


def load_base_model(recipe: Recipe, environment: RunEnvironment) -> BaseModel:
    """Load or initialize the model a recipe starts from."""
    source = recipe.model
    if source.checkpoint is None:
        assert source.config is not None and source.tokenizer is not None
        tokenizer = environment.path(source.tokenizer)
        return BaseModel.new(environment.path(source.config), tokenizer, recipe.seed)
    # Frozen weights are only read, trained ones need their exact values; several processes map the
    # file and read a layer at a time.
    dtype = torch.float32 if recipe.lora is None else environment.dtype
    device = environment.device if environment.group.size == 1 else None
    base = BaseModel.load(environment.checkpoint(source.checkpoint), device, dtype)
    if source.tokenizer is None:
        return base
    return replace(base, tokenizer=environment.path(source.tokenizer))


def _make_optimizer(
    objective: Objective, optim: OptimSettings, environment: RunEnvironment
) -> MixedPrecisionOptimizer:
    """Move the weights to where they are trained, and make their optimizer."""
    model = objective.model
    if environment.group.size > 1:
        if environment.device.type == "cuda":
            compile_sharded_layers(model)
        shard_model(objective, model.layers, environment.device.type, environment.dtype)
        return MixedPrecisionOptimizer(model, optim)
    return MixedPrecisionOptimizer(model.to(environment.device), optim, environment.dtype)


@contextmanager
def open_recipe(
    path: Path, changes: Sequence[str] = ()
) -> Iterator[tuple[Recipe, BaseModel, Mixture | MixedBatches]]:
    """Load a recipe's model and data on the CPU for inspection."""
    recipe = load_recipe(path, changes)
    with tempfile.TemporaryDirectory() as out:
        cpu, dtype = torch.device("cpu"), torch.float32
        environment = RunEnvironment(recipe=path, out=Path(out), device=cpu, dtype=dtype)
        base = load_base_model(recipe, environment)
        mixture = MixtureBuilder(recipe, environment, base).build()
        yield recipe, base, mixture


# --- data


@dataclass(frozen=True, slots=True)
class MixtureBuilder:
    """Opens the sources of a recipe; `warnings` and held-out components are collected."""

    recipe: Recipe
    environment: RunEnvironment
    base: BaseModel
    warnings: list[str] = field(default_factory=list)
    heldout: list[MixtureComponent] = field(default_factory=list)

    def build(self) -> Mixture | MixedBatches:
        """Open the data."""
        # The first process tokenizes files, the others find them in the cache.
        group, device = self.environment.group, self.environment.device
        if not group.is_main:
            group.barrier(device)
        eos_id = eos_id_of(self.base.tokenizer)
        components = [self._component(data, eos_id) for data in self.recipe.data]
        if group.is_main:
            group.barrier(device)
        return self.mix(components)

    def heldout_mixture(self) -> Mixture | None:
        """Mix the held-out examples with the same weights."""
        return self._whole(self.heldout) if self.heldout else None

    def heldout_prompts(self) -> Iterator[tuple[int, ...]]:
        for component in self.heldout:
            assert isinstance(component.source, StoreSource)
            yield from component.source.prompts()

    def mix(self, components: Sequence[MixtureComponent]) -> Mixture | MixedBatches:
        shape, whole = self.recipe.batch, self._whole(components)
        if not shape.persistent_sequences:
            return whole
        on_policy, off_policy = (
            [c for c in components if c.corruption.on_policy is flag] for flag in (True, False)
        )
        num_fresh = shape.sequences - shape.persistent_sequences
        num_new = shape.persistent_sequences // shape.persistent_steps
        return MixedBatches(
            fresh=replace(whole, components=off_policy, sequences=num_fresh),
            new_sequences=replace(whole, components=on_policy, sequences=num_new),
            steps=shape.persistent_steps,
        )

    def _whole(self, components: Sequence[MixtureComponent]) -> Mixture:
        rows, count = self.recipe.batch.rows, self.recipe.batch.sequences
        return Mixture(components=components, sequences=count, rows=rows, seed=self.recipe.seed)

    def _component(self, data: DataSource, eos_id: int) -> MixtureComponent:
        canvas, rows = self.recipe.canvas, self.recipe.batch.rows
        lengths = self._canvas_lengths(canvas.lengths if data.lengths is None else data.lengths)
        copies = canvas.copies if data.copies is None else data.copies
        source, heldout = self._split(data, self._open_source(data))
        if isinstance(source, StoreSource):
            layout = PackingLayout(canvas_length=min(lengths), max_rows=rows, copies=copies)
            self.warnings.extend(f"{data.file}: {w}" for w in source.length_warnings(layout))
        component = MixtureComponent(
            source=source,
            weight=data.weight,
            canvas_lengths=lengths,
            copies=copies,
            train_on_prompt=data.train_on_prompt,
            causal_fraction=data.causal_fraction,
            corruption=self._corruption(data, eos_id),
        )
        if heldout is not None:
            self.heldout.append(replace(component, source=StoreSource(heldout)))
        return component

    def _split(self, data: DataSource, source: Source) -> tuple[Source, TokenStore | None]:
        """Split off the held-out examples of a source."""
        if data.heldout is not None:
            return source, self._load_store(data, data.heldout)
        if not data.heldout_fraction:
            return source, None
        assert isinstance(source, StoreSource)
        if len(source.store) < MIN_SPLIT:
            self.warnings.append(
                f"{data.file}: {len(source.store)} examples are too few to hold some out; there is "
                "no held-out loss without --heldout FILE"
            )
            return source, None
        trained, heldout = source.store.split(data.heldout_fraction, self.recipe.seed)
        return StoreSource(trained), heldout

    def _corruption(self, data: DataSource, eos_id: int) -> Corruption:
        canvas, has_lines = self.recipe.canvas, data.line_hole_fraction > 0
        holes, padding = data.hole_fraction, data.padding_loss_fraction
        settings = {field.name: getattr(data, field.name) for field in fields(NoiseSettings)}
        return Corruption(
            **settings,
            vocab_size=self.base.model.config.vocab_size,
            eos_id=eos_id,
            hole_fraction=canvas.hole_fraction if holes is None else holes,
            padding_loss_fraction=canvas.padding_loss_fraction if padding is None else padding,
            lines=LineTokens.of(Tokenizer.load(self.base.tokenizer)) if has_lines else None,
        )

    def _canvas_lengths(self, lengths: Mapping[str, float] | None) -> dict[int, float]:
        maximum = self.base.model.config.canvas_length
        if lengths is None:
            return {maximum: 1.0}
        wrong = [name for name in lengths if not name.isdecimal() or not 0 < int(name) <= maximum]
        if wrong or not lengths or min(lengths.values()) <= 0:
            raise ConfigError(
                f"lengths is {dict(lengths)}; it must give canvas lengths of 1 to {maximum} "
                "tokens, the model's own, each with a frequency above 0"
            )
        return {int(length): frequency for length, frequency in lengths.items()}

    def _open_source(self, data: DataSource) -> Source:
        directory, path = self.base.tokenizer, self.environment.path
        if data.file is None:
            assert data.bank is not None
            return puzzle_source(path(data.bank), directory)
        store = self._load_store(data, data.file)
        if not data.as_infill:
            return StoreSource(store)
        tokenizer = Tokenizer.load(directory)
        return InfillSource(store, tokenizer, ChatTemplate.load(directory, tokenizer))

    def _load_store(self, data: DataSource, file: str) -> TokenStore:
        """Tokenize a file, or load it from the cache."""
        directory, progress = self.environment.out / "tokens", self.environment.progress
        cache = TokenCache(directory=directory, tokenizer=self.base.tokenizer, progress=progress)
        max_tokens = self.recipe.batch.rows if data.max_tokens is None else data.max_tokens
        store, dropped = cache.load(self.environment.path(file), max_tokens)
        if dropped:
            self.warnings.append(
                f"{file}: {dropped} examples over {max_tokens} tokens were dropped"
            )
        return store
