"""What one engine was told and has said, kept beside it, and what has to hold whenever it has looked.

Nothing here is read off the engine's own deadlines or memory: an engine that loses one is found out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from decode_worker.flow import DecodeEngine
from decode_worker.state import Phase, Reservation
from prefill_worker.flow import PrefillEngine
from splitserve.engine.allocator import BlockState
from splitserve.service.reasons import Reason
from splitserve.worker import commands, reports
from tests.simulation.hash_model import CheckedPool


@dataclass
class Due:
    """A state that waits, and until when; another state has another deadline."""

    state: tuple[str, bool]
    until: float


class EngineBooks:
    def __init__(self, worker_id: str, engine: PrefillEngine | DecodeEngine, pool: CheckedPool) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._pool = pool
        self._limits: dict[tuple[str, str], float] = {}
        self._keep: dict[str, float] = {}
        self._sessions: dict[str, int] = {}
        self._due: dict[str, Due] = {}
        self._living: set[str] = set()
        self._gone: set[str] = set()
        self._released: list[str] = []
        self._losses: set[str] = set()
        self._heard_drain: commands.Drain | None = None
        self._drains_until: float | None = None
        self._is_over = False
        self._is_drained = False

    # What it is told, and what it says

    def hear(self, command: commands.Command) -> None:
        """The engine gets to it in its next turn."""
        match command:
            case commands.Reserve(session=session, attempt=attempt, timeout_s=timeout_s, keep_s=keep_s):
                self._sessions[attempt] = session
                self._limits.setdefault((attempt, ""), timeout_s)
                self._keep.setdefault(attempt, keep_s)
            case commands.Renew(attempt=attempt, transfer_id=transfer_id, timeout_s=timeout_s):
                self._limits.setdefault((attempt, transfer_id), timeout_s)
            case commands.Prefill(session=session, attempt=attempt, timeout_s=timeout_s):
                self._sessions[attempt] = session
                self._limits.setdefault((attempt, ""), timeout_s)
            case commands.Release(attempt=attempt, samples=()):
                self._released.append(attempt)
            case commands.EndSession(session=session):
                self._released += [attempt for attempt, other in self._sessions.items() if other == session]
            case commands.Drain():
                self._heard_drain = command

    def say(self, report: reports.Report, *, is_spoilt: bool) -> None:
        """`is_spoilt`: something was damaged on its way, so peers may find fault with each other."""
        match report:
            case reports.TransferLost(transfer_id=transfer_id):
                self._losses.add(transfer_id)
            case reports.Drained():
                assert self._engine.is_empty(), f"{self._worker_id} has drained, and still has attempts"
                self._is_drained = True
        reason = getattr(report, "reason", None)
        assert is_spoilt or reason is not Reason.INVALID, (
            f"{self._worker_id} finds fault with what it was given: {report}"
        )

    # What it holds

    def _reservations(self) -> list[Reservation]:
        return list(self._engine._reservations) if isinstance(self._engine, DecodeEngine) else []

    def _states(self) -> dict[str, tuple[str, bool]]:
        """Of every attempt that waits for its blocks to go or to come: by which transfer, and whether that is lost; no
        transfer where they are computed here."""
        if isinstance(self._engine, PrefillEngine):
            return {a.attempt: (a.ticket.transfer_id, False) for a in self._engine._attempts.values() if not a.released}
        living = (r for r in self._reservations() if r.phase is not Phase.CLOSING)
        states = {r.attempt: (r.transfer_id, r.phase is Phase.PARKED) for r in living}
        return states | {prompt.attempt: ("", False) for prompt in self._engine._local}

    def _running(self) -> set[str]:
        return {s.attempt for s in self._engine._running} if isinstance(self._engine, DecodeEngine) else set()

    def _holders(self) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """The blocks of each that uses some, and of each that has reserved some."""
        if isinstance(self._engine, PrefillEngine):
            return [attempt.blocks for attempt in self._engine._attempts.values()], []
        reservations = self._reservations()
        used = [holder.blocks for holder in (*self._engine._running, *self._engine._local)]
        return used + [r.pinned_blocks for r in reservations], [r.reserved_blocks for r in reservations]

    # What has to hold

    def looked(self, now: float) -> None:
        """The engine has handled what was there and seen to its deadlines."""
        states = self._states()
        living = states.keys() | self._running()
        new, self._gone = living - self._living, self._gone | (self._living - living) | set(self._released)
        self._living = living
        self._released.clear()
        assert living.isdisjoint(self._gone), f"{self._worker_id} keeps an attempt that has ended, or has revived it"
        self._check_deadlines(states, now)
        self._check_drain(new, now)

    def _check_deadlines(self, states: dict[str, tuple[str, bool]], now: float) -> None:
        due, self._due = self._due, {}
        for attempt, state in states.items():
            before = due.get(attempt)
            self._due[attempt] = before if before and before.state == state else self._arm(attempt, state, before, now)
            assert now <= self._due[attempt].until, f"{self._worker_id} keeps an attempt past its deadline: {state}"
            transfer_id, is_parked = state
            assert not is_parked or transfer_id in self._losses, f"{self._worker_id} told nobody of a lost transfer"

    def _arm(self, attempt: str, state: tuple[str, bool], before: Due | None, now: float) -> Due:
        if state[1]:
            return Due(state, now + self._keep[attempt])
        renewed = self._limits.get((attempt, before.state[0])) if before else None
        return Due(state, now + (self._limits[attempt, ""] if renewed is None else renewed))

    def _check_drain(self, new: set[str], now: float) -> None:
        if self._drains_until is not None:
            assert not new, f"{self._worker_id} drains, and took new work"
            assert now <= self._drains_until or not self._living, f"{self._worker_id} drains for ever"
        if self._heard_drain is not None and self._drains_until is None:
            self._drains_until = now + self._heard_drain.timeout_s
        # What the step of a turn has ended is known in the next one.
        was_over, self._is_over = self._is_over, self._drains_until is not None and self._engine.is_empty()
        assert self._is_drained or not (was_over and self._is_over), f"{self._worker_id} never says that it has drained"

    def check_blocks(self) -> None:
        """A block has one state, and whoever holds it is known."""
        allocator = self._engine._allocator
        allocator.check()
        used, reserved = self._holders()
        references = Counter(block for blocks in used for block in blocks)
        for block, (state, count) in enumerate(zip(allocator._states, allocator._references, strict=True)):
            assert count == references[block], f"{self._worker_id} counts {count} users of block {block}"
            assert state is BlockState.IN_USE or self._pool.sending[block] <= 0, f"block {block} is lent and not in use"
            assert state is BlockState.RESERVED or block not in self._pool.receiving, f"block {block} is not reserved"
        taken = Counter(block for blocks in reserved for block in blocks)
        expected = [block for block, state in enumerate(allocator._states) if state is BlockState.RESERVED]
        assert sorted(taken.elements()) == expected, f"{self._worker_id} has reserved blocks for nobody, or twice"

    def check_idle(self) -> None:
        assert not self._living, f"{self._worker_id} still has {self._living}"
        assert self._engine.is_empty()
        self._engine.check()
        self._engine._allocator.check_idle()
