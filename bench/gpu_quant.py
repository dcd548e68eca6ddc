"""From disk to a GPU in every form: seconds, memory, and how far answers move; random weights.

    python bench/gpu_quant.py [--layers 2] [--vocab 32768] [--place DIR] [--device cuda]

A checkpoint of the released widths with few layers is written, and once more in each of the two
released layouts; each is loaded in the forms it can have. `peak` is the most memory while loading,
`held` what remains, both in bytes of the device; `whole` is one layer in bfloat16, which `peak` may
exceed `held` by. Answers are compared with those of bfloat16 for plain files, and with those of the
same numbers multiplied out for packed ones: there nothing but the activations' rounding may differ.
"""

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from dgemma.config import FULL, SLIDING, ModelConfig
from dgemma.model import Gemma
from dgemma.roofline.table import RELEASED
from dgemma.weights.agreement import agreement
from dgemma.weights.layouts import SCHEMES
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.packed import Quant
from dgemma.weights.quantize import quantize_checkpoint
from dgemma.weights.random import random_model
from dgemma.weights.save import save_checkpoint

CASES: dict[str, tuple[Quant, ...]] = {
    "plain": ("none", "fp8", "nvfp4"),
    "fp8": ("none", "own"),
    "nvfp4": ("none", "own", "nvfp4"),
}


def shape(arguments: argparse.Namespace) -> ModelConfig:
    kinds = (SLIDING,) * (arguments.layers - 1) + (FULL,)
    config = replace(RELEASED, layer_types=kinds, vocab_size=arguments.vocab)
    if arguments.small:
        config = replace(config, hidden_size=128, moe_intermediate_size=64, num_experts=16)
    return config


def write(config: ModelConfig, place: Path, device: torch.device) -> dict[str, Path]:
    model = random_model(config, 0, device=device, dtype=torch.bfloat16).cpu()
    save_checkpoint(Checkpoint(model=model), place / "plain")
    for name, scheme in SCHEMES.items():
        quantize_checkpoint(place / "plain", place / name, scheme)
    return {name: place / name for name in CASES}


def load(directory: Path, quant: Quant, device: torch.device) -> tuple[Gemma, str]:
    """The model, with seconds and memory in words."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    model = load_model(directory, device=device, dtype=torch.bfloat16, quant=quant).model
    if not is_gpu:
        return model, f"{time.perf_counter() - begin:6.2f} s"
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() - before
    held = torch.cuda.memory_allocated() - before
    return model, f"{seconds:6.2f} s, peak {peak / 1e9:.3f}, held {held / 1e9:.3f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--small", action="store_true", help="narrow, to try it on a CPU")
    parser.add_argument("--place", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    config, device = shape(arguments), torch.device(arguments.device)
    place = Path(tempfile.mkdtemp(dir=arguments.place))
    try:
        begin = time.perf_counter()
        paths = write(config, place, device)
        print(f"written in {time.perf_counter() - begin:.1f} s", flush=True)
        width, inner = config.hidden_size, config.moe_intermediate_size
        print(f"whole {6 * config.num_experts * width * inner / 1e9:.3f} GB of experts a layer")
        for name, quants in CASES.items():
            reference, told = load(paths[name], quants[0], device)
            print(f"{name:6} {quants[0]:6} {told}", flush=True)
            for quant in quants[1:]:
                try:
                    model, told = load(paths[name], quant, device)
                    near = agreement(reference, model, 0, device)
                    moved = f"KL {near.kl:.1e}, worst {near.worst_kl:.1e}, same {near.top_1:.3f}"
                except Exception as error:  # one form that fails must not hide the others
                    told, moved = type(error).__name__, str(error).splitlines()[0][:120]
                print(f"{name:6} {quant:6} {told}: {moved}", flush=True)
                model = None  # type: ignore[assignment]
            del reference
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
