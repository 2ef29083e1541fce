"""The control experiment's load: a bare loop of matmuls on given cores, as a prefill computes them, with no hand-off.

`python -P -m splitserve.bench.load.control` is the loop; `matmul_loop` runs it for as long as a benchmark looks.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import httpx
import psutil

from splitserve.service.errors import Internal, InvalidRequest

# The default model's widest linear layer, and the prompt tokens that one step of it computes.
_ROWS, _IN, _OUT = 512, 576, 3072
_BEGUN = b"running"
_START_S = 60.0


@asynccontextmanager
async def matmul_loop(cores: Sequence[int]) -> AsyncIterator[None]:
    """Computing on all of `cores` from entry to exit. Raises Internal where it does not start."""
    command = [sys.executable, "-P", "-m", "splitserve.bench.load.control", *map(str, cores)]
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    loop = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe)
    try:
        assert loop.stdout is not None
        said = b""
        with suppress(TimeoutError):
            said = await asyncio.wait_for(loop.stdout.readline(), _START_S)
        if said.strip() != _BEGUN:
            raise Internal("the matmul loop ended, or took too long, before it began")
        yield
    finally:
        with suppress(ProcessLookupError):
            loop.kill()
        await loop.wait()


def prefill_cores(url: str) -> tuple[int, ...]:
    """The cores on which the prefill workers of the cluster at `url` may run.

    Raises InvalidRequest where they are not to be found on this machine.
    """
    try:
        state = httpx.get(f"{url.rstrip('/').removesuffix('/v1')}/cluster", timeout=10.0, trust_env=False)
        workers = [worker for worker in state.raise_for_status().json()["workers"] if worker["role"] == "prefill"]
        # What is known by the worker's name is its front; the engine, which computes, is the front's child.
        engines = [engine for worker in workers for engine in psutil.Process(worker["pid"]).children()]
        cores = {core for engine in engines for core in engine.cpu_affinity() or ()}
    except (httpx.HTTPError, psutil.Error, ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(
            f"no prefill workers on this machine are known to {url} ({error}); --control-cores names the cores",
            field="control_cores",
        ) from error
    if not cores or len(cores) == psutil.cpu_count():
        raise InvalidRequest(
            "the prefill workers have no cores of their own; --control-cores names those of the loop",
            field="control_cores",
        )
    return tuple(sorted(cores))


def _run(cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    rows = torch.randn(_ROWS, _IN).bfloat16()
    weight = torch.randn(_OUT, _IN).bfloat16()
    print(_BEGUN.decode(), flush=True)  # noqa: T201  # for the benchmark
    with torch.inference_mode():
        while True:
            torch.nn.functional.linear(rows, weight)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Started by a benchmark, not by hand.")
    parser.add_argument("cores", type=int, nargs="+")
    _run(parser.parse_args().cores)
