"""What is known of GPUs: groups that are split or run together, and a driver that tells nothing."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitserve.engine import device
from splitserve.engine.gpus import Gpu, topology_groups

NODE, SYSTEM = 40, 50


class FakeNvml:
    """GPUs by UUID, in the driver's order; `nvlinks` and `nodes` (those on one NUMA node) name them by index."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_TOPOLOGY_NODE = NODE

    class NVMLError(Exception):
        pass

    def __init__(
        self,
        uuids: list[str],
        nvlinks: Iterable[tuple[int, int]] = (),
        nodes: Iterable[set[int]] = (),
        missing: str = "",
    ) -> None:
        self._uuids = uuids
        self._nvlinks = {frozenset(pair) for pair in nvlinks}
        self._nodes = list(nodes)
        self._missing = missing
        self.num_open = 0

    def _told(self, what: str) -> None:
        if what == self._missing:
            raise self.NVMLError(what)

    def nvmlInit(self) -> None:
        self._told("init")
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._told("count")
        return len(self._uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self._uuids[handle]

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        self._told("nvlink")
        return 0 if frozenset({one, other}) in self._nvlinks else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        self._told("topology")
        return NODE if any({one, other} <= node for node in self._nodes) else SYSTEM


@pytest.mark.parametrize(
    ("nvlinks", "nodes", "groups"),
    [
        ([], [], "abcd"),
        ([(0, 1), (2, 3)], [], "aacc"),
        ([(0, 3), (3, 1)], [], "aaca"),  # connected, though not each with each
        ([], [{0, 1}, {2, 3}], "aacc"),
        ([(1, 2)], [{0, 1}, {2, 3}], "aaaa"),
        ([(2, 3), (1, 3)], [], "abbb"),
    ],
)
def test_group_is_split_or_two_run_together(nvlinks: list[tuple[int, int]], nodes: list[set[int]], groups: str) -> None:
    nvml = FakeNvml(list("abcd"), nvlinks, nodes)
    assert "".join(topology_groups(nvml)[uuid] for uuid in "abcd") == groups
    assert nvml.num_open == 0


def test_group_is_named_by_the_order_of_the_driver() -> None:
    """Another process may be shown the same GPUs in another order."""
    assert topology_groups(FakeNvml(list("cab"), [(0, 2), (1, 2)])) == dict.fromkeys("cab", "a")


@pytest.mark.parametrize(
    ("missing", "groups"),
    [
        ("init", {}),
        ("count", {}),
        ("nvlink", {"a": "a", "b": "a", "c": "c"}),
        ("topology", {"a": "a", "b": "b", "c": "b"}),
    ],
)
def test_driver_that_does_not_tell_ends_the_worker(missing: str, groups: dict[str, str]) -> None:
    """What it does tell counts."""
    nvml = FakeNvml(list("abc"), [(1, 2)], [{0, 1}], missing)
    assert topology_groups(nvml) == groups
    assert nvml.num_open == 0


def test_gpu_has_the_number_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may be shown some of them only, in another order: a GPU's group goes by its UUID."""
    properties = [SimpleNamespace(uuid="b", name="B"), SimpleNamespace(uuid="x", name="X")]
    assert device.list_gpus() == () or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    nvml: Any = FakeNvml(["GPU-a", "GPU-b"], [(0, 1)])
    monkeypatch.setattr(device, "topology_groups", lambda: topology_groups(nvml))
    assert device.list_gpus() == (Gpu(0, "GPU-b", "B", "GPU-a"), Gpu(1, "GPU-x", "X", ""))
