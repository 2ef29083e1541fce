"""One scale command at a time for a name, over all processes of this user on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from splitserve.cli.scale.sockets import make_private, runtime_folder
from splitserve.service.errors import DeadlineExceeded


@contextmanager
def serialized(name: str, timeout_s: float) -> Iterator[None]:
    """The kernel releases it when its holder ends, however. Raises DeadlineExceeded when others take too long."""
    from filelock import FileLock, Timeout  # of the same extra as the Docker SDK

    lock = FileLock(make_private(runtime_folder()) / f"{name}.lock", timeout=timeout_s, mode=0o600)
    try:
        lock.acquire()
    except Timeout:
        raise DeadlineExceeded(f"another scale command was not done within {timeout_s:g} s") from None
    try:
        yield
    finally:
        lock.release()
