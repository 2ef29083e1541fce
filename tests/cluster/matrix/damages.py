"""What may happen to one message on the way of the blocks, and what must hold: the reservation serves another leg, and
the text is exact."""

from dataclasses import dataclass
from typing import Any

from tests.cluster.cells import assert_exact
from tests.cluster.fault_bench import FaultBench
from tests.cluster.harness import Process, wait_for
from tests.cluster.stages import STAGES

RENEWALS = "splitserve_ticket_renewals_total"
KINDS = ["drop", "duplicate", "delay", "corrupt"]


@dataclass(frozen=True)
class Message:
    """The `nth` of its name in one direction, as the prefill worker sees it; `after` what has to go wrong before there
    is one."""

    name: str
    nth: int = 1
    direction: str = "out"
    after: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.nth if self.nth > 1 else ''}-{self.direction}"


MESSAGES = [
    Message("Open"),
    Message("Blocks"),
    Message("Blocks", nth=3),
    Message("BlocksAck", direction="in"),
    Message("BlocksAck", nth=3, direction="in"),
    Message("Finish"),
    Message("Acked", direction="in"),
    # Either side gives the transfer up: the source because nobody answers, the sink because of what it gets.
    Message("Cancel", after="drop Finish"),
    Message("Cancel", direction="in", after="corrupt Blocks"),
    Message("Closed", direction="in", after="drop Finish"),
]


@dataclass(frozen=True)
class Damage:
    kind: str
    message: Message

    def __str__(self) -> str:
        return f"{self.kind}-{self.message}"

    @property
    def is_in_make_test(self) -> bool:
        """What the two sides tell each other about blocks is only lost and damaged there."""
        return self.message.name not in ("BlocksAck", "Cancel", "Closed") or self.kind in ("drop", "corrupt")

    @property
    def loses_the_transfer(self) -> bool:
        """For certain: without some messages it may still come to its end."""
        is_needed = self.message.name in ("Blocks", "Finish") and self.kind in ("drop", "corrupt")
        return is_needed or bool(self.message.after)

    @property
    def rules(self) -> list[dict[str, Any]]:
        message = self.message
        rule = {"message": message.name, "nth": message.nth, "direction": message.direction, "seconds": 0.3}
        first = [dict(zip(("kind", "message"), message.after.split(), strict=True))] if message.after else []
        return [*first, {"kind": self.kind, "part": "blocks", **rule}]

    def num_done(self, process: Process) -> int:
        done = {"event": "fault", "kind": self.kind, "message": self.message.name}
        return sum(event.items() >= done.items() for event in process.events)


DAMAGES = [Damage(kind, message) for kind in KINDS for message in MESSAGES]


def run_damage(bench: FaultBench, damage: Damage, prompt: list[int], options: dict[str, Any]) -> None:
    with bench.balanced():
        bench.make_ready()
        with STAGES["reserved"](bench, prompt, options) as victim:
            prefill = bench.worker_of(victim, "prefill")
            before = damage.num_done(prefill)
            renewals = bench.cluster.metric(RENEWALS)
            prefill.set_plan(*damage.rules)
        answer = victim.result()
        wait_for("the damage", lambda: damage.num_done(prefill) > before)
        bench.plan()
        assert answer.attempts == 1, "the ticket is renewed, the attempt goes on"
        if damage.loses_the_transfer:
            assert bench.cluster.metric(RENEWALS) > renewals
        assert_exact(bench, victim, answer)
        bench.cluster.wait_drained()
