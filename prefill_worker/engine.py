"""The engine process of the prefill worker, started by its front: `python -P -m prefill_worker.engine`."""

import sys

from prefill_worker.flow import PrefillEngine
from splitserve.worker.engine_process import run_engine

if __name__ == "__main__":
    sys.exit(run_engine(PrefillEngine, "prefill"))
