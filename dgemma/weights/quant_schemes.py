"""The two released quantization schemes: tensor names, dtypes, shapes and config entries.

    nvfp4  NVIDIA's, by modelopt: experts in four bits, all else as it was
           X.weight U8 [O, I / 2], X.weight_scale F8_E4M3 [O, I / 16],
           X.weight_scale_2 F32 [], X.input_scale F32 []
    fp8    RedHatAI's, by compressed-tensors: experts, attention and dense MLP in eight bits
           X.weight F8_E4M3 [O, I], X.weight_scale [O, 1]

Both split the experts: `experts.7.gate_proj`, `up_proj` and `down_proj` are slices of
`experts.gate_up_proj` and `experts.down_proj`. Entries for activations and KV cache are ignored:
here both stay in 16 bits. Imports only the standard library.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dgemma.config.strict_json import read_json
from dgemma.errors import ConfigError
from dgemma.quant.nvfp4 import GROUP
from dgemma.weights.files import TensorShape

SchemeName = Literal["nvfp4", "fp8"]

CONFIG_KEY = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"
EXPERT_PARTS = ("gate", "up", "down")
STACKED = re.compile(r"(?P<prefix>.+\.experts)\.(?P<stack>gate_up|down)_proj")
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
class PackedSpec:
    """Dtype and shape of a stored tensor; several dtypes if writers differ."""

    dtypes: tuple[str, ...]
    shape: TensorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """One scheme: the dtype of a packed weight, and the tensors of its module."""

    name: SchemeName
    packed: str
    item_bytes: Mapping[str, int]  # additional dtypes in its files

    def is_packed(self, module: str) -> bool:
        """True if this module is packed, by its name without `.weight`."""
        is_expert = ONE_EXPERT.fullmatch(module) is not None
        return is_expert or (self.name == "fp8" and DENSE.fullmatch(module) is not None)

    def tensors(self, shape: TensorShape) -> dict[str, PackedSpec]:
        """Return all tensors of a packed matrix, by their suffix."""
        rows, columns = shape
        if self.name == "fp8":
            return {
                ".weight": PackedSpec(dtypes=("F8_E4M3",), shape=shape),
                ".weight_scale": PackedSpec(dtypes=("BF16", "F16", "F32"), shape=(rows, 1)),
            }
        return {
            ".weight": PackedSpec(dtypes=("U8",), shape=(rows, columns // 2)),
            ".weight_scale": PackedSpec(dtypes=("F8_E4M3",), shape=(rows, columns // GROUP)),
            ".weight_scale_2": PackedSpec(dtypes=("F32",), shape=()),
            ".input_scale": PackedSpec(dtypes=("F32",), shape=()),
        }

    def unpacked_shape(self, stored: TensorShape) -> TensorShape:
        """Return the shape of a matrix by the shape of its packed values."""
        return stored if self.name == "fp8" else (stored[0], 2 * stored[1])


NVFP4 = QuantScheme(name="nvfp4", packed="U8", item_bytes={"U8": 1, "F8_E4M3": 1})
FP8 = QuantScheme(name="fp8", packed="F8_E4M3", item_bytes={"F8_E4M3": 1})
SCHEMES: dict[str, QuantScheme] = {"nvfp4": NVFP4, "fp8": FP8}


def expert_slices(name: str, shape: TensorShape) -> dict[str, TensorShape]:
    """Return the modules that stacked experts are split into, in order, or nothing.

    Gate rows come first in the stack.
    """
    match = STACKED.fullmatch(name)
    if match is None:
        return {}
    count, rows, columns = shape
    parts = {"gate_up": ("gate", "up"), "down": ("down",)}[match["stack"]]
    return {
        f"{match['prefix']}.{expert}.{part}_proj": (rows // len(parts), columns)
        for expert in range(count)
        for part in parts
    }


def read_scheme(directory: Path) -> QuantScheme | None:
    """Return the scheme declared by a checkpoint; None: plain weights."""
    if directory.is_file():  # GGUF: types are in the file
        return None
    source = directory / "config.json"
    declared = read_json(source).get(CONFIG_KEY)
    older = directory / MODELOPT_FILE
    if declared is None and older.is_file():
        source = older
        raw = read_json(older)
        declared = {"quant_method": "modelopt", **_object(raw.get("quantization"), str(source))}
    if declared is None:
        return None
    return _scheme(_object(declared, f"{source}: {CONFIG_KEY}"), f"{source}: {CONFIG_KEY}")


def scheme_to_json(scheme: QuantScheme, ignored: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` in the format of other readers."""
    if scheme.name == "fp8":
        activations = {**FP8_WEIGHTS, "strategy": "token", "dynamic": True}
        group: dict[str, Any] = {"weights": FP8_WEIGHTS, "input_activations": activations}
        declared: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
        }
        declared |= {"quantization_status": "compressed", "kv_cache_scheme": None}
    else:
        group = {"weights": NVFP4_WEIGHTS, "input_activations": NVFP4_WEIGHTS}
        declared = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        declared["producer"] = {"name": "dgemma", "version": "1"}
    groups = {"group_0": {"targets": ["Linear"], **group}}
    return declared | {"config_groups": groups, "ignore": ignored}


