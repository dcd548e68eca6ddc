"""LoRA adapters: a low-rank change beside weights that stay as they are, in the files PEFT writes.

    y = W x + scale * B (A x)         scale = alpha / rank; with rsLoRA, alpha / sqrt(rank)

    adapter_config.json
    adapter_model.safetensors         base_model.model.{module}.lora_A.weight, ... lora_B.weight

Here one stack serves both modes, so one pair A, B does. In transformers encoder and decoder are
apart: files are written with every layer's pair under both names, and read if the two are equal or
only the decoder's is there.
Experts and the embedding table take no adapter. Knows no training, packing or quantization.

R rank, I inputs and O outputs of a module.
"""

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dgemma.config import Family, ModelConfig
from dgemma.errors import CheckpointError, ConfigError, UsageError
from dgemma.model import Gemma
from dgemma.weights.files import listing, read_header
from dgemma.weights.mapped import DTYPES, MappedTensors
from dgemma.weights.names import ENCODER_PREFIX, SELF_CONDITIONING, TEXT_PREFIX, skeleton
from dgemma.weights.save import write_safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
PEFT_PREFIX = "base_model.model."
PAIR_NAME = re.compile(re.escape(PEFT_PREFIX) + r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
NO_TARGETS = {"experts", "gate_up_proj", "embed_tokens", "lm_head"}
NO_TARGET = "the experts' stacked weights and the embedding table take no adapter"

BASE_MODEL = "base_model_name_or_path"
REQUIRED_KEYS = {"peft_type", "r", "lora_alpha", "target_modules"}
IGNORED: dict[str, str] = {
    "auto_mapping": "classes of another library",
    "corda_config": "how the adapter was first drawn (what matters of it is checked)",
    "eva_config": "how the adapter was first drawn (what matters of it is checked)",
    "loftq_config": "how the adapter was first drawn (what matters of it is checked)",
    "lora_ga_config": "how the adapter was first drawn (what matters of it is checked)",
    "ensure_weight_tying": "concerns the embedding table, which takes no adapter",
    "exclude_modules": "the tensor names say which modules there are",
    "layers_pattern": "the tensor names say which layers there are",
    "layers_to_transform": "the tensor names say which layers there are",
    "inference_mode": "whether another library would train it",
    "lora_dropout": "zero at inference",
    "megatron_core": "only read with megatron_config (checked)",
    "qalora_group_size": "only read with use_qalora (checked)",
    "peft_version": "who wrote the file",
    "revision": "of the base model, whose shapes are checked",
    "runtime_config": "how another library would run it",
    "task_type": "the wrapper of another library; the weights are the same",
}
# Each changes what the tensors mean, and must be off; with what it stands for.
UNSUPPORTED: dict[str, str] = {
    "alora_invocation_tokens": "an adapter that waits for certain tokens",
    "alpha_pattern": "another alpha for some modules",
    "arrow_config": "a choice among several adapters",
    "fan_in_fan_out": "transposed weights",
    "kasa_config": "singular values beside A and B",
    "layer_replication": "layers used more than once",
    "lora_bias": "a bias beside B",
    "megatron_config": "weights split over machines",
    "modules_to_save": "whole modules beside the adapter",
    "monteclora_config": "adapters drawn at random",
    "rank_pattern": "another rank for some modules",
    "target_parameters": "experts, which take no adapter",
    "trainable_token_indices": "new rows of the embedding table, which takes no adapter",
    "use_bdlora": "block-diagonal matrices",
    "use_dora": "magnitudes beside A and B",
    "use_qalora": "pooled inputs",
    "velora_config": "projected inputs",
}
OFF: tuple[Any, ...] = (None, False, [], {})
ALLOWED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # The others, such as pissa and loftq, take something out of the base weights first: their
    # adapters do not fit the released ones.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "use_rslora": (False, True, None),
}


class Pair(NamedTuple):
    """The two matrices of one module."""

    a_RI: Tensor
    b_OR: Tensor


