"""Clusters shared by tests. Each is started at first use, healed between tests, and ended with the session."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.cluster.harness import Cluster
from tests.cluster.moved import TRANSPORTS, assert_moved_by
from tests.tiny_models import add_tokenizer, build

# For references: with more, tiny matmuls mostly wait for threads, and the cluster waits with them.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def get(family: str) -> Path:
        directory = root / family
        if not directory.exists():
            build(family, directory)
            add_tokenizer(directory)
        return directory

    return get


@pytest.fixture(scope="session")
def _one_pair(tiny: Callable[[str], Path]) -> Iterator[Callable[[str], Cluster]]:
    """One for each transport, made when it is first asked for."""
    made: dict[str, Cluster] = {}

    def get(transport: str) -> Cluster:
        if transport not in made:
            # Some tests take away the only worker of a role, and its successor may take long to start.
            flags = {"router_flags": {"failover_timeout": "120s"}, "max_num_batched_tokens": 48}
            made[transport] = Cluster(tiny("llama"), kv_transport=transport, **flags)
        return made[transport]

    yield get
    for cluster in made.values():
        cluster.close()


@contextmanager
def _healed(cluster: Cluster) -> Iterator[Cluster]:
    cluster.heal()
    yield cluster
    cluster.wait_drained()
    cluster.heal()


@pytest.fixture
def pair(_one_pair: Callable[[str], Cluster]) -> Iterator[Cluster]:
    """A router, one prefill and one decode worker with a tiny Llama in float32, chunks of 48 tokens."""
    with _healed(_one_pair("zmq")) as cluster:
        yield cluster


@pytest.fixture(params=TRANSPORTS)
def either_pair(request: pytest.FixtureRequest, _one_pair: Callable[[str], Cluster]) -> Iterator[Cluster]:
    """As `pair`, over each transport in turn, and over no other."""
    with _healed(_one_pair(request.param)) as cluster:
        yield cluster
        assert_moved_by(cluster, request.param)


@pytest.fixture(scope="session")
def _two_by_three(tiny: Callable[[str], Path]) -> Iterator[Cluster]:
    # A drain is tested that is too short for what runs on decode, and one that is not on prefill.
    short = {"drain_timeout": "0.1s"}
    cluster = Cluster(tiny("gemma2"), prefill=2, decode=3, max_num_batched_tokens=48, decode_flags=short)
    yield cluster
    cluster.close()


@pytest.fixture
def two_by_three(_two_by_three: Cluster) -> Iterator[Cluster]:
    """Two prefill and three decode workers with a tiny Gemma 2 in float32."""
    with _healed(_two_by_three) as cluster:
        yield cluster
