"""The source's ends of all ways that a benchmark measures, each beside its floor. Called by `measure`."""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import zmq

from kvtransfer.frames import digest
from kvtransfer.pairs.communicator import why_not
from splitserve.bench.kv.agents import AgentSender
from splitserve.bench.kv.pool import CPU, BenchPool, HostPool
from splitserve.bench.kv.ranks import RankSender
from splitserve.bench.kv.sink import SinkProcess
from splitserve.bench.kv.sockets import SocketSender
from splitserve.bench.kv.ways import PAIRS, TRANSPORTS, Sender
from splitserve.bench.kv.zmq_sockets import ZmqSender
from splitserve.bench.progress import Say
from splitserve.service.errors import Unavailable

MEMCPY = "memcpy"
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"What NCCL has to be told where both ranks are on one GPU; from version 2.30 on it listens."


@dataclass(frozen=True)
class Way:
    """`sink_end` is what the sink process calls its end, "" for none; `floor` the way to compare with, "" for none."""

    name: str
    kind: str
    floor: str
    sink_end: str
    pool: BenchPool
    sender: Sender


class Memcpy:
    """The floor of everything: a copy into memory that two processes could share."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._target = np.frombuffer(mmap.mmap(-1, pool.data.nbytes), np.uint8)

    def send(self, transfer_id: str, num_blocks: int) -> None:
        source = np.frombuffer(self._pool.part(num_blocks), np.uint8)
        np.copyto(self._target[: source.nbytes], source)

    def digest(self, num_bytes: int) -> bytes:
        return digest(self._target[:num_bytes].data)

    def close(self) -> None:
        """Its memory goes with it."""


def default_transports() -> list[str]:
    """What this machine can. Two ranks on one GPU are a try-out: they have to be asked for."""
    found = [name for name in TRANSPORTS if name != "nccl" and _reason(name) is None]
    return [*found, "nccl"] if torch.cuda.device_count() > 1 and _reason("nccl") is None else found


def require(transports: Sequence[str]) -> None:
    """Raises Unavailable for one that cannot be had here."""
    for transport in transports:
        if reason := _reason(transport):
            raise Unavailable(f"--transports {transport}: {reason}")


def _reason(transport: str) -> str | None:
    if transport not in PAIRS:
        return None
    if transport == "nccl" and not torch.cuda.is_available():
        return "there is no GPU that torch could use"
    return why_not(transport, gpus()[0] if transport == "nccl" else CPU)


def gpus() -> tuple[torch.device, torch.device]:
    """The source's and the sink's. NCCL has to be told that one GPU may be both, before its first rank."""
    if torch.cuda.device_count() < 2:
        os.environ.setdefault(SHARED_GPU, "1")
    return torch.device("cuda", 0), torch.device("cuda", min(1, torch.cuda.device_count() - 1))


@dataclass(frozen=True)
class _Ways:
    """Those opened, and how to open more."""

    sink: SinkProcess
    stack: ExitStack
    say: Say
    opened: list[Way]

    def add(self, name: str, kind: str, floor: str, sink_end: str, pool: BenchPool, sender: Sender) -> None:
        self.stack.callback(sender.close)
        self.opened.append(Way(name, kind, floor, sink_end, pool, sender))

    def add_ipc(self, pool: HostPool) -> None:
        self.sink.open("unix")
        self.add("unix socket", "floor", "", "unix", pool, SocketSender(pool, self.sink.unix))
        sender = AgentSender(pool, self.sink.open("agent"), "ipc")
        self.add("zmq ipc", "transfer", "unix socket", "agent", pool, sender)

    def add_tcp(self, pool: HostPool) -> None:
        self.sink.open("tcp")
        self.add("tcp socket", "floor", "", "tcp", pool, SocketSender(pool, self.sink.tcp))
        sender = AgentSender(pool, self.sink.open("agent"), "tcp")
        self.add("zmq tcp", "transfer", "tcp socket", "agent", pool, sender)
        self.add("raw zmq tcp", "zmq", "tcp socket", "zmq", pool, ZmqSender(pool, self.sink.open("zmq")))
        if zmq.has("curve"):
            curve = ZmqSender(pool, self.sink.open("curve"))
            self.add("raw zmq tcp + CURVE", "zmq", "tcp socket", "curve", pool, curve)
        else:
            self.say("this ZeroMQ has no CURVE")

    def add_pair(self, library: str, pool: BenchPool) -> None:
        floor, end = f"raw {library}", "agent" if pool.device == CPU else "gpu agent"
        self.add(floor, "floor", "", floor, pool, RankSender(pool, self.sink.open(floor), library))
        sender = AgentSender(pool, self.sink.open(end), library)
        self.add(sender.path, "transfer", floor, end, pool, sender)


@contextmanager
def open_ways(sink: SinkProcess, host: HostPool, transports: Sequence[str], say: Say) -> Iterator[list[Way]]:
    """Those of `transports`, the floors first. `host` is left alone where blocks are on a GPU only."""
    with ExitStack() as stack:
        ways = _Ways(sink, stack, say, [])
        size = f"{host.data.nbytes / (1 << 20):,.0f} MiB"
        if set(transports) != {"nccl"}:
            say(f"three buffers of {size}: the source's, the sink's and the memcpy's")
            host.fill()
            ways.add(MEMCPY, "floor", "", "", host, Memcpy(host))
        for transport in transports:
            match transport:
                case "ipc":
                    ways.add_ipc(host)
                case "tcp":
                    ways.add_tcp(host)
                case "gloo":
                    ways.add_pair("gloo", host)
                case "nccl":
                    say(f"two buffers of {size} on {' and '.join(map(str, gpus()))}: the source's and the sink's")
                    pool = BenchPool(host.num_blocks, host.block_nbytes, gpus()[0])
                    pool.fill()
                    ways.add_pair("nccl", pool)
        yield ways.opened
