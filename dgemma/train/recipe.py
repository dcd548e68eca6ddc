"""A recipe: one TOML file that says what is trained, on what, and how. Read strictly.

    name, seed
    [model]     config: shape of a new model, or checkpoint: one to go on from; tokenizer; frozen
    [batch]     sequences, rows, accumulate, carried, carried_steps
    [canvas]    lengths with their frequencies, copies, hole_share, fill_share
    [[data]]    file (.npz tokens, .jsonl) or puzzle with its bank; weight; learn_prompt, ...
    [loss] [optim] [schedule] [run]     settings that differ from their defaults
    [lora]      train an adapter beside the weights, which stay as they are
    [eval]      tasks that the command line runs before and after

Paths are relative to the recipe, or to where the command runs if they begin with `./`.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dgemma.errors import ConfigError, UsageError
from dgemma.train.optim import OptimSettings, Schedule
from dgemma.train.weighting import Weighting

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A new model of a shape, or an existing one."""

    config: str | None = None
    checkpoint: str | None = None
    tokenizer: str | None = None  # a directory; None: the checkpoint's own
    frozen: tuple[str, ...] = ()  # parts of weights' names that are not trained, such as "router"

    def __post_init__(self) -> None:
        if (self.config is None) == (self.checkpoint is None):
            raise ConfigError("[model] needs either config (a new model) or checkpoint, not both")
        if self.config is not None and self.tokenizer is None:
            raise ConfigError("[model] config needs a tokenizer: a directory with tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    sequences: int = 8
    rows: int = 2048  # of each sequence; clean and canvas rows are both counted
    accumulate: int = 1  # parts that a batch is worked through in
    carried: int = 0  # of the sequences, those that go on from step to step (`train/carry.py`)
    carried_steps: int = 16  # for which they stay

    def __post_init__(self) -> None:
        if min(self.sequences, self.rows, self.accumulate, self.carried_steps) < 1:
            raise ConfigError(
                "[batch] sequences, rows, accumulate and carried_steps must be 1 or more"
            )
        if self.carried:
            self._check_carried()

    def _check_carried(self) -> None:
        others = self.sequences - self.carried
        if self.carried < 0 or self.carried % self.carried_steps or others < 2 or others % 2:
            raise ConfigError(
                f"[batch] carried is {self.carried} of {self.sequences} sequences, for "
                f"{self.carried_steps} steps; it must be 0 or a multiple of carried_steps, and "
                "leave an even number of sequences for what is not carried"
            )


def _check_shares(table: str, **shares: float | None) -> None:
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"{table} {name} is {share}; it is a share, from 0 to 1")


