"""What GPUs have, by their data sheets: memory, its bandwidth, and matmuls in bfloat16 without sparsity."""

from dataclasses import dataclass

from splitserve.service.errors import InvalidRequest

_GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """Bytes, bytes per second, floating-point operations per second."""

    name: str
    memory: float
    bandwidth: float
    flops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A10G", 24 * _GB, 600 * _GB, 70e12),
        Gpu("A100", 80 * _GB, 2039 * _GB, 312e12),
        Gpu("B200", 180 * _GB, 8000 * _GB, 2250e12),
        Gpu("H100", 80 * _GB, 3350 * _GB, 989e12),
        Gpu("H200", 141 * _GB, 4800 * _GB, 989e12),
        Gpu("L4", 24 * _GB, 300 * _GB, 121e12),
        Gpu("L40S", 48 * _GB, 864 * _GB, 362e12),
    )
}


def find_gpu(name: str) -> Gpu:
    """Raises InvalidRequest for one that is not known."""
    gpu = GPUS.get(name.upper())
    if gpu is None:
        raise InvalidRequest(f"--gpu {name}: known are {', '.join(GPUS)}", field="gpu")
    return gpu
