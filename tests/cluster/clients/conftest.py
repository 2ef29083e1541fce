"""One cluster for all tests with real clients: what a failure looks like from outside is seen at its limits, too."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from splitserve.models.tokenizer import Tokenizer
from tests.cluster.harness import Cluster

# A request that loses its worker fails, and a ninth one that has to wait is refused.
ROUTER_FLAGS = {"max_attempts": 1, "max_queue_requests": 8, "failover_timeout": "120s", "stall_timeout": "60s"}


@pytest.fixture(scope="package")
def _served(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    plans = tmp_path_factory.mktemp("plans")
    cluster = Cluster(tiny("llama"), router_flags=ROUTER_FLAGS, plans=plans, max_num_batched_tokens=48)
    yield cluster
    cluster.close()


@pytest.fixture
def served(_served: Cluster) -> Iterator[Cluster]:
    """A router, one prefill and one decode worker with a tiny Llama in float32, chunks of 48 tokens."""
    _served.heal()
    yield _served
    _served.wait_drained()


@pytest.fixture
def openai(served: Cluster) -> Iterator[OpenAI]:
    with client_of(str(served.http.base_url)) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(tiny: Callable[[str], Path]) -> Tokenizer:
    return Tokenizer.load(tiny("llama"))


def client_of(url: str, key: str = "none") -> OpenAI:
    """It does not try again: a test is to see what came first."""
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)
