"""Whether the process in this container is ready: `python healthcheck.py PORT`. Compose calls it every few seconds.

It waits while the process starts, which of a large model takes minutes, and while it is others that are missing, as the
process says by Retry-After: what replaces all workers, or the router, must not find the other side called unhealthy. It
fails at once when nothing answers, when an engine stands still, and when `run_role.py` has written that a start failed.
Prints what is missing, which `docker inspect` shows. Needs little of the standard library: it runs all the time.
"""

import os
import socket
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("TMPDIR", "/tmp"), "splitserve-start")  # noqa: S108
"""Written by `run_role.py`, which says what of."""
PATIENCE_S = 450.0
"""Two calls that fail in a row make a container unhealthy."""
ANSWER_TIMEOUT_S = 4.0
POLL_S = 0.5


def main(port: int) -> int:
    called = time.monotonic()
    while True:
        is_ready, waits_for_others, text = ask(port)
        state = STATE.read_text(encoding="ascii") if STATE.exists() else ""
        is_starting = state in ("starting", "")
        if is_ready and is_starting:
            STATE.write_text("ready", encoding="ascii")
        waits = not is_ready and (is_starting or waits_for_others)
        if not waits or time.monotonic() - called > PATIENCE_S:
            sys.stdout.write(state if state.startswith("failed") else text)
            return 0 if is_ready else 1
        time.sleep(POLL_S)


def ask(port: int) -> tuple[bool, bool, str]:
    """Whether /health/ready says so, whether it is others that are missing, and all that it says. HTTP/1.0: the answer
    ends with the connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), ANSWER_TIMEOUT_S) as connection:
            connection.sendall(b"GET /health/ready HTTP/1.0\r\nHost: localhost\r\n\r\n")
            with connection.makefile("rb") as stream:
                head, _, body = stream.read().partition(b"\r\n\r\n")
    except OSError as error:
        return False, False, f"no answer from port {port}: {error}"
    is_ready = head.split(b" ")[1:2] == [b"200"]
    return is_ready, b"\r\nretry-after:" in head.lower(), body.decode("utf-8", errors="replace")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
