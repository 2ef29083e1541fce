"""What the benchmark and its sink process say to each other: lines of JSON on a local socket."""

import socket

import msgspec


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first word: the sink's pools. `gpu` is where the second one is, such as "cuda:1"; "" for none."""

    num_blocks: int
    block_nbytes: int
    gpu: str = ""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Makes the sink's end of a way."""

    way: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """What the source needs to reach it."""

    address: bytes


class Receive(msgspec.Struct, frozen=True, tag=True):
    """One round of transfers."""

    way: str
    transfer_ids: list[str]
    num_blocks: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """They may come."""


class Received(msgspec.Struct, frozen=True, tag=True):
    """All are here: what they cost this process, in seconds of processor time, and the digest of their blocks."""

    cpu_s: float
    digest: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The sink cannot go on."""

    message: str


Command = Setup | Open | Receive
Reply = Opened | Prepared | Received | Failed


class Control:
    """One end of the socket. OSError where the other end is gone, or silent for longer than the socket's timeout."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lines = sock.makefile("rb")

    def send(self, message: Command | Reply) -> None:
        self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def command(self) -> Command | None:
        """The next one; None when the benchmark is over."""
        line = self._lines.readline()
        return msgspec.json.decode(line, type=Command) if line else None

    def reply(self) -> Reply | None:
        """The next one; None when the sink has ended."""
        line = self._lines.readline()
        return msgspec.json.decode(line, type=Reply) if line else None

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
