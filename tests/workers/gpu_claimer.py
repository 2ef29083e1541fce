"""A worker that does nothing but claim a GPU of a fake list: `python -m tests.workers.gpu_claimer FOLDER NAME NUM`.

Says "here", waits for a line, claims one of NUM GPUs and says which, or why not; holds it until its input ends.
"""

import sys
from pathlib import Path

from splitserve.engine.gpus import Gpu
from splitserve.service.errors import SplitserveError
from splitserve.worker.gpu_claim import claim_gpu


def fake_gpus(count: int) -> list[Gpu]:
    return [Gpu(index, f"GPU-{index:08x}", "Fake") for index in range(count)]


def main(folder: str, name: str, count: str) -> None:
    print("here", flush=True)
    sys.stdin.readline()
    try:
        claim = claim_gpu("auto", fake_gpus(int(count)), Path(folder), name)
        print(claim.device if claim else "cpu", flush=True)
    except SplitserveError as error:
        print(error, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
