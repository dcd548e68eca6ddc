"""The two released ways to store weights in fewer bits: names, types, shapes, and what says so.

    nvfp4  NVIDIA's, by modelopt: experts in four bits, all else as it was
           X.weight U8 [O, I / 2], X.weight_scale F8_E4M3 [O, I / 16],
           X.weight_scale_2 F32 [], X.input_scale F32 []
    fp8    RedHatAI's, by compressed-tensors: experts, attention and dense MLP in eight bits
           X.weight F8_E4M3 [O, I], X.weight_scale [O, 1]

Both split the experts: `experts.7.gate_proj`, `up_proj` and `down_proj` stand for a slice of
`experts.gate_up_proj` and `experts.down_proj`. What a file says of activations or of the cache is
left alone: here both stay in 16 bits. Standard library only; knows names, opens no weights.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dgemma.errors import CheckpointError, ConfigError

SchemeName = Literal["nvfp4", "fp8"]
Shape = tuple[int, ...]

CONFIG_KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
GROUP = 16
PARTS = ("gate", "up", "down")
STACKED = re.compile(r"(?P<prefix>.+\.experts)\.(?P<kind>gate_up|down)_proj")
ONE_EXPERT = re.compile(r"(?P<prefix>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj")
DENSE = re.compile(r".+\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj")

MODELOPT_KEYS = frozenset(
    """quant_method quant_algo group_size config_groups ignore exclude_modules kv_cache_scheme
    kv_cache_quant_algo producer""".split()
)
COMPRESSED_KEYS = frozenset(
    """quant_method format quantization_status global_compression_ratio kv_cache_scheme ignore
    config_groups version sparsity_config transform_config""".split()
)
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": GROUP, "dynamic": False}
FP8_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor as a layout wants it; several types where writers differ."""

    types: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One layout: the type that marks a packed weight, and what has to stand beside it."""

    name: SchemeName
    packed: str
    item_bytes: Mapping[str, int]  # of the types its files may hold beside 16 and 32 bits

    def is_packed(self, module: str) -> bool:
        """Whether writers pack this module; named without its `.weight`."""
        is_expert = ONE_EXPERT.fullmatch(module) is not None
        return is_expert or (self.name == "fp8" and DENSE.fullmatch(module) is not None)

    def beside(self, shape: Shape) -> dict[str, Stored]:
        """All tensors of a packed matrix, by what follows the module's name."""
        rows, columns = shape
        if self.name == "fp8":
            return {
                ".weight": Stored(types=("F8_E4M3",), shape=shape),
                ".weight_scale": Stored(types=("BF16", "F16", "F32"), shape=(rows, 1)),
            }
        return {
            ".weight": Stored(types=("U8",), shape=(rows, columns // 2)),
            ".weight_scale": Stored(types=("F8_E4M3",), shape=(rows, columns // GROUP)),
            ".weight_scale_2": Stored(types=("F32",), shape=()),
            ".input_scale": Stored(types=("F32",), shape=()),
        }

    def matrix(self, stored: Shape) -> Shape:
        """The shape of a matrix whose packed numbers have this one."""
        return stored if self.name == "fp8" else (stored[0], 2 * stored[1])


NVFP4 = Scheme(name="nvfp4", packed="U8", item_bytes={"U8": 1, "F8_E4M3": 1})
FP8 = Scheme(name="fp8", packed="F8_E4M3", item_bytes={"F8_E4M3": 1})
SCHEMES: dict[str, Scheme] = {"nvfp4": NVFP4, "fp8": FP8}


def expert_slices(name: str, shape: Shape) -> dict[str, Shape]:
    """The modules a tensor of stacked experts is split into, in their order; none: it is not one.

    Gate rows come first in the stack.
    """
    found = STACKED.fullmatch(name)
    if found is None:
        return {}
    count, rows, columns = shape
    kinds = {"gate_up": ("gate", "up"), "down": ("down",)}[found["kind"]]
    return {
        f"{found['prefix']}.{expert}.{kind}_proj": (rows // len(kinds), columns)
        for expert in range(count)
        for kind in kinds
    }


def read_scheme(directory: Path) -> Scheme | None:
    """How a checkpoint says its weights are stored; None: as plain numbers."""
    source = directory / "config.json"
    said = _read(source).get(CONFIG_KEY)
    older = directory / MODELOPT_FILE
    if said is None and older.is_file():
        source = older
        raw = _read(older)
        said = {"quant_method": "modelopt", **_object(raw.get("quantization"), str(source))}
    if said is None:
        return None
    return _scheme(_object(said, f"{source}: {CONFIG_KEY}"), f"{source}: {CONFIG_KEY}")


def scheme_to_json(scheme: Scheme, ignored: list[str]) -> dict[str, Any]:
    """What `config.json` says of the layout, for other readers as well."""
    if scheme.name == "fp8":
        activations = {**FP8_WEIGHTS, "strategy": "token", "dynamic": True}
        group: dict[str, Any] = {"weights": FP8_WEIGHTS, "input_activations": activations}
        said: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        said |= {"quantization_status": "compressed", "kv_cache_scheme": None}
    else:
        group = {"weights": NVFP4_WEIGHTS, "input_activations": NVFP4_WEIGHTS}
        said = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        said["producer"] = {"name": "dgemma", "version": "1"}
    groups = {"group_0": {"targets": ["Linear"], **group}}
    return said | {"config_groups": groups, "ignore": ignored}


def modelopt_file(ignored: list[str]) -> dict[str, Any]:
    """The file by which some readers know a checkpoint of modelopt."""
    return {
        "producer": {"name": "dgemma", "version": "1"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": GROUP,
            "exclude_modules": ignored,
        },
    }


def _scheme(said: Mapping[str, Any], source: str) -> Scheme:
    method = said.get("quant_method")
    if method == "modelopt":
        _refuse_unknown(said, MODELOPT_KEYS, source)
        if said.get("quant_algo") != "NVFP4" or said.get("group_size", GROUP) != GROUP:
            raise ConfigError(
                f"{source}: quant_algo is {said.get('quant_algo')!r} with groups of "
                f"{said.get('group_size', GROUP)}; of modelopt's this build reads NVFP4 in groups "
                f"of {GROUP}"
            )
        _check_groups(said, NVFP4_WEIGHTS, source)
        return NVFP4
    if method == "compressed-tensors":
        _refuse_unknown(said, COMPRESSED_KEYS, source)
        if said.get("format") != "float-quantized":
            raise ConfigError(
                f"{source}: format is {said.get('format')!r}; of compressed-tensors' this build "
                "reads 'float-quantized'"
            )
        changed = [key for key in ("sparsity_config", "transform_config") if said.get(key)]
        if changed:
            raise ConfigError(f"{source}: {', '.join(changed)} is set, which this build lacks")
        if not said.get("config_groups"):
            raise ConfigError(f"{source}: config_groups is missing")
        _check_groups(said, FP8_WEIGHTS, source)
        return FP8
    raise ConfigError(
        f"{source}: quant_method is {method!r}; this build reads 'modelopt' (NVFP4) and "
        "'compressed-tensors' (float-quantized)"
    )


def _check_groups(said: Mapping[str, Any], wanted: Mapping[str, Any], source: str) -> None:
    for name, group in _object(said.get("config_groups") or {}, source).items():
        weights = _object(_object(group, source).get("weights"), f"{source}: {name}.weights")
        # What is not said is the default of its writer, which is the layout meant here.
        wrong = {
            key: weights[key] for key in wanted if weights.get(key, wanted[key]) != wanted[key]
        }
        if wrong:
            need = {key: wanted[key] for key in wrong}
            raise ConfigError(f"{source}: {name}.weights has {wrong}; this build reads {need}")


def _refuse_unknown(said: Mapping[str, Any], known: frozenset[str], source: str) -> None:
    unknown = sorted(said.keys() - known)
    if unknown:
        raise ConfigError(f"{source}: this build does not know {', '.join(unknown)}")


def _object(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{source} must be an object, not a {type(value).__name__}")
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
