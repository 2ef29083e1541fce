"""What a first start has found out, a second one does not find out again."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.models.cache import cache_root
from tests.cluster.harness import wait_for
from tests.cluster.up import up

pytestmark = pytest.mark.cluster

# Words of the engine's progress for what takes a start longest.
TESTING = ("checking that llama runs on paged attention", "comparing with transformers' own attention")
COMPARING = "comparing with an earlier self-test"
COMPILING = ("compiling", "compiled kernels cannot be read")


def test_second_start_compiles_or_repeats_the_self_test(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """And each start says what its parts took. Compiled kernels are the tests' own, so the first start may have them;
    self-tests it has none."""
    (tmp_path / "cache").mkdir()
    (cache_root() / "kernels").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "kernels").symlink_to(cache_root() / "kernels")
    flags = ("--model", str(tiny("llama")), "--kv-cache-memory", "4MiB")

    def start(name: str) -> tuple[str, dict[str, set[str]]]:
        """What it says, and for each worker the parts of its start."""
        with up(tmp_path / name, *flags, env={"SPLITSERVE_CACHE": str(tmp_path / "cache")}) as cluster:
            wait_for("the last word of the start", lambda: "Ctrl-C here ends it" in cluster.log.read_text())
        text = cluster.log.read_text()
        lines = re.findall(r"^splitserve +\| (\S+) started in [\d.]+ s: ([^;]+);", text, re.MULTILINE)
        return text, {worker: {part.rsplit(" ", 1)[0] for part in parts.split(", ")} for worker, parts in lines}

    first, parts = start("first")
    # A worker that is slow to start may find what the other one has just found out.
    num_tested = first.count(TESTING[0])
    assert num_tested in (1, 2), first
    assert first.count(TESTING[1]) == num_tested
    assert first.count(COMPARING) == 2 - num_tested, first
    assert parts.keys() == {"prefill-0", "decode-0"}
    assert all(told >= {"front", "imports", "kernels"} for told in parts.values()), parts
    # Comparing is short, but not too short to be told on a busy machine.
    assert sum("self-test" in told for told in parts.values()) >= num_tested, parts

    second, parts = start("second")
    for words in (*TESTING, *COMPILING):
        assert words not in second, second
    assert second.count(COMPARING) == 2
    assert parts.keys() == {"prefill-0", "decode-0"}
    assert all(told >= {"front", "imports", "kernels"} for told in parts.values()), parts
