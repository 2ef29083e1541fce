"""Models that several tests look at; none of them loads a weight."""

import pytest

from splitserve.models.description import ModelDescription
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def default_model() -> ModelDescription:
    """The default model, from the user's own cache: made there if this machine never served it."""
    return locate_model(None)


@pytest.fixture(scope="session")
def default_tokenizer(default_model: ModelDescription) -> Tokenizer:
    return Tokenizer.load(default_model.directory)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    """A tiny GGUF, converted."""
    folder = tmp_path_factory.mktemp("tiny")
    return locate_model(str(write_tiny_gguf(folder / "tiny.gguf")), cache_dir=folder / "cache")
