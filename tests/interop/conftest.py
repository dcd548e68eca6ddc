"""The built-in model, here and in the released layout."""

from pathlib import Path

import pytest

from dgemma.model.gemma import Gemma
from dgemma.weights.hub import NANO_DIRECTORY
from dgemma.weights.load import load_model
from dgemma.weights.save import export


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    export(NANO_DIRECTORY, directory)
    return directory


@pytest.fixture
def model() -> Gemma:
    return load_model(NANO_DIRECTORY).model
