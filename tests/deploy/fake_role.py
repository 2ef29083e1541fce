"""A role as containers run it: `python -m tests.deploy.fake_role BEHAVIOUR PORT`.

"refuse" ends with status 78; "serve" answers 503 until there is a file `$TMPDIR/go`, then 200, and ends with 0 on
SIGTERM. With `$TMPDIR/waits` the 503 says that it is others that are missing.
"""

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_ready, waits = (Path(os.environ["TMPDIR"], name).exists() for name in ("go", "waits"))
        self.send_response(200 if self.path == "/health/ready" and is_ready else 503)
        if waits:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(b"ready" if is_ready else b"not ready")

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    if sys.argv[1] == "refuse":
        sys.exit(78)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Path(os.environ["TMPDIR"], "pid").write_text(str(os.getpid()))
    HTTPServer(("127.0.0.1", int(sys.argv[2])), Page).serve_forever()
