"""An event loop on which time passes only when the test says so."""

import asyncio
from dataclasses import dataclass
from typing import Any

# A loop that is still busy after so many turns without time passing is going round in circles.
MAX_TURNS = 500


@dataclass
class VirtualClock:
    """Seconds since some beginning; the only clock of everything in a simulation."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._virtual = clock
        self.errors: list[str] = []
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._virtual.now

    def run_ready(self) -> None:
        """Runs everything that can run at this moment."""
        for _ in range(MAX_TURNS):
            if not self._is_busy():
                return
            self.call_soon(self.stop)
            self.run_forever()
        raise AssertionError("the event loop never comes to rest")

    def pass_time(self, seconds: float) -> None:
        """Runs every timer that falls due meanwhile, at its time."""
        end = self._virtual.now + seconds
        while (due := self._next_timer()) is not None and due <= end:
            self._virtual.now = max(due, self._virtual.now)
            self.run_ready()
        self._virtual.now = end
        self.run_ready()

    # asyncio has no public way to ask what waits.

    def _is_busy(self) -> bool:
        due = self._next_timer()
        return bool(self._ready) or (due is not None and due <= self._virtual.now)  # type: ignore[attr-defined]

    def _next_timer(self) -> float | None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        return scheduled[0].when() if scheduled else None

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")
