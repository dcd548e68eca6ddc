"""Attention of a training step by FlexAttention at several block sizes, forward and backward.

    PYTHONPATH=. python bench/train_attention.py [--sequences 64] [--rows 2048]

One layer of each kind at the shapes of the built-in model, on batches of the lengths it is trained
on. Printed: milliseconds, and TFLOP/s counted over the pairs that see each other.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

from dgemma.train.context import Batch, rule

sys.path.insert(0, str(Path(__file__).parent))
from train_step import NANO, dense_pairs, mixture

KERNEL = {"BLOCK_M": 64, "BLOCK_N": 64}  # of the forward


def backward(m1: int, n1: int, warps: int = 4, stages: int = 2) -> dict[str, int]:
    """Tiles of the two halves of the backward: of the keys' gradient, and of the queries'."""
    own = {"BLOCK_M1": m1, "BLOCK_N1": n1, "BLOCK_M2": n1, "BLOCK_N2": m1}
    own |= {"num_warps": warps, "num_stages": stages}
    return KERNEL | {f"bwd_{name}": value for name, value in own.items()}


SIZES = {  # rows of a mask block, and what the kernels are told
    "default": (128, {}),
    "kernel 64": (128, KERNEL),
    "backward 32 x 64": (128, backward(32, 64)),
    "backward 64 x 64": (128, backward(64, 64)),
    "backward 64 x 64, 3 stages": (128, backward(64, 64, stages=3)),
    "backward 32 x 128": (128, backward(32, 128)),
    "backward 64 x 128": (128, backward(64, 128)),
    "backward 64 x 128, 8 warps": (128, backward(64, 128, warps=8)),
    "backward 128 x 128, 8 warps": (128, backward(128, 128, warps=8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2048)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    batch = Batch.of(torch.from_numpy(mixture(args).batch(0)), "cuda")
    heads, width = NANO.num_attention_heads, NANO.head_dim
    shape = (args.sequences, args.rows)
    q, k, v = (
        torch.randn(
            *shape, n, width, dtype=torch.bfloat16, device="cuda", requires_grad=True
        ).transpose(1, 2)
        for n in (heads, NANO.num_key_value_heads, NANO.num_key_value_heads)
    )
    for window in (None, NANO.sliding_window):
        pairs = dense_pairs(batch, window)
        for name, (size, options) in SIZES.items():
            torch._dynamo.reset()
            mask = create_block_mask(
                rule(batch, window), shape[0], None, shape[1], shape[1], "cuda", size, _compile=True
            )
            attend = torch.compile(flex_attention, dynamic=False)
            try:
                measure(f"window {window}, {name}", attend, (q, k, v, mask, options), pairs)
            except Exception as error:  # a size the kernels do not take is a result too
                print(f"window {window}, {name}: {str(error).splitlines()[0][:100]}")


def measure(name, attend, given, pairs) -> None:  # type: ignore[no-untyped-def]
    q, k, v, mask, options = given

    def forward():  # type: ignore[no-untyped-def]
        return attend(q, k, v, block_mask=mask, scale=1.0, enable_gqa=True, kernel_options=options)

    out = forward()
    grad = torch.randn_like(out)
    ahead = do_bench(forward, return_mode="median")
    back = do_bench(lambda: out.backward(grad, retain_graph=True), return_mode="median")
    work = 4 * pairs * q.shape[1] * q.shape[3] / 1e9
    print(
        f"{name}: forward {ahead:.2f} ms ({work / ahead:.0f} TFLOP/s), backward {back:.2f} ms "
        f"({2.5 * work / back:.0f}), blocks empty {mask.sparsity():.0f} %",
        flush=True,
    )


if __name__ == "__main__":
    main()
