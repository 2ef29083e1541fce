"""What --device means, and what a user hears when there is no such device."""

import pytest
import torch

from splitserve.engine.device import choose_device
from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import KVPool
from splitserve.service.config import parse_device


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
