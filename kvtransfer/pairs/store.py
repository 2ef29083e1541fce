"""Where the two ranks of a pair find each other: a torch store whose keys travel over the pair's control link.

So no port is opened for a rendezvous, and nobody but the peer on that link can take part. Made for one try to form a
pair; the next try has another. `put` is called by the KV thread, the rest by the pair's lane and the library in it.
"""

import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # torch documents it all the same


class PairStore(Store):
    """`publish` sends a key to the peer; it is called on the lane's thread."""

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._publish = publish
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._end: str | None = None

    # What the library calls.

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        """RuntimeError when the peer does not set it in time, or is gone."""
        self.wait([key])
        with self._changed:
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As `get`."""
        timeout_s = self._timeout_s if timeout is None else min(timeout.total_seconds(), self._timeout_s)

        def missing() -> list[str]:
            return [key for key in keys if key not in self._values]

        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or not missing(), timeout_s)
            if self._end is not None:
                raise RuntimeError(self._end)
            if left := missing():
                raise RuntimeError(f"the peer did not set {left[0]!r} within {timeout_s:g} s")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    # What its owner calls.

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Whoever waits hears of it now."""
        with self._changed:
            self._end = reason
            self._changed.notify_all()
