"""`splitserve scale` on a compose project: replicas come and go under load, and no request notices."""

import pytest

from splitserve import Client
from splitserve.client.types import Message
from tests.e2e.project import Project, eventually
from tests.e2e.streams import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

QUESTION = [Message(role="user", content="What is the capital of France?")]
ONE_EACH = {"prefill": 1, "decode": 1}


def ask(client: Client) -> str:
    return client.chat(QUESTION, temperature=0, max_tokens=32).text


def containers(project: Project, service: str) -> list[str]:
    return [str(container["ID"]) for container in project.containers(service)]


@pytest.fixture
def smallest(cluster: Project) -> Project:
    """With one worker of each role; the next test's cluster is whole again."""
    cluster.scale("decode=1", "prefill=1")
    eventually("one worker of each role", lambda: cluster.counts() == ONE_EACH)
    return cluster


def test_scaling_cost_a_request_or_touched_another_role(smallest: Project) -> None:
    project = smallest
    before = {service: containers(project, service) for service in ("router", "prefill", "decode")}
    with Load(project, ask) as load:
        project.scale("decode=3")
        eventually("three decode workers", lambda: project.counts() == {"prefill": 1, "decode": 3})
        assert set(before["decode"]) < set(containers(project, "decode"))
        num_answers = len(load.answers)
        eventually("answers of the larger cluster", lambda: len(load.answers) >= num_answers + 6)
        said = project.scale("decode=1")
        assert said.count(" is gone\n") == 2, said
        assert containers(project, "decode") == before["decode"]
        project.scale("prefill=2")
        eventually("two prefill workers", lambda: project.counts() == {"prefill": 2, "decode": 1})
        project.scale("prefill=1")
    eventually("one worker of each role", lambda: project.counts() == ONE_EACH)
    assert {service: containers(project, service) for service in before} == before
    eventually("nothing is held", project.is_drained)
    assert all("Paris" in text for text in load.answers)


def test_what_was_scaled_by_hand_was_miscounted(smallest: Project) -> None:
    project = smallest
    oldest = containers(project, "decode")
    project.up("--no-recreate", "--scale", "decode=2")
    eventually("two decode workers", lambda: project.counts() == {"prefill": 1, "decode": 2})
    assert project.scale("decode=2").splitlines()[1:] == ["  decode: 2 → 2"]
    assert project.scale("decode=1").splitlines()[1] == "  decode: 2 → 1"
    assert containers(project, "decode") == oldest
    assert project.scale("decode=2", "--timeout", "4m").splitlines()[1] == "  decode: 1 → 2"
    project.up("--no-recreate", "--scale", "decode=1")
    assert project.scale("decode=1").splitlines()[1:] == ["  decode: 1 → 1"]
