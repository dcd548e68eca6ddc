"""A recipe: one TOML file that says what is trained, on what, and how. Read strictly.

The comment of each field is its description in docs/training.md (docs/make_training.py).
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dgemma.errors import ConfigError, UsageError
from dgemma.train.corruption import NoiseSettings
from dgemma.train.layers import CompileMode
from dgemma.train.objective import LossSettings
from dgemma.train.optim import OptimSettings, Schedule
from dgemma.weights.hub import NANO, find_checkpoint

T = TypeVar("T")

RECIPES = Path(__file__).parent / "recipes"  # of the package


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A new model, or a checkpoint to continue from."""

    config: str | None = None  # `config.json` of a new model
    checkpoint: str | None = None  # directory, `nano` or downloaded hub id, instead of `config`
    # directory with `tokenizer.json`, needed with `config`; default: the checkpoint's own
    tokenizer: str | None = None
    frozen: tuple[str, ...] = ()  # parts of names of weights that are not trained: `["router"]`

    def __post_init__(self) -> None:
        if (self.config is None) == (self.checkpoint is None):
            raise ConfigError("[model] needs either config (a new model) or checkpoint, not both")
        if self.config is not None and self.tokenizer is None:
            raise ConfigError("[model] config needs a tokenizer: a directory with tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Packed sequences of a step."""

    sequences: int = 8  # packed sequences; an even number in each micro-batch and process
    rows: int = 2048  # rows of a sequence; a text takes one per token, each copy of a canvas too
    # micro-batches per batch: less memory, same gradients; the balance loss is per micro-batch
    grad_accum_steps: int = 1
    # sequences, out of `sequences`, that persist over training steps as on-policy canvases; needs a
    # single process, and excludes `grad_accum_steps` and `rollout_fraction`
    persistent_sequences: int = 0
    persistent_steps: int = 16  # training steps for which such a sequence persists

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("sequences", "rows", "grad_accum_steps")}
        _check_counts("[batch]", 1, **counts, persistent_steps=self.persistent_steps)
        count, fresh = self.persistent_sequences, self.sequences - self.persistent_sequences
        if count and (count < 0 or count % self.persistent_steps or fresh < 2 or fresh % 2):
            raise ConfigError(
                f"[batch] persistent_sequences is {count} of {self.sequences} sequences, for "
                f"{self.persistent_steps} steps; it must be 0 or a multiple of persistent_steps, "
                "and leave an even number of other sequences"
            )


def _check_fractions(table: str, **fractions: float | None) -> None:
    for name, fraction in fractions.items():
        if fraction is not None and not 0 <= fraction <= 1:
            raise ConfigError(f"{table} {name} is {fraction}; it must be from 0 to 1")