def modelopt_file(ignored: list[str]) -> dict[str, Any]:
    """Return the file by which some readers recognize modelopt checkpoints."""
    return {
        "producer": {"name": "dgemma", "version": "1"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": GROUP,
            "exclude_modules": ignored,
        },
    }


def _scheme(declared: Mapping[str, Any], source: str) -> QuantScheme:
    method = declared.get("quant_method")
    if method == "modelopt":
        _refuse_unknown(declared, MODELOPT_KEYS, source)
        if declared.get("quant_algo") != "NVFP4" or declared.get("group_size", GROUP) != GROUP:
            raise ConfigError(
                f"{source}: quant_algo is {declared.get('quant_algo')!r} with groups of "
                f"{declared.get('group_size', GROUP)}; of modelopt's this build reads NVFP4 in "
                f"groups of {GROUP}"
            )
        _check_groups(declared, NVFP4_WEIGHTS, source)
        return NVFP4
    if method == "compressed-tensors":
        _refuse_unknown(declared, COMPRESSED_KEYS, source)
        if declared.get("format") != "float-quantized":
            raise ConfigError(
                f"{source}: format is {declared.get('format')!r}; of compressed-tensors' this "
                "build reads 'float-quantized'"
            )
        changed = [key for key in ("sparsity_config", "transform_config") if declared.get(key)]
        if changed:
            raise ConfigError(f"{source}: {', '.join(changed)} is set, which this build lacks")
        if not declared.get("config_groups"):
            raise ConfigError(f"{source}: config_groups is missing")
        _check_groups(declared, FP8_WEIGHTS, source)
        return FP8
    raise ConfigError(
        f"{source}: quant_method is {method!r}; this build reads 'modelopt' (NVFP4) and "
        "'compressed-tensors' (float-quantized)"
    )


def _check_groups(declared: Mapping[str, Any], known: Mapping[str, Any], source: str) -> None:
    for name, group in _object(declared.get("config_groups") or {}, source).items():
        weights = _object(_object(group, source).get("weights"), f"{source}: {name}.weights")
        # Missing keys mean the writer's default, which is this scheme.
        wrong = {key: weights[key] for key in known if weights.get(key, known[key]) != known[key]}
        if wrong:
            need = {key: known[key] for key in wrong}
            raise ConfigError(f"{source}: {name}.weights has {wrong}; this build reads {need}")


def _refuse_unknown(declared: Mapping[str, Any], known: frozenset[str], source: str) -> None:
    unknown = sorted(declared.keys() - known)
    if unknown:
        raise ConfigError(f"{source}: this build does not know {', '.join(unknown)}")


def _object(value: Any, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{source} must be an object, not a {type(value).__name__}")
    return value
