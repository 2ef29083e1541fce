"""A model hub of one repository on loopback, as far as the hub's client asks it. A hand-written fake."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPOSITORY = "maker/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)


class FakeHub:
    """Serves `files`; `requested` lists the files that were fetched."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requested: set[str] = set()
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        path = path.partition("?")[0]
        parts = path.strip("/").split("/")
        if parts[:1] == ["api"]:
            return self._api(parts[2:])
        if "/".join(parts[:2]) == REPOSITORY and parts[2] == "resolve" and parts[3] in REVISIONS:
            return self._file("/".join(parts[4:]))
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _api(self, parts: list[str]) -> tuple[int, dict[str, str], bytes]:
        if "/".join(parts[:2]) != REPOSITORY:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision = parts[3] if len(parts) > 3 else "main"
        if revision not in REVISIONS:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if parts[2:3] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        siblings = [{"rfilename": name} for name in self.files]
        return 200, {}, json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode()

    def _file(self, name: str) -> tuple[int, dict[str, str], bytes]:
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        self.requested.add(name)
        content = self.files[name]
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[FakeHub]:
    """Runs a hub on a free port of loopback until the block ends."""
    hub = FakeHub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def _send(self, *, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a test's output is no place for it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
