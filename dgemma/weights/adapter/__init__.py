"""LoRA adapters: a low-rank change beside weights that stay as they are, in the files PEFT writes.

    y = W x + scale * B (A x)         scale = alpha / rank; with rsLoRA, alpha / sqrt(rank)

Experts and the embedding table take no adapter. Knows no training, packing or quantization.
"""

from dgemma.weights.adapter.files import load_adapter, save_adapter
from dgemma.weights.adapter.modules import attach, detach, merge, new_adapter, read_back
from dgemma.weights.adapter.pairs import Adapter, Pair

__all__ = [
    "Adapter",
    "Pair",
    "attach",
    "detach",
    "load_adapter",
    "merge",
    "new_adapter",
    "read_back",
    "save_adapter",
]
