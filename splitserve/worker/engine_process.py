"""The engine process of a worker: turns commands and KV events into steps.

Threads: the engine thread (the loop below, the only one that touches model, allocator and attempts), one reader of the
front's socket, and the KV thread inside `KVAgent`. They meet in one inbox. The front starts this process with two
inherited descriptors and takes its exit for the worker's death.
"""

import argparse
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog

from kvtransfer import events
from kvtransfer.agent import KVAgent
from kvtransfer.pairs.lane import are_any_left
from splitserve.service.config import exit_status_of
from splitserve.service.errors import SplitserveError
from splitserve.service.logging import configure_logging
from splitserve.worker import commands, reports
from splitserve.worker.clock import StepClock
from splitserve.worker.engine_setup import EngineContext, Publish, build_context, ready_report
from splitserve.worker.link import EngineLink
from splitserve.worker.load import StepSize
from splitserve.worker.watchdog import StandstillError, Watchdog, end_with_parent

# How often an idle engine shows a sign of life and looks at deadlines.
_IDLE_WAIT_S = 0.2
# The engine shares its interpreter with the KV thread: the default of 5 ms would be added to a step now and then.
_SWITCH_INTERVAL_S = 1e-4
# An engine that is stuck in a step does not see that its front is gone: it gets this long to come out.
_FRONT_GONE_GRACE_S = 5.0

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

Item = commands.Command | events.KVEvent | None


class RoleEngine(Protocol):
    """What prefill and decode put into the loop. Every method runs on the engine thread."""

    def handle(self, item: commands.Command | events.KVEvent) -> None: ...

    def expire(self, now: float) -> None:
        """Ends what has passed its deadline; `now` is a time of the context's clock."""

    def has_work(self) -> bool: ...

    def step(self) -> StepSize | None:
        """Computes one step; None when everything that runs has to wait for something to arrive."""

    def report_load(self) -> None:
        """Publishes what of the load, and of how the pool is used, is another than what was published last."""

    def check(self) -> None:
        """Raises ValueError if what the engine holds does not add up. Called when it has been idle for a moment."""


def run_engine(make_engine: Callable[[EngineContext], RoleEngine], role: str) -> int:
    """The whole life of an engine process; returns its exit status."""
    parser = argparse.ArgumentParser(description="Started by a worker's front, not by hand.")
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--clock-fd", type=int, required=True)
    arguments = parser.parse_args()
    end_with_parent()
    # Who signals all processes of a worker means its front, which lets the engine finish or ends it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(f"{role}-engine")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    link = EngineLink(socket.socket(fileno=arguments.link_fd))
    configure = link.receive()
    if not isinstance(configure, commands.Configure):
        return 1
    inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
    try:
        context = build_context(configure, link.send, inbox.put)
    except (SplitserveError, ValueError, OSError, MemoryError) as error:
        link.send(reports.StartFailed(message=str(error), status=exit_status_of(error)))
        return 1
    threading.Thread(target=_read_commands, args=(link, inbox), name="front-reader", daemon=True).start()
    try:
        clock = StepClock(arguments.clock_fd)
        # Before anyone is told: from then on the front misses an engine that shows no sign of life.
        clock.beat()
        link.send(ready_report(context))
        context.runner.on_layer = clock.advance_step
        watched = watchdogs(clock, context.agent, context.config.stall_timeout)
        EngineLoop(make_engine(context), context.publish, inbox, clock, context.clock, watched).run()
    except StandstillError as error:
        log.error("the engine ends", reason=str(error))
        os._exit(1)
    except OSError as error:
        log.error("the front is gone", error=str(error))
        return 1
    except Exception:
        # What is in memory cannot be trusted any more. No orderly farewell: it takes a second in which routers go on
        # giving work to a worker that will never do it.
        log.exception("the engine failed")
        os._exit(1)
    context.agent.close()
    if are_any_left():
        sys.stdout.flush()
        os._exit(0)
    return 0


def watchdogs(clock: StepClock, agent: KVAgent, limit_s: float) -> tuple[Watchdog, ...]:
    """Over those that an engine cannot do without: nobody else would miss them."""
    return (
        Watchdog("the front", clock.front_beats, limit_s),
        Watchdog("the KV thread", lambda: agent.num_turns, limit_s),
    )


