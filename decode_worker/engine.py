"""The engine process of the decode worker, started by its front: `python -P -m decode_worker.engine`."""

import sys

from decode_worker.flow import DecodeEngine
from splitserve.worker.engine_process import run_engine

if __name__ == "__main__":
    sys.exit(run_engine(DecodeEngine, "decode"))
