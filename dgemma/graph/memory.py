"""Memory that captured steps of one row read and write. It never moves.

The first half of what is said of a pass (how positions turn heads, places of the keys) belongs to a
block that is committed in it, the second to the canvas behind that; a canvas alone uses the second.

N steps, L canvas length, D width, V vocabulary, X layers, P pairs of a head's numbers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dgemma.cache import Pass
from dgemma.canvas import Canvas
from dgemma.denoise import Row
from dgemma.graph.capture import WARM_UPS
from dgemma.model import Gemma, Turns
from dgemma.sampler import Rule, Sampler
from dgemma.stack import Places

if TYPE_CHECKING:
    from dgemma.ops.kernels.enter import Numbers
    from dgemma.ops.kernels.move import Held

MOVED = ("tokens_L", "guess_L", "kept_L", "entropy_L", "settled", "steady_steps")  # by a step
TYPES = (torch.long, torch.long, torch.bool, torch.float32, torch.bool, torch.long)
ALIGNED = 64  # bytes

Piece = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]  # size, stride, offset


@dataclass(frozen=True, slots=True)
class Shape:
    """What a capture is for."""

    length: int
    steps: int  # at most
    rule: Rule


class Memory:
    """What a step reads and writes."""

    @torch.inference_mode(False)
    def __init__(self, model: Gemma, shape: Shape) -> None:
        table_VD = model.embed_tokens.weight
        device, length = table_VD.device, shape.length

        def empty(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.block_L = empty(length)
        self.pinned_L = empty(length, dtype=torch.bool)
        self.pieces, num_bytes = _pieces(length)
        self.moved = empty(num_bytes, dtype=torch.uint8)
        parts = self._parts(self.moved)
        self.tokens_L, self.guess_L, self.kept_L, self.entropy_L = parts[:4]
        self.settled, self.steady_steps = parts[4:]
        self.soft_LD = empty(length, table_VD.shape[1], dtype=table_VD.dtype)
        steps = shape.steps + WARM_UPS  # a capture at the last step goes on beyond it
        self.uniform_NL = empty(steps + 1, length, dtype=torch.float64)
        self.noise_NL = empty(steps + 1, length)
        self.heat_N = empty(steps, dtype=torch.float32)
        self.sampler: Sampler | None = None  # whose heats these are
        self.index_1 = empty(1)  # steps taken
        self.heat_L = empty(length, dtype=torch.float32)  # of the step at hand...
        self.uniform_L = empty(length, dtype=torch.float64)  # ...whose draws these decide
        self.turns = model.turns(empty(2 * length))  # once for all steps of a block
        self.table_2X6 = empty(2, model.config.num_hidden_layers, 6)
        # What the host reads of a step: settled; the sparse soft embedding will do.
        self.seen_2 = torch.zeros(2, dtype=torch.bool, pin_memory=device.type == "cuda")

    def load(self, row: Row) -> None:
        """Begin with a row as it stands."""
        canvas, sampler = row.canvas, row.sampler
        for name in ("pinned_L", *MOVED):
            getattr(self, name).copy_(getattr(canvas, name))
        if canvas.soft_LD is None:
            self.soft_LD.zero_()  # contributes exactly nothing
        else:
            self.soft_LD.copy_(canvas.soft_LD)
        count = sampler.max_steps
        self.uniform_NL[: count + 1].copy_(row.noise.uniform_NL)
        self.noise_NL[: count + 1].copy_(row.noise.tokens_NL)
        if sampler != self.sampler:  # else its heats are here already
            heats = [sampler.heat(count - n) for n in range(count)]
            self.heat_N[:count].copy_(torch.tensor(heats))
            self.sampler = sampler
        self.index_1.fill_(canvas.num_steps)

    def place(self, context: Pass, places: Places, turns: Turns) -> None:
        """Say how the places of a pass's tokens turn their heads, and where their keys lie."""
        count = len(context.positions_T)
        for kind, parts in turns.items():
            for held_2LP, part_TP in zip(self.turns[kind], parts, strict=True):
                held_2LP[-count:].copy_(part_TP)
        self.table_2X6[-len(context.spans) :].copy_(places.table_IX6)

    def turns_of(self, count: int) -> Turns:
        """Of the last so many positions."""
        return {k: (cos[-count:], sin[-count:]) for k, (cos, sin) in self.turns.items()}

    def numbers(self) -> "Numbers":
        """For the kernel that fetches a step's own."""
        from dgemma.ops.kernels.enter import Numbers

        return Numbers(
            index_1=self.index_1,
            heat_N=self.heat_N,
            uniform_NL=self.uniform_NL,
            heat_L=self.heat_L,
            uniform_L=self.uniform_L,
        )

    def held(self) -> "Held":
        """For the kernel that moves a canvas."""
        from dgemma.ops.kernels.move import Held

        moved = {name: getattr(self, name) for name in MOVED}
        return Held(
            pinned_L=self.pinned_L,
            noise_NL=self.noise_NL,
            index_1=self.index_1,
            seen_2=self.seen_2,
            **moved,
        )

    def _parts(self, moved: Tensor) -> list[Tensor]:
        """What a step moves, out of one piece of memory, in the order of MOVED."""
        as_type = {dtype: moved.view(dtype) for dtype in (torch.long, torch.float32, torch.bool)}
        return [
            as_type[dtype].as_strided(size, stride, offset)
            for dtype, size, stride, offset in self.pieces
        ]

    def copies(self) -> dict[str, Tensor]:
        """What a step has moved, for whoever may keep it: two copies, however much it is."""
        moved = dict(zip(MOVED, self._parts(self.moved.clone()), strict=True))
        return {**moved, "soft_LD": self.soft_LD.clone()}

    def canvas(self, num_steps: int) -> Canvas:
        """The canvas in this memory, not copied."""
        return Canvas(
            tokens_L=self.tokens_L,
            pinned_L=self.pinned_L,
            kept_L=self.kept_L,
            guess_L=self.guess_L,
            entropy_L=self.entropy_L,
            soft_LD=self.soft_LD,
            settled=self.settled,
            steady_steps=self.steady_steps,
            num_steps=num_steps,
        )

    def keep(self, canvas: Canvas) -> None:
        for name in MOVED:
            getattr(self, name).copy_(getattr(canvas, name))

    @property
    def all(self) -> list[Tensor]:
        return [held for held in vars(self).values() if isinstance(held, Tensor)]


def _pieces(length: int) -> tuple[list[Piece], int]:
    """Type, size, stride and offset of each part that a step moves, and the bytes of all.

    Each begins at an even address, as kernels like it.
    """
    pieces: list[Piece] = []
    end = 0
    for name, dtype in zip(MOVED, TYPES, strict=True):
        is_row = name.endswith("_L")
        pieces.append((dtype, (length,) * is_row, (1,) * is_row, end // dtype.itemsize))
        end += -(-(length if is_row else 1) * dtype.itemsize // ALIGNED) * ALIGNED
    return pieces, end
