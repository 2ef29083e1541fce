"""One joined worker as the router sees it: what it is, what it last said, and the attempts that wait for its words.

A session of one `Join` stream, made by `join` and owned by `membership`; never revived after `lose`. Holds plain data
only: commands leave through a `CommandChannel`, events arrive already translated.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtransfer.ticket import Ticket
from router.events import AttemptEvent, Ended, Mailbox, Refused, WorkerLost
from router.request import Sampling
from router.scheduler import EVERY_LENGTH, DecodeView, PrefillView
from splitserve.service.reasons import Reason


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Start:
    """What an attempt continues from: prompt and outputs apart, because limits count outputs only."""

    prompt_ids: tuple[int, ...]
    outputs: Mapping[int, tuple[int, ...]]
    sampling: Sampling

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sample."""
        return len(self.prompt_ids) + max(len(output) for output in self.outputs.values())


class CommandChannel(Protocol):
    """The way down to the worker; sending never blocks and never fails: a dead stream shows as a lost worker."""

    def reserve(
        self, attempt_id: str, start: Start, timeout_s: float, keep_s: float, traceparent: str, *, is_local: bool
    ) -> None:
        """`is_local`: the worker is to compute the prompt itself."""

    def renew(
        self, attempt_id: str, transfer_id: str, outputs: Mapping[int, tuple[int, ...]], timeout_s: float
    ) -> None: ...

    def prefill(self, attempt_id: str, start: Start, ticket: Ticket, timeout_s: float, traceparent: str) -> None: ...

    def release(self, attempt_id: str, reason: str, samples: Sequence[int] = ()) -> None:
        """Of the whole attempt, or only of those of its samples that are named."""

    def close(self, reason: str) -> None:
        """Ends the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a worker says it is; fixed for the session."""

    worker_id: str
    role: Role
    model: str
    revision: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_threshold: int
    max_model_len: int
    host_id: str
    pid: int
    device: str
    topology_group: str
    transport: str
    numerics: str
    recompute_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The worker's last word on its load; a hint, its answers decide."""

    engine_steps: int = 0
    step_age_s: float = 0.0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_in_use: int = 0
    blocks_reserved: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    tokens_ahead: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    silence_s: float = 0.0
    kv_messages_dropped: int = 0

    @property
    def idle_silence_s(self) -> float:
        """0 within a step, which may be silent for long; an idle engine shows signs of life all the time."""
        return 0.0 if self.step_age_s else self.silence_s


@dataclass(frozen=True, slots=True)
class Promise:
    """Room given to an attempt that the worker's reports do not show yet; `num_tokens` are to be computed."""

    num_blocks: int
    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Link:
    """`detail` is the path in use, or why there is none; `fallback` why a transport that was preferred is not used.

    `bytes_per_s` is how fast blocks travelled on it lately, 0.0 until enough have.
    """

    reachable: bool
    detail: str
    bytes_per_s: float = 0.0
    fallback: str = ""


@dataclass(eq=False)
class Worker:
    """One session. `last_heard` is the event loop's time of the last message."""

    identity: Identity
    session: int
    channel: CommandChannel
    last_heard: float
    load: LoadReport
    links: dict[str, Link] = field(default_factory=dict)
    attempts: dict[str, Mailbox] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    has_reported: bool = False
    "Whether `load` is the worker's own word in this session."
    is_draining: bool = False
    is_lost: bool = False

    @property
    def worker_id(self) -> str:
        return self.identity.worker_id

    @property
    def role(self) -> Role:
        return self.identity.role

    # Room

    def promise(
        self, attempt_id: str, mailbox: Mailbox, num_blocks: int, num_tokens: int, num_samples: int = 1
    ) -> None:
        """Counts an attempt in before the worker hears of it, so that the next placement sees the room as taken."""
        self.attempts[attempt_id] = mailbox
        self.promises[attempt_id] = Promise(num_blocks, num_tokens, num_samples)

    def forget(self, attempt_id: str) -> None:
        self.attempts.pop(attempt_id, None)
        self.promises.pop(attempt_id, None)

    def hear(self, attempt_id: str, event: AttemptEvent) -> bool:
        """Passes the event to its attempt; False when the attempt is not (or no longer) here.

        A worker reports its load before it answers, so the room of an answered attempt shows there from now on. What
        was promised to a refused one is nobody else's until its flow has let go of it, and then it is queued again.
        """
        if not isinstance(event, Refused):
            self.promises.pop(attempt_id, None)
        mailbox = self.attempts.get(attempt_id)
        if mailbox is None:
            return False
        mailbox.deliver(event)
        return True

    def lose(self, message: str) -> None:
        """The worker is gone: every attempt that this router has on it learns so. Idempotent.

        One that was about to end has ended, whether or not it could say so.
        """
        if self.is_lost:
            return
        self.is_lost = True
        end = Ended(self.worker_id, Reason.DRAINING, message) if self.is_draining else None
        for mailbox in list(self.attempts.values()):
            mailbox.deliver(end or WorkerLost(self.worker_id, message))
        self.attempts.clear()
        self.promises.clear()
        self.channel.close(message)

    # Views for the scheduler

    def _available_blocks(self) -> int:
        promised = sum(promise.num_blocks for promise in self.promises.values())
        return self.load.blocks_free + self.load.blocks_cached - promised

    def decode_view(self) -> DecodeView:
        return DecodeView(
            worker=self.worker_id,
            available_blocks=self._available_blocks(),
            total_blocks=self.identity.num_blocks,
            block_size=self.identity.block_size,
            num_seqs=self.load.num_running
            + self.load.num_waiting
            + sum(promise.num_samples for promise in self.promises.values()),
            max_num_seqs=self.identity.max_num_seqs,
            max_model_len=self.identity.max_model_len,
            numerics=self.identity.numerics,
            host=self.identity.host_id,
            topology_group=self.identity.topology_group,
        )

    def prefill_view(self, takes: range = EVERY_LENGTH) -> PrefillView:
        """Also of a decode worker, for prompts that it computes itself."""
        is_prefill = self.role is Role.PREFILL
        reachable = (peer for peer, link in self.links.items() if link.reachable) if is_prefill else (self.worker_id,)
        threshold = self.identity.long_prefill_threshold
        return PrefillView(
            worker=self.worker_id,
            available_blocks=self._available_blocks(),
            total_blocks=self.identity.num_blocks,
            block_size=self.identity.block_size,
            waiting_tokens=self.load.waiting_tokens + sum(p.num_tokens for p in self.promises.values()),
            tokens_ahead=self.load.tokens_ahead + sum(min(p.num_tokens, threshold) for p in self.promises.values()),
            long_threshold=threshold,
            # One step under way and one to go on with: more would wait here where no dead client is noticed.
            max_waiting_tokens=2 * self.identity.max_num_batched_tokens,
            max_model_len=self.identity.max_model_len,
            numerics=self.identity.numerics,
            reachable=frozenset(reachable),
            takes=takes,
            host=self.identity.host_id,
            topology_group=self.identity.topology_group,
            bytes_per_s={peer: link.bytes_per_s for peer, link in self.links.items() if link.bytes_per_s},
        )

    def silence_s(self) -> float:
        return asyncio.get_running_loop().time() - self.last_heard
