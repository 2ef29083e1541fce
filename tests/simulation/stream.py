"""One `Join` stream without gRPC: the router's handler on one end, a simulated front on the other, and in between two
queues of messages that move when the test says so.

Signs of life do not wait in the queues, or holding back a message would kill the worker: they pass by, and those of the
worker repeat the last load that has arrived.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc.aio

from splitserve.v1 import cluster_pb2 as pb
from splitserve.worker.clock import Signs

# What a stream may bring once more, now or later, without that being a lie about the present.
REPEATABLE = frozenset({"reserved", "already_running", "accepted", "refused", "first_tokens", "step_tokens"}) | {
    "prompt_logprobs",
    "transfer_lost",
    "transferred",
    "attempt_ended",
    "reserve",
    "renew",
    "prefill",
    "release",
}


class JoinStream:
    """Is the handler's `ServicerContext`. `down` holds None once the router's side has ended, behind what it said."""

    def __init__(
        self, hello: pb.WorkerMessage, now: Callable[[], float], on_command: Callable[[pb.RouterMessage], None]
    ) -> None:
        """`on_command` sees what the router says, as it says it."""
        self.up: deque[pb.WorkerMessage] = deque()
        self.down: deque[pb.RouterMessage | None] = deque()
        self.arrived_up: list[pb.WorkerMessage] = []
        self.arrived_down: list[pb.RouterMessage] = []
        self.router_heard_at = now()
        self._now = now
        self._on_command = on_command
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox.put_nowait(hello)
        self._last_load: pb.WorkerMessage | None = None
        self._handler: asyncio.Task[None]

    def serve(self, handler: "asyncio.Task[None]") -> None:
        self._handler = handler
        handler.add_done_callback(lambda _: self.down.append(None))

    @property
    def is_served(self) -> bool:
        return not self._handler.done()

    # The router's end

    async def read(self) -> Any:
        return await self._inbox.get()

    async def write(self, message: pb.RouterMessage) -> None:
        if message.WhichOneof("body") == "heartbeat":
            self.router_heard_at = self._now()
        else:
            self._on_command(message)
            self.down.append(message)

    # In between

    def deliver_up(self) -> None:
        message = self.up.popleft()
        if message.WhichOneof("body") == "load":
            self._last_load = message
        self.arrived_up.append(message)
        self._inbox.put_nowait(message)

    def deliver_down(self) -> pb.RouterMessage | None:
        message = self.down.popleft()
        if message is not None:
            self.arrived_down.append(message)
        return message

    def repeat(self, way: str, place: int, *, is_late: bool) -> None:
        """The next message comes twice, or one that came before comes again behind what is under way."""
        queue: deque[Any] = self.up if way == "up" else self.down
        earlier: list[Any] = self.arrived_up if way == "up" else self.arrived_down
        choice = [m for m in (earlier if is_late else queue) if m is not None and m.WhichOneof("body") in REPEATABLE]
        if choice:
            message = choice[-1 - place % len(choice)]
            queue.insert(len(queue) if is_late else queue.index(message), message)

    def beat(self, signs: Signs) -> None:
        if self._last_load is not None:
            beat = pb.WorkerMessage()
            beat.CopyFrom(self._last_load)
            beat.load.step_age_s = signs.step_age_s
            self._inbox.put_nowait(beat)

    def end_up(self) -> None:
        """The worker closes the stream, behind what it said."""
        while self.up:
            self.deliver_up()
        self._inbox.put_nowait(grpc.aio.EOF)

    def break_off(self) -> None:
        """The connection is gone, with all that was under way."""
        self.up.clear()
        self.down.clear()
        if self.is_served:
            self._handler.cancel()
