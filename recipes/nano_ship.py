"""Put a trained `nano` into the package: 8 bits, small pieces, the same bytes every time.

    python -m recipes.nano_ship out/nano/v1 [--into dgemma/models/nano]

A model card that is already in the package stays; without one, that of the checkpoint is taken.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from dgemma.errors import CheckpointError
from dgemma.weights.download import NANO_DIRECTORY
from dgemma.weights.load import load_model
from dgemma.weights.save import save_int8

CARD = "README.md"
PLACEHOLDER = "# nano\n\nThe model that comes with this package. Its card is still to be written.\n"
MAX_BYTES = 32_000_000  # of all files: each version stays in the history of the repository
MAX_FILE_BYTES = 8_000_000


def ship(checkpoint: Path, into: Path = NANO_DIRECTORY) -> dict[str, int]:
    """Write the package's model from a checkpoint, and return its files with their sizes."""
    loaded = load_model(checkpoint, verify=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nano-", dir=into.parent) as temporary:
        place = Path(temporary) / into.name
        # Headers count, too.
        save_int8(
            loaded, place, tokenizer_from=checkpoint, max_shard_bytes=MAX_FILE_BYTES - 100_000
        )
        (place / CARD).write_bytes(_card(checkpoint, into))
        sizes = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
        _check(sizes)
        if into.exists():
            shutil.rmtree(into)
        place.rename(into)
    return sizes


def _card(checkpoint: Path, into: Path) -> bytes:
    cards = [directory / CARD for directory in (into, checkpoint)]
    found = [card for card in cards if card.is_file()]
    return found[0].read_bytes() if found else PLACEHOLDER.encode()


def _check(sizes: dict[str, int]) -> None:
    large = [name for name, size in sizes.items() if size > MAX_FILE_BYTES]
    if large:
        raise CheckpointError(
            f"{large} would pass {MAX_FILE_BYTES} bytes a file; nothing is changed"
        )
    total = sum(sizes.values())
    if total > MAX_BYTES:
        raise CheckpointError(
            f"the files would have {total} bytes, more than {MAX_BYTES}; nothing is changed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--into", type=Path, default=NANO_DIRECTORY)
    arguments = parser.parse_args()
    sizes = ship(arguments.checkpoint, arguments.into)
    for name, size in sizes.items():
        print(f"{size:>10,}  {name}")
    print(f"{sum(sizes.values()):>10,}  in all, of at most {MAX_BYTES:,}")


if __name__ == "__main__":
    main()
