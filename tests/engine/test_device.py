"""What --device means, and what a user hears when there is no such device."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from splitserve.engine.attention import INTERFACE_NAME, register_paged_attention
from splitserve.engine.backends import choose_backends
from splitserve.engine.batch import Segment
from splitserve.engine.device import choose_device
from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import KVPool
from splitserve.engine.report import LoadReport
from splitserve.engine.runner import ModelRunner
from splitserve.engine.selftest_result import SelfTestResult
from splitserve.engine.torch_attention import TorchAttention
from splitserve.service.config import parse_device, parse_transports


class FakeCuda:
    """As many CUDA devices as a test wants, of which none can compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, *, is_built: bool = True) -> None:
        self.current: list[torch.device] = []
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_built and count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", self.current.append)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("auto", 0, "cpu"), ("cpu", 0, "cpu"), ("cpu", 2, "cpu"),
        ("auto", 2, "cuda:0"), ("cuda", 1, "cuda:0"), ("cuda:1", 2, "cuda:1"),
    ],
)  # fmt: skip
def test_name_means_another_device(monkeypatch: pytest.MonkeyPatch, name: str, count: int, expected: str) -> None:
    cuda = FakeCuda(monkeypatch, count)
    assert str(choose_device(name)) == expected
    assert [str(device) for device in cuda.current] == ([expected] if expected != "cpu" else [])


@pytest.mark.parametrize(
    ("name", "count", "is_built", "message"),
    [
        ("cuda:3", 1, True, "cuda:3: 1 CUDA device here"),
        ("cuda:2", 2, True, "cuda:2: 2 CUDA devices here"),
        ("cuda", 0, True, "cuda:0: no CUDA devices here"),
        ("cuda", 0, False, r"cuda:0: this torch \(.+\) has no CUDA"),
        ("mps", 0, False, "must be auto, cpu, cuda or cuda:N, not 'mps'"),
        ("gpu", 0, False, "must be auto, cpu, cuda or cuda:N, not 'gpu'"),
    ],
)
def test_absent_device_is_used(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int, is_built: bool, message: str
) -> None:
    cuda = FakeCuda(monkeypatch, count, is_built=is_built)
    with pytest.raises(ValueError, match=message):
        choose_device(name)
    assert not cuda.current


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CUDA", "cuda:0 "])
def test_front_takes_a_word_that_no_engine_knows(text: str) -> None:
    with pytest.raises(ValueError, match="device"):
        parse_device(text)
    for name in ("auto", "cpu", "cuda", "cuda:12"):
        assert parse_device(name) == name


def test_pool_outside_of_host_memory_gives_a_view() -> None:
    pool = KVPool(KVLayout(1, 1, 8, 4, "float32"), 2, device="meta")
    for action in (pool.view, lambda block: pool.write(block, bytes(pool.block_nbytes))):
        with pytest.raises(ValueError, match="no view in host memory"):
            action(1)


def test_copied_block_differs_or_spreads() -> None:
    pool = KVPool(KVLayout(1, 1, 8, 4, "float32"), 4)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    before = pool.tensor.clone()
    pool.copy_block(3, 1)
    assert torch.equal(pool.tensor[1], before[3])
    assert torch.equal(pool.tensor[[0, 2, 3]], before[[0, 2, 3]])
    for source, target in ((4, 0), (0, 4), (-1, 0)):
        with pytest.raises(ValueError, match="pool of 4 blocks"):
            pool.copy_block(source, target)


class OneDevice(TorchDispatchMode):
    """Notes every operation that mixes tensors of two devices; single numbers and copies may."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing: list[str] = []
        self.num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        self.num_seen += 1
        if len({tensor.device for tensor in tensors}) > 1 and "copy" not in str(func):
            self.mixing.append(str(func))
        return result


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_forward_mixes_the_devices_tensors_with_host_ones(family: str) -> None:
    """A prompt, a chunk and two decode tokens on torch's device without memory. It refuses to show a value: so besides,
    nothing makes the host wait for a GPU within a forward."""
    register_paged_attention()
    config = AutoConfig.for_model(
        family, vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=20, max_position_embeddings=1024,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=INTERFACE_NAME)
    backends = choose_backends("meta", "bfloat16", None, lambda _: None)
    assert isinstance(backends.attention, TorchAttention)
    backends.prepare(model, "bfloat16")
    pool = KVPool(KVLayout(2, 2, 16, 16, "bfloat16"), 100, "meta")
    runner = ModelRunner(
        model.eval(), pool, backends, num_heads=4, max_model_len=1024,
        result=SelfTestResult.untested(min_rows=2), report=LoadReport(),
    )  # fmt: skip
    segments = [
        Segment(list(range(300)), 0, list(range(20)), wants_logits=True),
        Segment(list(range(70)), 30, list(range(20, 30)), wants_logits=False),
        Segment([5], 99, list(range(30, 40)), wants_logits=True),
        Segment([5], 300, list(range(40, 60)), wants_logits=True),
    ]
    with OneDevice() as watched:
        logits = runner.run(segments)
        pool.copy_block(1, 2)
    assert watched.mixing == []
    assert watched.num_seen > 100
    assert (logits.shape, logits.device.type) == ((3, 384), "meta")


def test_transport_that_is_none_is_found_out_later() -> None:
    for text in ("", "zmq,", "rdma", "auto,zmq", "nccl zmq"):
        with pytest.raises(ValueError, match="neither auto nor a list of zmq, nccl and gloo"):
            parse_transports(text)
    assert parse_transports("nccl, zmq,nccl") == "nccl,zmq"
    assert parse_transports("auto") == "auto"
