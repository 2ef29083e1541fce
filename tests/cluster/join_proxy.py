"""Between workers and router: forwards what they say on `Join`, by message, and holds or cuts it on demand.

A test names a request by its prompt; the proxy learns from `Reserve` and `Prefill` which ids belong to it and which
workers it is on. Runs in a thread of the test's process; all public methods may be called from any thread.
"""

import asyncio
import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from splitserve.v1 import cluster_pb2 as pb
from splitserve.v1 import cluster_pb2_grpc as pb_grpc
from tests.cluster.harness import PATIENCE_S

Prompt = tuple[int, ...]
_END = None


class Held:
    """Messages of one kind and prompt that wait, in order, and all that is said of that prompt behind them."""

    def __init__(self, proxy: "JoinProxy", kind: str, prompt: Prompt) -> None:
        self.kind = kind
        self.prompt = prompt
        self._proxy = proxy
        self._arrived = threading.Event()
        self._waiting: list[tuple[asyncio.Queue[Any], Any]] = []

    def stops(self, lane: "asyncio.Queue[Any]") -> bool:
        return any(waiting is lane for waiting, _ in self._waiting)

    def keep(self, lane: "asyncio.Queue[Any]", message: Any) -> None:
        self._waiting.append((lane, message))
        self._arrived.set()

    def wait(self) -> None:
        """Until the first one is here."""
        assert self._arrived.wait(PATIENCE_S), f"no {self.kind} came"

    def release(self) -> None:
        """Lets all go; harmless a second time, and when their stream has ended."""
        self._proxy.call(self._let_go)

    def _let_go(self) -> None:
        self._proxy.holds.pop((self.kind, self.prompt), None)
        for lane, message in self._waiting:
            lane.put_nowait(message)
        self._waiting.clear()


@dataclass(eq=False)
class _Session:
    """One worker's stream: what goes up to the router and down to the worker."""

    hello: pb.Hello
    up: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)
    down: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)

    @property
    def role(self) -> str:
        return "prefill" if self.hello.role == pb.ROLE_PREFILL else "decode"


class JoinProxy:
    """`address` is where workers find it; `connect` says where the router is, before any worker comes."""

    def __init__(self) -> None:
        self.address = ""
        self.holds: dict[tuple[str, Prompt], Held] = {}
        self._router = ""
        self._prompts: dict[str, Prompt] = {}
        self._workers: dict[tuple[Prompt, str], str] = {}
        self._seen: Counter[tuple[str, Prompt]] = Counter()
        self._last: dict[tuple[str, Prompt], Any] = {}
        self._sessions: dict[str, _Session] = {}
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(PATIENCE_S)

    def connect(self, router: str) -> None:
        self._router = router

    # For tests

    def hold(self, kind: str, prompt: Sequence[int]) -> Held:
        """From now on messages of `kind` (a field of WorkerMessage or RouterMessage) of this prompt wait, and after the
        first of them all of that stream and prompt."""
        held = Held(self, kind, tuple(prompt))
        self.holds[kind, held.prompt] = held
        return held

    def seen(self, kind: str, prompt: Sequence[int]) -> int:
        return self._seen[kind, tuple(prompt)]

    def last(self, kind: str, prompt: Sequence[int]) -> Any:
        """The last message of `kind` of this prompt; a copy."""
        message = self._last[kind, tuple(prompt)]
        return type(message).FromString(message.SerializeToString())

    def tell(self, worker_id: str, message: pb.RouterMessage) -> None:
        """Says it to the worker as if its router had."""
        self.call(lambda: self._sessions[worker_id].down.put_nowait(message))

    def worker_of(self, prompt: Sequence[int], role: str) -> str:
        """The worker that was asked last."""
        return self._workers[tuple(prompt), role]

    def cut(self, worker_id: str) -> None:
        """Ends the worker's stream on both sides, as a lost connection does."""

        def end() -> None:
            session = self._sessions.get(worker_id)
            if session is not None:
                session.up.put_nowait(_END)
                session.down.put_nowait(_END)

        self.call(end)

    def close(self) -> None:
        self.call(self._loop.stop)
        self._thread.join(10)

    def call(self, function: Any) -> None:
        self._loop.call_soon_threadsafe(function)

    # In the thread

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)

        async def serve() -> grpc.aio.Server:
            server = grpc.aio.server()
            pb_grpc.add_ClusterServiceServicer_to_server(_Servicer(self), server)
            self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            return server

        server = self._loop.run_until_complete(serve())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(server.stop(0.2))

    async def carry(self, context: Any) -> None:
        first = await context.read()
        session = _Session(first.hello)
        worker_id = session.hello.worker_id
        self._sessions[worker_id] = session
        async with grpc.aio.insecure_channel(self._router, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = pb_grpc.ClusterServiceStub(channel).Join()
            try:
                await call.write(first)
            except grpc.aio.AioRpcError:
                return  # no router is there at present: the worker comes again
            pumps = [
                asyncio.ensure_future(pump)
                for pump in (
                    self._receive(context, session, session.up),
                    self._receive(call, session, session.down),
                    self._send(session.up, call),
                    self._send(session.down, context),
                )
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                call.cancel()
                if self._sessions.get(worker_id) is session:
                    del self._sessions[worker_id]

    async def _receive(self, stream: Any, session: _Session, lane: "asyncio.Queue[Any]") -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            while isinstance(message := await stream.read(), pb.WorkerMessage | pb.RouterMessage):
                for part in _parts(message):
                    self._forward(session, lane, part)
        # Not at once: what has come before the end is passed on.
        lane.put_nowait(_END)
        await asyncio.sleep(PATIENCE_S)

    async def _send(self, lane: "asyncio.Queue[Any]", stream: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            while (message := await lane.get()) is not _END:
                await stream.write(message)

    def _forward(self, session: _Session, lane: "asyncio.Queue[Any]", message: Any) -> None:
        kind = message.WhichOneof("body")
        prompt = self._prompt_of(session, kind, message)
        if prompt is None:
            lane.put_nowait(message)
            return
        self._seen[kind, prompt] += 1
        self._last[kind, prompt] = message
        behind = [held for held in self.holds.values() if held.prompt == prompt and held.stops(lane)]
        held = next(iter(behind), self.holds.get((kind, prompt)))
        if held is None:
            lane.put_nowait(message)
        else:
            held.keep(lane, message)

    def _prompt_of(self, session: _Session, kind: str, message: Any) -> Prompt | None:
        body = getattr(message, kind)
        if kind in ("reserve", "prefill"):
            prompt = tuple(body.start.prompt_ids)
            self._prompts[body.attempt_id] = prompt
            self._workers[prompt, session.role] = session.hello.worker_id
            return prompt
        if kind == "step_tokens":
            return self._prompts.get(body.tokens[0].attempt_id) if body.tokens else None
        return self._prompts.get(getattr(body, "attempt_id", ""))


class _Servicer(pb_grpc.ClusterServiceServicer):
    def __init__(self, proxy: JoinProxy) -> None:
        self._proxy = proxy

    async def Join(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._proxy.carry(context)


def _parts(message: Any) -> list[Any]:
    """A step's tokens apart by attempt, so that one attempt's can wait without the others'."""
    if not isinstance(message, pb.WorkerMessage) or message.WhichOneof("body") != "step_tokens":
        return [message]
    by_attempt: defaultdict[str, list[pb.Token]] = defaultdict(list)
    for token in message.step_tokens.tokens:
        by_attempt[token.attempt_id].append(token)
    return [pb.WorkerMessage(step_tokens=pb.StepTokens(tokens=tokens)) for tokens in by_attempt.values()]
