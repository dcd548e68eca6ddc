"""Put a trained `nano` into the package: few bits, small pieces, the same bytes every time.

    python -m recipes.nano_ship out/nano/v1 [--into dgemma/models/nano] [--bits 6 --expert-bits 4]

Unless bits are asked for, the most that fit are taken (`LADDER`). A model card that is already in
the package stays; without one, that of the checkpoint is taken.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dgemma.errors import CheckpointError, UsageError
from dgemma.weights.download import NANO_DIRECTORY
from dgemma.weights.int8 import EIGHT, Bits
from dgemma.weights.load import Checkpoint, load_model
from dgemma.weights.save import save_int8

CARD = "README.md"
PLACEHOLDER = "# nano\n\nThe model that comes with this package. Its card is still to be written.\n"
MAX_BYTES = 32_000_000  # of all files: each version stays in the history of the repository
MAX_FILE_BYTES = 8_000_000
# What is lost grows downwards, and in fewer bits than the last it grows fast (docs/decisions/029).
LADDER = (EIGHT, Bits(experts=6, rest=6), Bits(experts=5, rest=6), Bits(experts=4, rest=6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    bits: Bits
    sizes: dict[str, int]  # bytes, by file

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def ship(checkpoint: Path, into: Path = NANO_DIRECTORY, ladder: Sequence[Bits] = LADDER) -> Shipped:
    """Write the package's model from a checkpoint, in the first bits of a ladder that fit."""
    loaded = load_model(checkpoint, verify=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nano-", dir=into.parent) as temporary:
        place = Path(temporary) / into.name
        problem = "there are no bits to try"
        for bits in ladder:
            shipped = _write(loaded, place, checkpoint, bits, _card(checkpoint, into))
            problem = _problem(shipped)
            if not problem:
                break
        if problem:
            raise CheckpointError(f"{problem}; nothing is changed")
        if into.exists():
            shutil.rmtree(into)
        place.rename(into)
    return shipped


def _card(checkpoint: Path, into: Path) -> bytes:
    cards = [directory / CARD for directory in (into, checkpoint)]
    found = [card for card in cards if card.is_file()]
    return found[0].read_bytes() if found else PLACEHOLDER.encode()


def _write(loaded: Checkpoint, place: Path, checkpoint: Path, bits: Bits, card: bytes) -> Shipped:
    # Headers count, too.
    room = MAX_FILE_BYTES - 100_000
    save_int8(
        loaded, place, bits=bits, tokenizer_from=checkpoint, max_shard_bytes=room, overwrite=True
    )
    (place / CARD).write_bytes(card)
    sizes = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
    return Shipped(bits=bits, sizes=sizes)


def _problem(shipped: Shipped) -> str:
    """Why it cannot be kept; empty where it can."""
    large = [name for name, size in shipped.sizes.items() if size > MAX_FILE_BYTES]
    if large:
        return f"{large} would pass {MAX_FILE_BYTES} bytes a file, {shipped.bits}"
    if shipped.total > MAX_BYTES:
        return f"the files would have {shipped.total} bytes, {shipped.bits}, more than {MAX_BYTES}"
    return ""


def _ladder(bits: int | None, expert_bits: int | None) -> Sequence[Bits]:
    """What is asked for alone, or all that may be tried."""
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
    given = parser.parse_args()
    shipped = ship(given.checkpoint, given.into, _ladder(given.bits, given.expert_bits))
    for name, size in shipped.sizes.items():
        print(f"{size:>10,}  {name}")
    print(f"{shipped.total:>10,}  in all, of at most {MAX_BYTES:,}; {shipped.bits}")


if __name__ == "__main__":
    main()
