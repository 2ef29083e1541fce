"""One scale command at a time for a name, over all processes of this user on this machine."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from splitserve.cli.scale.sockets import make_private, runtime_folder
from splitserve.service.errors import DeadlineExceeded

_POLL_S = 0.2


@contextmanager
def serialized(name: str, timeout_s: float) -> Iterator[None]:
    """The kernel releases it when its holder ends, however. Raises DeadlineExceeded when others take too long."""
    path = make_private(runtime_folder()) / f"{name}.lock"
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        os.chmod(path, 0o600)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"another scale command was not done within {timeout_s:g} s") from None
                time.sleep(_POLL_S)
        yield
