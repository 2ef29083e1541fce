"""What a worker says of its start: the parts, which make it up, and the memory; in its log and in its metrics. And what
would make it longer than it has to be."""

import gc
import io
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from splitserve.service.config import exit_status_of
from splitserve.service.errors import InvalidRequest, NotFound, Unavailable
from splitserve.service.logging import configure_logging
from splitserve.service.startup import collect_rarely, find_startup_line, startup_line, uncollected_imports

PARTS = {"front", "imports", "config", "weights", "packing", "self-test"}


@pytest.fixture
def worker(tiny: Callable[[str], Path]) -> Iterator["subprocess.Popen[str]"]:
    """A decode worker that finds no router: its start needs none."""
    flags = ["--model", str(tiny("llama")), "--router", "127.0.0.1:1", "--http-port", "0", "--kv-cache-memory", "4MiB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "decode_worker", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"SPLITSERVE_LOG_FORMAT": "json"},
    )
    yield process
    process.terminate()
    process.communicate(timeout=60)


def test_start_is_not_accounted_for(worker: "subprocess.Popen[str]") -> None:
    assert worker.stderr is not None
    lines = []
    for line in worker.stderr:
        lines.append(line)
        if '"ready"' in line:
            break
    told = find_startup_line(lines)
    assert told, lines
    total = float(re.findall(r"started in ([\d.]+) s", told)[0])
    shown = {
        name: float(seconds) for name, seconds in re.findall(r"([a-zA-Z-]+) ([\d.]+)[,;]", told.split("; ")[0] + ";")
    }
    assert total == pytest.approx(sum(shown.values()), abs=0.06 * len(shown)), told
    assert shown["other"] < 0.2 * total, told
    assert "KV pool 4, in huge pages " in told

    port = int(re.findall(r'"http_port": (\d+)', lines[-1])[0])
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    seconds = dict(re.findall(r'splitserve_startup_seconds\{model="[^"]*",part="([^"]*)"\} (\S+)', page))
    assert seconds.keys() >= PARTS
    assert 0.75 * total < sum(map(float, seconds.values())) <= total + 0.1
    nbytes = dict(re.findall(r'splitserve_memory_bytes\{kind="([^"]*)",model="[^"]*"\} (\S+)', page))
    assert nbytes.keys() == {"weights", "packed_weights", "kv_pool", "huge_pages"}
    assert float(nbytes["kv_pool"]) <= 4 << 20


@pytest.mark.parametrize("module", ["decode_worker", "router"])
def test_what_may_be_there_later_ends_a_worker_for_good(module: str, tmp_path: Path) -> None:
    """Exit status 75: the model hub does not answer. Nobody starts a process again that ends with 78."""
    command = [sys.executable, "-m", module, "--model", "nobody/nothing"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "SPLITSERVE_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, "the model hub gave no answer" in done.stderr) == (75, True), done.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("no such option"), 78),
        (NotFound("no such model"), 78),
        (ValueError("block size"), 78),
        (Unavailable("no GPU is left"), 75),
        (OSError("the address is in use"), 75),
        (MemoryError(), 75),
    ],
)
def test_supervisor_is_told_the_wrong_thing(error: Exception, status: int) -> None:
    assert exit_status_of(error) == status


def test_short_parts_vanish_from_the_sum() -> None:
    line = startup_line(3.0, {"imports": 2.0, "config": 0.01, "pool": 0.04}, "details")
    assert line == "started in 3.0 s: imports 2.0, other 1.0; details"


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "console"])
def test_line_is_lost_in_the_log(as_json: bool) -> None:
    stream = io.StringIO()
    line = startup_line(3.25, {"imports": 2.0, "self-test": 1.0}, "memory in MiB: weights 1,024")
    configure_logging("decode_worker", json=as_json, stream=stream)
    try:
        structlog.get_logger().info("ready", startup=line, port=1)
    finally:
        configure_logging("tests")
    assert find_startup_line(["an earlier one", *stream.getvalue().splitlines(), "stopping"]) == line
    assert find_startup_line(["started by hand", ""]) is None


def test_front_imports_what_only_engines_and_routers_need() -> None:
    program = """
import sys
import decode_worker.__main__, prefill_worker.__main__
assert not {"torch", "transformers", "numpy", "numba", "zmq", "fastapi"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_collector_looks_at_what_was_imported_or_stays_off() -> None:
    num_frozen = gc.get_freeze_count()
    try:
        with uncollected_imports():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > num_frozen
    finally:
        gc.unfreeze()


def test_waiting_tokens_make_the_collector_look_through_all_streams() -> None:
    before, looks = gc.get_threshold(), gc.get_stats()[0]["collections"]
    try:
        collect_rarely()
        waiting = [[number] for number in range(5_000)]
        assert gc.get_stats()[0]["collections"] == looks
        garbage = []
        garbage.append(garbage)
        del garbage, waiting
        assert gc.collect() > 0, "what is made afterwards is still collected"
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
