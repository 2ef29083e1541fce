"""Bytes that no correct peer sends end that peer's link, and only that; unequal peers refuse each other by name."""

import errno
import pickle
import random
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvtransfer import zmq_router
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.events import FailureReason, LinkRefused, LinkUp, TransferAcked, TransferFailed
from kvtransfer.messages import (
    CHECKSUM_BYTES,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Acked,
    BadMessageError,
    Blocks,
    Finish,
    Hello,
    Open,
    Ping,
    Refused,
    Welcome,
    decode,
    encode,
    seal,
)
from kvtransfer.same_host import IpcDirectory, is_same_host
from kvtransfer.zeromq import ZeroMQCarrier, ZeroMQSettings
from splitserve.service.errors import Unavailable
from tests.kvtransfer.worlds import FINGERPRINT, PATIENCE_S, Worker, World, connect

HELLO = encode(Hello(PROTOCOL_VERSION, "stranger", "d0", FINGERPRINT))
DIGEST = b"d" * 16
BAD_MESSAGES: dict[str, list[bytes]] = {
    "empty": [b""],
    "a checksum and nothing else": [seal(b"")],
    "text": [b"GET / HTTP/1.1"],
    "pickle": [pickle.dumps({"transfer_id": "t"})],
    "an unknown type": [seal(msgspec.msgpack.encode(["Exec", "rm"]))],
    "a truncated message": [seal(encode(Open("t", 0, 1))[CHECKSUM_BYTES:-1])],
    "a damaged message": [encode(Open("t", 0, 1))[:-1] + b"x"],
    "trailing bytes": [seal(encode(Open("t", 0, 1))[CHECKSUM_BYTES:] + b"\x00")],
    "an empty id": [seal(msgspec.msgpack.encode(["Open", "", 0, 1, ""]))],
    "a huge count": [seal(msgspec.msgpack.encode(["Open", "t", 0, 2**40, ""]))],
    "a negative count": [seal(msgspec.msgpack.encode(["Open", "t", -1, 1, ""]))],
    "a message of the other side": [encode(Acked("t"))],
    "raw frames where none belong": [encode(Open("t", 0, 1)), b"surplus"],
    "a missing frame": [encode(Blocks("t", 0, [0, 1], [DIGEST, DIGEST], 0, 1)), b"x" * 1024],
    "too many frames": [encode(Blocks("t", 0, [0], [DIGEST], 0, 1)), *([b"x"] * 5000)],
    "deep nesting": [seal(b"\x91" * 100_000)],
}


