from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import build

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directory of a tiny model of the named family, with some config fields changed, built once."""
    root = tmp_path_factory.mktemp("tiny")

    def directory(family: str, **overrides: Any) -> Path:
        path = root / "-".join([family, *(f"{name}={value}" for name, value in sorted(overrides.items()))])
        return path if path.exists() else build(family, path, **overrides)

    return directory
