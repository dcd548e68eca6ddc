"""Tiny models are fastest on one thread, and do not fight the other core for it."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# Files that take longest, begun first: at the end one process would have them for itself.
LONGEST_FIRST = (
    "kernels/test_interpreted.py",
    "test_parity.py",
    "server/test_browser.py",
    "test_prefix.py",
    "test_cli.py",
    "constrain/test_fill.py",
    "weights/test_cpu_int8.py",
    "train/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As they are collected, but for those; the Makefile tells xdist to keep the order."""
    here = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        name = item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""
        places = (i for i, long in enumerate(LONGEST_FIRST) if name.startswith(long))
        return next(places, len(LONGEST_FIRST))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint on disk that knows its answers by heart; not to be changed."""
    from tests.taught import save_taught

    directory = tmp_path_factory.mktemp("taught")
    save_taught(directory)
    return directory
