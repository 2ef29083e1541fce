"""Where fetched and converted models lie, and how a directory gets there whole.

Called by everything in `splitserve.models` that makes a directory. The file system owns the state: a finished
directory is renamed into place, so it is either complete or absent, and a lock file makes several processes that
want the same one make it once.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from splitserve.models.progress import Progress, report
from splitserve.service.errors import InvalidRequest, Unavailable

LOCK_TIMEOUT_S = 3600.0
_LOCK_POLL_S = 0.5


def cache_root(explicit: Path | None = None) -> Path:
    """The cache folder: the argument, else `SPLITSERVE_CACHE`, else `splitserve` under the user's cache folder."""
    if explicit is not None:
        return explicit
    if own := os.environ.get("SPLITSERVE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "splitserve"


def build_once(target: Path, build: Callable[[Path], None], progress: Progress | None = None) -> None:
    """Makes `target` by calling `build` on an empty directory beside it, unless it is there already.

    Whatever ends `build` early, a kill included, leaves no `target`; the next caller sweeps the leftovers.
    Raises `Unavailable` when another process holds the lock longer than `LOCK_TIMEOUT_S`.
    """
    if target.is_dir():
        return
    prepare_folder(target.parent)
    with _locked(target, progress):
        if target.is_dir():
            return
        for leftover in target.parent.glob(f".{target.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            build(staging)
            _make_durable(staging)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        _sync(target.parent)


def prepare_folder(folder: Path) -> None:
    """Creates a cache folder, or says which setting names a better one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        raise InvalidRequest(f"cannot create the cache folder {folder}: {error}; set SPLITSERVE_CACHE") from error
    if not writable:
        raise InvalidRequest(f"the cache folder {folder} is not writable; set SPLITSERVE_CACHE to one that is")


@contextmanager
def _locked(target: Path, progress: Progress | None) -> Iterator[None]:
    lock = FileLock(target.parent / f".{target.name}.lock")
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            lock.acquire(timeout=_LOCK_POLL_S)
            break
        except Timeout:
            report(progress, "waiting for another process", 0, 0)
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"another process has been making {target} for more than {LOCK_TIMEOUT_S:.0f} s"
                ) from None
    try:
        yield
    finally:
        lock.release()


def _make_durable(directory: Path) -> None:
    """World-readable and on disk before the rename: a power cut must not leave an empty file under a final name."""
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