Pairs = Mapping[str, Pair]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """Pairs by the name of their module in `Gemma`, all of one rank and number type."""

    family: Family
    rank: int
    alpha: float
    use_rslora: bool = False
    base_model: str | None = None  # the model it is for, as the file says; None: it does not
    pairs: Pairs

    def __post_init__(self) -> None:
        _check_numbers(self.rank, self.alpha)
        if not self.pairs:
            raise CheckpointError("an adapter needs a pair of tensors for at least one module")
        self._check_shapes()
        dtypes = {half.dtype for pair in self.pairs.values() for half in pair}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES.values()):
            raise CheckpointError(
                f"the tensors are {listing(sorted(map(str, dtypes)))}; they must all be one of "
                f"{listing(map(str, DTYPES.values()))}"
            )

    def _check_shapes(self) -> None:
        wrong = [
            f"{name} ({list(a_RI.shape)} and {list(b_OR.shape)})"
            for name, (a_RI, b_OR) in self.pairs.items()
            if a_RI.dim() != 2 or b_OR.dim() != 2 or {len(a_RI), b_OR.shape[1]} != {self.rank}
        ]
        if wrong:
            raise CheckpointError(
                f"A and B must be [{self.rank}, inputs] and [outputs, {self.rank}], which they are "
                f"not in {listing(wrong)}"
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted modules in `Gemma`."""
        return tuple(self.pairs)


class LoRALinear(nn.Module):
    """A linear module and the low-rank term beside it; the base is the module itself, no copy."""

    def __init__(self, base: nn.Linear, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
        super().__init__()
        self.base: nn.Module = base  # no longer an nn.Linear once it is packed
        self.scale = scale
        self.a_RI, self.b_OR = (
            nn.Parameter(half.detach().to(base.weight, copy=True), requires_grad=False)
            for half in (a_RI, b_OR)
        )

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = F.linear(self.scale * F.linear(x, self.a_RI), self.b_OR)
        return self.base(x) + change  # type: ignore[no-any-return]


def attach(model: Gemma, adapter: Adapter) -> Gemma:
    """Put the adapter beside the weights of a model, in place; before packing, if that is done."""
    for name, linear in _linears(model, adapter).items():
        _put(model, name, LoRALinear(linear, *adapter.pairs[name], adapter.scale))
    return model


def detach(model: Gemma) -> Gemma:
    """Give the model its own modules back, in place; without an adapter there is nothing to do."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            _put(model, name, module.base)
    return model


def read_back(model: Gemma, adapter: Adapter) -> Adapter:
    """The adapter with the values it now has in the model, such as training has left them."""
    modules = dict(model.named_modules())
    pairs = {}
    for name in adapter.targets:
        module = modules.get(name)
        if not isinstance(module, LoRALinear):
            raise UsageError(f"the model has no adapter on {name}; attach this one first")
        pairs[name] = Pair(*(half.detach().cpu().clone() for half in (module.a_RI, module.b_OR)))
    return replace(adapter, pairs=pairs)


@torch.no_grad()
def merge(model: Gemma, adapter: Adapter) -> Gemma:
    """Give the adapted modules new weights W + scale * B A, in place; in float32 or better."""
    for name, linear in _linears(model, adapter).items():
        old_OI = linear.weight
        exact_OI = old_OI.to(torch.promote_types(old_OI.dtype, torch.float32))
        a_RI, b_OR = (half.to(exact_OI) for half in adapter.pairs[name])
        new_OI = torch.addmm(exact_OI, b_OR, a_RI, alpha=adapter.scale).to(old_OI.dtype)
        linear.weight = nn.Parameter(new_OI, requires_grad=old_OI.requires_grad)
    return model


def new_adapter(
    model: Gemma, targets: Sequence[str], rank: int, alpha: float, seed: int
) -> Adapter:
    """An adapter that changes nothing yet: A random as PEFT draws it, B zero, both float32.

    A target is the end of a module's name: `q_proj`, `mlp.gate_proj`, `layers.3.router.proj`.
    """
    _check_numbers(rank, alpha)
    generator, pairs = torch.Generator().manual_seed(seed), {}
    for name, linear in _resolve(model.config, targets).items():
        bound = linear.in_features**-0.5
        a_RI = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        pairs[name] = Pair(a_RI, torch.zeros(linear.out_features, rank))
    return Adapter(family=model.config.family, rank=rank, alpha=alpha, pairs=pairs)


def load_adapter(path: Path) -> Adapter:
    """Read the adapter of a directory, or of either of its two files."""
    directory = _find(path)
    try:
        raw, pairs = _read_config(directory / CONFIG), _read_pairs(directory / WEIGHTS)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None
    _check_covered(raw["target_modules"], pairs, directory)
    family, pairs = _one_stack(pairs, directory)
    try:
        return Adapter(
            family=family,
            rank=raw["r"],
            alpha=raw["lora_alpha"],
            use_rslora=bool(raw.get("use_rslora")),
            base_model=raw.get(BASE_MODEL),
            pairs=pairs,
        )
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{directory}: {error}") from None


def save_adapter(adapter: Adapter, directory: Path, *, overwrite: bool = False) -> None:
    """Write the two files, under the names that make PEFT adapt transformers' model alike."""
    there = [name for name in (CONFIG, WEIGHTS) if (directory / name).exists()]
    if there and not overwrite:
        raise UsageError(
            f"{directory} already holds an adapter ({listing(there)}); allow overwriting it or "
            "choose another directory"
        )
    stored = {
        module: pair
        for name, pair in sorted(adapter.pairs.items())
        for module in _stored_modules(adapter.family, name)
    }
    tensors = {
        f"{PEFT_PREFIX}{module}.lora_{half}.weight": tensor
        for module, pair in stored.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    text = json.dumps(_config_to_json(adapter, list(stored)), indent=2, sort_keys=True) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as place:
            write_safetensors(Path(place, WEIGHTS), tensors, next(iter(tensors.values())).dtype)
            Path(place, CONFIG).write_text(text, encoding="utf-8")
            # An old config beside new tensors must never look whole.
            (directory / CONFIG).unlink(missing_ok=True)
            for name in (WEIGHTS, CONFIG):
                os.replace(Path(place, name), directory / name)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {directory}: {error.strerror}; check its free space and permissions"
        ) from None


def _put(model: Gemma, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _linears(model: Gemma, adapter: Adapter) -> dict[str, nn.Linear]:
    """The modules an adapter is for, once all of them fit."""
    modules = dict(model.named_modules())
    if any(isinstance(module, LoRALinear) for module in modules.values()):
        raise UsageError("the model already has an adapter; detach it first")
    if adapter.family != model.config.family:
        raise CheckpointError(
            f"the adapter is for a {adapter.family}, but the model is a {model.config.family}"
        )
    missing = [name for name in adapter.targets if name not in modules]
    if missing:
        raise CheckpointError(
            f"the adapter is for {listing(missing)}, which the model does not have; it belongs to "
            "a model of another shape"
        )
    linears = {name: m for name in adapter.targets if isinstance(m := modules[name], nn.Linear)}
    others = sorted(adapter.pairs.keys() - linears.keys())
    if others:
        raise UsageError(
            f"{listing(others)} cannot be adapted: only plain linear modules can, before they are "
            f"packed or quantized; {NO_TARGET}"
        )
    _check_fit(linears, adapter)
    return linears


def _check_fit(linears: Mapping[str, nn.Linear], adapter: Adapter) -> None:
    changes = {name: (len(p.b_OR), p.a_RI.shape[1]) for name, p in adapter.pairs.items()}
    wrong = [
        f"{name} ({list(changes[name])}, not {list(linear.weight.shape)})"
        for name, linear in linears.items()
        if changes[name] != tuple(linear.weight.shape)
    ]
    if wrong:
        raise CheckpointError(f"the adapter changes weights of other shapes: {listing(wrong)}")


def _resolve(config: ModelConfig, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear modules, without storage, whose names end in one of the targets."""
    linears = {n: m for n, m in skeleton(config).named_modules() if isinstance(m, nn.Linear)}
    for target in targets:
        if not any(_ends_in(name, target) for name in linears):
            allowed = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", name) for name in linears)
            reason = f": {NO_TARGET}" if NO_TARGETS & set(target.split(".")) else ""
            raise UsageError(
                f"{target!r} is no target{reason}; targets are {', '.join(allowed)}, the ends of "
                "these names, or one layer's, such as layers.0.mlp.up_proj"
            )
    return {n: m for n, m in linears.items() if any(_ends_in(n, target) for target in targets)}


def _ends_in(name: str, target: str) -> bool:
    """Whether a target means a module: by its whole name, or by the end of it at a dot."""
    return f".{name}".endswith(f".{target}")


def _check_numbers(rank: Any, alpha: Any) -> None:
    if type(rank) is not int or rank <= 0:
        raise ConfigError(f"the rank (r) must be a positive whole number, not {rank!r}")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise ConfigError(f"alpha (lora_alpha) must be a positive number, not {alpha!r}")


def _find(path: Path) -> Path:
    """The directory of an adapter, both of its files there."""
    directory = path.parent if path.name in (CONFIG, WEIGHTS) else path
    missing = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        pickled = f" ({PICKLED} is not read)" if (directory / PICKLED).exists() else ""
        raise CheckpointError(
            f"{path} is not an adapter, that is, a directory with {CONFIG} and {WEIGHTS} or the "
            f"path of either: it lacks {' and '.join(missing)}{pickled}"
        )
    return directory


def _read_config(path: Path) -> dict[str, Any]:
    """The config of an adapter, once this build is sure to do all that it asks for."""
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its JSON cannot be read ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(raw).__name__}")
    # Before the other keys: those of another method would all be unknown.
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {raw.get('peft_type')!r}; this build reads 'LORA'")
    known = REQUIRED_KEYS | IGNORED.keys() | UNSUPPORTED.keys() | ALLOWED.keys() | {BASE_MODEL}
    unknown = raw.keys() - known
    if unknown:
        raise ConfigError(
            f"{path}: this build does not know {', '.join(sorted(unknown))}; the adapter may need "
            "a newer dgemma"
        )
    missing = REQUIRED_KEYS - raw.keys()
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}")
    _check_values(raw, path)
    return raw


def _check_values(raw: Mapping[str, Any], path: Path) -> None:
    for key, what in UNSUPPORTED.items():
        if raw.get(key) not in OFF:
            raise ConfigError(
                f"{path}: {key} is {raw[key]!r}, that is, {what}; this build needs it off"
            )
    for key, values in ALLOWED.items():
        if key in raw and raw[key] not in values:
            allowed = " or ".join(map(repr, values))
            raise ConfigError(f"{path}: {key} is {raw[key]!r}; this build reads {allowed}")
    if not isinstance(raw.get(BASE_MODEL), str | None):
        raise ConfigError(f"{path}: {BASE_MODEL} must be a name, not {raw[BASE_MODEL]!r}")
    targets = raw["target_modules"]
    is_list = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not is_list and not isinstance(targets, str):
        raise ConfigError(
            f"{path}: target_modules must be a list of names or a pattern, not {targets!r}"
        )


def _read_pairs(path: Path) -> dict[str, Pair]:
    """The pairs of a file by their stored module."""
    stored = read_header(path)
    no_targets = [name for name in stored if NO_TARGETS & set(name.split("."))]
    if no_targets:
        raise CheckpointError(f"{path} holds {listing(no_targets)}, but {NO_TARGET}")
    unknown = [name for name in stored if not PAIR_NAME.fullmatch(name)]
    if unknown:
        raise CheckpointError(
            f"{path} holds the unknown {listing(unknown)}; an adapter's tensors are named "
            f"{PEFT_PREFIX}MODULE.lora_A.weight and lora_B.weight"
        )
    tensors, halves = MappedTensors(stored), dict[str, dict[str, Tensor]]()
    for match in filter(None, map(PAIR_NAME.fullmatch, stored)):
        tensor = tensors[match[0]].clone()  # a file may change under a view of it
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {match[0]} holds NaN or infinity")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    lone = [f"lora_{half} of {name}" for name, h in halves.items() if len(h) == 1 for half in h]
    if lone:
        raise CheckpointError(f"{path} holds only {listing(lone)}; A and B come in pairs")
    return {name: Pair(a_RI=h["A"], b_OR=h["B"]) for name, h in halves.items()}


def _check_covered(targets: list[str] | str, pairs: Pairs, directory: Path) -> None:
    """PEFT leaves out, without a word, tensors that its list of targets does not cover."""
    # A pattern is the writer's own and could take for ever to match: the tensor names count.
    if isinstance(targets, str):
        return
    stray = [name for name in pairs if not any(_ends_in(name, target) for target in targets)]
    if stray:
        raise CheckpointError(
            f"{directory}: {WEIGHTS} holds {listing(stray)}, which target_modules in {CONFIG} "
            "does not name"
        )


def _one_stack(pairs: Pairs, directory: Path) -> tuple[Family, dict[str, Pair]]:
    """The family an adapter is for, and its pairs by their module in `Gemma`."""
    prefixes = (*TEXT_PREFIX.values(), ENCODER_PREFIX)
    stray = [name for name in pairs if not name.startswith(prefixes)]
    if stray:
        raise CheckpointError(
            f"{directory} adapts {listing(stray)}; only what begins with {', '.join(prefixes)} can "
            "be adapted"
        )
    stacks = {
        prefix: {n.removeprefix(prefix): p for n, p in pairs.items() if n.startswith(prefix)}
        for prefix in prefixes
    }
    encoder = stacks[ENCODER_PREFIX]
    families = [family for family, prefix in TEXT_PREFIX.items() if stacks[prefix]]
    if len(families) > 1 or (encoder and "gemma4" in families):
        used = [prefix for prefix, stack in stacks.items() if stack]
        raise CheckpointError(f"{directory} mixes two models: {' and '.join(used)}")
    family: Family = families[0] if families else "diffusion_gemma"
    stack = stacks[TEXT_PREFIX[family]]
    if encoder:
        _check_encoder(encoder, stack, directory)
    return family, stack


def _check_encoder(encoder: Pairs, decoder: Pairs, directory: Path) -> None:
    """The encoder's pairs must be those of the decoder, each of them."""
    layers = {name for name in decoder if not name.startswith(SELF_CONDITIONING)}
    differing = sorted(encoder.keys() ^ layers) + [
        name
        for name in sorted(encoder.keys() & layers)
        if not all(map(_are_same, encoder[name], decoder[name]))
    ]
    if differing:
        raise CheckpointError(
            f"{directory} adapts encoder and decoder differently in {listing(differing)}; here one "
            "stack serves as both, so train one adapter for the two"
        )


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _stored_modules(family: Family, name: str) -> list[str]:
    """Where the reference has this module: in both of its stacks, unless it is of the canvas."""
    modules = [TEXT_PREFIX[family] + name]
    if family == "diffusion_gemma" and not name.startswith(SELF_CONDITIONING):
        modules.append(ENCODER_PREFIX + name)
    return modules


def _config_to_json(adapter: Adapter, modules: list[str]) -> dict[str, Any]:
    return {
        BASE_MODEL: adapter.base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        # In full: `q_proj` alone would also mean the image tower's.
        "target_modules": modules,
        "task_type": None,
        "use_dora": False,
        "use_rslora": adapter.use_rslora,
    }
