"""The internal network edge: one `Join` stream per worker, turned into a `Worker` session and back.

The only place in the router that knows the proto of `ClusterService`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import structlog

from kvtransfer.ticket import Ticket
from router.config import RouterConfig
from router.membership import Membership
from router.request import FinishReason
from router.worker import (
    Accepted,
    AttemptEvent,
    Ended,
    FirstTokensArrived,
    Identity,
    Link,
    LoadReport,
    Refused,
    Reserved,
    Role,
    Start,
    TokenArrived,
    Worker,
)
from splitserve.service.errors import InvalidRequest
from splitserve.service.lifecycle import first_of
from splitserve.service.reasons import Reason
from splitserve.v1 import cluster_pb2 as pb
from splitserve.v1 import cluster_pb2_grpc as pb_grpc
from splitserve.worker.contract import REASON_FROM_PROTO, ticket_from_proto, ticket_to_proto

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_HELLO_TIMEOUT_S = 5.0
_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE}
_FINISH_REASONS = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}

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

    def reserve(self, attempt_id: str, start: Start, timeout_s: float, traceparent: str) -> None:
        self.send(
            pb.RouterMessage(
                reserve=pb.Reserve(
                    attempt_id=attempt_id, start=_start(start), timeout_s=timeout_s, traceparent=traceparent
                )
            )
        )

    def prefill(self, attempt_id: str, start: Start, ticket: Ticket, timeout_s: float, traceparent: str) -> None:
        self.send(
            pb.RouterMessage(
                prefill=pb.Prefill(
                    attempt_id=attempt_id,
                    start=_start(start),
                    ticket=ticket_to_proto(ticket),
                    timeout_s=timeout_s,
                    traceparent=traceparent,
                )
            )
        )

    def release(self, attempt_id: str, reason: str) -> None:
        self.send(pb.RouterMessage(release=pb.Release(attempt_id=attempt_id, reason=reason)))

    def close(self, reason: str) -> None:
        self._closed = True
        self.outgoing.put_nowait(None)


class ClusterServicer(pb_grpc.ClusterServiceServicer):
    def __init__(self, config: RouterConfig, membership: Membership, router_id: str) -> None:
        self._config = config
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
            identity = _identity(first.hello)
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
                pb.Peer(worker_id=key, role=_proto_role(workers[key].role), kv_endpoint=other.kv_endpoint)
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
                worker.hear(token.attempt_id, _token(worker, token))
        elif kind == "load":
            worker.load = _load(message.load)
            self._membership.changed()
        elif kind == "link_report":
            report = message.link_report
            worker.links[report.peer_worker_id] = Link(report.reachable, report.detail)
            self._membership.changed()
        else:
            attempt_id, event = _event(worker, message)
            if event is not None and not worker.hear(attempt_id, event):
                log.debug("said about an attempt that has ended", worker=worker.worker_id, said=kind)
            self._membership.changed()


# From proto


def _identity(hello: pb.Hello) -> Identity:
    role = _ROLES.get(hello.role)
    if role is None or not hello.worker_id:
        raise InvalidRequest("the hello names no role or no worker id")
    capacity = hello.capacity
    if capacity.num_blocks < 1 or capacity.block_size < 1 or capacity.max_model_len < 1:
        raise InvalidRequest("the hello's capacity is not positive")
    return Identity(
        worker_id=hello.worker_id,
        role=role,
        model=hello.model,
        revision=hello.revision,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=capacity.max_model_len,
        host_id=hello.host_id,
        pid=hello.pid,
        device=hello.device,
        transport=hello.transport,
        numerics=hello.numerics,
        recompute_exact=hello.recompute_exact,
    )


def _load(load: pb.Load) -> LoadReport:
    return LoadReport(
        engine_steps=load.engine_steps,
        step_age_s=load.step_age_s,
        blocks_free=load.blocks_free,
        blocks_cached=load.blocks_cached,
        blocks_in_use=load.blocks_in_use,
        blocks_reserved=load.blocks_reserved,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        waiting_tokens=load.waiting_tokens,
        kv_bytes_sent=load.kv_bytes_sent,
        kv_bytes_received=load.kv_bytes_received,
    )


def _token(worker: Worker, token: pb.Token) -> TokenArrived:
    return TokenArrived(
        worker=worker.worker_id,
        sample=token.sample,
        position=token.position,
        token_id=token.token_id,
        finish_reason=_FINISH_REASONS.get(token.finish_reason),
    )


def _event(worker: Worker, message: pb.WorkerMessage) -> tuple[str, AttemptEvent | None]:
    match message.WhichOneof("body"):
        case "reserved":
            return message.reserved.attempt_id, Reserved(ticket_from_proto(message.reserved.ticket))
        case "accepted":
            return message.accepted.attempt_id, Accepted()
        case "refused":
            refused = message.refused
            reason = REASON_FROM_PROTO.get(refused.reason, Reason.INTERNAL)
            return refused.attempt_id, Refused(worker.worker_id, reason, refused.message)
        case "first_tokens":
            first = message.first_tokens
            tokens = tuple(_token(worker, token) for token in first.tokens)
            return first.attempt_id, FirstTokensArrived(tokens, first.num_cached_tokens)
        case "attempt_ended":
            ended = message.attempt_ended
            reason = REASON_FROM_PROTO.get(ended.reason, Reason.INTERNAL)
            return ended.attempt_id, Ended(worker.worker_id, reason, ended.message)
        case _:
            return "", None


# To proto


def _proto_role(role: Role) -> pb.Role.ValueType:
    return pb.ROLE_PREFILL if role is Role.PREFILL else pb.ROLE_DECODE


def _start(start: Start) -> pb.SequenceStart:
    sampling = start.sampling
    return pb.SequenceStart(
        prompt_ids=start.prompt_ids,
        samples=[pb.SampleStart(index=index, output_ids=output) for index, output in start.outputs.items()],
        limits=pb.SequenceLimits(
            seed=sampling.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
        ),
    )