@contextmanager
def dealer(endpoint: KVEndpoint) -> "Iterator[zmq.Socket[bytes]]":
    """A peer that speaks ZeroMQ, if nothing else."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
    peer.connect(endpoint.tcp)
    try:
        yield peer
    finally:
        peer.close()
        context.term()


def check_still_serves(source: Worker, sink: Worker) -> None:
    """The link that was there before, and a transfer that was half done on it."""
    source.push(sink.ticket_for("after", [9]), [9])
    source.seen.wait(TransferAcked, "after")
    assert len([event for event in source.seen.events if isinstance(event, LinkUp)]) == 1


@pytest.mark.parametrize("name", BAD_MESSAGES)
@pytest.mark.parametrize("is_greeted", [False, True])
def test_one_bad_peer_ends_the_worker(zmq_net: World, name: str, is_greeted: bool) -> None:
    source, sink = zmq_net.worker("p0"), zmq_net.worker("d0")
    connect(source, sink)
    with dealer(sink.agent.endpoint) as peer:
        if is_greeted:
            peer.send(HELLO)
            assert isinstance(decode(peer.recv()), Welcome)
        peer.send_multipart(BAD_MESSAGES[name])
        assert isinstance(decode(peer.recv()), Refused)
        assert peer.recv_multipart() == [b"", b""]  # asked to close
        peer.send(HELLO)  # the link is dead, whatever it says now
        check_still_serves(source, sink)
        assert sink.agent.stats().links_rejected == 1
        assert peer.poll(0) == 0


def test_an_oversize_message_is_read_into_memory(zmq_net: World) -> None:
    source, sink = zmq_net.worker("p0"), zmq_net.worker("d0")
    connect(source, sink)
    with dealer(sink.agent.endpoint) as peer:
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.send_multipart([HELLO, b"x" * (MAX_HEADER_BYTES + 1)])
        assert monitor.poll(PATIENCE_S * 1000), "an oversize frame did not end the connection"
        peer.disable_monitor()
        monitor.close()
    check_still_serves(source, sink)
    with pytest.raises(BadMessageError, match="the limit is"):
        decode(bytes(MAX_HEADER_BYTES + 1))


def test_bytes_that_are_no_zeromq_end_the_worker(zmq_net: World) -> None:
    source, sink = zmq_net.worker("p0"), zmq_net.worker("d0")
    connect(source, sink)
    host, port = sink.agent.endpoint.tcp.removeprefix("tcp://").split(":")
    noise = random.Random(1)
    for text in (b"GET / HTTP/1.1\r\n\r\n", pickle.dumps([1]), noise.randbytes(4096), b"", b"\xff" + bytes(63)):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer:
            peer.sendall(text)
    check_still_serves(source, sink)


def test_a_stranger_writes_to_a_transfer(zmq_net: World) -> None:
    """C80: a transfer belongs to the link that brought its first message."""
    source, sink = zmq_net.worker("p0"), zmq_net.worker("d0")
    connect(source, sink)
    pattern = source.store.fill(0, "the right one")
    source.agent.open(sink.ticket_for("t", [5, 6]))
    source.agent.send("t", [(0, 0)])
    while sink.agent.stats().bytes_received < 1024:
        assert not sink.seen.terminal("t")
    with dealer(sink.agent.endpoint) as peer:
        peer.send(HELLO)
        assert isinstance(decode(peer.recv()), Welcome)
        for message in (Open("t", 0, 2), Finish("t", 0, 2, [b"", b""], [DIGEST] * 2, b"")):
            peer.send(encode(message))
            assert "belongs to another link" in repr(decode(peer.recv()))
        peer.send_multipart([encode(Blocks("t", 0, [0], [DIGEST], 0, 1)), b"x" * 1024])
        assert "belongs to another link" in repr(decode(peer.recv()))
        peer.send(encode(Ping()))
        peer.recv()
    assert bytes(sink.store.view(5)) == pattern
    assert sink.agent.stats().messages_dropped == 3
    assert not sink.seen.terminal("t")


# The handshake.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("revision", "r2"),
        ("dtype", "bfloat16"),
        ("block_size", 32),
        ("num_layers", 4),
        ("num_kv_heads", 3),
        ("head_dim", 64),
        ("layout_version", 1),
        ("tp_rank", 1),
        ("tp_size", 2),
    ],
)
def test_unequal_pools_exchange_blocks(loopback: World, field: str, value: str | int) -> None:
    """C05: refused at the handshake, with the field and both values; transfers fail at once, nothing is sent."""
    sink = loopback.worker("d0")
    source = loopback.worker("p0", fingerprint=msgspec.structs.replace(FINGERPRINT, **{field: value}))
    source.agent.open(sink.ticket_for("t", [0]))
    source.agent.set_peers({"d0": sink.agent.endpoint})
    expected = f"{field}: ours {getattr(FINGERPRINT, field)}, theirs {value}"
    assert source.seen.wait(LinkRefused) == LinkRefused("d0", expected)
    failed = source.seen.wait(TransferFailed)
    assert (failed.reason, failed.detail) == (FailureReason.UNREACHABLE, expected)
    assert source.agent.stats().bytes_sent == 0


def test_unequal_pools_meet_over_sockets(real_net: World) -> None:
    sink = real_net.worker("d0")
    source = real_net.worker("p0", fingerprint=msgspec.structs.replace(FINGERPRINT, block_size=32, dtype="bfloat16"))
    source.agent.set_peers({"d0": sink.agent.endpoint})
    detail = source.seen.wait(LinkRefused).detail
    assert detail == "dtype: ours float32, theirs bfloat16; block_size: ours 16, theirs 32"


def test_another_worker_answers_at_a_reused_address(net: World) -> None:
    """C80: the port of a worker that is gone was given to another one."""
    source, sink = net.worker("p0"), net.worker("d0")
    source.agent.set_peers({"gone": sink.agent.endpoint})
    assert source.seen.wait(LinkRefused) == LinkRefused("gone", "worker_id: ours d0, theirs gone")


def test_another_protocol_version_is_spoken_to(zmq_net: World) -> None:
    sink = zmq_net.worker("d0")
    with dealer(sink.agent.endpoint) as peer:
        peer.send(encode(Hello(PROTOCOL_VERSION + 1, "stranger", "d0", FINGERPRINT)))
        refused = decode(peer.recv())
    assert refused == Refused(f"version: ours {PROTOCOL_VERSION}, theirs {PROTOCOL_VERSION + 1}")


# The same host.


@pytest.fixture
def ipc() -> Iterator[KVEndpoint]:
    """The endpoint of a sink on this host."""
    made = IpcDirectory.create()
    assert made is not None
    yield KVEndpoint("tcp://127.0.0.1:1", str(made.socket_path), str(made.nonce_path), made.nonce_digest)
    made.remove()


def test_the_same_host_is_recognized(ipc: KVEndpoint) -> None:
    assert is_same_host(ipc)
    directory = Path(ipc.ipc_path).parent
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", ["no nonce", "another nonce", "a link", "open to others", "elsewhere", "too long"])
def test_the_same_host_is_believed_without_proof(ipc: KVEndpoint, change: str, tmp_path: Path) -> None:
    """Then TCP is used."""
    nonce = Path(ipc.nonce_path)
    match change:
        case "no nonce":
            nonce.unlink()
        case "another nonce":
            nonce.write_bytes(b"n" * 32)
        case "a link":
            nonce.rename(tmp_path / "nonce")
            nonce.symlink_to(tmp_path / "nonce")
        case "open to others":
            nonce.parent.chmod(0o755)
        case "elsewhere":
            ipc = msgspec.structs.replace(ipc, ipc_path="/tmp/kv.sock")
        case "too long":
            ipc = msgspec.structs.replace(ipc, ipc_path=f"{nonce.parent}/{'x' * 100}")
    assert not is_same_host(ipc)


def test_a_sink_on_another_host_is_dialled_by_ipc() -> None:
    """The nonce is unreadable: the link takes TCP, and says so."""
    world = World("ipc")
    try:
        source, sink = world.worker("p0"), world.worker("d0")
        Path(sink.agent.endpoint.nonce_path).unlink()
        connect(source, sink)
        assert source.seen.wait(LinkUp) == LinkUp("d0", "tcp", "zmq")
    finally:
        world.close()


class UntoldFrame:
    """A message of whose origin the transport says nothing, as on systems without peer credentials."""

    def get(self, name: str) -> str:
        raise zmq.ZMQError(errno.EINVAL)


def test_a_link_of_unknown_origin_is_called_tcp(zmq_net: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path_of = zmq_router._path_of
    monkeypatch.setattr(zmq_router, "_path_of", lambda frames: path_of([UntoldFrame()]))
    source, sink = zmq_net.worker("p0"), zmq_net.worker("d0")
    connect(source, sink)
    assert sink.agent.stats().peers["p0"].path == ""


def test_a_deep_directory_breaks_the_endpoint(tmp_path: Path) -> None:
    """A socket path beyond the kernel's limit: the endpoint has TCP alone. A closed endpoint leaves nothing behind."""
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    carrier = ZeroMQCarrier(ZeroMQSettings(ipc_parent=deep))
    carrier.start()
    assert carrier.endpoint.ipc_path == ""
    carrier.close()
    assert list(deep.iterdir()) == []
    short = Path("/tmp") / f"kv-test-{random.Random().randbytes(4).hex()}"
    short.mkdir()
    carrier = ZeroMQCarrier(ZeroMQSettings(ipc_parent=short))
    carrier.start()
    assert Path(carrier.endpoint.ipc_path).is_socket()
    carrier.close()
    assert list(short.iterdir()) == []
    shutil.rmtree(short)


def test_an_address_in_use_is_reported_late(zmq_net: World) -> None:
    taken = int(zmq_net.worker("d0").agent.endpoint.tcp.rpartition(":")[2])
    with pytest.raises(Unavailable, match="cannot bind"):
        zmq_net.worker("d1", wrap=lambda _: ZeroMQCarrier(ZeroMQSettings(port=taken)))
