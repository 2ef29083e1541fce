"""Which attempts have ended here lately, so that a command that comes late or again revives none.

Kept by an engine, on its thread. An attempt's id is fresh, so one that has ended never begins again.
"""

from collections import OrderedDict

# A command that is later than this many attempts meets an engine that has forgotten; then the router's answer ends it.
NUM_REMEMBERED = 4096


class EndedAttempts:
    """The last ids, bounded."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, attempt: str) -> None:
        """Also of an attempt that has not come yet: what is released before it comes is not wanted any more."""
        self._ids[attempt] = None
        self._ids.move_to_end(attempt)
        if len(self._ids) > NUM_REMEMBERED:
            self._ids.popitem(last=False)
