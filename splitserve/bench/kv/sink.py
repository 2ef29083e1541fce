"""The sink's process: `python -P -m splitserve.bench.kv.sink CONTROL_FD UNIX_FD TCP_FD`, and how the benchmark has it.

It receives on whatever way it is told to, and ends with its control socket or with its parent.
"""

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import TypeVar

import torch

from splitserve.bench.kv import control
from splitserve.bench.kv.agents import AgentReceiver
from splitserve.bench.kv.pool import BenchPool, HostPool
from splitserve.bench.kv.ranks import RankReceiver
from splitserve.bench.kv.sockets import SocketReceiver, tcp_pair, unix_pair
from splitserve.bench.kv.ways import PATIENCE_S, Receiver
from splitserve.bench.kv.zmq_sockets import ZmqReceiver
from splitserve.service.errors import Internal
from splitserve.service.logging import configure_logging
from splitserve.worker.watchdog import end_with_parent

_END_S = 10.0
_ON_GPU = ("gpu agent", "raw nccl")

_Reply = TypeVar("_Reply", bound=control.Reply)


class SinkProcess:
    """The benchmark's end. `pairs` are its ends of the sockets that the two share."""

    def __init__(self, link: control.Control, unix: socket.socket, tcp: socket.socket) -> None:
        self.unix, self.tcp = unix, tcp
        self._link = link

    def open(self, way: str) -> bytes:
        """The address of the sink's end of a way."""
        return self._ask(control.Open(way), control.Opened).address

    def prepare(self, way: str, transfer_ids: list[str], num_blocks: int) -> None:
        self._ask(control.Receive(way, transfer_ids, num_blocks), control.Prepared)

    def received(self) -> control.Received:
        """Once all is there that was prepared for."""
        return self._reply(control.Received)

    def _ask(self, command: control.Command, kind: type[_Reply]) -> _Reply:
        with suppress(OSError):  # one that is gone may have said why
            self._link.send(command)
        return self._reply(kind)

    def _reply(self, kind: type[_Reply]) -> _Reply:
        try:
            reply = self._link.reply()
        except OSError as error:
            raise Internal(f"the sink process is silent: {error}") from error
        if isinstance(reply, kind):
            return reply
        why = reply.message if isinstance(reply, control.Failed) else f"it said {reply}"
        raise Internal(f"the sink process failed: {why}" if reply else "the sink process has ended")


@contextmanager
def sink_process(num_blocks: int, block_nbytes: int, gpu: torch.device | None = None) -> Iterator[SinkProcess]:
    """Running on entry, with a pool of that size in host memory and one on `gpu`, and gone on exit."""
    with ExitStack() as stack:
        ours, theirs = zip(unix_pair(), unix_pair(), tcp_pair(), strict=True)
        for end in ours:
            stack.callback(end.close)
        fds = [end.fileno() for end in theirs]
        command = [sys.executable, "-P", "-m", "splitserve.bench.kv.sink", *map(str, fds)]
        # In a session of its own: Ctrl-C reaches this process, which then ends it.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)  # noqa: S603
        stack.callback(_end, process)
        for end in theirs:
            end.close()
        ours[0].settimeout(PATIENCE_S)
        link = control.Control(ours[0])
        stack.callback(link.close)
        link.send(control.Setup(num_blocks, block_nbytes, str(gpu or "")))
        yield SinkProcess(link, *ours[1:])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Its socket is closed: it tidies up and goes."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# In the process


class _Pools:
    """That on the GPU is made when a way needs it."""

    def __init__(self, setup: control.Setup) -> None:
        self._setup = setup
        self.host = HostPool(setup.num_blocks, setup.block_nbytes)

    @cached_property
    def gpu(self) -> BenchPool:
        return BenchPool(self._setup.num_blocks, self._setup.block_nbytes, torch.device(self._setup.gpu))


def _serve(link: control.Control, unix: socket.socket, tcp: socket.socket) -> None:
    setup = link.command()
    if not isinstance(setup, control.Setup):
        return
    pools = _Pools(setup)
    with ExitStack() as stack:
        opened: dict[str, tuple[BenchPool, Receiver, bytes]] = {}
        while (command := link.command()) is not None:
            match command:
                case control.Open(way=way):
                    if way not in opened:
                        made = _receiver(way, pools, unix, tcp)
                        stack.callback(made.close)
                        opened[way] = (pools.gpu if way in _ON_GPU else pools.host, made, made.address)
                    link.send(control.Opened(opened[way][2]))
                case control.Receive():
                    pool, receiver, _ = opened[command.way]
                    _receive(link, pool, receiver, command)


def _receiver(
    way: str, pools: _Pools, unix: socket.socket, tcp: socket.socket
) -> AgentReceiver | SocketReceiver | ZmqReceiver | RankReceiver:
    match way:
        case "agent":
            return AgentReceiver(pools.host, "zmq,gloo")
        case "gpu agent":
            return AgentReceiver(pools.gpu, "nccl")
        case "unix" | "tcp":
            return SocketReceiver(pools.host, unix if way == "unix" else tcp)
        case "zmq" | "curve":
            return ZmqReceiver(pools.host, is_encrypted=way == "curve")
        case "raw gloo":
            return RankReceiver(pools.host, "gloo")
        case "raw nccl":
            return RankReceiver(pools.gpu, "nccl")
    raise Internal(f"there is no way {way}")


def _receive(link: control.Control, pool: BenchPool, receiver: Receiver, command: control.Receive) -> None:
    receiver.prepare(command.transfer_ids, command.num_blocks)
    began = time.process_time()
    link.send(control.Prepared())
    receiver.receive()
    cpu_s = time.process_time() - began
    link.send(control.Received(cpu_s, pool.digest(command.num_blocks)))


def _main() -> int:
    parser = argparse.ArgumentParser(description="Started by a benchmark, not by hand.")
    parser.add_argument("fds", type=int, nargs=3)
    end_with_parent()
    log_to_nowhere("bench-kv-sink")
    link, unix, tcp = (socket.socket(fileno=fd) for fd in parser.parse_args().fds)
    channel = control.Control(link)
    try:
        _serve(channel, unix, tcp)
    except Exception as error:
        with suppress(OSError):  # nobody may be left to hear it
            channel.send(control.Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def log_to_nowhere(role: str) -> None:
    """A worker's log lines are a part of what its transfers cost; nobody reads those of a benchmark."""
    configure_logging(role, json=True, stream=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(_main())
