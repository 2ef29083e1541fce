"""The engine process of the decode worker, started by its front: `python -P -m decode_worker.engine`."""

import sys

from splitserve.service.startup import uncollected_imports


def main() -> int:
    with uncollected_imports():
        from decode_worker.flow import DecodeEngine
        from splitserve.worker.engine_process import run_engine
    return run_engine(DecodeEngine, "decode")


if __name__ == "__main__":
    sys.exit(main())
