"""Fixtures of the transfer tests."""

from collections.abc import Iterator

import pytest

from tests.kvtransfer.worlds import World, world


@pytest.fixture(params=["loopback", "tcp", "ipc", "gloo"])
def net(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world over each carrier."""
    with world(request.param) as made:
        yield made


@pytest.fixture(params=["tcp", "ipc", "gloo"])
def real_net(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world over sockets, for what only a real transport does."""
    with world(request.param) as made:
        yield made


@pytest.fixture(params=["bare tcp", "bare ipc"])
def zmq_net(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world over ZeroMQ and nothing around it, for what is said of its sockets."""
    with world(request.param) as made:
        yield made


@pytest.fixture
def loopback() -> Iterator[World]:
    """The in-process twin, for what does not depend on the transport."""
    with world("loopback") as made:
        yield made


@pytest.fixture
def tcp() -> Iterator[World]:
    """A world over ZeroMQ's TCP, for tests that put around it what they need."""
    with world("bare tcp") as made:
        yield made
