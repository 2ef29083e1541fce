"""Engines whose pool is in a device's memory: what the KV thread gets, and what is said of a device that is absent."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitserve.engine.layout import KVLayout
from splitserve.engine.pool import KVPool
from splitserve.engine.staging import StagedStore
from splitserve.service.errors import Unavailable
from splitserve.worker import commands, engine_setup
from splitserve.worker.config import WorkerConfig
from tests.lazy_device import LazyDevice
from tests.reference import greedy
from tests.tiny_models import VOCAB_SIZE
from tests.workers.pair import Pair

Tiny = Callable[[str], Path]


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB_SIZE), k=length)


def test_text_differs_through_staging(tiny: Tiny, make_pair: Callable[..., Pair]) -> None:
    """Nothing reaches the KV thread that was not lent to it: chunks, partial blocks, hits of the prefix cache."""
    pair = make_pair(max_num_batched_tokens=24, make_store=lambda pool: StagedStore(pool, LazyDevice()))
    prompts = [prompt_of(length) for length in (1, 16, 17, 100)]
    expected = [greedy(tiny("llama"), prompt, 8) for prompt in prompts]
    assert pair.generate(prompts, max_tokens=8) == expected
    assert pair.generate(prompts, max_tokens=8) == expected
    pair.assert_drained()


def build(directory: Path, **config: str) -> None:
    configure = commands.Configure(worker_id="w", config=WorkerConfig(model=str(directory), **config))  # type: ignore[arg-type]
    engine_setup.build_context(configure, lambda report: None, lambda event: None)


def test_absent_device_is_an_accident(tiny: Tiny) -> None:
    """It is a setting that can never work, so the worker must not be started again and again."""
    with pytest.raises(ValueError, match="cuda:99: "):
        build(tiny("llama"), device="cuda:99")


def test_full_device_is_an_accident(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine_setup, "load_runner", load)
    with pytest.raises(ValueError, match="do not fit into the memory of cpu: CUDA out of memory"):
        build(tiny("llama"), device="cpu")


def test_device_that_others_hold_is_a_wrong_setting(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may let go of it, so the worker is to be started again."""

    def load(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine_setup, "load_runner", load)
    monkeypatch.setattr(engine_setup, "choose_device", lambda _: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 8 << 30)
    with pytest.raises(Unavailable, match=r"cuda:0: CUDA out of memory.*Other processes hold 62\.0 GiB of it"):
        build(tiny("llama"), device="cpu")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 69 << 30)
    with pytest.raises(ValueError, match="cuda:0: CUDA out of memory"):
        build(tiny("llama"), device="cpu")


def test_pool_is_reached_the_wrong_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory without a copy, anything else through the host."""
    layout = KVLayout(1, 1, 8, 4, "float32")
    pool = KVPool(layout, 2)
    assert engine_setup.block_store(pool) is pool
    devices: list[torch.device] = []
    monkeypatch.setattr(engine_setup, "CudaLane", lambda device: devices.append(device) or LazyDevice())
    store = engine_setup.block_store(KVPool(layout, 2, device="meta"))
    assert isinstance(store, StagedStore)
    assert devices == [torch.device("meta")]
