"""What the engine tells its front: how it starts, what becomes of each attempt, and what the metrics count.

The front passes an `AttemptReport` on to the router that it is for (`translate`), and keeps the rest.
"""

import msgspec

from kvtransfer.endpoint import KVEndpoint
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.ticket import Ticket
from splitserve.service.reasons import Reason
from splitserve.worker.messages import Logprobs, Message, Token


class Progress(Message, frozen=True):
    """What start-up is doing, for the log."""

    text: str


class StartFailed(Message, frozen=True):
    """The engine cannot serve; `status` is what the worker ends with, and says whether it may at another start."""

    message: str
    status: int


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
    topology_group: str
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


class Transferred(Message, frozen=True):
    """All blocks of the reservation's transfer are here: `num_bytes` of them came with it, the others were cached."""

    session: int
    attempt: str
    transfer_id: str
    num_bytes: int


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
    """As a whole, or the `samples` named, while others go on."""

    session: int
    attempt: str
    reason: Reason
    message: str
    samples: tuple[int, ...] = ()


class LinkReport(Message, frozen=True):
    """`detail` is the path in use, or why there is none; `fallback` why a transport that was preferred is not used.

    `bytes_per_s` is 0 while it is not known how fast blocks travel there.
    """

    peer: str
    reachable: bool
    detail: str
    bytes_per_s: float = 0.0
    fallback: str = ""


class TransportFallback(Message, frozen=True):
    """A link uses another transport than the first that was asked for, for the metrics."""

    used: str


class TransferReport(Message, frozen=True):
    """How a KV transfer ended, for the metrics: `reason` is "" for success, `side` is "source" or "sink".

    `transport` is "" where no peer was met.
    """

    side: str
    transport: str
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


class Step(Message, frozen=True):
    """One step, for the metrics: how long the engine took for it, and of what (see `load.StepSize`)."""

    seconds: float
    num_sequences: int
    num_prompt_tokens: int
    floor_s: float


class Slots(Message, frozen=True):
    """Of the blocks in use or reserved, for the metrics: the tokens that they have room for, and how much of that
    room is no token's, neither now nor once all that they are held for has arrived or been computed."""

    num_taken: int
    num_empty: int


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


Countable = TransferReport | TransportFallback | CacheLookup | Ignored | Step | Slots | FirstTokens | StepTokens
"What the front's metrics count."

AttemptReport = (
    Reserved
    | Accepted
    | AlreadyRunning
    | TransferLost
    | Transferred
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
    | TransportFallback
    | CacheLookup
    | Ignored
    | Step
    | Slots
    | Drained
    | Load
)
