"""Composes a worker's KV agent: which carrier, with which settings, and with which injected faults."""

from collections.abc import Callable
from pathlib import Path

from kvtransfer.agent import KVAgent
from kvtransfer.carrier import Carrier
from kvtransfer.events import KVEvent
from kvtransfer.fault_plan import load_fault_plan
from kvtransfer.faults import FaultyCarrier
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.settings import KVSettings
from kvtransfer.store import BlockStore
from kvtransfer.zeromq import ZeroMQCarrier, ZeroMQSettings
from splitserve.worker.config import WorkerConfig


def make_agent(
    config: WorkerConfig,
    worker_id: str,
    fingerprint: Fingerprint,
    store: BlockStore,
    on_event: Callable[[KVEvent], None],
) -> KVAgent:
    """Not yet started; binds an ephemeral port on the configured address."""
    carrier: Carrier = ZeroMQCarrier(
        ZeroMQSettings(bind=config.bind, advertise=config.advertise or "", max_block_bytes=store.block_nbytes)
    )
    if config.fault_plan:
        carrier = FaultyCarrier(carrier, load_fault_plan(Path(config.fault_plan)))
    settings = KVSettings(transfer_timeout_s=config.transfer_timeout)
    return KVAgent(
        worker_id=worker_id,
        fingerprint=fingerprint,
        store=store,
        carrier=carrier,
        settings=settings,
        on_event=on_event,
    )
