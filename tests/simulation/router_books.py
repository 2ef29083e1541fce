"""What the router tells its workers and its attempts, seen from outside, and what has to hold of it at any moment."""

from collections.abc import Iterable
from typing import Any

from router.attempt import Attempt
from router.dispatcher import ClusterDispatcher
from router.events import AttemptEvent, Ended, WorkerLost
from router.leg import Leg
from splitserve.v1 import cluster_pb2 as pb
from tests.simulation.client import Client
from tests.simulation.worker import SimulatedWorker


class WatchedDispatcher(ClusterDispatcher):
    """Notes who is told that a worker is lost."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._attempts: list[Attempt] = []
        self._legs: list[Leg] = []
        self._told: set[object] = set()

    def _grant(self, *args: Any) -> Attempt:
        attempt = super()._grant(*args)
        self._watch(attempt)
        self._attempts = [a for a in self._attempts if not a._is_closed] + [attempt]
        return attempt

    def _leg(self, *args: Any) -> Leg:
        leg = super()._leg(*args)
        self._watch(leg)
        self._legs = [other for other in self._legs if not other.is_closed] + [leg]
        return leg

    def _watch(self, mailbox: Attempt | Leg) -> None:
        deliver = mailbox.deliver

        def note(event: AttemptEvent) -> None:
            if isinstance(event, WorkerLost | Ended):
                self._told.add(mailbox)
            deliver(event)

        mailbox.deliver = note  # type: ignore[method-assign]

    def check(self) -> None:
        open_ones = [(a.decode, a) for a in self._attempts if not a._is_closed]
        for worker, mailbox in [*open_ones, *((leg.worker, leg) for leg in self._legs if not leg.is_closed)]:
            assert not worker.is_lost or mailbox in self._told, (
                f"{mailbox} was not told that {worker.worker_id} is lost"
            )


class Commands:
    """Whatever a worker is asked goes on from what the client has: every token, no other one."""

    def __init__(self, clients: list[Client], workers: list[SimulatedWorker]) -> None:
        self._clients = clients
        self._workers = workers
        self._by_attempt: dict[str, Client] = {}

    def told(self, message: pb.RouterMessage) -> None:
        match message.WhichOneof("body"):
            case "reserve":
                self._by_attempt[message.reserve.attempt_id] = client = self._client(message.reserve.traceparent)
                assert list(message.reserve.start.prompt_ids) == client.reference.prompt_ids
                self._check_outputs(client, message.reserve.start.samples)
            case "renew":
                self._check_outputs(self._by_attempt[message.renew.attempt_id], message.renew.samples)
            case "prefill":
                client = self._client(message.prefill.traceparent)
                assert list(message.prefill.start.prompt_ids) == client.reference.prompt_ids
                self._check_outputs(client, message.prefill.start.samples)
                self._check_ticket(message.prefill)

    def _client(self, traceparent: str) -> Client:
        return next(client for client in self._clients if client.traceparent == traceparent)

    def _check_outputs(self, client: Client, samples: Iterable[pb.SampleStart]) -> None:
        for sample in samples:
            outputs, text = list(sample.output_ids), client.reference.texts[sample.index]
            assert outputs == [token.token_id for token in text[: len(outputs)]], "goes on from other tokens"
            assert len(outputs) >= len(client.tokens[sample.index]), "goes on from fewer tokens than the client has"

    def _check_ticket(self, prefill: pb.Prefill) -> None:
        """A prefill worker computes what the decode worker has reserved for."""
        for worker in self._workers:
            if worker.worker_id == prefill.ticket.sink_worker_id:
                reservation = worker.engine._reservations.of_transfer(prefill.ticket.transfer_id)
                if reservation is not None:
                    reserved = [(sample.index, sample.output_ids) for sample in reservation.samples]
                    asked = [(sample.index, list(sample.output_ids)) for sample in prefill.start.samples]
                    assert asked == reserved, "the ticket is for other tokens"
