"""A worker that cannot start: `docker compose up --wait` waits for ever, or ends with nothing to go by."""

import pytest

from tests.e2e.containers import Container
from tests.e2e.project import Project, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WRONG = {
    # Found by the front, which reads it, and by the engine, which would have to hold it.
    "SPLITSERVE_DTYPE": ("fp8", 'Invalid value "fp8" for SPLITSERVE_DTYPE'),
    "SPLITSERVE_KV_CACHE_MEMORY": ("1KiB", "hold no block"),
}


@pytest.mark.parametrize("setting", WRONG)
def test_worker_with_a_wrong_setting_is_waited_for(cluster: Project, setting: str) -> None:
    value, named = WRONG[setting]
    try:
        with pytest.raises(AssertionError, match=r"container \S+-(prefill|decode)-\d is unhealthy"):
            cluster.up(settings={setting: value})
        assert named in cluster.logs()
        victim = Container.of(cluster, "decode")
        started = victim.started
        eventually("Docker tries again", lambda: victim.started != started)
    finally:
        cluster.up()
