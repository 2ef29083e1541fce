"""The engine process of the prefill worker, started by its front: `python -P -m prefill_worker.engine`."""

import sys

from splitserve.service.startup import uncollected_imports


def main() -> int:
    with uncollected_imports():
        from prefill_worker.flow import PrefillEngine
        from splitserve.worker.engine_process import run_engine
    return run_engine(PrefillEngine, "prefill")


if __name__ == "__main__":
    sys.exit(main())
