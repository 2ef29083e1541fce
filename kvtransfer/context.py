"""What all protocol machines of one worker work with. Built by the agent; `node` hands it to each machine."""

from dataclasses import dataclass

from kvtransfer.counters import Counters
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.outbox import Clock, Outbox
from kvtransfer.settings import KVSettings
from kvtransfer.store import BlockStore


@dataclass(frozen=True)
class Context:
    worker_id: str
    fingerprint: Fingerprint
    store: BlockStore
    outbox: Outbox
    settings: KVSettings
    counters: Counters
    clock: Clock
