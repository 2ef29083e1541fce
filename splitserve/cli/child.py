"""One process of the local cluster: started, listened to, ended. Owned by the supervisor, on its event loop.

A child is the leader of a session of its own, so that Ctrl-C in the terminal reaches the supervisor alone and a child's
own children can be ended with it. It inherits the read end of a pipe whose other end only the supervisor holds: when
the supervisor is gone, however it went, that pipe ends, and so does the child.
"""

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from splitserve.cli.roles import ChildSpec
from splitserve.service.startup import find_startup_line

_LONGEST_LINE = 64 * 1024
_CHUNK_BYTES = 64 * 1024
_NUM_LAST_LINES = 20
# After the process and its group are gone nothing holds the pipe; this only bounds a descendant that left the group.
_DRAIN_S = 2.0

LineSink = Callable[[str, bytes], None]
"""Takes a child's name and one whole line of its output, without the line end."""


class Child:
    """A running process. `last_lines` are the newest of what it wrote to stdout and stderr, `startup_line` is what it
    said of its start."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, output_fd: int, sink: LineSink) -> None:
        self.spec = spec
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.startup_line: str | None = None
        self._process = process
        self._sink = sink
        self._output = asyncio.create_task(_read_lines(output_fd, self._take_line))

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """The exit status, negative for a signal, after its output is read and the rest of its session is gone."""
        status = await self._process.wait()
        self.kill()
        await asyncio.wait([self._output], timeout=_DRAIN_S)
        self._output.cancel()
        return status

    async def stop(self, number: signal.Signals, grace_s: float, hurry: asyncio.Event) -> int:
        """Asks it to end by that signal, and kills it after `grace_s` or as soon as `hurry` is set. It is gone when
        this returns; gives the exit status."""
        waiters = (asyncio.ensure_future(self.wait()), asyncio.ensure_future(hurry.wait()))
        try:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
            await asyncio.wait(waiters, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.kill()
            status = await waiters[0]
            waiters[1].cancel()
        return status

    def kill(self) -> None:
        """Kills the whole session: what a dead worker leaves behind must not outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _take_line(self, line: bytes) -> None:
        if line.strip():
            text = line.decode(errors="replace")
            self.last_lines.append(text)
            self.startup_line = self.startup_line or find_startup_line([text])
        self._sink(self.spec.name, line)


async def start(spec: ChildSpec, parent_fd: int, env: Mapping[str, str], sink: LineSink) -> Child:
    """Runs `spec` with `--parent-fd`; raises OSError where there is no such program."""
    read_fd, write_fd = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            "--parent-fd",
            str(parent_fd),
            stdin=asyncio.subprocess.DEVNULL,
            # A pipe of our own: asyncio's would keep `wait` from returning while any descendant holds it.
            stdout=write_fd,
            stderr=write_fd,
            env=env,
            pass_fds=(parent_fd,),
            start_new_session=True,
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return Child(spec, process, read_fd, sink)


async def _read_lines(fd: int, sink: Callable[[bytes], None]) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        rest = b""
        while data := await reader.read(_CHUNK_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) >= _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                sink(line)
        if rest:
            sink(rest)
    finally:
        transport.close()


def last_words(lines: Iterable[str]) -> str:
    """What a process said last: the reason inside a log line of JSON, or the last line that is more than a frame."""
    for line in reversed(list(lines)):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            return str(event.get("reason") or event.get("event") or line)
        words = line.strip(" │╭╮╰╯─|")
        if words:
            return words
    return "it wrote nothing"
