"""The cluster's secret: random bytes in a file that only its user may read, made once and then kept.

Made by `splitserve secret init`. Routers and workers do not read it yet: it is what their links will be authenticated
with.
"""

import os
import secrets
import stat
from pathlib import Path

from splitserve.service.errors import InvalidRequest

SECRET_NAME = "cluster.secret"  # noqa: S105 - a file's name
SECRET_NBYTES = 32


def init_secret(directory: Path) -> tuple[Path, bool]:
    """The secret's file in `directory`, and whether it was made now: one that is there is never replaced.

    Several processes may do this at once and all find the same bytes. The directory is made (0700) if need be. Raises
    `InvalidRequest` for a file that is no such secret or is open to others, OSError where nothing can be written.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / SECRET_NAME
    # Written whole under another name first: whoever finds the file finds all of it, also after a power cut.
    partial = directory / f".{SECRET_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_NBYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)
        except FileExistsError:
            _check(path)
            return path, False
    finally:
        partial.unlink()
    return path, True


def _check(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size != SECRET_NBYTES:
        raise InvalidRequest(f"{path} is no file of {SECRET_NBYTES} bytes, so it is not this cluster's secret")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise InvalidRequest(f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}); want 0400")
