"""A sink in a process of its own, for tests that freeze or kill it.

Run as `python -m tests.kvtransfer.sink_process WORKER_ID PORT BLOCK_NBYTES TRANSPORT`. Writes its endpoint as one
line of JSON, then per terminal event a line; reads lines `expect TRANSFER_ID NUM_BLOCKS`; ends with its standard input.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtransfer.agent import KVAgent
from kvtransfer.endpoint import KVEndpoint
from kvtransfer.events import KVEvent, TransferComplete, TransferFailed
from kvtransfer.settings import KVSettings
from kvtransfer.ticket import Ticket
from tests.kvtransfer.worlds import FINGERPRINT, PATIENCE_S, ByteStore, worker_carrier

NUM_BLOCKS = 64
WINDOW_BYTES = 256 * 1024


@dataclass
class SinkProcess:
    """The parent's end."""

    worker_id: str
    endpoint: KVEndpoint
    process: "subprocess.Popen[str]"

    def ticket_for(self, transfer_id: str, num_blocks: int) -> Ticket:
        assert self.process.stdin is not None
        self.process.stdin.write(f"expect {transfer_id} {num_blocks}\n")
        self.process.stdin.flush()
        while (line := self.line()) != f"expecting {transfer_id}":
            assert line, "the sink has ended"
        return Ticket(transfer_id, self.worker_id, 0, num_blocks)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextmanager
def sink_process(worker_id: str, *, block_nbytes: int, port: int = 0, transport: str = "ipc") -> Iterator[SinkProcess]:
    """`transport` as in `worker_carrier`."""
    command = [sys.executable, "-m", "tests.kvtransfer.sink_process"]
    command += [worker_id, str(port), str(block_nbytes), transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            endpoint = KVEndpoint(
                said["tcp"], said["ipc_path"], said["nonce_path"], base64.b64decode(said["nonce_digest"])
            )
            yield SinkProcess(worker_id, endpoint, process)
        finally:
            process.kill()


def main(worker_id: str, port: int, block_nbytes: int, transport: str) -> None:
    def say(line: str) -> None:
        os.write(1, line.encode() + b"\n")

    def on_event(event: KVEvent) -> None:
        if isinstance(event, TransferComplete):
            say(f"complete {event.transfer_id}")
        elif isinstance(event, TransferFailed):
            say(f"failed {event.transfer_id} {event.reason.value}")

    # The log goes to standard output, which is the parent's here.
    sys.stdout = sys.stderr
    agent = KVAgent(
        worker_id=worker_id,
        fingerprint=FINGERPRINT,
        store=ByteStore(NUM_BLOCKS, block_nbytes),
        carrier=worker_carrier(transport, block_nbytes, port),
        settings=KVSettings(window_bytes=WINDOW_BYTES),
        on_event=on_event,
    )
    agent.start()
    place = agent.endpoint
    digest = base64.b64encode(place.nonce_digest).decode()
    say(
        json.dumps(
            {"tcp": place.tcp, "ipc_path": place.ipc_path, "nonce_path": place.nonce_path, "nonce_digest": digest}
        )
    )
    for line in sys.stdin:
        _, transfer_id, num_blocks = line.split()
        # More blocks than the pool has are never all sent in these tests.
        agent.expect(transfer_id, list(range(int(num_blocks))), 0, 30.0)
        say(f"expecting {transfer_id}")
    agent.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