def _check_counts(table: str, least: int, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < least:
            raise ConfigError(f"{table} {name} is {count}; it must be {least} or more".lstrip())


@dataclass(frozen=True, slots=True, kw_only=True)
class CanvasSettings:
    lengths: Mapping[str, float] = field(default_factory=lambda: {"256": 1.0})
    copies: int = 1  # of each canvas in a pass, noised apart
    hole_share: float = 0.2
    fill_share: float = 1.0  # of what fills a text's last canvas, that is asked for

    def __post_init__(self) -> None:
        _check_shares("[canvas]", hole_share=self.hole_share, fill_share=self.fill_share)
        _check_counts("[canvas]", 1, copies=self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    file: str | None = None  # tokens (.npz), or text, pairs or chats (.jsonl)
    puzzle: Literal["sudoku", "colouring"] | None = None
    bank: str | None = None  # of a puzzle
    as_fill: bool = False  # plain texts shown with holes and then told: see train/fill_source.py
    weight: float = 1.0
    learn_prompt: bool = True
    causal_share: float = 1.0  # of its examples, those that the causal pass is asked for
    # None here and below: as [canvas] says; 0 copies: no canvases, the causal pass alone learns it
    copies: int | None = None
    hole_share: float | None = None
    fill_share: float | None = None
    lengths: Mapping[str, float] | None = None
    line_share: float = 0.0  # of the canvases with holes, those whose holes are lines
    canvas_weight: int = 1  # rows that one of its canvases counts for, beside other sources'
    hole_weight: int = 1  # times that, of one in a hole: a canvas with holes asks few
    level_power: float = 1.0  # of noise levels; below 1 a canvas is oftener almost all noise
    echo_share: float = 0.0  # of its noise, tokens that stand near it instead of any at all
    rollout: bool = True  # whether [loss] rollout is for it: where one reply alone is right
    max_tokens: int | None = None  # of a .jsonl example, longer ones left out; None: [batch] rows

    def __post_init__(self) -> None:
        if (self.file is None) == (self.puzzle is None) or (self.puzzle is None) != (
            self.bank is None
        ):
            raise ConfigError("[[data]] needs either file, or puzzle with its bank")
        if self.as_fill and self.file is None:
            raise ConfigError("[[data]] as_fill opens lines of a file's texts; a puzzle has none")
        if self.max_tokens is not None and not (self.file or "").endswith(".jsonl"):
            raise ConfigError(
                f"[[data]] max_tokens is {self.max_tokens}; it is for a .jsonl file, the only data "
                "that is tokenized here; leave it out"
            )
        if self.level_power <= 0:
            raise ConfigError(f"[[data]] level_power is {self.level_power}; it must be above 0")
        weights = {"canvas_weight": self.canvas_weight, "hole_weight": self.hole_weight}
        _check_counts("[[data]]", 1, **weights)
        _check_counts("[[data]]", 0, copies=self.copies)
        names = ("causal_share", "hole_share", "fill_share", "line_share", "echo_share")
        _check_shares("[[data]]", **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    save_every: int = 1000
    report_every: int = 20
    keep: int = 2
    workers: int = 0
    average: float = 0.0  # decay of a running mean of the weights, which is what is saved; 0: none
    checkpointing: bool = False  # recompute activations instead of keeping them
    drift: float = 1.5  # nats that the loss may rise above its best before the run is stopped
    # On a GPU: code for each kind of layer, soon ready, or for a pass as a whole.
    compile: Literal["kinds", "whole"] = "kinds"

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("save_every", "report_every", "keep")}
        _check_counts("[run]", 1, **counts)
        _check_counts("[run]", 0, workers=self.workers)
        if not 0 <= self.average < 1:
            raise ConfigError(f"[run] average is {self.average}; it must be 0 or more, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASettings:
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    tasks: tuple[str, ...] = ()  # names as `dgemma eval` knows them
    limit: int | None = None  # most cases of each set


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    name: str
    seed: int = 0
    model: ModelSource
    batch: BatchShape = field(default_factory=BatchShape)
    canvas: CanvasSettings = field(default_factory=CanvasSettings)
    data: tuple[DataSource, ...]
    loss: Weighting = field(default_factory=Weighting)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: Schedule
    run: RunShape = field(default_factory=RunShape)
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
                f"[model] frozen is {list(self.model.frozen)} beside [lora], which freezes all but "
                "its targets; leave frozen out, or what is to stay out of targets"
            )
        self._check_carried()

    def _check_carried(self) -> None:
        if self.batch.carried == 0:
            return
        if self.loss.rollout or self.loss.guess_gradient:
            raise ConfigError(
                "[batch] carried takes the place of [loss] rollout and has no guess_gradient; "
                "leave them out, or carried"
            )
        kinds = {data.rollout for data in self.data}
        if kinds != {False, True}:
            raise ConfigError(
                "[batch] carried needs [[data]] with rollout = true, which is carried, and some "
                f"with false, which is not; here all have {str(*kinds).lower()}"
            )

    def to_json(self) -> str:
        """The whole recipe, defaults written out."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def load_recipe(path: Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe; `changes` such as `optim.adam_lr=1e-4` go before what the file says.

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
    """A recipe that `to_json` wrote; what was not known when it did has its default."""
    return _read(Recipe, json.loads(path.read_text(encoding="utf-8")), str(path))


def _change(raw: dict[str, Any], change: str) -> None:
    """Set one value: `data.0.weight=2` is that of the first [[data]]."""
    key, equals, text = change.partition("=")
    *tables, last = (part.strip() for part in key.split("."))
    if not equals or not last:
        raise UsageError(f"{change!r} sets nothing; write key=value, such as schedule.steps=500")
    place: Any = raw
    for name in tables:
        if isinstance(place, dict):
            place = place.setdefault(name, {})
        else:
            place = place[_index(place, name, change)]
    value = _toml_value(text.strip())
    if isinstance(place, dict):
        place[last] = value
    else:
        place[_index(place, last, change)] = value


def _index(place: Any, name: str, change: str) -> int:
    """The number of an item of a list."""
    if not isinstance(place, list):
        raise UsageError(f"{change!r}: what stands before {name} is no table")
    if not name.isdecimal() or int(name) >= len(place):
        raise UsageError(f"{change!r}: {name!r} must be a number from 0 to {len(place) - 1}")
    return int(name)


def _toml_value(text: str) -> Any:
    """A value as TOML has it; what is none is a string, so that paths need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read(kind: type[T], raw: Any, place: str) -> T:
    if not isinstance(raw, dict):
        raise ConfigError(f"{place} must be a table, not {raw!r}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(raw.keys() - known.keys())
    if unknown:
        raise ConfigError(f"{place}: {', '.join(unknown)} not known; use {', '.join(known)}")
    missing = [
        name
        for name, f in known.items()
        if name not in raw and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{place} lacks {', '.join(missing)}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], raw[name], f"{place}: {name}") for name in raw})


def _value(hint: Any, raw: Any, place: str) -> Any:
    """A value of a field's type: tables become dataclasses, lists tuples."""
    if raw != raw:  # TOML has nan, which no comparison with a bound refuses
        raise ConfigError(f"{place} is nan; it must be a number")
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if is_dataclass(kind) and isinstance(raw, dict):
            return _read(cast(type[Any], kind), raw, place)
        if get_origin(kind) is tuple and isinstance(raw, list):
            inner, *others = get_args(kind)
            if others != [...] and len(raw) != 1 + len(others):
                raise ConfigError(f"{place} has {len(raw)} values, not {1 + len(others)}")
            return tuple(_value(inner, item, f"{place}[{i}]") for i, item in enumerate(raw))
        if get_origin(kind) is Mapping and isinstance(raw, dict):
            inner = get_args(kind)[1]
            return {key: _value(inner, item, f"{place}: {key}") for key, item in raw.items()}
        if get_origin(kind) is Literal and raw in get_args(kind):
            return raw
        if kind is float and type(raw) is int:
            return float(raw)
        if isinstance(kind, type) and type(raw) is kind:
            return raw
    raise ConfigError(f"{place} is {raw!r}; it must be {' or '.join(map(_spelled, kinds))}")


def _spelled(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if is_dataclass(kind) or get_origin(kind) is Mapping:
        return "a table"
    if get_origin(kind) is tuple:
        return "a list"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(kind, "absent")
