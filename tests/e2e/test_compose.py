"""`docker compose up` on a real engine: the image, the published ports, the walls between networks, and scaling."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from splitserve import Client
from splitserve.client.types import Message
from splitserve.service.errors import InvalidRequest
from splitserve.service.secret import SECRET_NAME
from tests.e2e.project import IMAGE, Project, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

QUESTION = [Message(role="user", content="What is the capital of France?")]
SERVICES = ("router", "prefill", "decode")
PROCESS = """
import json, os, pathlib
lines = pathlib.Path("/proc/1/status").read_text().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
try:
    pathlib.Path("/opt/splitserve/new").touch()
    written = True
except OSError:
    written = False
pathlib.Path("/tmp/new").touch()
print(json.dumps([os.getuid(), int(status["CapEff"], 16), int(status["NoNewPrivs"]), written]))
"""
CONNECT = """
import socket
for port in 50051, 50052:
    try:
        socket.create_connection(("router", port), 5).close()
        print("open")
    except ConnectionRefusedError:
        print("refused")
"""


def answer(project: Project) -> str:
    """One greedy answer, whole, through the published port."""
    with Client(project.published(50051)) as client:
        return client.chat(QUESTION, temperature=0, max_tokens=32).text


def received(project: Project) -> dict[str, int]:
    """KV bytes that each decode worker has received, by worker id."""
    return {worker["id"]: worker["kv_bytes_received"] for worker in project.workers("decode")}


def test_text_came_in_one_piece_or_its_kv_did_not_cross_containers(cluster: Project) -> None:
    def kv_bytes() -> tuple[int, int]:
        workers = cluster.cluster()["workers"]
        return sum(w["kv_bytes_sent"] for w in workers), sum(w["kv_bytes_received"] for w in workers)

    sent, num_received = kv_bytes()
    with (
        Client(cluster.published(50051)) as client,
        client.stream_chat(QUESTION, temperature=0, max_tokens=32) as stream,
    ):
        pieces = [chunk.text for chunk in stream if chunk.text]
        whole = stream.result()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text
    assert "Paris" in whole.text
    assert whole.attempts == 1

    def bytes_agree() -> bool:
        now = kv_bytes()
        return 0 < now[0] - sent == now[1] - num_received

    eventually("a decode worker received the KV bytes that the prefill worker sent", bytes_agree)


def test_blocks_take_the_network_between_containers_of_one_host(cluster: Project) -> None:
    def links() -> list[tuple[bool, str]]:
        (source,) = cluster.workers("prefill")
        sinks = [worker["id"] for worker in cluster.workers("decode")]
        return [(link["reachable"], link["detail"]) for sink in sinks if (link := source["links"].get(sink))]

    eventually("both decode workers are linked", lambda: len(links()) == 2)
    assert links() == [(True, "ipc")] * 2
    # C66: one machine, whatever its containers are called.
    assert len({worker["host"] for worker in cluster.workers("prefill") + cluster.workers("decode")}) == 1


def test_third_decode_worker_did_not_join_or_got_no_requests(cluster: Project) -> None:
    first = received(cluster)
    cluster.up("--no-recreate", "--scale", "decode=3")
    try:
        eventually("three decode workers are ready", lambda: cluster.counts()["decode"] == 3)
        before = received(cluster)
        assert first.keys() < before.keys(), "a worker was replaced"
        with ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(lambda _: answer(cluster), range(12)))
        assert all("Paris" in text for text in answers)

        def all_received() -> bool:
            now = received(cluster)
            return all(now[worker] > before[worker] for worker in before)

        eventually("every decode worker received KV bytes", all_received)
    finally:
        cluster.up("--no-recreate", "--scale", "decode=1")
    eventually("two workers left", lambda: len(cluster.workers("decode")) == 1)
    assert "Paris" in answer(cluster)


def test_port_without_authentication_could_be_reached(cluster: Project) -> None:
    # From the network of the published ports, where an application's container would be.
    words = ("run", "--rm", "--network", f"{cluster.name}_api", "--entrypoint", "python", IMAGE, "-c", CONNECT)
    assert cluster.docker(*words).split() == ["open", "refused"]
    containers = cluster.containers()
    published = {
        (container["Service"], port["URL"], port["TargetPort"])
        for container in containers
        for port in container["Publishers"] or ()
        if port["PublishedPort"]
    }
    assert published == {("router", "127.0.0.1", 50051), ("router", "127.0.0.1", 8000)}


@pytest.mark.parametrize("service", SERVICES)
def test_container_could_do_more_than_it_needs(cluster: Project, service: str) -> None:
    uid, capabilities, no_new_privileges, written = json.loads(
        cluster.compose("exec", "-T", service, "python", "-c", PROCESS)
    )
    assert (uid, capabilities, no_new_privileges, written) == (10001, 0, 1, False)


def test_command_was_missing_in_the_image(cluster: Project) -> None:
    generate = ("splitserve", "generate", "Once upon a time", "--quiet", "--max-tokens", "8", "--ignore-eos")
    assert cluster.compose("exec", "-T", "router", *generate).strip()


def test_secret_was_replaced_or_is_open_to_others(cluster: Project) -> None:
    look = f"stat -c '%a %u %s' /run/splitserve/secret/{SECRET_NAME}; sha256sum /run/splitserve/secret/{SECRET_NAME}"

    def seen(service: str) -> list[str]:
        return cluster.compose("exec", "-T", service, "sh", "-c", look).splitlines()

    before = {service: seen(service) for service in SERVICES}
    assert all(lines[0] == "400 10001 32" for lines in before.values())
    assert len({lines[1] for lines in before.values()}) == 1
    assert cluster.compose("run", "--rm", "--no-deps", "-T", "secret").endswith(f"{SECRET_NAME}: kept\n")
    assert {service: seen(service) for service in SERVICES} == before
    spoil = f"echo x > /run/splitserve/secret/{SECRET_NAME}"
    cluster.compose("exec", "-T", "decode", "sh", "-c", spoil, check=False)
    assert {service: seen(service) for service in SERVICES} == before


def test_prompt_or_answer_is_in_a_log(cluster: Project) -> None:
    canary = "xylograph-7261 quetzal"
    with Client(cluster.published(50051)) as client:
        said = client.generate(f"Say {canary} and", temperature=0, max_tokens=24, ignore_eos=True).text
        with pytest.raises(InvalidRequest):
            client.generate(canary, temperature=-1)
        with client.stream(f"{canary} is cancelled", max_tokens=400, ignore_eos=True) as stream:
            next(stream)
    host, _, port = cluster.published(8000).rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": canary, "no_such_option": canary}))
    assert connection.getresponse().status == 400
    eventually("the requests are over", cluster.is_drained)
    log = cluster.logs("all")
    assert "request ended" in log
    assert not [word for word in (*canary.split(), said.strip()) if word in log]


def test_idle_connection_was_closed_as_it_was_used_again(cluster: Project) -> None:
    """C68: through the published port, a while longer than many servers keep what is idle."""
    host, _, port = cluster.published(8000).rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    sockets = []
    with Client(cluster.published(50051)) as client:
        for pause_s in (0.0, 6.0):
            time.sleep(pause_s)
            connection.request("GET", "/health/live")
            assert connection.getresponse().read() == b'{"status":"live"}'
            sockets.append(connection.sock)
            assert client.model_info().ready
    assert sockets[0] is sockets[1] is not None, "the server said that it would close it"
    connection.close()


def test_cluster_was_killed_at_stop_or_did_not_come_back(cluster: Project) -> None:
    cluster.compose("stop")
    containers = cluster.containers()
    exits = {(container["Service"], container["ExitCode"]) for container in containers}
    cluster.up()
    assert exits == {(service, 0) for service in (*SERVICES, "model", "secret")}
    assert "Paris" in answer(cluster)
