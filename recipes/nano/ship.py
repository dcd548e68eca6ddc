"""Write a trained nano into the package: quantized, sharded, the same bytes every time.

    python -m recipes.nano.ship out/nano/v1 [--into dgemma/models/nano] [--bits 6 --expert-bits 4]

Without `--bits`, the first entry of `LADDER` that fits is taken. A model card that the package has
already is kept; without one, that of the checkpoint is taken.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dgemma.errors import CheckpointError, UsageError
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.int_layout import INT8, Bits
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.save import save_int8

CARD = "README.md"
PLACEHOLDER = "# nano\n\nThe model that comes with this package. Its card is still to be written.\n"
MAX_BYTES = 32_000_000  # of all files: each version stays in the history of the repository
MAX_FILE_BYTES = 8_000_000
MAX_HEADER_BYTES = 100_000
# Tried in order. Below the last entry the loss grows fast (docs/decisions/021).
LADDER = (INT8, Bits(experts=6, rest=6), Bits(experts=5, rest=6), Bits(experts=4, rest=6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """The bits that were taken, and bytes by file."""

    bits: Bits
    sizes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def ship(checkpoint: Path, into: Path = NANO_DIRECTORY, ladder: Sequence[Bits] = LADDER) -> Shipped:
    """Write the package's model from a checkpoint, in the first bits of a ladder that fit."""
    loaded = load_model(checkpoint, verify=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nano-", dir=into.parent) as temporary:
        directory = Path(temporary) / into.name
        problem = "there are no bits to try"
        for bits in ladder:
            shipped = _write(loaded, directory, checkpoint, bits, _card(checkpoint, into))
            problem = _problem(shipped)
            if not problem:
                break
        if problem:
            raise CheckpointError(f"{problem}; nothing is changed")
        if into.exists():
            shutil.rmtree(into)
        directory.rename(into)
    return shipped


def _card(checkpoint: Path, into: Path) -> bytes:
    cards = [directory / CARD for directory in (into, checkpoint)]
    present = [card for card in cards if card.is_file()]
    return present[0].read_bytes() if present else PLACEHOLDER.encode()


def _write(
    loaded: Checkpoint, directory: Path, checkpoint: Path, bits: Bits, card: bytes
) -> Shipped:
    save_int8(
        loaded,
        directory,
        bits=bits,
        tokenizer_from=checkpoint,
        max_shard_bytes=MAX_FILE_BYTES - MAX_HEADER_BYTES,
        overwrite=True,
    )
    (directory / CARD).write_bytes(card)
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    return Shipped(bits=bits, sizes=sizes)


def _problem(shipped: Shipped) -> str:
    """Return why the files cannot ship, or nothing."""
    large = [name for name, size in shipped.sizes.items() if size > MAX_FILE_BYTES]
    if large:
        return f"{large} would pass {MAX_FILE_BYTES} bytes a file, {shipped.bits}"
    if shipped.total > MAX_BYTES:
        return f"the files would have {shipped.total} bytes, {shipped.bits}, more than {MAX_BYTES}"
    return ""


def _ladder(bits: int | None, expert_bits: int | None) -> Sequence[Bits]:
    """Return the requested bits alone, or all that may be tried."""
    if bits is None and expert_bits is None:
        return LADDER
    if bits is None or expert_bits is None:
        raise UsageError("give --bits and --expert-bits, or neither of them")
    return [Bits(experts=expert_bits, rest=bits)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--into", type=Path, default=NANO_DIRECTORY)
    parser.add_argument("--bits", type=int, help="of all matrices but the experts': 4, 5, 6 or 8")
    parser.add_argument("--expert-bits", type=int, help="of the experts': 4, 5, 6 or 8")
    options = parser.parse_args()
    shipped = ship(options.checkpoint, options.into, _ladder(options.bits, options.expert_bits))
    for name, size in shipped.sizes.items():
        print(f"{size:>10,}  {name}")
    print(f"{shipped.total:>10,}  in all, of at most {MAX_BYTES:,}; {shipped.bits}")


if __name__ == "__main__":
    main()
