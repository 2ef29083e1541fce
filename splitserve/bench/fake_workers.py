"""Workers without a model: they join a real router and speak its contract, so that a benchmark measures the router.

`router` runs them in its own process. A decode worker takes what it is asked to, and gives every running sequence one
token per step; when a step is due is the benchmark's to say. Everything happens on one event loop.
"""

import asyncio
from collections.abc import Sequence

import grpc.aio

from splitserve.client.channel import channel_options
from splitserve.v1 import cluster_pb2 as pb
from splitserve.v1 import cluster_pb2_grpc as pb_grpc

_BLOCK_SIZE = 16
_MANY = 1_000_000
_BLOCKS = 100 * _MANY

Stream = grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.RouterMessage]


class FakeWorker:
    """One `Join` stream. Runs until cancelled."""

    role: pb.Role.ValueType

    def __init__(self, worker_id: str, model: str, revision: str, max_num_seqs: int) -> None:
        self.worker_id = worker_id
        self.is_welcome = asyncio.Event()
        self._hello = pb.Hello(
            worker_id=worker_id,
            role=self.role,
            model=model,
            revision=revision,
            capacity=pb.Capacity(
                num_blocks=_BLOCKS,
                block_size=_BLOCK_SIZE,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=_MANY,
                max_model_len=_BLOCKS,
                long_prefill_threshold=_MANY,
            ),
            device="none",
            transport="none",
            numerics="none",
            recompute_exact=True,
        )
        self._outgoing: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()

    async def run(self, target: str) -> None:
        """Joins the router at `target`. Raises AioRpcError when the stream breaks."""
        async with grpc.aio.insecure_channel(target, options=channel_options(target)) as channel:
            stream: Stream = pb_grpc.ClusterServiceStub(channel).Join()
            self.say(hello=self._hello)
            self.report()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(stream))
                tasks.create_task(self._read(stream))

    def say(self, **body: object) -> None:
        self._outgoing.put_nowait(pb.WorkerMessage(**body))  # type: ignore[arg-type]

    def report(self) -> None:
        """Load, which is also a sign of life."""
        running = self.num_running
        self.say(load=pb.Load(blocks_free=_BLOCKS - running, blocks_in_use=running, num_running=running))

    @property
    def num_running(self) -> int:
        """Sequences."""
        return 0

    async def _write(self, stream: Stream) -> None:
        while True:
            await stream.write(await self._outgoing.get())

    async def _read(self, stream: Stream) -> None:
        while isinstance(message := await stream.read(), pb.RouterMessage):
            match message.WhichOneof("body"):
                case "welcome":
                    self.is_welcome.set()
                case "heartbeat":
                    self.report()
                case "reserve":
                    self._on_reserve(message.reserve)
                case "prefill":
                    self._on_prefill(message.prefill)
                case "release":
                    self._on_release(message.release)

    def _on_reserve(self, reserve: pb.Reserve) -> None:
        raise AssertionError("a prefill worker is asked for no reservation")

    def _on_prefill(self, prefill: pb.Prefill) -> None:
        raise AssertionError("a decode worker is given no prompt")

    def _on_release(self, release: pb.Release) -> None:
        """What a prefill worker is given it has forgotten at once."""


class FakeDecode(FakeWorker):
    """`num_sent` counts the tokens that it has given out in steps."""

    role = pb.ROLE_DECODE

    def __init__(self, worker_id: str, model: str, revision: str, max_num_seqs: int, first_id: int) -> None:
        super().__init__(worker_id, model, revision, max_num_seqs)
        self.num_sent = 0
        self._first_id = first_id
        self._positions: dict[str, int] = {}

    @property
    def num_running(self) -> int:
        return len(self._positions)

    def step(self, token_id: int) -> None:
        """The same token for every sequence."""
        tokens = []
        for attempt, position in self._positions.items():
            tokens.append(pb.Token(attempt_id=attempt, position=position, token_id=token_id))
            self._positions[attempt] = position + 1
        self.num_sent += len(tokens)
        self.say(step_tokens=pb.StepTokens(tokens=tokens))

    def begin(self, attempt: str) -> None:
        """The blocks of the attempt have come; the first token is prefill's."""
        self._positions[attempt] = 1
        self.say(step_tokens=pb.StepTokens(tokens=[pb.Token(attempt_id=attempt, token_id=self._first_id)]))

    def _on_reserve(self, reserve: pb.Reserve) -> None:
        ticket = pb.Ticket(transfer_id=reserve.attempt_id, sink_worker_id=self.worker_id, num_blocks=1)
        self.report()
        self.say(reserved=pb.Reserved(attempt_id=reserve.attempt_id, ticket=ticket))

    def _on_release(self, release: pb.Release) -> None:
        self._positions.pop(release.attempt_id, None)


class FakePrefill(FakeWorker):
    """Hands every prompt over at once: the decode worker begins in the same moment."""

    role = pb.ROLE_PREFILL

    def __init__(self, model: str, revision: str, decodes: Sequence[FakeDecode], first_id: int) -> None:
        super().__init__("prefill", model, revision, _MANY)
        self._decodes = {decode.worker_id: decode for decode in decodes}
        self._first_id = first_id

    def link(self) -> None:
        """Tells the router that blocks can flow to every decode worker."""
        for worker_id in self._decodes:
            self.say(link_report=pb.LinkReport(peer_worker_id=worker_id, reachable=True, detail="none"))

    def _on_prefill(self, prefill: pb.Prefill) -> None:
        self.say(accepted=pb.Accepted(attempt_id=prefill.attempt_id))
        first = pb.Token(token_id=self._first_id)
        self.say(first_tokens=pb.FirstTokens(attempt_id=prefill.attempt_id, tokens=[first]))
        # The reservation has the attempt's id, a prefill worker knows it by its leg's.
        self._decodes[prefill.ticket.sink_worker_id].begin(prefill.ticket.transfer_id)
