"""Composes a worker's KV agent: which carrier, with which settings, and with which injected faults."""

from collections.abc import Callable

from kvtransfer.agent import KVAgent
from kvtransfer.events import KVEvent
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.settings import KVSettings
from kvtransfer.store import BlockStore
from splitserve.worker.config import WorkerConfig


def make_agent(
    config: WorkerConfig,
    worker_id: str,
    fingerprint: Fingerprint,
    store: BlockStore,
    on_event: Callable[[KVEvent], None],
) -> KVAgent:
