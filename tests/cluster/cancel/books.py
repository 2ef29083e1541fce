"""What a test of an early end counts, before and after."""

import time

from tests.cluster.fault_bench import HEARTBEAT_INTERVAL_S, FaultBench

OUTCOMES = ("stop", "length", "cancelled", "deadline", "rejected", "failed")


def outcomes(bench: FaultBench) -> dict[str, float]:
    return {name: bench.cluster.metric("splitserve_requests_total", outcome=name) for name in OUTCOMES}


def held_blocks(bench: FaultBench, role: str) -> int:
    return sum(w["blocks"]["in_use"] + w["blocks"]["reserved"] for w in bench.cluster.workers_of(role))


def num_steps(bench: FaultBench, *roles: str) -> int:
    """Of all workers of these roles, once heartbeats tell nothing new; of both roles where none is named."""
    told: list[int] = []
    while len(told) < 5 or len(set(told[-5:])) > 1:
        workers = bench.cluster.state()["workers"]
        told.append(sum(worker["steps"] for worker in workers if worker["role"] in (roles or ("prefill", "decode"))))
        time.sleep(HEARTBEAT_INTERVAL_S / 2)
    return told[-1]
