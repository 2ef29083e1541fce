"""A router without a network: real membership, queue, dispatcher and flow over workers that a test speaks for."""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from kvtransfer.ticket import Ticket
from router.config import RouterConfig
from router.dispatcher import ClusterDispatcher
from router.events import (
    Accepted,
    AlreadyRunning,
    Ended,
    FirstTokensArrived,
    PromptLogprobsArrived,
    Refused,
    Reserved,
    TokenArrived,
    TransferLost,
    Transferred,
)
from router.flow import RequestFlow
from router.membership import Membership
from router.metrics import RouterMetrics
from router.pacing import Pacer
from router.request import Event, FinishReason, GenerationRequest, Sampling, TokenEvent, TokenLogprobs
from router.stages import StageClock
from router.worker import Identity, Link, LoadReport, Role, Start, Worker
from splitserve.service.reasons import Reason

_SESSIONS = itertools.count(1)


def ticket(attempt: str, number: int) -> str:
    """The transfer that the `number`-th ticket of an attempt is for."""
    return f"{attempt}/{number}"


@dataclass
class FakeChannel:
    """Notes every command; `commands` holds (kind, attempt id, start), `renewals` what each renewal asked for."""

    commands: list[tuple[str, str, Start | None]] = field(default_factory=list)
    tickets: list[str] = field(default_factory=list)
    renewals: list[tuple[str, str, Mapping[int, tuple[int, ...]]]] = field(default_factory=list)
    local: set[str] = field(default_factory=set)
    "Attempts whose prompts are to be computed here."
    released_samples: list[tuple[str, int]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    # A prefill worker knows an attempt by its leg; tests speak of the attempt, and mean its last leg here.
    legs: dict[str, str] = field(default_factory=dict)

    def reserve(
        self, attempt_id: str, start: Start, timeout_s: float, keep_s: float, traceparent: str, *, is_local: bool
    ) -> None:
        if is_local:
            self.local.add(attempt_id)
        self._note("reserve", attempt_id, start)

    def renew(
        self, attempt_id: str, transfer_id: str, outputs: Mapping[int, tuple[int, ...]], timeout_s: float
    ) -> None:
        self.renewals.append((attempt_id, transfer_id, outputs))
        self._note("renew", attempt_id, None)

    def prefill(self, attempt_id: str, start: Start, ticket: Ticket, timeout_s: float, traceparent: str) -> None:
        attempt = ticket.transfer_id.split("/")[0]
        self.legs[attempt] = attempt_id
        self.tickets.append(ticket.transfer_id)
        self._note("prefill", attempt, start)

    def release(self, attempt_id: str, reason: str, samples: Sequence[int] = ()) -> None:
        if samples:
            self.released_samples += [(attempt_id, sample) for sample in samples]
            return
        attempt = next((attempt for attempt, leg in self.legs.items() if leg == attempt_id), attempt_id)
        self._note("release", attempt, None)

    def close(self, reason: str) -> None:
        self._note("close", "", None)

    def _note(self, kind: str, attempt_id: str, start: Start | None) -> None:
        self.commands.append((kind, attempt_id, start))
        self.arrived.set()

    def of_kind(self, kind: str) -> list[str]:
        return [attempt for noted, attempt, _ in self.commands if noted == kind]


@dataclass
class FakeWorker:
    """One worker: the test decides what it says and when."""

    worker: Worker
    channel: FakeChannel

    async def command(self, kind: str, number: int = 0) -> tuple[str, Start | None]:
        """Waits for the `number`-th command of this kind."""
        async with asyncio.timeout(5):
            while True:
                found = [(attempt, start) for noted, attempt, start in self.channel.commands if noted == kind]
                if len(found) > number:
                    return found[number]
                self.channel.arrived.clear()
                await self.channel.arrived.wait()

    def say(self, attempt: str, event: Any) -> bool:
        return self.worker.hear(self.channel.legs.get(attempt, attempt), event)

    def reserved(self, attempt: str, number: int = 1) -> None:
        """With the `number`-th ticket of the attempt."""
        self.say(attempt, Reserved(Ticket(ticket(attempt, number), self.worker.worker_id, 0, 1)))

    def already_running(self, attempt: str) -> None:
        self.say(attempt, AlreadyRunning())

    def transfer_lost(self, attempt: str, number: int = 1, reason: Reason = Reason.TRANSFER_FAILED) -> None:
        lost = TransferLost(self.worker.worker_id, ticket(attempt, number), reason, "the test says so")
        self.say(attempt, lost)

    def transferred(self, attempt: str, num_bytes: int, number: int = 1) -> None:
        self.say(attempt, Transferred(ticket(attempt, number), num_bytes))

    def refused(self, attempt: str, reason: Reason = Reason.NO_ROOM) -> None:
        self.say(attempt, Refused(self.worker.worker_id, reason, "the test says so"))

    def ended(self, attempt: str, reason: Reason, *samples: int) -> None:
        """As a whole, or only these samples."""
        self.say(attempt, Ended(self.worker.worker_id, reason, "the test says so", frozenset(samples)))

    def accepted(self, attempt: str, num_cached_tokens: int = 0) -> None:
        self.say(attempt, Accepted(num_cached_tokens))

    def prompt_logprobs(self, attempt: str, start: int, *tokens: TokenLogprobs) -> None:
        self.say(attempt, PromptLogprobsArrived(start, tokens))

    def first(
        self,
        attempt: str,
        position: int,
        token: int,
        finish: FinishReason | None = None,
        logprobs: TokenLogprobs | None = None,
        samples: Sequence[int] = (0,),
    ) -> None:
        """The same token for each of the samples."""
        tokens = (self._token(position, token, finish, logprobs, sample) for sample in samples)
        self.say(attempt, FirstTokensArrived(tuple(tokens)))

    def token(
        self,
        attempt: str,
        position: int,
        token: int,
        finish: FinishReason | None = None,
        logprobs: TokenLogprobs | None = None,
        sample: int = 0,
    ) -> None:
        self.say(attempt, self._token(position, token, finish, logprobs, sample))

    def _token(
        self,
        position: int,
        token: int,
        finish: FinishReason | None,
        logprobs: TokenLogprobs | None,
        sample: int,
    ) -> TokenArrived:
        return TokenArrived(self.worker.worker_id, sample, position, token, finish, logprobs)


class Router:
    """Everything between the public edge and the workers' streams."""

    def __init__(self, **settings: Any) -> None:
        self.config = RouterConfig(**({"reserve_timeout": 1.0, "failover_timeout": 1.0} | settings))
        self.membership = Membership(self.config, "tiny", "r1")
        self.registry = CollectorRegistry()
        self.metrics = RouterMetrics(self.registry, "tiny")
        self.pacer = Pacer()
        self.dispatcher = ClusterDispatcher(self.config, self.membership, self.metrics, self.pacer)
        self.fakes: list[FakeWorker] = []

    def join(self, role: Role, name: str, **identity: Any) -> FakeWorker:
        """A worker that every other one can reach."""
        fields: dict[str, Any] = {
            "worker_id": name,
            "role": role,
            "model": "tiny",
            "revision": "r1",
            "num_blocks": 100,
            "block_size": 16,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "long_prefill_threshold": 32,
            "max_model_len": 1024,
            "host_id": "h",
            "pid": 1,
            "device": "cpu",
            "topology_group": "",
            "transport": "zmq",
            "numerics": "n",
            "recompute_exact": True,
        }
        channel = FakeChannel()
        whole = Identity(**(fields | identity))
        now = asyncio.get_running_loop().time()
        load = LoadReport(blocks_free=whole.num_blocks)
        # Nobody beats for it: it stays fresh for the whole test.
        worker = Worker(whole, next(_SESSIONS), channel, now + 3600, load, has_reported=True)
        self.fakes.append(FakeWorker(worker, channel))
        self.membership.add(worker)
        for fake in self.fakes:
            if fake.worker.role is Role.PREFILL:
                fake.worker.links.update({f.worker.worker_id: Link(True, "ipc") for f in self.fakes if f is not fake})
        self.membership.changed()
        return self.fakes[-1]

    def pairs(self, num_prefill: int = 1, num_decode: int = 1) -> tuple[list[FakeWorker], list[FakeWorker]]:
        prefills = [self.join(Role.PREFILL, f"p{index}") for index in range(num_prefill)]
        return prefills, [self.join(Role.DECODE, f"d{index}") for index in range(num_decode)]

    def leave(self, fake: FakeWorker, reason: str = "killed") -> None:
        self.membership.remove(fake.worker, reason)

    def submit(
        self, num_prompt: int = 10, deadline_s: float = 600.0, stages: StageClock | None = None, **sampling: Any
    ) -> RequestFlow:
        return self.dispatcher.submit(request(num_prompt, deadline_s, **sampling), stages or self.stage_clock())

    def stage_clock(self, clock: Callable[[], float] = time.perf_counter) -> StageClock:
        return StageClock(self.metrics.observe_stage, clock)

    def assert_idle(self) -> None:
        """Nothing waits, and no worker holds a promise or an attempt of ours."""
        assert len(self.dispatcher.queue) == 0
        assert self.dispatcher.queue.num_tokens == 0
        for fake in self.fakes:
            assert not fake.worker.attempts
            assert not fake.worker.promises


def request(num_prompt: int = 10, deadline_s: float = 600.0, priority: int = 0, **sampling: Any) -> GenerationRequest:
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 1,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "n": 1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": (),
        "logprobs": None,
        "prompt_logprobs": None,
    }
    deadline = asyncio.get_running_loop().time() + deadline_s
    return GenerationRequest(
        "client", "tiny", tuple(range(num_prompt)), Sampling(**(values | sampling)), priority, deadline, ""
    )


async def collect(flow: RequestFlow) -> list[TokenEvent]:
    """All tokens of a flow; closes it whatever happens."""
    return [event for event in await collect_all(flow) if isinstance(event, TokenEvent)]


async def collect_all(flow: RequestFlow) -> list[Event]:
    """As `collect`, with the prompt's logprobs."""
    try:
        return [event async for event in flow]
    finally:
        await flow.aclose()


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]
