"""Processes of a measured server: started on given cores, waited for, and ended with all that they started."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from splitserve.bench.local_cluster import last_line
from splitserve.service.errors import Unavailable

_POLL_S = 0.25
_STOP_S = 20.0
_LONGEST_LINE = 300


@dataclass(frozen=True, kw_only=True)
class Process:
    """One of a server's processes. It may run on `cores` alone; `environment` comes beside this process's own."""

    name: str
    command: Sequence[str]
    cores: Sequence[int]
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_url: str
    "Answers 200 once the process serves."


@contextmanager
def running(processes: Sequence[Process], logs: Path, ready_s: float) -> Iterator[float]:
    """All of them, ready on entry and gone on exit, in the order given; yields the seconds until then.

    What each writes goes to a file in `logs`. Raises Unavailable with its last line when one ends early or takes too
    long.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        started = [(process, stack.enter_context(_started(process, logs))) for process in processes]
        for process, child in started:
            _await(process, child, logs, began + ready_s)
        yield time.monotonic() - began


@contextmanager
def _started(process: Process, logs: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with _log(process, logs).open("wb") as log:
        try:
            child = subprocess.Popen(  # noqa: S603
                process.command,
                env=os.environ | dict(process.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Before it starts a thread: each inherits what its maker has.
                preexec_fn=lambda: os.sched_setaffinity(0, process.cores),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"{process.name} cannot be started: {error}") from error
    try:
        yield child
    finally:
        _stop(child)


def _await(process: Process, child: "subprocess.Popen[bytes]", logs: Path, deadline: float) -> None:
    while not _answers(process.ready_url):
        if child.poll() is not None:
            raise Unavailable(f"{process.name} ended before it was ready: {_last_words(process, logs)}")
        if time.monotonic() > deadline:
            raise Unavailable(f"{process.name} was not ready in time: {_last_words(process, logs)}")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _log(process: Process, logs: Path) -> Path:
    return logs / f"{process.name}.log"


def _last_words(process: Process, logs: Path) -> str:
    return last_line(_log(process, logs))[:_LONGEST_LINE]


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """With its whole process group: servers start workers of their own."""
    for how in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(child.pid, how)
        except ProcessLookupError:
            return
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            continue
        # Its leader has ended; who is left of the group gets no time of his own.
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
