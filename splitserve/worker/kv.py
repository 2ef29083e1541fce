"""Composes a worker's KV agent: which address and carrier, with which settings, and with which injected faults."""

import ipaddress
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvtransfer.agent import KVAgent
from kvtransfer.carrier import ZMQ, Carrier
from kvtransfer.events import KVEvent
from kvtransfer.fault_plan import FaultPlanFile
from kvtransfer.faults import FaultyCarrier
from kvtransfer.fingerprint import Fingerprint
from kvtransfer.pairs.carrier import PairCarrier, PairSettings
from kvtransfer.pairs.communicator import why_not
from kvtransfer.pairs.nccl import prepare_environment
from kvtransfer.settings import MIB, KVSettings
from kvtransfer.store import BlockStore
from kvtransfer.zeromq import ZeroMQCarrier, ZeroMQSettings
from splitserve.engine.layout import KVLayout
from splitserve.service.errors import InvalidRequest, Unavailable
from splitserve.worker.config import WorkerConfig

# A router that is being replaced has no address for a moment; the worker can do nothing without it anyway.
ROUTER_TIMEOUT_S = 60.0
# NCCL may take seconds to start.
PAIR_TIMEOUT_S = 20.0
# A message costs a pair's two threads more than it costs ZeroMQ, and no receive buffer.
PAIR_FRAME_BYTES = 4 * MIB
_RETRY_PAUSE_S = 0.5


def model_fingerprint(model: str, revision: str, layout: KVLayout) -> Fingerprint:
    return Fingerprint(
        model=model,
        revision=revision,
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        layout_version=layout.LAYOUT_VERSION,
        tp_rank=0,
        tp_size=1,
    )


def transports(wanted: str, device: torch.device) -> tuple[str, ...]:
    """What --kv-transport comes to, in order of preference."""
    if wanted == "auto":
        return ("nccl", ZMQ) if device.type == "cuda" else (ZMQ,)
    return tuple(wanted.split(","))


def make_agent(
    config: WorkerConfig,
    worker_id: str,
    fingerprint: Fingerprint,
    store: BlockStore,
    device: torch.device,
    on_event: Callable[[KVEvent], None],
) -> KVAgent:
    """Not yet started; binds the configured port on the configured address.

    Raises `Unavailable` when the worker has to find out its own address and cannot, see `advertised_host`, and
    `InvalidRequest` when it can have none of the transports that it was told to use.
    """
    names = transports(config.kv_transport, device)
    problems = [problem for name in names if name != ZMQ and (problem := why_not(name, device))]
    if len(problems) == len(names):
        raise InvalidRequest(f"--kv-transport {config.kv_transport}: {'; '.join(problems)}", field="kv_transport")
    host = advertised_host(config)
    control = ZeroMQCarrier(
        ZeroMQSettings(
            bind=config.bind,
            advertise=host,
            port=config.kv_port,
            max_block_bytes=store.block_nbytes,
            ipc_parent=Path(config.kv_socket_dir) if config.kv_socket_dir else None,
        )
    )
    if "nccl" in names and why_not("nccl", device) is None:
        prepare_environment()  # now, as long as few threads may read it
    num_pairs = sum(name != ZMQ for name in names)
    settings = KVSettings(
        frame_bytes=PAIR_FRAME_BYTES if num_pairs else KVSettings.frame_bytes,
        # A handshake that has to form pairs may try each of them in turn.
        connect_timeout_s=KVSettings.connect_timeout_s * (1 + num_pairs) + PAIR_TIMEOUT_S * num_pairs,
        transfer_timeout_s=config.transfer_timeout,
        ping_interval_s=config.kv_peer_timeout / 4,
        ping_timeout_s=config.kv_peer_timeout,
        closing_timeout_s=config.kv_peer_timeout,
    )
    pairs = PairSettings(
        transports=names,
        block_nbytes=store.block_nbytes,
        device=device,
        host=_address_of(own_host(config)) if "gloo" in names else "",
        form_timeout_s=PAIR_TIMEOUT_S,
        timeout_s=config.transfer_timeout,
        max_pending_bytes=settings.window_bytes + max(settings.frame_bytes, store.block_nbytes),
    )
    carrier: Carrier = PairCarrier(control, pairs)
    if config.fault_plan:
        carrier = FaultyCarrier(carrier, FaultPlanFile(Path(config.fault_plan)))
    return KVAgent(
        worker_id=worker_id,
        fingerprint=fingerprint,
        store=store,
        carrier=carrier,
        settings=settings,
        on_event=on_event,
    )


def advertised_host(config: WorkerConfig, timeout_s: float = ROUTER_TIMEOUT_S) -> str:
    """The host that peers dial: as configured, else the bind address, else our address on the way to the router.

    Waits up to `timeout_s` for the router's name to have an address, then raises `Unavailable`.
    """
    return config.advertise or own_host(config, timeout_s)


def own_host(config: WorkerConfig, timeout_s: float = ROUTER_TIMEOUT_S) -> str:
    """As `advertised_host`, but certainly one of this machine's."""
    if not _is_wildcard(config.bind):
        return config.bind
    # A socket bound to :: takes IPv4 as well.
    family = socket.AF_UNSPEC if ":" in config.bind else socket.AF_INET
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _host_towards(config.router, family)
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"no own address leads to the router {config.router}: {error}; --advertise names one"
                ) from error
        time.sleep(_RETRY_PAUSE_S)


def _address_of(host: str) -> str:
    """Looked up once, here: Gloo would do so for every pair, with all threads of this process waiting."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Unavailable(f"{host} has no address: {error}") from error


def _is_wildcard(bind: str) -> bool:
    try:
        return ipaddress.ip_address(bind).is_unspecified
    except ValueError:  # a name
        return False


def _host_towards(target: str, family: socket.AddressFamily) -> str:
    """Our address on the interface that leads to `target` (HOST:PORT). OSError when there is no way to it."""
    host, _, port = target.rpartition(":")
    found, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), family, socket.SOCK_DGRAM)[0]
    with socket.socket(found, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a route is looked up, and nothing sent
        return str(probe.getsockname()[0])
