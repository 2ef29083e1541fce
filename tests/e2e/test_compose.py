"""`docker compose up` on a real engine: the image, the published ports, the walls between networks, and scaling."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from splitserve import Client
from splitserve.client.types import Message
from tests.e2e.project import Project, eventually

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


def test_text_came_in_one_piece_or_its_kv_did_not_cross_containers(project: Project) -> None:
    (prefill,), (decode,) = project.workers("prefill"), project.workers("decode")
    with (
        Client(project.published(50051)) as client,
        client.stream_chat(QUESTION, temperature=0, max_tokens=32) as stream,
    ):
        pieces = [chunk.text for chunk in stream if chunk.text]
        whole = stream.result()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text
    assert "Paris" in whole.text
    assert whole.attempts == 1

    def bytes_agree() -> bool:
        (source,), (sink,) = project.workers("prefill"), project.workers("decode")
        sent: int = source["kv_bytes_sent"] - prefill["kv_bytes_sent"]
        num_received: int = sink["kv_bytes_received"] - decode["kv_bytes_received"]
        return 0 < sent == num_received

    eventually("the decode worker received the KV bytes that the prefill worker sent", bytes_agree)
    (source,) = project.workers("prefill")
    assert source["links"][decode["id"]] == {"reachable": True, "detail": "tcp"}


def test_second_decode_worker_did_not_join_or_got_no_requests(project: Project) -> None:
    (first,) = received(project)
    project.up("--no-recreate", "--scale", "decode=2")
    try:
        eventually(
            "two decode workers are ready",
            lambda: [worker["state"] for worker in project.workers("decode")] == ["ready", "ready"],
        )
        before = received(project)
        assert first in before, "the first worker was replaced"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: answer(project), range(8)))
        assert all("Paris" in text for text in answers)

        def both_received() -> bool:
            now = received(project)
            return all(now[worker] > before[worker] for worker in before)

        eventually("both decode workers received KV bytes", both_received)
    finally:
        project.up("--no-recreate", "--scale", "decode=1")
    eventually("the second worker left", lambda: len(project.workers("decode")) == 1)
    assert "Paris" in answer(project)


def test_port_without_authentication_could_be_reached(project: Project) -> None:
    # `model` shares the network of the published ports with the router, as an application's container would.
    assert project.compose(
        "run", "--rm", "--no-deps", "-T", "--entrypoint", "python", "model", "-c", CONNECT
    ).split() == ["open", "refused"]
    containers = [json.loads(line) for line in project.compose("ps", "--format", "json").splitlines()]
    published = {
        (container["Service"], port["URL"], port["TargetPort"])
        for container in containers
        for port in container["Publishers"] or ()
        if port["PublishedPort"]
    }
    assert published == {("router", "127.0.0.1", 50051), ("router", "127.0.0.1", 8000)}


@pytest.mark.parametrize("service", SERVICES)
def test_container_could_do_more_than_it_needs(project: Project, service: str) -> None:
    uid, capabilities, no_new_privileges, written = json.loads(
        project.compose("exec", "-T", service, "python", "-c", PROCESS)
    )
    assert (uid, capabilities, no_new_privileges, written) == (10001, 0, 1, False)


def test_command_was_missing_in_the_image(project: Project) -> None:
    generate = ("splitserve", "generate", "Once upon a time", "--quiet", "--max-tokens", "8", "--ignore-eos")
    assert project.compose("exec", "-T", "router", *generate).strip()


def test_cluster_was_killed_at_stop_or_did_not_come_back(project: Project) -> None:
    project.compose("stop")
    containers = [json.loads(line) for line in project.compose("ps", "--all", "--format", "json").splitlines()]
    exits = {container["Service"]: container["ExitCode"] for container in containers}
    project.up()
    assert exits == dict.fromkeys((*SERVICES, "model"), 0)
    assert "Paris" in answer(project)
