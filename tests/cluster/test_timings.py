"""Through real processes: what a request's timings leave out, and where they differ from the metrics."""

import time

import pytest

from splitserve.client.types import Timings
from tests.cluster.harness import Cluster
from tests.cluster.test_exact import BLOCK_NBYTES, B, prompt_of

pytestmark = pytest.mark.cluster

STAGES = ("tokenize", "queue", "prefill", "handoff", "decode")
# Between the clocks of router and client there are two messages and a busy machine: no stage hides in less than this.
SLACK_S = 5.0


def counted(cluster: Cluster) -> dict[str, float]:
    sums = {f"{stage}_s": cluster.metric(f"splitserve_request_{stage}_time_seconds_sum") for stage in STAGES}
    [decode] = cluster.of_role("decode")
    return sums | {"transfer_bytes": decode.metric("splitserve_kv_transfer_bytes_total", side="sink")}


def increase(cluster: Cluster, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counted(cluster).items()}


def as_numbers(timings: Timings) -> dict[str, float]:
    return {name: getattr(timings, name) for name in timings.__slots__}


@pytest.mark.parametrize("n", [1, 3])
def test_timings_differ_from_the_metrics_and_from_the_clients_clock(pair: Cluster, n: int) -> None:
    pair.wait_drained()
    before, began = counted(pair), time.monotonic()
    options = {"max_tokens": 12, "ignore_eos": True, "seed": 1, "n": n}
    answer = pair.client.generate(prompt_of(2 * B + 3, 9100 + n), timings=True, **options)
    seconds = time.monotonic() - began
    told = answer.timings
    assert told is not None
    assert as_numbers(told) == pytest.approx(increase(pair, before), abs=1e-6)
    assert told.transfer_bytes == 3 * BLOCK_NBYTES
    assert told.total_s <= seconds < told.total_s + SLACK_S
    assert min(told.queue_s, told.prefill_s, told.handoff_s, told.decode_s) > 0


def test_bytes_of_cached_blocks_or_of_nobody_are_told(pair: Cluster) -> None:
    """The last token is computed anew, but all blocks are there. Over HTTP, where it is the same numbers."""
    prompt = prompt_of(2 * B, 9105)
    body = {"prompt": prompt, "max_tokens": 4, "timings": True, "ignore_eos": True}
    first, again = (pair.http.post("/v1/completions", json=body, timeout=60).json() for _ in range(2))
    assert [reply["timings"]["transfer_bytes"] for reply in (first, again)] == [2 * BLOCK_NBYTES, 0]
    assert [reply["timings"]["cached_tokens"] for reply in (first, again)] == [0, 2 * B - 1]
    assert [reply["timings"]["attempts"] for reply in (first, again)] == [1, 1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * B - 1
