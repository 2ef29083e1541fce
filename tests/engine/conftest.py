from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import build

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny model of the named family, built once."""
    root = tmp_path_factory.mktemp("tiny")

    def directory(family: str) -> Path:
        path = root / family
        return path if path.exists() else build(family, path)

    return directory
