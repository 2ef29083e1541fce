"""Where a local cluster listens for `splitserve scale`: `<folder>/<its gRPC port>.sock`, both its user's alone.

The kernel authenticates: only the user (or root) can enter the folder, whose owner and mode are checked, because
somebody else may have made one of its name.
"""

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from splitserve.service.errors import Unavailable

FOLDER_VARIABLE = "SPLITSERVE_RUNTIME_DIR"
# The kernel's limit for a socket path is 108 bytes, less on other systems.
MAX_PATH_BYTES = 100
_SUFFIX = ".sock"
_BACKLOG = 16
_PROBE_TIMEOUT_S = 1.0


def runtime_folder() -> Path:
    """The same for every process of this user, whatever the session. It need not be there."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    uid = os.getuid()
    of_user = Path(f"/run/user/{uid}")
    return of_user / "splitserve" if _is_private(of_user) else Path(tempfile.gettempdir()) / f"splitserve-{uid}"


def make_private(folder: Path) -> Path:
    """Makes the folder where it is missing. Raises Unavailable where it is another user's or open to others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"{folder} cannot be made: {error.strerror or error}") from error
    if not _is_private(folder):
        raise Unavailable(f"{folder} is not this user's alone (mode 0700); ${FOLDER_VARIABLE} names another folder")
    return folder


def listen(folder: Path, port: int) -> tuple[socket.socket, Path]:
    """A listening socket, mode 0600, and its path; removes what killed clusters have left there. Raises Unavailable."""
    path = make_private(folder) / f"{port}{_SUFFIX}"
    if len(os.fsencode(path)) >= MAX_PATH_BYTES:
        raise Unavailable(f"{path} is too long for a socket; ${FOLDER_VARIABLE} names another folder")
    # Whoever sees the name finds somebody listening: that is how what is left over is told.
    unfinished = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX)
    try:
        _sweep(folder)
        unfinished.unlink(missing_ok=True)
        listener.bind(os.fspath(unfinished))
        unfinished.chmod(0o600)
        listener.listen(_BACKLOG)
        unfinished.rename(path)
    except OSError as error:
        listener.close()
        raise Unavailable(f"{path} cannot be listened at: {error.strerror or error}") from error
    return listener, path


def remove(path: Path) -> None:
    """The name of a socket whose listener is closed."""
    path.unlink(missing_ok=True)


def connect(path: Path, timeout_s: float) -> socket.socket | None:
    """None where nobody listens. Raises OSError, TimeoutError among them, where somebody does who does not answer."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        connection.connect(os.fspath(path))
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def paths(folder: Path) -> dict[int, Path]:
    """By gRPC port, of this user's folder only; there may be nobody behind one."""
    if not _is_private(folder):
        return {}
    found = {path.stem: path for path in sorted(folder.glob(f"*{_SUFFIX}"))}
    return {int(port): path for port, path in found.items() if port.isdecimal()}


def _sweep(folder: Path) -> None:
    for path in paths(folder).values():
        with contextlib.suppress(OSError):
            connection = connect(path, _PROBE_TIMEOUT_S)
            if connection is None:
                path.unlink(missing_ok=True)
            else:
                connection.close()


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700
