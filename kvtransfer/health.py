"""Whether a link's peer is still listening. Owned per link by the dialler and the greeter.

A frozen process keeps its connection, so only an answer counts. Asked only while a transfer depends on the link.
"""

import enum

from kvtransfer.settings import KVSettings


class Verdict(enum.Enum):
    FINE = enum.auto()
    PING = enum.auto()
    SILENT = enum.auto()


class LinkHealth:
    def __init__(self, settings: KVSettings, now: float) -> None:
        self._interval = settings.ping_interval_s
        self._timeout = settings.ping_timeout_s
        self._heard_at = now
        self._pinged_at = now
        self._was_needed = False

    def heard(self, now: float) -> None:
        self._heard_at = now

    def check(self, now: float, *, is_needed: bool) -> Verdict:
        """`is_needed`: some transfer waits for this peer. Verdict PING means that a ping is sent now."""
        if not is_needed:
            self._was_needed = False
            return Verdict.FINE
        if not self._was_needed:
            # Silence counts from the moment an answer is due.
            self._was_needed = True
            self._heard_at = self._pinged_at = now
        if now - self._heard_at >= self._timeout:
            return Verdict.SILENT
        if now - self._pinged_at >= self._interval:
            self._pinged_at = now
            return Verdict.PING
        return Verdict.FINE
