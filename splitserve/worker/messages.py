"""What the front and the engine process of one worker say to each other over their local socket.

Commands flow from the front to the engine, reports the other way. `session` names the router connection that a message
belongs to: the front numbers its connections, so the engine needs to know nothing about routers.
"""

from typing import Literal

import msgspec

from kvtransfer.endpoint import KVEndpoint
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.ticket import Ticket
from splitserve.service.reasons import Reason
from splitserve.worker.config import WorkerConfig

MAX_MESSAGE_BYTES = 64 << 20


class Sample(msgspec.Struct, frozen=True):
    """One sample of a request: its index, stable over attempts, and what earlier attempts already produced."""

    index: int
    output_ids: list[int]


class Limits(msgspec.Struct, frozen=True):
    """How to sample and when to stop: the limits of the request, not of the attempt."""

    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    logprobs: int | None
    prompt_logprobs: int | None


class Start(msgspec.Struct, frozen=True):
    """What an attempt continues from. Prompt and outputs stay apart, because limits count outputs only."""

    prompt_ids: list[int]
    samples: list[Sample]
    limits: Limits

    @property
    def token_ids(self) -> list[int]:
        """The tokens so far, those of its one sample included; several samples have none of their own yet."""
        return self.prompt_ids + self.samples[0].output_ids


class Logprobs(msgspec.Struct, frozen=True):
    """A token's log-probability, None where nothing predicts it, and those of the likeliest tokens in its place."""

    token_id: int
    logprob: float | None
    top_ids: list[int]
    top_logprobs: list[float]


FinishReason = Literal["", "stop", "length"]


class Token(msgspec.Struct, frozen=True):
    """One generated token; `position` counts the sample's outputs over all attempts, `finish_reason` is "" while it
    runs."""

    sample: int
    position: int
    token_id: int
    finish_reason: FinishReason = ""
    attempt: str = ""
    logprobs: Logprobs | None = None


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything on the local socket: the tag is the class name."""


# Commands: front → engine.


class Configure(Message, frozen=True):
    """The first command: what to serve, and under which id."""

    worker_id: str
    config: WorkerConfig


class Reserve(Message, frozen=True):
    session: int
    attempt: str
    start: Start
    timeout_s: float
    traceparent: str = ""
    keep_s: float = 0.0


class Renew(Message, frozen=True):
    """Closes the transfer of a reservation and opens another, with these outputs."""

    session: int
    attempt: str
    transfer_id: str
    samples: list[Sample]
    timeout_s: float


class Prefill(Message, frozen=True):
    session: int
    attempt: str
    start: Start
    ticket: Ticket
    timeout_s: float


class Release(Message, frozen=True):
    attempt: str
    reason: str


class EndSession(Message, frozen=True):
    """The router connection is gone: whatever it had here ends."""

    session: int


class SetPeers(Message, frozen=True):
    """Every worker that this one may send blocks to, by id."""

    endpoints: dict[str, KVEndpoint]


class Drain(Message, frozen=True):
    """Takes no new work from now on, and ends what is left after `timeout_s`."""

    timeout_s: float


class Stop(Message, frozen=True):
    pass


Command = Configure | Reserve | Renew | Prefill | Release | EndSession | SetPeers | Drain | Stop

# Reports: engine → front.


class Progress(Message, frozen=True):
    """What start-up is doing, for the log."""

    text: str


class StartFailed(Message, frozen=True):
    """The engine cannot serve this configuration, now or later."""

    message: str


class Memory(msgspec.Struct, frozen=True):
    """Bytes: `weights` as they are in the model's files, the linear layers' `packed_weights`, and the whole pool;
    `huge_pages`: how much of the process lies in such when it becomes ready."""

    weights: int
    packed_weights: int
    kv_pool: int
    huge_pages: int


class Ready(Message, frozen=True):
    """The engine can take work. `startup` names the parts of its start in order, in seconds."""

    fingerprint: Fingerprint
    num_blocks: int
    block_size: int
    block_nbytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_threshold: int
    max_model_len: int
    kv_endpoint: KVEndpoint
    device: str
    transport: str
    numerics: str
    recompute_exact: bool
    linear: str
    attention: str
    layers: str
    memory: Memory
    startup: dict[str, float]


class Reserved(Message, frozen=True):
    session: int
    attempt: str
    ticket: Ticket


class Accepted(Message, frozen=True):
    """`num_cached_tokens` of the tokens came from the prefix cache and are not computed."""

    session: int
    attempt: str
    num_cached_tokens: int


class AlreadyRunning(Message, frozen=True):
    """The answer to a `Renew` that came after the blocks."""

    session: int
    attempt: str


class TransferLost(Message, frozen=True):
    """The reservation is kept although its transfer has failed, for a while."""

    session: int
    attempt: str
    transfer_id: str
    reason: Reason
    message: str


class Refused(Message, frozen=True):
    session: int
    attempt: str
    reason: Reason
    message: str


class PromptLogprobs(Message, frozen=True):
    """Of the prompt's tokens from position `start` on: one report per chunk, in order, before the first tokens."""

    session: int
    attempt: str
    start: int
    tokens: list[Logprobs]


class FirstTokens(Message, frozen=True):
    session: int
    attempt: str
    tokens: list[Token]
    num_computed_tokens: int


class StepTokens(Message, frozen=True):
    """The new tokens of one decode step, for one router connection."""

    session: int
    tokens: list[Token]


class AttemptEnded(Message, frozen=True):
    session: int
    attempt: str
    reason: Reason
    message: str


class LinkReport(Message, frozen=True):
    peer: str
    reachable: bool
    detail: str


class TransferReport(Message, frozen=True):
    """How a KV transfer ended, for the metrics: `reason` is "" for success, `side` is "source" or "sink"."""

    side: str
    reason: str
    num_bytes: int = 0
    seconds: float = 0.0


class CacheLookup(Message, frozen=True):
    """What an admitted attempt found in the prefix cache, for the metrics."""

    num_tokens: int
    num_cached_tokens: int


class Ignored(Message, frozen=True):
    """A command of this kind came late or again and changed nothing, for the metrics."""

    kind: str


class Drained(Message, frozen=True):
    """The answer to `Drain`: nothing is left here."""


class Load(Message, frozen=True):
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    blocks_reserved: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    tokens_ahead: int
    kv_bytes_sent: int
    kv_bytes_received: int
    kv_messages_dropped: int


Countable = TransferReport | CacheLookup | Ignored | FirstTokens | StepTokens
"What the front's metrics count."

AttemptReport = (
    Reserved
    | Accepted
    | AlreadyRunning
    | TransferLost
    | Refused
    | PromptLogprobs
    | FirstTokens
    | StepTokens
    | AttemptEnded
)
"What is for the router of one session."

Report = (
    Progress
    | StartFailed
    | Ready
    | AttemptReport
    | LinkReport
    | TransferReport
    | CacheLookup
    | Ignored
    | Drained
    | Load
)
