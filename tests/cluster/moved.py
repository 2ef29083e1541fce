"""Which blocks went where, and by which transport: the workers' own books, which the two ends of a pair keep apart."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.cluster.harness import Cluster, Process, wait_for

TRANSPORTS = ("zmq", "gloo")
_PATHS = {"zmq": {"ipc", "tcp"}, "gloo": {"gloo"}}
_BYTES = "splitserve_kv_transfer_bytes_total"


@dataclass(frozen=True)
class Moved:
    """One transfer that came to its end, as one of its ends tells it: two worker ids, and bytes of blocks."""

    source: str
    sink: str
    num_bytes: int
    path: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.source, self.sink


class Books:
    """What these workers move from now on, by transfer. They may die, and their books remain."""

    def __init__(self, workers: Iterable[Process]) -> None:
        self._begin = {worker: len(worker.events) for worker in workers}

    def follow(self, worker: Process) -> None:
        """One that has come since."""
        self._begin.setdefault(worker, 0)

    def sent(self) -> dict[str, Moved]:
        return {
            transfer: Moved(source=own, sink=event["peer"], num_bytes=event["num_bytes"], path=event["path"])
            for transfer, own, event in self._told("kv blocks sent")
        }

    def received(self) -> dict[str, Moved]:
        return {
            transfer: Moved(source=event["peer"], sink=own, num_bytes=event["num_bytes"], path=event["path"])
            for transfer, own, event in self._told("kv blocks received")
        }

    def is_undisturbed(self) -> bool:
        """No transfer has failed, which under load one may."""
        return not self._told("kv transfer failed")

    def lost_links(self) -> set[str]:
        """The sinks that sources have lost their link to."""
        return {
            event["change"].partition("worker_id='")[2].partition("'")[0]
            for _, _, event in self._told("kv link")
            if event["event_type"] == "LinkDown"
        }

    def _told(self, name: str) -> list[tuple[str, str, dict[str, Any]]]:
        """(transfer, who tells, log line)."""
        return [
            (event.get("transfer_id", ""), id_of(worker), event)
            for worker, begin in self._begin.items()
            for event in list(worker.events)[begin:]
            if event.get("event") == name
        ]

    def settled(self, *, besides: Iterable[str] = ()) -> list[Moved]:
        """Once both ends tell the same of every transfer between workers other than `besides`, who died: those
        transfers. Logs are a moment late."""
        dead = set(besides)

        def agree() -> list[dict[str, Moved]]:
            sides = [
                {transfer: moved for transfer, moved in side.items() if not dead & set(moved.pair)}
                for side in (self.sent(), self.received())
            ]
            return sides if sides[0] == sides[1] else []

        return list(wait_for("both ends to tell the same", agree, 10.0)[0].values())


def id_of(worker: Process) -> str:
    return str(worker.event("ready")["worker_id"])


def by_pair(moved: Iterable[Moved]) -> "Counter[tuple[str, str]]":
    """Bytes by (source, sink); a pair that moved none is there with 0."""
    total: Counter[tuple[str, str]] = Counter()
    for one in moved:
        total[one.pair] += one.num_bytes
    return total


def assert_moved_by(cluster: Cluster, transport: str) -> None:
    """All blocks of the workers that are here, since their start, and there were some; what `/cluster` says of links
    agrees."""
    workers = [worker for worker in cluster.workers if worker.popen.poll() is None]
    total = sum(worker.metric(_BYTES) for worker in workers)
    assert total == sum(worker.metric(_BYTES, transport=transport) for worker in workers) > 0
    links = [link for worker in cluster.state()["workers"] for link in worker["links"].values() if link["reachable"]]
    assert {link["detail"] for link in links} <= _PATHS[transport]
    assert not [link["warning"] for link in links if link["warning"]]
