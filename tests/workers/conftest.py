"""Tiny models, each built once; pairs end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import build
from tests.workers.pair import Pair


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")
    torch.set_num_threads(1)

    def get(family: str) -> Path:
        directory = root / family
        return directory if directory.exists() else build(family, directory)

    return get


@pytest.fixture
def make_pair(tiny: Callable[[str], Path]) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(family: str = "llama", **options: Any) -> Pair:
        pairs.append(Pair(tiny(family), **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
