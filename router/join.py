"""The internal network edge: one `Join` stream per worker, turned into a `Worker` session and back.

`translate` turns its messages into plain data; nothing else in the router knows the proto of `ClusterService`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc
import grpc.aio
import structlog

from kvtransfer.ticket import Ticket
from router.config import RouterConfig
from router.membership import Membership
from router.translate import (
    role_to_proto,
    samples_to_proto,
    start_to_proto,
    to_event,
    to_identity,
    to_link,
    to_load,
    to_token,
)
from router.worker import Identity, LoadReport, Start, Worker
from splitserve.service.errors import InvalidRequest
from splitserve.service.lifecycle import first_of
from splitserve.v1 import cluster_pb2 as pb
from splitserve.v1 import cluster_pb2_grpc as pb_grpc
from splitserve.worker.contract import ticket_to_proto

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_HELLO_TIMEOUT_S = 5.0

# What a worker says that keeps blocks for an attempt and waits for more.
_SAID_BY_A_HOLDER = frozenset({"reserved", "accepted", "transfer_lost", "already_running"})

Context = grpc.aio.ServicerContext[pb.WorkerMessage, pb.RouterMessage]


class JoinChannel:
    """The way down one stream: commands queue here until the stream takes them."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self.kv_endpoint = pb.KVEndpoint()
        self._closed = False

    def send(self, message: pb.RouterMessage) -> None:
        if not self._closed:
            self.outgoing.put_nowait(message)

    def reserve(
        self, attempt_id: str, start: Start, timeout_s: float, keep_s: float, traceparent: str, *, is_local: bool
    ) -> None:
        self.send(
            pb.RouterMessage(
                reserve=pb.Reserve(
                    attempt_id=attempt_id,
                    start=start_to_proto(start),
                    timeout_s=timeout_s,
                    keep_s=keep_s,
                    traceparent=traceparent,
                    is_local=is_local,
                )
            )
        )

    def renew(
        self, attempt_id: str, transfer_id: str, outputs: Mapping[int, tuple[int, ...]], timeout_s: float
    ) -> None:
        self.send(
            pb.RouterMessage(
                renew=pb.Renew(
                    attempt_id=attempt_id,
                    transfer_id=transfer_id,
                    samples=samples_to_proto(outputs),
                    timeout_s=timeout_s,
                )
            )
        )

    def prefill(self, attempt_id: str, start: Start, ticket: Ticket, timeout_s: float, traceparent: str) -> None:
        self.send(
            pb.RouterMessage(
                prefill=pb.Prefill(
                    attempt_id=attempt_id,
                    start=start_to_proto(start),
                    ticket=ticket_to_proto(ticket),
                    timeout_s=timeout_s,
                    traceparent=traceparent,
                )
            )
        )

    def release(self, attempt_id: str, reason: str, samples: Sequence[int] = ()) -> None:
        self.send(pb.RouterMessage(release=pb.Release(attempt_id=attempt_id, reason=reason, samples=samples)))

    def close(self, reason: str) -> None:
        self._closed = True
        self.outgoing.put_nowait(None)


