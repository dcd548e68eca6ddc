"""Compiles a kernel for any GPU and reports the resources it uses."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from dgemma.backends.cuda import device
from dgemma.backends.cuda.kernels import attention_wide

HALF, FLOAT, INT, LONG, DOUBLE = "*bf16", "*fp32", "*i32", "*i64", "*fp64"
FP8, BYTE = "*fp8e4nv", "*u8"
WIDTH, INNER, EXPERTS, TOP_K, CANVAS = 2816, 704, 128, 8, 256
# What may not come before the wait of a kernel with PDL, nor loads, but of weights.
NOT_YET = ("st.global", "atom.", "red.global", "cp.async", "bra", "ret;")
# These read what never changes, or was written before the kernel that they wait for.
READ_WEIGHTS = {
    *("_qk_norm_rope", "_gemm", "_gemv", "_residual_add_norm_router", "_layer_epilogue"),
    *("_router_logits", "_topk", "_attend"),
}
Types = dict[str, str]


@dataclass(frozen=True)
class Card:
    """What a GPU has for one program, and for its kernels."""

    name: str
    capability: tuple[int, int]
    shared: int  # bytes that a program may use
    spilled: int  # bytes of a thread's registers that may go to memory

    @property
    def number(self) -> int:
        major, minor = self.capability
        return 10 * major + minor

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)

    @property
    def has_pdl(self) -> bool:
        return self.capability >= (9, 0)

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Let configs be chosen for this card."""
        with patch.object(device, "capability", lambda: self.capability):
            yield


CARDS = {
    card.name: card
    for card in (
        Card("sm_80", (8, 0), 163 * 1024, 256),  # A100
        Card("sm_86", (8, 6), 99 * 1024, 256),  # RTX 3090
        Card("sm_89", (8, 9), 99 * 1024, 256),  # RTX 4090
        Card("sm_90", (9, 0), 227 * 1024, 256),  # H100, H200
        Card("sm_100", (10, 0), 227 * 1024, 256),  # B200
        Card("sm_120", (12, 0), 99 * 1024, 256),  # RTX 5090
    )
}


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments, and its constants."""

    name: str
    kernel: Any
    types: Types
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3

    @property
    def key(self) -> str:
        """Text that is equal for cases which compile to the same."""
        return str((self.kernel, self.types, self.constants, self.warps, self.stages))

    @property
    def has_fp8(self) -> bool:
        return any("fp8" in kind for kind in self.types.values())


def fp8_operand(rows: int, depth: int) -> str:
    """Return the type of a matrix that is read in blocks, on the card that is assumed."""
    return f"tensordesc<fp8e4nv[{rows},{depth}]>" if device.has_tma() else FP8


def compiled(case: Case, card: Card) -> Any:
    """Compile for a card."""
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    known = {"PDL": card.has_pdl, **case.constants}
    constants = {(i,): known[n] for i, n in enumerate(names) if n not in case.types}
    # The released vocabulary is a multiple of 16, which a launch sees too.
    aligned = [i for i, n in enumerate(names) if case.types.get(n, "")[:1] == "*" or n == "vocab"]
    made_by = GluonASTSource if case.kernel is attention_wide._attend else ASTSource
    source = made_by(
        fn=case.kernel,
        signature=signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": case.warps, "num_stages": case.stages}
    options["maxnreg"] = case.constants.get("maxnreg")
    return triton.compile(source, target=GPUTarget("cuda", card.number, 32), options=options)


def usage_line(case: Case, card: Card, made: Any) -> str:
    """Return a line that says what a kernel takes; fails if that is too much."""
    registers, spilled = usage(made.asm["cubin"])
    shared = made.metadata.shared
    line = f"{card.name:6} {case.name:28} compiled: {shared:6} shared, {registers:3} registers"
    line += f", {spilled} spilled"
    assert shared <= card.shared, f"{line}: too much shared memory"
    assert spilled <= card.spilled, f"{line}: too many registers"
    if "PDL" in case.kernel.arg_names and case.constants.get("PDL", card.has_pdl):
        before, *waits = made.asm["ptx"].split("griddepcontrol.wait")
        wrong = NOT_YET if case.kernel.fn.__name__ in READ_WEIGHTS else (*NOT_YET, "ld.global")
        assert waits, f"{line}: launched early, it never waits"
        assert not any(word in before for word in wrong), f"{line}: does not wait"
    return line


def usage(binary: bytes) -> tuple[int, int]:
    """Return registers of a thread, and bytes of its stack."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", out)
    assert found is not None, out
    return int(found[1]), int(found[2])
