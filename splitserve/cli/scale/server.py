"""Listens in a running `splitserve up` for `splitserve scale`. Runs beside the supervisor, on its loop."""

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from splitserve.cli.scale.messages import (
    MAX_LINE_BYTES,
    Answer,
    Cluster,
    Describe,
    Done,
    Progress,
    Refused,
    Request,
    Scale,
    decode_request,
    encode,
)
from splitserve.cli.scale.scaler import Scaler
from splitserve.cli.scale.sockets import listen, remove, runtime_folder
from splitserve.cli.setup import Setup
from splitserve.cli.supervisor import Supervisor
from splitserve.service.errors import InvalidRequest, SplitserveError, Unavailable

_REQUEST_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 5.0
# For those that still wait to hear that the cluster ends.
_FAREWELL_S = 1.0


class ScaleServer:
    """`describe` is called for each who asks. `say` is the supervisor's log."""

    def __init__(self, scaler: Scaler, describe: Callable[[], Cluster], say: Callable[[str], None]) -> None:
        self._scaler = scaler
        self._describe = describe
        self._say = say
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket, path: Path) -> None:
        """Until it is cancelled; `path` is removed then."""
        server = await asyncio.start_unix_server(self._on_connection, sock=listener, limit=MAX_LINE_BYTES)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            remove(path)
            if self._serving:
                await asyncio.wait(self._serving, timeout=_FAREWELL_S)
            for task in self._serving:
                task.cancel()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            # Who asked may be gone, or not read: that is its own affair.
            with suppress(OSError):
                await _send(writer, await self._answer(reader, writer))
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        """The last word on a connection."""
        try:
            request = await _read(reader)
            if isinstance(request, Describe):
                return self._describe()
            return await self._scale(request, writer)
        except SplitserveError as error:
            return Refused.of(error)

    async def _scale(self, request: Scale, writer: asyncio.StreamWriter) -> Answer:
        def say(text: str) -> None:
            self._say(text)
            writer.write(encode(Progress(text)))  # a few lines: they need no wait for room

        order = self._scaler.order(request.target, say)
        if request.wait_s is not None:
            await self._scaler.wait(order, request.wait_s, say)
        return Done()


async def _read(reader: asyncio.StreamReader) -> Request:
    try:
        line = await asyncio.wait_for(reader.readline(), _REQUEST_TIMEOUT_S)
        return decode_request(line)
    except TimeoutError:
        raise InvalidRequest(f"no request within {_REQUEST_TIMEOUT_S:g} s") from None
    except (ValueError, msgspec.MsgspecError) as error:  # a line too long, or no message of ours
        raise InvalidRequest(f"not a request: {error}") from None


async def _send(writer: asyncio.StreamWriter, message: Answer) -> None:
    """Raises OSError, also where it is not read in time."""
    writer.write(encode(message))
    await asyncio.wait_for(writer.drain(), _WRITE_TIMEOUT_S)


async def listen_for_scale(setup: Setup, supervisor: Supervisor, poll_s: float) -> None:
    """Until it is cancelled. Where it cannot listen it says so: a cluster that cannot be scaled still serves."""
    scaler = Scaler(
        supervisor,
        setup.roster,
        url=setup.url,
        serves_without_prefill=setup.serves_without_prefill,
        drain_grace_s=setup.drain_grace_s,
        poll_s=poll_s,
    )

    def describe() -> Cluster:
        return Cluster(
            pid=os.getpid(),
            model=setup.model.served_name,
            grpc_port=setup.ports.grpc,
            http_port=setup.ports.http,
            counts=scaler.counts(),
        )

    try:
        listener, path = await asyncio.to_thread(listen, runtime_folder(), setup.ports.grpc)
    except Unavailable as error:
        supervisor.say(f"`splitserve scale` cannot reach this cluster: {error.message}")
        return
    await ScaleServer(scaler, describe, supervisor.say).serve(listener, path)