class ClusterServicer(pb_grpc.ClusterServiceServicer):
    """`count_ignored` is told the kind of each word that is about no attempt of ours."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        router_id: str,
        count_ignored: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._config = config
        self._count_ignored = count_ignored
        self._membership = membership
        self._router_id = router_id
        self._sessions = itertools.count(1)
        self._channels: dict[str, JoinChannel] = {}

    # A coroutine that reads and writes: unlike a generator it is never left suspended at a yield when the stream ends.
    async def Join(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Context
    ) -> None:
        """Holds one worker's session for as long as its stream lasts."""
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await context.read()
            if not isinstance(first, pb.WorkerMessage) or first.WhichOneof("body") != "hello":
                raise InvalidRequest("the first message must be a hello")
            identity = to_identity(first.hello)
            self._membership.check(identity)
        except InvalidRequest as error:
            log.warning("refused a worker", reason=error.message)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello")
        await self._hold(context, identity, first.hello.kv_endpoint)

    async def _hold(self, context: Context, identity: Identity, kv_endpoint: pb.KVEndpoint) -> None:
        channel = JoinChannel()
        channel.kv_endpoint = kv_endpoint
        worker = Worker(
            identity=identity,
            session=next(self._sessions),
            channel=channel,
            last_heard=asyncio.get_running_loop().time(),
            load=LoadReport(blocks_free=identity.num_blocks),
        )
        channel.send(
            pb.RouterMessage(
                welcome=pb.Welcome(
                    router_id=self._router_id,
                    session=worker.session,
                    heartbeat_interval_s=self._config.heartbeat_interval,
                    heartbeat_timeout_s=self._config.heartbeat_timeout,
                )
            )
        )
        self._membership.add(worker)
        self._channels[worker.worker_id] = channel
        self._tell_peers()
        reason = "its stream ended"
        try:
            await first_of(self._read(context, worker), self._write(context, channel), self._beat(channel))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            reason = str(error)
        finally:
            self._membership.remove(worker, reason)
            if self._channels.get(worker.worker_id) is channel:
                del self._channels[worker.worker_id]
            self._tell_peers()

    def _tell_peers(self) -> None:
        """Every worker hears of all others, each time someone comes or goes."""
        workers = {worker.worker_id: worker for worker in self._membership}
        known = {key: channel for key, channel in self._channels.items() if key in workers}
        for receiver, channel in known.items():
            peers = [
                pb.Peer(worker_id=key, role=role_to_proto(workers[key].role), kv_endpoint=other.kv_endpoint)
                for key, other in known.items()
                if key != receiver
            ]
            channel.send(pb.RouterMessage(peers=pb.Peers(peers=peers)))

    async def _write(self, context: Context, channel: JoinChannel) -> None:
        while (message := await channel.outgoing.get()) is not None:
            await context.write(message)

    async def _beat(self, channel: JoinChannel) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_interval)
            channel.send(pb.RouterMessage(heartbeat=pb.Heartbeat()))

    async def _read(self, context: Context, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        while isinstance(message := await context.read(), pb.WorkerMessage):
            worker.last_heard = loop.time()
            self._on_message(worker, message)

    def _on_message(self, worker: Worker, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("body")
        if kind == "step_tokens":
            for token in message.step_tokens.tokens:
                if not worker.hear(token.attempt_id, to_token(worker, token)):
                    self._on_late_word(worker, token.attempt_id, kind)
        elif kind == "load":
            worker.load = to_load(message.load)
            worker.has_reported = True
            self._membership.changed()
        elif kind == "draining":
            log.info("worker drains", worker=worker.worker_id, attempts=len(worker.attempts))
            worker.is_draining = True
            self._membership.changed()
        elif kind == "leave":
            self._membership.remove(worker, "it has drained")
        elif kind == "link_report":
            self._on_link_report(worker, message.link_report)
        else:
            attempt_id, event = to_event(worker, message)
            if event is not None and not worker.hear(attempt_id, event):
                self._on_late_word(worker, attempt_id, str(kind))
            self._membership.changed()

    def _on_link_report(self, worker: Worker, report: pb.LinkReport) -> None:
        # Of a peer that has left, a worker may still speak for a moment.
        if self._membership.get(report.peer_worker_id) is None:
            return
        link, before = to_link(report), worker.links.get(report.peer_worker_id)
        worker.links[report.peer_worker_id] = link
        warning = self._membership.link_warning(worker, report.peer_worker_id, link)
        if warning and (before is None or link.fallback != before.fallback or link.detail != before.detail):
            log.warning("kv link", source=worker.worker_id, sink=report.peer_worker_id, path=link.detail, why=warning)
        # Its speed alone lets no waiting request go.
        if before is None or (link.reachable, link.detail) != (before.reachable, before.detail):
            self._membership.changed()

    def _on_late_word(self, worker: Worker, attempt_id: str, kind: str) -> None:
        """The attempt has ended, or a message came again. A worker that still holds something for it is told."""
        self._count_ignored(kind)
        log.debug("said about no attempt of ours", worker=worker.worker_id, attempt=attempt_id, said=kind)
        if kind in _SAID_BY_A_HOLDER:
            worker.channel.release(attempt_id, "the router knows no such attempt")
