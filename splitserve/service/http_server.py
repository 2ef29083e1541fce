"""Serves an ASGI application inside the running event loop, for the router and for every worker's front.

uvicorn's own `run` wants a process for itself and takes over its signals; here the process keeps both.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

# An open stream may not hold up the process longer than this.
GRACEFUL_STOP_S = 3

# A client that vanished without a word is found within 40 s, as on the gRPC port: `uvicorn` asks nobody whether he is
# still there. One that is there and takes nothing of what waits for it is cut off after as long.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
UNREAD_TIMEOUT_S = 40.0

# An idle connection has to outlive its stay in clients' pools, which is 90 s at most: one that is closed here just as
# it is used again fails a request.
IDLE_TIMEOUT_S = 120


class HttpServer:
    """One listening port. Made by `serve_http`, which has already started it."""

    def __init__(self, server: "_Server", task: asyncio.Task[None], port: int) -> None:
        self._server = server
        self._task = task
        self.port = port

    async def stop(self) -> None:
        """Takes no new connections, lets running answers end within GRACEFUL_STOP_S, then closes. Idempotent."""
        self._server.should_exit = True
        await self._task


async def serve_http(app: Any, bind: str, port: int, *, unread_timeout_s: float = UNREAD_TIMEOUT_S) -> HttpServer:
    """Starts `app` (an ASGI application) on `bind`; with `port` 0 the result says which port it is.

    A connection is cut off whose client takes nothing of what waits for it for `unread_timeout_s`. Raises OSError if
    the address cannot be bound.
    """
    listener = _listen(bind, port, unread_timeout_s)
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_TIMEOUT_S,
            timeout_graceful_shutdown=GRACEFUL_STOP_S,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]), name=f"http {bind}")
    waiter = asyncio.create_task(server.has_started.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        await task
        raise OSError(f"the HTTP server on {bind}:{port} ended before it started")
    return HttpServer(server, task, listener.getsockname()[1])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the composition root's.
        yield


def _listen(bind: str, port: int, unread_timeout_s: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What a listener has, its connections have from the start.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (_KEEPALIVE | {"TCP_USER_TIMEOUT": round(1000 * unread_timeout_s)}).items():
            if hasattr(socket, name):  # not every system has all of them
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listener.bind((bind, port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {bind}:{port}: {error.strerror}") from error
    return listener
