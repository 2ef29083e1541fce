"""The front process of the decode worker: `python -P -m decode_worker`."""

from decode_worker.config import DecodeConfig
from splitserve.service.config import run_process
from splitserve.worker.front import Role, run_front


def main(config: DecodeConfig) -> int:
    return run_front(Role.DECODE, config)


if __name__ == "__main__":
    run_process("decode_worker", "Takes in KV blocks and generates tokens.", DecodeConfig, main)
