"""The front process of the prefill worker: `python -P -m prefill_worker`."""

from splitserve.service.config import run_process
from splitserve.worker.config import WorkerConfig
from splitserve.worker.front import Role, run_front


def main(config: WorkerConfig) -> int:
    return run_front(Role.PREFILL, config)


if __name__ == "__main__":
    run_process("prefill_worker", "Computes prompts and sends their KV blocks to decode workers.", WorkerConfig, main)
