"""The ipc:// path of an endpoint, and the proof that two processes share a host.

The sink keeps a socket and a nonce in a directory that only its user may enter; a source that can read the nonce is
on the same host as the same user. It is proved, not declared: a host name or address would not tell containers apart.
"""

import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.endpoint import KVEndpoint

# The kernel's limit for a socket path is 108 bytes, less on other systems.
MAX_PATH_BYTES = 100
NONCE_BYTES = 32


@dataclass(frozen=True)
class IpcDirectory:
    """Made by the sink at start, removed when it closes."""

    directory: Path
    nonce_digest: bytes

    @classmethod
    def create(cls, parent: Path | None = None) -> "IpcDirectory | None":
        """None where a socket path would be too long: the endpoint is then reached by TCP alone."""
        directory = Path(tempfile.mkdtemp(prefix="splitserve-kv-", dir=parent))  # mode 0700
        if len(os.fsencode(directory / "kv.sock")) >= MAX_PATH_BYTES:
            directory.rmdir()
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        descriptor = os.open(directory / "nonce", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(nonce)
        return cls(directory, hashlib.sha256(nonce).digest())

    @property
    def socket_path(self) -> Path:
        return self.directory / "kv.sock"

    @property
    def nonce_path(self) -> Path:
        return self.directory / "nonce"

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


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
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
