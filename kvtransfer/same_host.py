"""The ipc:// path of an endpoint, and the proof that two processes share a host.

The sink keeps a socket and a nonce in a directory that only its user may enter; a source that can read the nonce is
on the same host as the same user. It is proved, not declared: a host name or address would not tell containers apart.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import structlog

from kvtransfer.endpoint import KVEndpoint

log = structlog.get_logger(__name__)

# The kernel's limit for a socket path is 108 bytes, less on other systems.
MAX_PATH_BYTES = 100
NONCE_BYTES = 32
PREFIX = "splitserve-kv-"
RANDOM_PART = "x" * 8  # as long as what mkdtemp appends
SOCKET_NAME, NONCE_NAME = "kv.sock", "nonce"
# A sweeper can take a directory between its making and its locking, but hardly one after the other.
NUM_ATTEMPTS = 8


@dataclass(frozen=True)
class IpcDirectory:
    """Made by the sink at start, removed when it closes.

    Its owner holds a lock on the directory until then. The kernel lets go of the lock when the owner dies, so a
    directory whose lock is free belongs to nobody: the next sink on this host removes it.
    """

    directory: Path
    nonce_digest: bytes
    descriptor: int  # holds the lock

    @classmethod
    def create(cls, parent: Path | None = None) -> "IpcDirectory | None":
        """None where a socket path would be too long or locks do not work: the endpoint is reached by TCP alone.

        Removes what killed owners have left in `parent`. Raises OSError when nothing can be made there.
        """
        parent = parent or Path(tempfile.gettempdir())
        if len(os.fsencode(parent / f"{PREFIX}{RANDOM_PART}" / SOCKET_NAME)) >= MAX_PATH_BYTES:
            log.warning("no sockets on this host: their path would be too long", parent=str(parent))
            return None
        _sweep(parent)
        for _ in range(NUM_ATTEMPTS):
            directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
            descriptor = _lock(directory)
            if descriptor is not None:
                nonce = secrets.token_bytes(NONCE_BYTES)
                _write_new(directory / NONCE_NAME, nonce)
                return cls(directory, hashlib.sha256(nonce).digest(), descriptor)
            with contextlib.suppress(OSError):  # a sweeper has it, and removes it too
                directory.rmdir()
        log.warning("no directory for a socket can be locked", parent=str(parent))
        return None

    @property
    def socket_path(self) -> Path:
        return self.directory / SOCKET_NAME

    @property
    def nonce_path(self) -> Path:
        return self.directory / NONCE_NAME

    def remove(self) -> None:
        """Called once, after the socket is closed."""
        _remove_locked(self.directory, self.descriptor)


def is_same_host(endpoint: KVEndpoint) -> bool:
    """Whether the endpoint's nonce is readable here, private to our user, and the one that was announced."""
    if not (endpoint.ipc_path and endpoint.nonce_path and endpoint.nonce_digest):
        return False
    if len(os.fsencode(endpoint.ipc_path)) >= MAX_PATH_BYTES:
        return False
    nonce_path = Path(endpoint.nonce_path)
    if Path(endpoint.ipc_path).parent != nonce_path.parent or not _is_private_directory(nonce_path.parent):
        return False
    try:
        descriptor = os.open(nonce_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        nonce = file.read(NONCE_BYTES + 1)
    return secrets.compare_digest(hashlib.sha256(nonce).digest(), endpoint.nonce_digest)


def _is_private_directory(directory: Path) -> bool:
    try:
        return _is_private(directory.lstat())
    except OSError:
        return False


def _is_private(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


# Directories whose owners were killed.


def _sweep(parent: Path) -> None:
    """Removes our user's directories in `parent` that nobody holds. What cannot be removed stays: it harms nobody."""
    num_removed = 0
    for directory in parent.glob(f"{PREFIX}*"):
        descriptor = _lock(directory)
        if descriptor is not None:
            num_removed += _remove_locked(directory, descriptor)
    if num_removed:
        log.info("directories of killed workers removed", parent=str(parent), num_removed=num_removed)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the lock on this directory of ours. None when another holds it, or it is gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if _is_private(os.fstat(descriptor)) and _holds_lock(directory, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _holds_lock(directory: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # What was removed after it was opened can be locked too, but is not what the name means now.
        return os.path.samestat(os.fstat(descriptor), directory.lstat())
    except OSError:
        return False


def _remove_locked(directory: Path, descriptor: int) -> bool:
    """Removes what an owner puts there and gives up the lock. False when something else lies there: that stays."""
    try:
        for name in (SOCKET_NAME, NONCE_NAME):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
        directory.rmdir()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