def _read_commands(link: EngineLink, inbox: "queue.SimpleQueue[Item]") -> None:
    """Until the front is gone or cannot be understood; then the process ends, one way or the other."""
    try:
        while (command := link.receive()) is not None:
            inbox.put(command)
    except Exception as error:
        # A front that was killed with reports unread shows as a reset connection.
        log.error("the front can be read no longer", error=f"{type(error).__name__}: {error}")
    inbox.put(None)
    time.sleep(_FRONT_GONE_GRACE_S)
    log.error("the engine ends", reason="the front is gone, and a step does not end")
    os._exit(1)


class EngineLoop:
    """schedule → run → publish, for as long as there is work; a wait on the inbox otherwise."""

    def __init__(
        self,
        engine: RoleEngine,
        publish: Publish,
        inbox: "queue.SimpleQueue[Item]",
        clock: StepClock,
        now: Callable[[], float] = time.monotonic,
        watchdogs: Sequence[Watchdog] = (),
    ) -> None:
        """`now` is the clock of the engine's deadlines, and of what its watchdogs look at."""
        self._watchdogs = watchdogs
        self._engine = engine
        self._now = now
        self._publish = publish
        self._inbox = inbox
        self._clock = clock
        self._is_checked = True
        self._is_waiting = True

    def run(self) -> None:
        """Returns when the front says stop or is gone."""
        while self.turn(_IDLE_WAIT_S):
            pass

    def turn(self, wait_s: float) -> bool:
        """Handles what has arrived and computes at most one step; False when it is time to end.

        With nothing to compute it waits up to `wait_s` for something to arrive.
        """
        is_quiet = True
        for item in self._arrived(wait_s):
            is_quiet = False
            if item is None or isinstance(item, commands.Stop):
                return False
            self._is_checked = False
            self._dispatch(item)
        now = self._now()
        for watchdog in self._watchdogs:
            watchdog.look(now)
        self._engine.expire(now)
        self._is_waiting = True
        if self._engine.has_work():
            self._clock.begin_step()
            self._is_waiting = not self._step()
        if self._is_waiting:
            self._clock.beat()
            if is_quiet:
                self._check_once_idle(wait_s)
        else:
            self._clock.end_step()
            self._is_checked = False
        self._engine.report_load()
        return True

    def _step(self) -> bool:
        """False when everything has to wait."""
        began = self._now()
        size = self._engine.step()
        if size is None:
            return False
        seconds = self._now() - began
        self._publish(reports.Step(seconds, size.num_sequences, size.num_prompt_tokens, size.floor_s))
        return True

    def _check_once_idle(self, wait_s: float) -> None:
        """Looks through the books once the engine has been idle for a moment; a violation ends the worker before it
        serves from it. Not between two requests: of a large pool it takes tens of milliseconds."""
        if wait_s > 0 and not self._is_checked:
            self._engine.check()
            self._is_checked = True

    def _arrived(self, wait_s: float) -> Iterator[Item]:
        try:
            if self._is_waiting and wait_s > 0:
                yield self._inbox.get(timeout=wait_s)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def _dispatch(self, item: commands.Command | events.KVEvent) -> None:
        match item:
            case events.LinkUp(worker_id=peer, path=path, fallback=fallback):
                self._publish(reports.LinkReport(peer=peer, reachable=True, detail=path, fallback=fallback))
                if fallback:
                    self._publish(reports.TransportFallback(used=item.transport))
            case events.LinkMeasured(worker_id=peer, path=path, bytes_per_s=speed, fallback=fallback):
                self._publish(reports.LinkReport(peer, True, path, speed, fallback))
            case events.LinkDown(worker_id=peer, reason=reason):
                self._publish(reports.LinkReport(peer=peer, reachable=False, detail=reason))
            case events.LinkRefused(worker_id=peer, detail=detail):
                log.error("a peer does not fit", peer=peer, detail=detail)
                self._publish(reports.LinkReport(peer=peer, reachable=False, detail=detail))
            case events.AgentStopped(detail=detail):
                raise RuntimeError(f"the KV thread stopped: {detail}")
            case events.TransferComplete(num_bytes=num_bytes, seconds=seconds):
                self._publish(reports.TransferReport("sink", item.transport, "", num_bytes, seconds))
                self._engine.handle(item)
            case events.TransferAcked(num_bytes=num_bytes, seconds=seconds):
                self._publish(reports.TransferReport("source", item.transport, "", num_bytes, seconds))
                self._engine.handle(item)
            case events.TransferFailed(side=side, reason=failure):
                self._publish(reports.TransferReport(side.value, item.transport, failure.value.lower()))
                self._engine.handle(item)
            case _:
                self._engine.handle(item)
