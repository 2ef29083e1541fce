"""Runs a role as the process of its container: `python run_role.py MODULE ARGUMENT…`. Compose starts roles so.

Docker starts a container again whatever it ended with, at once, and calls it "starting" meanwhile: one whose settings
are wrong would start for ever, and `docker compose up --wait` wait for it. So a start that fails shows for a while
before the container ends: `STATE` says "failed", and the health check, which reads it, fails. What was ready once ends
as soon as it dies, and is there again the sooner. Needs the standard library alone.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

STATE = Path(os.environ.get("TMPDIR", "/tmp"), "splitserve-start")  # noqa: S108
"""What has become of this start: "starting", "ready", which the health check writes, or "failed" and how."""
PAUSE_S = 30.0


def main(words: Sequence[str]) -> int:
    asked = threading.Event()
    STATE.write_text("starting", encoding="ascii")
    role = subprocess.Popen([sys.executable, "-P", "-m", *words])  # noqa: S603

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.set()
        role.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    status = role.wait()
    if status and not asked.is_set() and STATE.read_text(encoding="ascii") == "starting":
        STATE.write_text(f"failed: {words[0]} ended with status {status}, and its log says why", encoding="ascii")
        asked.wait(PAUSE_S)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
