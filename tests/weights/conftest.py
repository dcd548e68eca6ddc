"""Checkpoints written once by transformers, and copies of them to damage."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.weights.sample import CONFIG, SIBLING, reference


@pytest.fixture(scope="session")
def theirs() -> Any:
    return reference(CONFIG)


@pytest.fixture(scope="session")
def sibling() -> Any:
    return reference(SIBLING)


@pytest.fixture(scope="session")
def single(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one file, as transformers writes it; not to be changed."""
    directory = tmp_path_factory.mktemp("single")
    theirs.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def sharded(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    theirs.save_pretrained(directory, max_shard_size="40KB")
    return directory


@pytest.fixture
def mine(single: Path, tmp_path: Path) -> Path:
    """A copy of the single-file checkpoint, free to be damaged."""
    return shutil.copytree(single, tmp_path / "mine")


@pytest.fixture
def my_shards(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "my_shards")
