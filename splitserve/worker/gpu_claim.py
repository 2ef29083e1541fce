"""Which GPU of the host a worker takes: one that no other worker has, by a lock file for each GPU.

Replicas of one service are all given the same GPUs and have to share them out. Called once, by the engine's start-up.
The kernel owns the state: a lock ends with the process that holds it, however that ends, and the files stay.
"""

import errno
import fcntl
import itertools
import os
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitserve.engine.gpus import Gpu
from splitserve.service.errors import InvalidRequest, Unavailable

_MAX_HOLDER_BYTES = 4096


class Holder(msgspec.Struct, frozen=True):
    """What a lock file says of the process that locked it last; for people. A container's `host` is its own id."""

    worker_id: str
    pid: int
    host: str

    def __str__(self) -> str:
        return f"{self.worker_id} (pid {self.pid} on {self.host})"


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """`slot` above 0: other workers have claimed this GPU before. Closing `descriptor` would give the claim up."""

    gpu: Gpu
    lock: Path
    slot: int
    descriptor: int

    @property
    def device(self) -> str:
        return f"cuda:{self.gpu.index}"

    def __str__(self) -> str:
        shared = "; others compute on it, too" if self.slot else ""
        return f"{self.device} ({self.gpu.name}, {self.gpu.uuid}), locked by {self.lock}{shared}"


def claim_gpu(
    device: str, gpus: Sequence[Gpu], folder: Path, worker_id: str, workers_per_gpu: int = 1
) -> GpuClaim | None:
    """The GPU that `device` means, from now on this process's; of several the first that nobody has.

    None where `device` means the processor, and for what is not here at all, which `choose_device` explains.
    `workers_per_gpu` is how many may claim the same one, 0 any number; none gets a second worker before each has one.
    Raises Unavailable, which names the holders, when none is left, and InvalidRequest when files in `folder` cannot be
    locked.
    """
    wanted = [gpu for gpu in gpus if device in ("auto", "cuda", f"cuda:{gpu.index}")]
    if not wanted:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for slot in range(workers_per_gpu) if workers_per_gpu else itertools.count():
            for gpu in wanted:
                lock = _lock_file(folder, gpu, slot)
                descriptor = _try_lock(lock)
                if descriptor is not None:
                    _write_holder(descriptor, worker_id)
                    return GpuClaim(gpu, lock, slot, descriptor)
    except OSError as error:
        raise InvalidRequest(
            f"cannot lock a GPU in {folder}: {error}; --device-locks names another folder", field="device_locks"
        ) from error
    raise Unavailable(_none_left(device, wanted, len(gpus), folder, workers_per_gpu), reason="NO_GPU")


def _lock_file(folder: Path, gpu: Gpu, slot: int) -> Path:
    return folder / (f"{gpu.uuid}.{slot}.lock" if slot else f"{gpu.uuid}.lock")


def _try_lock(path: Path) -> int | None:
    """An open descriptor that holds the lock; None while another process has it. OSError where locks do not work."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return descriptor


def _open(path: Path) -> int:
    """Not inherited by children: one that outlives this process would keep the GPU."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except PermissionError:
        # Another user's can be locked all the same.
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def _write_holder(descriptor: int, worker_id: str) -> None:
    """Says nothing in the file of another user."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return
    holder = Holder(worker_id, os.getpid(), socket.gethostname())
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(holder) + b"\n", 0)


def _none_left(device: str, wanted: Sequence[Gpu], num_gpus: int, folder: Path, workers_per_gpu: int) -> str:
    held = {(gpu, slot): _holder(_lock_file(folder, gpu, slot)) for gpu in wanted for slot in range(workers_per_gpu)}
    named = ", ".join(
        f"cuda:{gpu.index} ({gpu.uuid}) by {holder or 'an unknown worker'}" for (gpu, _), holder in held.items()
    )
    which = f"none of the {num_gpus} GPUs here is left" if len(wanted) > 1 else f"{device} is taken"
    limit = f" by {workers_per_gpu} workers each" if workers_per_gpu > 1 else ""
    return (
        f"--device {device}: {which}: claimed{limit} in {folder}: {named}. {_roles(held.values())}"
        "Run fewer workers on this host, or let them share a GPU by --workers-per-gpu"
    )


def _roles(holders: Iterable[Holder | None]) -> str:
    """A role without a GPU is why nothing is served, which the last worker to come has to tell."""
    roles = Counter(holder.worker_id.partition("-")[0] for holder in holders if holder)
    counts = [f"{roles[role] or 'no'} {role} worker{'' if roles[role] == 1 else 's'}" for role in ("prefill", "decode")]
    return f"Those are {' and '.join(counts)}. "


def _holder(path: Path) -> Holder | None:
    """None where it is just being written, or it was not we who wrote."""
    try:
        return msgspec.json.decode(path.read_bytes()[:_MAX_HOLDER_BYTES], type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None
