"""Tiny models are fastest on one thread, and do not fight the other core for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

# Files that take longest, run first: at the end one process would have them for itself.
LONGEST_FIRST = (
    "scale/test_replicas.py",
    "kernels/test_interpreted.py",
    "test_parity.py",
    "server/test_browser.py",
    "engine/test_prefix.py",
    "test_cli.py",
    "programs/test_fill.py",
    "weights/test_cpu_int8.py",
    "train/",
)
# Seconds of a test, where `timeout` of pyproject.toml is too short: Triton's interpreter, browsers,
# processes that train, the built-in model, other projects' loaders.
TIMEOUTS = {
    "kernels/": 420,
    "server/test_browser.py": 300,
    "server/test_openapi.py": 300,
    "scale/test_replicas.py": 600,
    "scale/test_cluster.py": 600,
    "train/test_distributed.py": 330,
    "test_nano.py": 300,
    "interop/": 600,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, an order that the Makefile tells xdist to keep; set timeouts."""
    here = Path(__file__).parent

    def name(item: pytest.Item) -> str:
        return item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""

    def rank(item: pytest.Item) -> int:
        ranks = (i for i, prefix in enumerate(LONGEST_FIRST) if name(item).startswith(prefix))
        return next(ranks, len(LONGEST_FIRST))

    items.sort(key=rank)
    for item in items:
        for prefix, seconds in TIMEOUTS.items():
            if name(item).startswith(prefix) and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(seconds))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is measured here, in this process and those it starts, out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint on disk that knows its answers by heart; not to be changed."""
    from tests.taught import save_taught

    directory = tmp_path_factory.mktemp("taught")
    save_taught(directory)
    return directory
