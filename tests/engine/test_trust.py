"""Weights in pickle files and code beside the weights: refused by default, used when the operator says so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from splitserve.engine.batch import Segment
from splitserve.engine.loading import load_runner
from splitserve.engine.runner import ModelRunner
from splitserve.engine.support import UnsupportedModel
from splitserve.engine.trust import SAFE, Trust
from tests.tiny_models import build


def load(directory: Path, trust: Trust) -> ModelRunner:
    return load_runner(directory, dtype="float32", device="cpu", block_size=16, kv_cache_bytes=1 << 20, trust=trust)


def test_pickle_weights_are_read_unasked(tmp_path: Path) -> None:
    safe = build("llama", tmp_path / "safe")
    pickled = build("llama", tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel):
        load(pickled, SAFE)
    segment = Segment([5, 6, 7], 0, [0], wants_logits=True)
    expected = load(safe, SAFE).run([segment])
    assert torch.equal(load(pickled, Trust(pickle=True)).run([segment]), expected)
