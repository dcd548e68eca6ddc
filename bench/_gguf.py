"""`quant.py gguf`: a GGUF file of the released size is loaded, steps and draws a token.

On a CPU wall time is that of a machine as busy as it is; CPU time counts all threads and does not
depend on it. Resident memory includes pages of the file, which the system may drop.

On a GPU the experts are repacked (`_gguf_gpu.py`): a step and an AR token beside NVFP4 in the same
run, errors and times of each kernel, and streaming within 16 and 12 GB. A part that fails prints
its traceback, and the others run.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from _gguf_gpu import PARTS, measure_gpu
from common import ATTENTION_SCALE, EXAMPLE, RELEASED, Facts, finish, head, new_state
from torch import Tensor

from dgemma.backends.base import ForwardInput, TokenDraw, prefill
from dgemma.backends.reference import ReferenceBackend
from dgemma.config import GenerationConfig, ModelConfig
from dgemma.model.kv_cache import Capacity, KVCache
from dgemma.quant.gguf_encode import encode
from dgemma.weights.gguf_checkpoint import open_gguf
from dgemma.weights.gguf_tokenizer import BYTE, CONTROL, NORMAL, TokenizerKeys
from dgemma.weights.gguf_write import (
    FILE_TYPES,
    gguf_metadata,
    gguf_shapes,
    header_bytes,
    rope_freqs,
    tensor_types,
)
from dgemma.weights.hub import ModelOptions
from dgemma.weights.inference import load_for_inference
from dgemma.weights.names import ROPE_FREQS, TOKEN_EMBD

FILE_TYPE = "Q4_K_M"
PROMPT, REPEATED_ROWS = 32, 2048
WRITERS = 8
CONTROL_PIECES = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")


def plain_pieces(count: int) -> TokenizerKeys:
    """Make a vocabulary of a size: control tokens, bytes, and pieces without meaning."""
    pieces = [*CONTROL_PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [CONTROL] * len(CONTROL_PIECES) + [BYTE] * 256
    more = count - len(pieces)
    return TokenizerKeys(
        [*pieces, *(f"p{i}" for i in range(more))], types + [NORMAL] * more, [], None
    )


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw a tensor, or for a stack and the token table the rows that are repeated."""
    generator = torch.Generator().manual_seed(prod(shape))
    if len(shape) == 1:
        is_scale = name.endswith("output_scale.weight")
        values = (
            torch.ones(shape) if is_scale else 1 + 0.1 * torch.randn(shape, generator=generator)
        )
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return values * shape[0] ** -0.25
        # For even routing, as in `common.build`.
        return values * (ATTENTION_SCALE if name.endswith("post_attention_norm.weight") else 1)
    rows = min(shape[-2], REPEATED_ROWS) if name == TOKEN_EMBD else shape[-2]
    gain = 1.0 if name.endswith("ffn_gate_inp.weight") else shape[-1] ** -0.5
    return gain * torch.randn(rows, shape[-1], generator=generator)


def make(path: Path, config: ModelConfig, device: torch.device) -> None:
    """Write a file of random blocks, quantized on a device; layers and experts repeat them.

    Threads write, since a copy into the page cache takes longer than all else.
    """
    shapes = gguf_shapes(config)
    types = tensor_types(shapes, FILE_TYPE)
    words = plain_pieces(config.vocab_size)
    metadata = gguf_metadata(config, GenerationConfig(), words, "random", FILE_TYPES[FILE_TYPE])
    blocks: dict[tuple[object, ...], bytes] = {}
    header = header_bytes(metadata, shapes, types)
    with path.open("wb") as file, ThreadPoolExecutor(WRITERS) as pool:
        file.write(header)
        file.flush()
        start, writes = len(header), []
        for name, shape in shapes.items():
            key = (name.split(".")[-2:], shape, types[name].name)
            known = blocks.setdefault(tuple(map(str, key)), b"")
            if not known:
                tensor = rope_freqs(config) if name == ROPE_FREQS else draw(name, shape)
                known = encode(tensor.to(device), types[name]).cpu().numpy().tobytes()
                blocks[tuple(map(str, key))] = known
            size = types[name].row_bytes(prod(shape))
            starts = range(start, start + size, len(known))
            writes += [pool.submit(os.pwrite, file.fileno(), known, at) for at in starts]
            start += -(-size // 32) * 32
        file.truncate(start)
        assert sum(done.result() for done in writes) == sum(
            types[name].row_bytes(prod(shape)) for name, shape in shapes.items()
        )


def memory(key: str) -> float:
    """Return a line of this process's status, in GB."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1e6


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Return wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }


def measure(path: Path, dtype: str) -> Facts:
    facts: Facts = {"file_gb": path.stat().st_size / 1e9, "open": timed(lambda: open_gguf(path))}
    print(f"open {facts['open']}", flush=True)
    options = ModelOptions(device="cpu", dtype=dtype)
    models = []
    facts["load"] = timed(lambda: models.append(load_for_inference(path, options).model))
    print(f"load {facts['load']}", flush=True)
    model = models[0]
    backend, weight = ReferenceBackend(model), model.embed_tokens.weight
    capacity = Capacity(tokens=PROMPT + model.config.canvas_length + 8)
    cache = KVCache(model.config, capacity, weight.dtype, weight.device)
    facts["prefill"] = timed(lambda: prefill(backend, cache, torch.arange(PROMPT), PROMPT))
    print(f"prefill of {PROMPT} tokens {facts['prefill']}", flush=True)
    state = new_state(model)
    facts["step"] = timed(lambda: backend.run([ForwardInput(cache=cache, state=state)]))
    print(f"step {facts['step']}", flush=True)
    token = ForwardInput(cache=cache, tokens=(5,), draw=TokenDraw())
    facts["token"] = timed(lambda: backend.run([token]))
    print(f"token {facts['token']}", flush=True)
    keys = {"peak_gb": "VmHWM", "resident_gb": "VmRSS", "anonymous_gb": "RssAnon"}
    return facts | {name: memory(key) for name, key in keys.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)
    parser.add_argument("--make", action="store_true", help="write the file first")
    parser.add_argument("--tiny", action="store_true", help="of the example's shapes")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts on a GPU")


def measure_file(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    config = replace(EXAMPLE if options.tiny else RELEASED, vision=None, media_ids={})
    facts = head("gguf", device) | {"dtype": options.dtype}
    if options.make:
        facts["make"] = timed(lambda: make(options.file, config, device))
        print(f"make {facts['make']}", flush=True)
    if device.type == "cuda":
        finish(facts | measure_gpu(options.file, config, options.only))
        return
    facts |= measure(options.file, options.dtype)
    print(f"memory: peak {facts['peak_gb']:.2f} GB, file {facts['file_gb']:.2f} GB")
    finish(facts)
