"""The address that a worker tells its peers (C66: never "every address", never a loopback that is not asked for)."""

import socket

import pytest

from splitserve.service.errors import Unavailable
from splitserve.worker.config import WorkerConfig
from splitserve.worker.kv import advertised_host


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
