"""What is known of a GPU, and which GPUs lie close together. Plain data for `device` and a worker's start; no torch.

The driver's own library tells the topology, of all GPUs that this machine or container has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True)
class Gpu:
    """`index` is the N of "cuda:N" in this process; `uuid` names the GPU in every process and container of the host.

    GPUs of one `topology_group` reach each other by NVLink or within a NUMA node; "" where nothing is known of that.
    """

    index: int
    uuid: str
    name: str
    topology_group: str = ""


def topology_groups(nvml: Any = pynvml) -> dict[str, str]:
    """The topology group of each GPU, by UUID; empty where the driver does not tell.

    A group is named by the first UUID in it, so processes that are shown the same GPUs name it alike.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return connected(uuids, lambda one, other: _are_close(nvml, handles[one], handles[other]))
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()


def connected(names: Sequence[str], are_close: Callable[[int, int], bool]) -> dict[str, str]:
    """Each name's connected component, called by the smallest name in it. `are_close` is asked for indices."""
    groups = {name: name for name in names}
    for one, name in enumerate(names):
        for other in range(one):
            merged = {groups[name], groups[names[other]]}
            if len(merged) == 2 and are_close(one, other):
                groups = {key: min(merged) if group in merged else group for key, group in groups.items()}
    return groups


def _are_close(nvml: Any, one: Any, other: Any) -> bool:
    return _have_nvlink(nvml, one, other) or _share_numa_node(nvml, one, other)


def _have_nvlink(nvml: Any, one: Any, other: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError:  # virtual machines, and drivers too old for it
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _share_numa_node(nvml: Any, one: Any, other: Any) -> bool:
    try:
        ancestor = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    except nvml.NVMLError:
        return False
    return bool(ancestor <= nvml.NVML_TOPOLOGY_NODE)
