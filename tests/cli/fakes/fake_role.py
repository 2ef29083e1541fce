"""A router or worker that does nothing but live and die as told; run as `python -P -m fake_<role>`.

It records each start as `$FAKE_DIR/<role>.<pid>` with its command line, and what asks it to end as `<role>.<signal>`.
`$FAKE_<ROLE>` says how it behaves: "" lives on; "config" refuses its settings; "crash" dies at once; "stubborn" ignores
what asks it to end; "parent" has a child of its own, recorded as `grandchild.<pid>`; "chatty" writes a very long line
and half a line; "telling" logs how it started; "draining" takes a second to end after SIGTERM; "unready" never shows as
ready; a "patient" router is not ready before `$FAKE_DIR/go` is there. `$FAKE_DIR/<role>.behaviour` says it instead, for
processes that start once it is there. The router shows the workers that it finds recorded and alive.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/cluster":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"workers": workers()}).encode())
            return
        is_patient = os.environ.get("FAKE_ROUTER") == "patient"
        is_ready = not is_patient or Path(os.environ["FAKE_DIR"], "go").exists()
        self.send_response(200 if self.path == "/health/ready" and is_ready else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: requests are not what these tests read."""


def workers() -> list[dict[str, Any]]:
    found = []
    for path in Path(os.environ["FAKE_DIR"]).glob("*.[0-9]*"):
        role, _, pid = path.name.partition(".")
        if role in ("prefill", "decode") and Path("/proc", pid).exists():
            is_ready = json.loads(path.read_text())["behaviour"] not in ("unready", "config", "crash")
            found.append({"role": role, "pid": int(pid), "state": "ready" if is_ready else "starting"})
    return found


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def end_with_parent(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os._exit(0)


def end_by(role: str, number: signal.Signals) -> None:
    if number == signal.SIGTERM and behaviour_of(role) == "draining":
        time.sleep(1.0)
    record(f"{role}.{number.name}")
    os._exit(0)


def behaviour_of(role: str) -> str:
    path = Path(os.environ["FAKE_DIR"], f"{role}.behaviour")
    return path.read_text() if path.exists() else os.environ.get(f"FAKE_{role.upper()}", "")


def behave(role: str) -> None:
    behaviour = behaviour_of(role)
    if behaviour == "config":
        print("block size 7 does not divide 16", file=sys.stderr, flush=True)
        sys.exit(78)
    if behaviour == "crash":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)
    if behaviour == "stubborn":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    if behaviour == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        record(f"grandchild.{child.pid}")
    if behaviour == "chatty":
        print("x" * 200_000 + "\nhalf", end="", flush=True)
    if behaviour == "telling":
        print(json.dumps({"event": "ready", "startup": "started in 3.5 s: imports 3.0, other 0.5; all of it"}))
    print(f"{role} is up", flush=True)


def record(name: str) -> None:
    part = Path(os.environ["FAKE_DIR"], f"part.{os.getpid()}")
    behaviour = behaviour_of(name.partition(".")[0])
    part.write_text(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "behaviour": behaviour}))
    part.rename(part.with_name(name))


def main(role: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: end_by(role, signal.Signals(number)))
    record(f"{role}.{os.getpid()}")
    threading.Thread(target=end_with_parent, args=(int(flag("--parent-fd")),), daemon=True).start()
    behave(role)
    if role == "router":
        HTTPServer(("127.0.0.1", int(flag("--http-port"))), Ready).serve_forever()
    while True:
        time.sleep(600)
