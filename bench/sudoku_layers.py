"""Where in a model a Sudoku is solved: what a cell knows behind each layer, in one pass over noise.

    PYTHONPATH=. python bench/sudoku_layers.py [--model nano] [--puzzles 120]

Canvases hold noise alone, and are told nothing. A linear map is fitted from the stream behind a
layer to a cell's row, column and digit on two thirds of the puzzles, and asked on the others. Needs
the bank of puzzles that `recipes/sudoku.toml` names. Layers that go by until a cell knows its row
and column are not there to solve the puzzle in.

C cells of all canvases, D width, K kinds of what is asked for.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma.model import Gemma
from dgemma.text.tokenizer import Tokenizer
from dgemma.train.build import Base, opened
from dgemma.train.context import Batch, PackedContext
from dgemma.train.mix import Mixture
from dgemma.train.objective import Objective
from dgemma.train.weighting import Weighting

RECIPE = Path("recipes/sudoku.toml")
LINE, GRID = 10, 90  # tokens of a line, whose end is one, and of a grid
RIDGE = 30.0


@dataclass(frozen=True, slots=True)
class Cells:
    """Of the canvases of a batch, by row of the pass."""

    at_C: Tensor  # which row of the pass a cell is
    row_C: Tensor
    column_C: Tensor
    digit_C: Tensor
    given_C: Tensor  # whether the puzzle has it

    @classmethod
    def of(cls, batch: Batch, words: Tokenizer) -> "Cells":
        offset = (batch.position - batch.start).flatten()
        is_cell = batch.is_canvas.flatten() & (offset < GRID) & (offset % LINE < LINE - 1)
        at_C = is_cell.nonzero()[:, 0]
        # The first of a line is another token than one with a space before it.
        texts = [
            words.token_bytes(token).strip() for token in batch.target.flatten()[at_C].tolist()
        ]
        assert set(texts) == {b"%d" % digit for digit in range(1, 10)}, (
            f"a grid is not {GRID} tokens here"
        )
        digit_C = torch.tensor([int(text) - 1 for text in texts])
        row_C, column_C = offset[at_C] // LINE, offset[at_C] % LINE
        return cls(at_C, row_C, column_C, digit_C, _given(batch, at_C))


def _given(batch: Batch, at_C: Tensor) -> Tensor:
    """A cell stands in the prompt as far before its canvas as every other: there, where digits
    agree oftenest.
    """
    width = batch.token.shape[1]
    sequence = torch.arange(len(batch.token))[:, None].expand_as(batch.token)
    place = torch.stack([sequence, batch.example, batch.position]).flatten(1)
    clean = ~batch.is_canvas.flatten() & (batch.example.flatten() >= 0)
    table = torch.full((len(batch.token), int(batch.example.max()) + 1, 2 * width), -1)
    table[tuple(place[:, clean])] = batch.token.flatten()[clean].to(table.dtype)
    sequence_C, example_C, position_C = place[:, at_C]
    target_C = batch.target.flatten()[at_C]
    agree = [
        table[sequence_C, example_C, (position_C - back).clamp(min=0)] == target_C
        for back in range(GRID, GRID + 20)
    ]
    return max(agree, key=lambda one: int(one.sum()))


def noise_batch(checkpoint: str, puzzles: int) -> tuple[Base, Batch]:
    with opened(RECIPE, [f"model.checkpoint={checkpoint}"]) as (_, base, mixture):
        assert isinstance(mixture, Mixture)
        (source,) = mixture.ingredients
        noise = replace(source.corruption, lowest=1.0, highest=1.0)
        alone = replace(source, corruption=noise, copies=1, canvas_lengths={96: 1.0})
        # A puzzle and its canvas are about 300 rows.
        made = replace(mixture, ingredients=[alone], sequences=max(2, puzzles // 10 * 2), rows=1600)
        return base, Batch.of(torch.from_numpy(made.batch(0)), "cpu")


@torch.no_grad()
def streams(model: Gemma, batch: Batch) -> list[Tensor]:
    """Behind each layer."""
    found: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, out: found.append(out))
    objective = Objective(model, Weighting())
    objective._hidden(batch, None, PackedContext(model.config, batch))
    return found


def readable(x_CD: Tensor, kind_C: Tensor) -> Tensor:
    """Of the last third of the cells, whether a linear map that is fitted on the others tells."""
    fitted = len(x_CD) * 2 // 3
    x_CD = (x_CD - x_CD[:fitted].mean(0)) / (x_CD[:fitted].std(0) + 1e-6)
    seen_CK = F.one_hot(kind_C[:fitted]).float()
    square = x_CD[:fitted].T @ x_CD[:fitted] + RIDGE * torch.eye(x_CD.shape[1])
    map_DK = torch.linalg.solve(square, x_CD[:fitted].T @ (seen_CK - seen_CK.mean(0)))
    return (x_CD[fitted:] @ map_DK + seen_CK.mean(0)).argmax(1) == kind_C[fitted:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--puzzles", type=int, default=120, help="about so many")
    given = parser.parse_args()
    base, batch = noise_batch(given.model, given.puzzles)
    cells = Cells.of(batch, Tokenizer.load(base.tokenizer))
    print(
        f"{given.model}: {len(cells.at_C) // 81} puzzles, {cells.given_C.float().mean():.0%} given"
    )
    print(f"{'behind layer':>12} {'row':>6} {'column':>7} {'digit, given':>13} {'digit, open':>12}")
    for number, x_TD in enumerate(streams(base.model, batch), 1):
        x_CD = x_TD[cells.at_C]
        row, column, digit = (
            readable(x_CD, k) for k in (cells.row_C, cells.column_C, cells.digit_C)
        )
        is_given = cells.given_C[-len(digit) :]
        shares = [x.float().mean() for x in (row, column, digit[is_given], digit[~is_given])]
        print(f"{number:12} {shares[0]:6.0%} {shares[1]:7.0%} {shares[2]:13.0%} {shares[3]:12.0%}")


if __name__ == "__main__":
    main()
