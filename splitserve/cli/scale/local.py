"""The local clusters of this user, as `splitserve scale` sees them: through the sockets that they listen at."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitserve.cli.scale import sockets
from splitserve.cli.scale.messages import (
    MAX_LINE_BYTES,
    Answer,
    Cluster,
    Describe,
    Done,
    Progress,
    Refused,
    Request,
    Scale,
    decode_answer,
    encode,
)
from splitserve.cli.scale.scalable import Say
from splitserve.cli.scale.target import Target
from splitserve.service.errors import Internal, Unavailable

_ANSWER_TIMEOUT_S = 10.0
"""For what takes the other side no time; it is added to whatever else is waited for."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """`cluster` is None when it does not answer."""

    port: int
    path: Path
    cluster: Cluster | None

    def __str__(self) -> str:
        if self.cluster is None:
            return f"the cluster at port {self.port}, which does not answer"
        counts = ", ".join(f"{role}={count}" for role, count in self.cluster.counts.items())
        return f"the cluster at port {self.port} ({self.cluster.model}; {counts})"

    def scale(self, target: Target, *, timeout_s: float, is_waited_for: bool, say: Say) -> None:
        if self.cluster is None:
            raise Unavailable(f"{self.path}: nobody answers there within {_ANSWER_TIMEOUT_S:g} s")
        request = Scale(dict(target), timeout_s if is_waited_for else None)
        # The other side watches the time, and can say what is missing.
        patience_s = _ANSWER_TIMEOUT_S + (timeout_s if is_waited_for else 0.0)
        for answer in _answers(self.path, request, patience_s):
            match answer:
                case Progress(text=text):
                    say(text)
                case Done():
                    return
                case Refused():
                    raise answer.error()
                case _:
                    raise Internal(f"{self.path} answered {type(answer).__name__} to a command")
        raise Unavailable(f"the cluster at port {self.port} ended before it was done")


def local_clusters(folder: Path) -> list[LocalCluster]:
    """Those that run, by port. What is left of one that was killed is none."""
    found = []
    for port, path in sockets.paths(folder).items():
        try:
            answers = list(_answers(path, Describe(), _ANSWER_TIMEOUT_S))
        except (Unavailable, Internal):
            found.append(LocalCluster(port, path, None))
            continue
        if answers:
            cluster = answers[0]
            found.append(LocalCluster(port, path, cluster if isinstance(cluster, Cluster) else None))
    return sorted(found, key=lambda cluster: cluster.port)


def _answers(path: Path, request: Request, timeout_s: float) -> Iterator[Answer]:
    """Nothing where nobody listens. Raises Unavailable where one answer takes longer than `timeout_s` or the connection
    fails, Internal for what is no answer."""
    try:
        with _connection(path, timeout_s) as connection:
            if connection is None:
                return
            connection.sendall(encode(request))
            with connection.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE_BYTES):
                    yield decode_answer(line)
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror or error or 'no answer'}") from error
    except msgspec.MsgspecError as error:
        raise Internal(f"{path} gave an answer of another version: {error}") from error


@contextmanager
def _connection(path: Path, timeout_s: float) -> Iterator[socket.socket | None]:
    connection = sockets.connect(path, timeout_s)
    try:
        yield connection
    finally:
        if connection is not None:
            connection.close()
