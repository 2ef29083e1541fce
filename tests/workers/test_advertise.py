"""The address that a worker tells its peers (C66: never "every address", never a loopback that is not asked for), and
where its sockets for those of the same host lie."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtransfer.pairs.carrier import PairSettings
from kvtransfer.settings import KVSettings
from splitserve.service.errors import InvalidRequest, Unavailable
from splitserve.worker import kv
from splitserve.worker.config import WorkerConfig
from splitserve.worker.kv import advertised_host, make_agent
from tests.kvtransfer.worlds import FINGERPRINT, ByteStore


def test_wildcard_was_advertised() -> None:
    assert advertised_host(WorkerConfig(bind="0.0.0.0", router="127.0.0.1:50052")) == "127.0.0.1"
    assert advertised_host(WorkerConfig(bind="0.0.0.0", router="localhost:50052")) == "127.0.0.1"


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_ipv6_wildcard_was_advertised() -> None:
    assert advertised_host(WorkerConfig(bind="::", router="127.0.0.1:50052")) == "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert advertised_host(WorkerConfig(bind="::", router="[::1]:50052")) == "::1"


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1", "kv.example"])
def test_bind_address_was_not_advertised(bind: str) -> None:
    assert advertised_host(WorkerConfig(bind=bind, router="nowhere.invalid:50052")) == bind


def test_asked_address_was_not_advertised() -> None:
    config = WorkerConfig(bind="0.0.0.0", advertise="kv.example", router="nowhere.invalid:50052")
    assert advertised_host(config) == "kv.example"


def test_router_that_starts_later_cost_the_worker_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = socket.getaddrinfo, []

    def at_second_try(host: str, *args: object) -> object:
        asked.append(host)
        if len(asked) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "no such name yet")
        return real("127.0.0.1", *args)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", at_second_try)
    assert advertised_host(WorkerConfig(bind="0.0.0.0", router="router:50052")) == "127.0.0.1"
    assert asked == ["router", "router"]


def test_unknown_router_was_waited_for_without_end() -> None:
    config = WorkerConfig(bind="0.0.0.0", router="nowhere.invalid:50052")
    with pytest.raises(Unavailable, match=r"nowhere\.invalid:50052.*--advertise"):
        advertised_host(config, timeout_s=0.0)


def test_port_that_a_firewall_lets_through_was_not_the_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agent = make_agent(WorkerConfig(kv_port=port), "d0", FINGERPRINT, ByteStore(4), torch.device("cpu"), lambda _: None)
    agent.start()
    try:
        assert agent.endpoint.tcp == f"tcp://127.0.0.1:{port}"
    finally:
        agent.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    made = Path(tempfile.mkdtemp(prefix="kv-"))
    yield made
    shutil.rmtree(made)


def test_sockets_lie_where_other_containers_do_not_see_them(folder: Path) -> None:
    config = WorkerConfig(kv_socket_dir=str(folder))
    agent = make_agent(config, "d0", FINGERPRINT, ByteStore(4), torch.device("cpu"), lambda _: None)
    agent.start()
    try:
        assert Path(agent.endpoint.ipc_path).parent.parent == folder
        assert Path(agent.endpoint.ipc_path).is_socket()
    finally:
        agent.close()
    assert list(folder.iterdir()) == []


def test_folder_for_sockets_that_is_not_there_is_ignored(folder: Path) -> None:
    config = WorkerConfig(kv_socket_dir=str(folder / "missing"))
    agent = make_agent(config, "d0", FINGERPRINT, ByteStore(4), torch.device("cpu"), lambda _: None)
    with pytest.raises(Unavailable, match="missing"):
        agent.start()


def test_worker_starts_without_a_transport_and_is_never_reached() -> None:
    def made(kv_transport: str) -> None:
        config = WorkerConfig(kv_transport=kv_transport)
        make_agent(config, "d0", FINGERPRINT, ByteStore(4), torch.device("cpu"), lambda _: None)

    with pytest.raises(InvalidRequest, match="--kv-transport nccl: the pool is on cpu, not on a GPU"):
        made("nccl")
    made("nccl,gloo")


@pytest.mark.parametrize(("kv_transport", "frame_bytes"), [("zmq", 1 << 20), ("gloo", 4 << 20), ("zmq,gloo", 4 << 20)])
def test_pair_moves_small_messages(monkeypatch: pytest.MonkeyPatch, kv_transport: str, frame_bytes: int) -> None:
    """A message costs it two threads more; and what a sink may have unread has to hold one more of them."""
    made: list[KVSettings] = []
    pairs: list[PairSettings] = []
    monkeypatch.setattr(kv, "KVAgent", lambda settings, **_: made.append(settings))
    monkeypatch.setattr(kv, "PairCarrier", lambda inner, settings: pairs.append(settings))
    config = WorkerConfig(kv_transport=kv_transport)
    make_agent(config, "d0", FINGERPRINT, ByteStore(4), torch.device("cpu"), lambda _: None)
    assert [settings.frame_bytes for settings in made] == [frame_bytes]
    assert pairs[0].max_pending_bytes == made[0].window_bytes + frame_bytes
