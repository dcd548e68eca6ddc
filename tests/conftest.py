"""Tiny models are fastest on one thread, and do not fight the other core for it."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint on disk that knows its answers by heart; not to be changed."""
    from tests.taught import save_taught

    directory = tmp_path_factory.mktemp("taught")
    save_taught(directory)
    return directory
