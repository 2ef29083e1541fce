"""How fast blocks travel on one outgoing link, as its source sees it. Plain state, owned by `source.Source`.

Measured over the time in which bytes are under way and not yet acknowledged. A transfer as a whole takes longer: it
waits for its prompt to be computed, chunk by chunk, and that says nothing of the link.
"""

from dataclasses import dataclass

MIB = 1 << 20
# A shorter run of bytes measures how long one message takes, whatever its size.
MIN_RUN_BYTES = MIB
# A link that is never idle is measured all the same.
MAX_RUN_BYTES = 64 * MIB
# What was measured this many bytes ago counts half.
HALF_LIFE_BYTES = 64 * MIB
# A smaller change than this part is not worth telling.
MIN_CHANGE = 0.1


@dataclass
class Bandwidth:
    """`bytes_per_s` is 0.0 until enough has travelled."""

    bytes_per_s: float = 0.0
    # The run that goes on: since when bytes are under way, and how many of them have been acknowledged.
    _since: float | None = None
    _num_bytes: int = 0
    # What was measured, older runs counting less.
    _past_bytes: float = 0.0
    _past_seconds: float = 0.0
    _told: float = 0.0

    def sent(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def acknowledged(self, num_bytes: int, now: float, *, is_idle: bool) -> None:
        """`is_idle`: nothing is under way any more."""
        if self._since is None:
            return
        self._num_bytes += num_bytes
        if not is_idle and self._num_bytes < MAX_RUN_BYTES:
            return
        if self._num_bytes >= MIN_RUN_BYTES and now > self._since:
            self._fold(self._num_bytes, now - self._since)
        self._since = None if is_idle else now
        self._num_bytes = 0

    def interrupted(self) -> None:
        """What is under way is lost: how long it took is not known."""
        self._since = None
        self._num_bytes = 0

    def news(self) -> float | None:
        """The bandwidth, if it is clearly another than it was the last time that this gave one."""
        if abs(self.bytes_per_s - self._told) <= MIN_CHANGE * self._told:
            return None
        self._told = self.bytes_per_s
        return self._told

    def _fold(self, num_bytes: int, seconds: float) -> None:
        weight = 0.5 ** (num_bytes / HALF_LIFE_BYTES)
        self._past_bytes = self._past_bytes * weight + num_bytes
        self._past_seconds = self._past_seconds * weight + seconds
        self.bytes_per_s = self._past_bytes / self._past_seconds