def _check_counts(table: str, minimum: int, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < minimum:
            raise ConfigError(f"{table} {name} is {count}; it must be {minimum} or more".lstrip())


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasSettings:
    """Canvases of all sources."""

    # canvas lengths with their relative frequencies; default: the model's own length only
    lengths: Mapping[str, float] | None = None
    copies: int = 1  # copies of each canvas in a pass, noised independently
    hole_fraction: float = 0.2  # fraction of canvases noised in spans only, the rest pinned
    # fraction of the `<eos>` padding of a last canvas that has a target; it is soon learned
    padding_loss_fraction: float = 1.0

    def __post_init__(self) -> None:
        names = ("hole_fraction", "padding_loss_fraction")
        _check_fractions("[canvas]", **{name: getattr(self, name) for name in names})
        _check_counts("[canvas]", 1, copies=self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource(NoiseSettings):
    """One table for each source."""

    file: str | None = None  # tokens (`.npz`), or texts or chats (`.jsonl`, `.json`)
    puzzle: Literal["sudoku"] | None = None  # instead of `file`
    bank: str | None = None  # puzzle bank, made by `python -m recipes.nano.bank`
    # plain texts as infill prompts: `<|fill|>` in the place of one code line, or of up to half of
    # them, and the whole text as reply; lines are opened anew at each draw
    as_infill: bool = False
    weight: float = 1.0  # fraction of the rows, relative to the other sources
    train_on_prompt: bool = True  # whether the prompt's tokens have a causal loss
    # fraction of its examples with a causal loss; lower where left-to-right prediction is hopeless
    causal_fraction: float = 1.0
    # default: as `[canvas]`; 0: no canvases, the causal loss only
    copies: int | None = None
    hole_fraction: float | None = None  # default: as `[canvas]`
    padding_loss_fraction: float | None = None  # default: as `[canvas]`
    lengths: Mapping[str, float] | None = None  # default: as `[canvas]`
    # examples to compute the held-out loss on, as `file`; never trained on
    heldout: str | None = None
    # fraction of the examples of `file` that is held out instead, if there are ten or more
    heldout_fraction: float = 0.0
    max_tokens: int | None = None  # longer examples of such a file are dropped; default: `rows`

    def __post_init__(self) -> None:
        if (self.file is None) == (self.puzzle is None) or (self.puzzle is None) != (
            self.bank is None
        ):
            raise ConfigError("[[data]] needs either file, or puzzle with its bank")
        if self.as_infill and self.file is None:
            raise ConfigError("[[data]] as_infill opens lines of a file's texts; a puzzle has none")
        if self.max_tokens is not None and not (self.file or "").endswith((".jsonl", ".json")):
            raise ConfigError(
                f"[[data]] max_tokens is {self.max_tokens}; it is for a .jsonl or .json file, the "
                "only data that is tokenized here; leave it out"
            )
        if (self.heldout or self.heldout_fraction) and (self.file is None or self.as_infill):
            raise ConfigError("[[data]] heldout is for a file of chats or texts; leave it out")
        if self.heldout and self.heldout_fraction:
            raise ConfigError(
                f"[[data]] heldout is {self.heldout} and heldout_fraction {self.heldout_fraction}; "
                "give one of them"
            )
        if self.noise_level_power <= 0:
            power = self.noise_level_power
            raise ConfigError(f"[[data]] noise_level_power is {power}; it must be above 0")
        names = ("canvas_loss_weight", "hole_loss_weight")
        _check_counts("[[data]]", 1, **{name: getattr(self, name) for name in names})
        _check_counts("[[data]]", 0, copies=self.copies)
        fractions = [f.name for f in fields(self) if f.name.endswith("_fraction")]
        _check_fractions("[[data]]", **{name: getattr(self, name) for name in fractions})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """States, reports and how the passes run."""

    save_every: int = 1000  # steps between saved states
    report_every: int = 20  # steps between lines of `metrics.jsonl`
    keep: int = 2  # number of saved states
    workers: int = 0  # processes that make batches
    # keep only the inputs of layers, and compute activations and logits again in the backward
    activation_checkpointing: bool = False
    max_loss_rise: float = 1.5  # nats of the smoothed loss above its best at which the run stops
    # unit of compilation on a GPU: one function per layer type, ready sooner, or each pass, as
    # always with `activation_checkpointing`
    compile: CompileMode = "layer_types"

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("save_every", "report_every", "keep")}
        _check_counts("[run]", 1, **counts)
        _check_counts("[run]", 0, workers=self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASettings:
    """Train a low-rank adapter; the checkpoint's weights stay as they are."""

    rank: int = 16  # of the two matrices
    alpha: float = 32.0  # the change is scaled by alpha / rank
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")  # ends of module names
    # of the sampler that comes with the adapter, nats; default: the checkpoint's
    entropy_bound: float | None = None

    def __post_init__(self) -> None:
        if self.entropy_bound is not None and self.entropy_bound <= 0:
            raise ConfigError(f"[lora] entropy_bound is {self.entropy_bound}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Evaluation before and after, by `dgemma train`."""

    tasks: tuple[str, ...] = ()  # tasks of `dgemma eval`
    limit: int | None = None  # maximum cases of each set


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A whole recipe."""

    name: str  # the run's directory is `out/train/NAME` unless `--out` says otherwise
    seed: int = 0  # of new weights, batches and noise
    model: ModelSource
    batch: BatchShape = field(default_factory=BatchShape)
    canvas: CanvasSettings = field(default_factory=CanvasSettings)
    data: tuple[DataSource, ...]
    loss: LossSettings = field(default_factory=LossSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: Schedule
    run: RunSettings = field(default_factory=RunSettings)
    lora: LoRASettings | None = None
    eval: EvalSettings = field(default_factory=EvalSettings)

    def __post_init__(self) -> None:
        _check_counts("", 0, seed=self.seed)
        if not self.data:
            raise ConfigError("a recipe needs at least one [[data]]")
        if self.lora is not None and self.model.checkpoint is None:
            raise ConfigError("[lora] needs [model] checkpoint: an adapter is for a trained model")
        if self.lora is not None and self.model.frozen:
            raise ConfigError(
                f"[model] frozen is {list(self.model.frozen)} with [lora], which trains only its "
                "targets; leave frozen out"
            )
        if self.batch.persistent_sequences:
            self._check_persistent()

    def _check_persistent(self) -> None:
        if self.loss.rollout_fraction:
            raise ConfigError(
                "[batch] persistent_sequences and [loss] rollout_fraction exclude each other; "
                "leave one of them out"
            )
        values = {data.on_policy for data in self.data}
        if values != {False, True}:
            raise ConfigError(
                "[batch] persistent_sequences needs [[data]] with on_policy = true, which persist, "
                f"and some with false, which do not; here all have {str(*values).lower()}"
            )

    def to_json(self) -> str:
        """Return the whole recipe, defaults included."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def find_recipe(recipe: Path) -> Path:
    """Return the path of a recipe: a file, or one of the package by its name alone."""
    built_in = RECIPES / f"{recipe}.toml"
    if recipe.name == str(recipe) and built_in.is_file():
        return built_in
    if not recipe.is_file():
        names = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
        raise UsageError(f"no recipe {recipe}; give a TOML file, or one that is built in: {names}")
    return recipe


def recipe_path(recipe: Path, name: str) -> Path:
    """Resolve a path relative to its recipe, or to the working directory if it begins with `./`."""
    return Path(name) if name.startswith("./") else recipe.parent / name


def recipe_checkpoint(recipe: Path, name: str) -> Path:
    """Find the directory of a checkpoint, or of a model that this machine has by that name."""
    path = recipe_path(recipe, name)
    found = path if name != NANO and path.is_dir() else find_checkpoint(name)
    if not found.is_dir():
        raise UsageError(
            f"{found} is a GGUF file, and training starts from a directory; write one with "
            f"`dgemma export {found} DIRECTORY`"
        )
    return found


def load_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe; `changes` such as `optim.adam_lr=1e-4` override the file.

    Unknown keys are refused by name.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for change in changes:
        _change(raw, change)
    return _read(Recipe, raw, str(path))


def reread_recipe(path: Path) -> Recipe:
    """Read a recipe that `to_json` wrote; keys added since have their defaults."""
    return _read(Recipe, json.loads(path.read_text(encoding="utf-8")), str(path))


def _change(raw: dict[str, Any], change: str) -> None:
    """Set one value: `data.0.weight=2` is that of the first [[data]]."""
    key, equals, text = change.partition("=")
    *tables, last = (part.strip() for part in key.split("."))
    if not equals or not last:
        raise UsageError(f"{change!r} sets nothing; write key=value, such as schedule.steps=500")
    table: Any = raw
    for name in tables:
        if isinstance(table, dict):
            table = table.setdefault(name, {})
        else:
            table = table[_index(table, name, change)]
    value = _toml_value(text.strip())
    if isinstance(table, dict):
        table[last] = value
    else:
        table[_index(table, last, change)] = value


def _index(table: Any, name: str, change: str) -> int:
    if not isinstance(table, list):
        raise UsageError(f"{change!r}: the key before {name} is not a table")
    if not name.isdecimal() or int(name) >= len(table):
        raise UsageError(f"{change!r}: {name!r} must be a number from 0 to {len(table) - 1}")
    return int(name)


def _toml_value(text: str) -> Any:
    """Parse a TOML value; anything else is a string, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read(kind: type[T], raw: Any, path: str) -> T:
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must be a table, not {raw!r}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(raw.keys() - known.keys())
    if unknown:
        raise ConfigError(f"{path}: {', '.join(unknown)} not known; use {', '.join(known)}")
    missing = [
        name
        for name, f in known.items()
        if name not in raw and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], raw[name], f"{path}: {name}") for name in raw})


def _value(hint: Any, raw: Any, path: str) -> Any:
    """Check a value against a field's type; tables become dataclasses, lists tuples."""
    if raw != raw:  # TOML has nan, which passes every comparison with a bound
        raise ConfigError(f"{path} is nan; it must be a number")
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if is_dataclass(kind) and isinstance(raw, dict):
            return _read(cast(type[Any], kind), raw, path)
        if get_origin(kind) is tuple and isinstance(raw, list):
            inner, *others = get_args(kind)
            if others != [...] and len(raw) != 1 + len(others):
                raise ConfigError(f"{path} has {len(raw)} values, not {1 + len(others)}")
            return tuple(_value(inner, item, f"{path}[{i}]") for i, item in enumerate(raw))
        if get_origin(kind) is Mapping and isinstance(raw, dict):
            inner = get_args(kind)[1]
            return {key: _value(inner, item, f"{path}: {key}") for key, item in raw.items()}
        if get_origin(kind) is Literal and raw in get_args(kind):
            return raw
        if kind is float and type(raw) is int:
            return float(raw)
        if isinstance(kind, type) and type(raw) is kind:
            return raw
    raise ConfigError(f"{path} is {raw!r}; it must be {' or '.join(map(_type_name, kinds))}")


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if is_dataclass(kind) or get_origin(kind) is Mapping:
        return "a table"
    if get_origin(kind) is tuple:
        return "a list"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(kind, "absent")
