"""A container is killed, paused or cut off while streams run: what they come to, and who is there afterwards.

C33, C35, C37 and C69 between real containers; `tests/cluster` has them between processes.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from splitserve import Client
from splitserve.service.errors import Unavailable
from tests.e2e.containers import Container
from tests.e2e.project import Project, eventually
from tests.e2e.streams import Load, Streams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_TOKENS = 150
SERVICES = ("router", "prefill", "decode")
SILENT_ROUTER = "no sign of life from the router"
Fault = tuple[Callable[[Container], None], Callable[[Container], None]]
# What breaks, and what mends it.
FAULTS: dict[str, Fault] = {
    "killed": (Container.kill, Container.start),
    "paused": (Container.pause, Container.unpause),
    "cut-off": (Container.disconnect, Container.connect),
}


@pytest.fixture(scope="module")
def texts(project: Project) -> list[str]:
    """What the streams say when nothing happens."""
    with Streams(project, num_tokens=NUM_TOKENS) as streams:
        pass
    return [answer.text for answer in streams.answers()]


def say(client: Client) -> str:
    return client.generate("The weather in the mountains", max_tokens=24, temperature=0, ignore_eos=True).text


def burst(project: Project, num: int) -> list[str]:
    """One thing asked so often at once; raises what failed."""
    with Client(project.published(50051)) as client, ThreadPoolExecutor(num) as pool:
        return list(pool.map(lambda _: say(client), range(num)))


@contextlib.contextmanager
def nothing_else_restarts(project: Project, *touched: Container) -> Iterator[None]:
    """Only `touched` are started anew meanwhile, and at the end the cluster is whole and holds nothing."""
    all_of_it = [Container(project, found["ID"], found["Service"]) for found in project.containers(*SERVICES)]
    others = [container for container in all_of_it if container.id not in {own.id for own in touched}]
    before = [container.started for container in others]
    yield
    eventually("the cluster is whole", lambda: project.counts() == {"prefill": 1, "decode": 2})
    eventually("nothing is held", project.is_drained)
    assert [container.started for container in others] == before


@pytest.mark.parametrize("fault", FAULTS)
def test_decode_worker_takes_its_streams_along(cluster: Project, texts: list[str], fault: str) -> None:
    breaks, mends = FAULTS[fault]
    victim = Container.of(cluster, "decode")
    started = victim.started
    # One that dies is another worker when it is back.
    with nothing_else_restarts(cluster, victim):
        with Streams(cluster, num_tokens=NUM_TOKENS) as streams:
            worker = victim.worker()
            assert worker is not None
            assert worker["running"] > 0, "nothing would be lost with it"
            breaks(victim)
            eventually("the router has lost the worker", lambda: not is_listed(cluster, worker["id"]))
        answers = streams.answers()
        assert [answer.text for answer in answers] == texts
        assert max(answer.attempts for answer in answers) == 2
        mends(victim)
        eventually("the worker is back", lambda: victim.is_joined)
    assert (victim.started == started) == (fault != "killed")
    burst(cluster, 8)


@pytest.mark.parametrize("fault", FAULTS)
def test_prefill_worker_stops_what_decodes_or_is_waited_for(cluster: Project, texts: list[str], fault: str) -> None:
    """Without it a request is refused at once and reaches no decode worker (C35); once it is back, all are served."""
    breaks, mends = FAULTS[fault]
    victim = Container.of(cluster, "prefill")
    worker = victim.worker()
    assert worker is not None
    with nothing_else_restarts(cluster, victim):
        with Streams(cluster, num_tokens=NUM_TOKENS) as streams:
            breaks(victim)
            eventually("the router has lost the worker", lambda: not is_listed(cluster, worker["id"]))
            attempts = num_attempts(cluster)
            with Client(cluster.published(50051)) as client, pytest.raises(Unavailable) as refused:
                say(client)
            assert (refused.value.reason, num_attempts(cluster)) == ("NO_WORKERS", attempts)
            assert refused.value.retry_after_s is not None
        assert [answer.text for answer in streams.answers()] == texts
        mends(victim)
        eventually("the worker is back", lambda: victim.is_joined)
        eventually("the router is ready", lambda: is_ready(cluster))
        burst(cluster, 8)


def test_killed_router_leaves_something_behind(cluster: Project) -> None:
    """Its streams end with an error, no worker restarts, and from its first "ready" on it serves a burst (C69)."""
    router = Container.of(cluster, "router")
    with nothing_else_restarts(cluster, router):
        with Streams(cluster, num_tokens=NUM_TOKENS) as streams:
            router.kill()
        assert {type(end) for end in streams.ends()} == {Unavailable}
        router.start()
        eventually("the router is ready", lambda: is_ready(cluster))
        assert len(set(burst(cluster, 50))) == 1


def test_paused_router_loses_its_streams(cluster: Project, texts: list[str]) -> None:
    """Its workers have given it up meanwhile; they join again, and the streams go on."""
    router = Container.of(cluster, "router")
    with nothing_else_restarts(cluster):
        with Streams(cluster, num_tokens=NUM_TOKENS) as streams:
            worker = Container.of(cluster, "decode")
            num = worker.logs.count(SILENT_ROUTER)
            router.pause()
            eventually("a worker has given the router up", lambda: worker.logs.count(SILENT_ROUTER) > num)
            router.unpause()
        assert [answer.text for answer in streams.answers()] == texts


def test_router_cut_off_from_its_workers_ends_them_or_stays_deaf(cluster: Project, texts: list[str]) -> None:
    """It is not ready, says so and refuses. Docker gives it another address, which it takes, and its streams go on."""
    router = Container.of(cluster, "router")
    address = router.address
    with nothing_else_restarts(cluster):
        with Streams(cluster, num_tokens=NUM_TOKENS) as streams:
            router.disconnect()
            eventually("the router has lost all workers", lambda: cluster.cluster()["workers"] == [])
            assert not is_ready(cluster)
            with Client(cluster.published(50051)) as client, pytest.raises(Unavailable):
                say(client)
            with cluster.neighbour():  # gets the address that is free now
                router.connect()
            assert router.address != address, "it would have been found at the old one as well"
        assert [answer.text for answer in streams.answers()] == texts
        eventually("the router is ready", lambda: is_ready(cluster))
        burst(cluster, 8)


def test_restarted_decode_worker_poisons_its_peers(cluster: Project) -> None:
    """C33: again and again at the same place, under load that notices nothing."""
    victim = Container.of(cluster, "decode")
    with nothing_else_restarts(cluster, victim), Load(cluster, say) as load:
        for _ in range(3):
            before = victim.worker_id
            victim.crash()
            eventually("the worker is another one", lambda before=before: victim.worker_id not in ("", before))
            eventually("the cluster is whole", lambda: cluster.counts() == {"prefill": 1, "decode": 2})
            num_answers = len(load.answers)
            eventually("answers after it", lambda num=num_answers: len(load.answers) >= num + 6)
    assert len(set(load.answers)) == 1


@pytest.mark.parametrize("service", ["decode", "prefill"])
def test_stopped_worker_cuts_its_streams(cluster: Project, texts: list[str], service: str) -> None:
    """C37: within the grace time that the compose file gives, and with exit status 0."""
    victim = Container.of(cluster, service)
    with nothing_else_restarts(cluster, victim):
        with Streams(cluster, num_tokens=NUM_TOKENS) as streams:
            victim.stop()
        assert [answer.text for answer in streams.answers()] == texts
        assert victim.exit_status == 0
        victim.start()


def test_frozen_engine_is_called_healthy(cluster: Project) -> None:
    """C69: the container is up and answers, but computes nothing. It ends, and Docker starts it again."""
    victim = Container.of(cluster, "decode")
    started, since = victim.started, time.time()
    with nothing_else_restarts(cluster, victim):
        victim.freeze_engine()
        eventually("the worker was started again", lambda: victim.started != started)
        assert "unhealthy" in victim.healths(since)
        eventually("it is healthy", lambda: victim.health == "healthy")


def is_ready(project: Project) -> bool:
    try:
        url = f"http://{project.published(8000)}/health/ready"
    except AssertionError:  # it has no port while it is down
        return False
    return httpx.get(url, trust_env=False).status_code == 200


def is_listed(project: Project, worker_id: str) -> bool:
    return any(worker["id"] == worker_id for worker in project.cluster()["workers"])


def num_attempts(project: Project) -> float:
    lines = httpx.get(f"http://{project.published(8000)}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("splitserve_attempts_total"))
