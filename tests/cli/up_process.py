"""`splitserve up` over fake processes (`fakes/`): its output line by line, and what its processes recorded."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

FAKES = Path(__file__).with_name("fakes")
PATIENCE_S = 60.0


def _python_path() -> str:
    return os.pathsep.join([str(FAKES), *filter(None, [os.environ.get("PYTHONPATH")])])


class Up:
    """A running supervisor: its output line by line, and the starts that its fake processes recorded."""

    def __init__(
        self, directory: Path, settings: dict[str, Any], env: dict[str, str], stderr_path: Path | None
    ) -> None:
        self.directory = directory
        ports = {"grpc_port": 0, "http_port": 0, "internal_port": 0}
        stderr = subprocess.PIPE if stderr_path is None else os.open(stderr_path, os.O_WRONLY)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(FAKES / "run_up.py"), json.dumps(ports | settings)],
            env=os.environ | {"PYTHONPATH": _python_path(), "FAKE_DIR": str(directory)} | env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        if stderr_path is not None:
            os.close(stderr)
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._readers = [threading.Thread(target=self._read, args=(stream,), daemon=True) for stream in self.streams()]
        for reader in self._readers:
            reader.start()

    def streams(self) -> list[Any]:
        return [stream for stream in (self.process.stdout, self.process.stderr) if stream is not None]

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._queue.put(line.rstrip("\n"))

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not any(text in line for line in self.lines):
            self.lines.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))

    def end(self) -> int:
        """The exit status; all output is in `lines` afterwards."""
        status = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        while not self._queue.empty():
            self.lines.append(self._queue.get())
        return status

    def signal_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def starts(self, role: str) -> dict[int, dict[str, Any]]:
        paths = self.directory.glob(f"{role}.[0-9]*")
        return {int(path.suffix[1:]): json.loads(path.read_text()) for path in paths}

    def pids(self) -> list[int]:
        return [pid for role in ("router", "prefill", "decode", "grandchild") for pid in self.starts(role)]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
