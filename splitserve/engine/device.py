"""Which device the engine computes on: the one place that knows what `--device` means and asks torch for GPUs."""

import torch

from splitserve.engine.gpus import Gpu, topology_groups

_NAMES = "auto, cpu, cuda or cuda:N"


def list_gpus() -> tuple[Gpu, ...]:
    """Every GPU that this process may use, numbered as torch numbers them; none without CUDA."""
    if not torch.cuda.is_available():
        return ()
    groups = topology_groups()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # torch leaves out the prefix by which the driver and its tools know a GPU.
        uuid = f"GPU-{properties.uuid}"
        gpus.append(Gpu(index, uuid, properties.name, groups.get(uuid, "")))
    return tuple(gpus)


def choose_device(name: str) -> torch.device:
    """The device that `name` means here, made the calling thread's current one.

    "auto" is the first CUDA device, or the processor where there is none. ValueError for a device that is not here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda:0" if name == "cuda" else name)
    except RuntimeError:
        raise ValueError(f"device must be {_NAMES}, not {name!r}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device must be {_NAMES}, not {name!r}")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise ValueError(f"{device}: this torch ({torch.__version__}) has no CUDA")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(f"{device}: {count or 'no'} CUDA device{'s' if count != 1 else ''} here")
    torch.cuda.set_device(device)
    return device
