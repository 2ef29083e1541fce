"""What shall go wrong, as a JSON file: read by `--fault-plan FILE`, carried out by `faults.FaultyCarrier`.

    {"seed": 1, "rules": [{"kind": "drop", "message": "Blocks", "nth": 2},
                          {"kind": "bandwidth", "bytes_per_s": 50000000}]}

A file that is replaced while it is carried out takes effect with the next message, and its counts begin anew.

For tests only: accepted only with SPLITSERVE_TESTING=1.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvtransfer.messages import AnyMessage
from splitserve.service.errors import InvalidRequest

ANY = "*"
Kind = Literal["delay", "drop", "duplicate", "corrupt", "cut", "freeze", "hold", "bandwidth"]


class FaultRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong.

    It befalls the nth to (nth + count - 1)th message that matches, counted from 1 over all links; `count` 0 means all
    from the nth on. `direction` is seen from this process. `delay` and `freeze` last `seconds`; a frozen link holds
    both directions. `hold` keeps the message and all behind it until the plan is replaced. `bandwidth` holds for every
    message of its direction, whatever the other fields say.
    """

    kind: Kind
    message: str = ANY
    transfer: str = ANY
    direction: Literal["out", "in"] = "out"
    nth: Annotated[int, Meta(ge=1)] = 1
    count: Annotated[int, Meta(ge=0)] = 1
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0
    part: Literal["header", "blocks"] = "blocks"

    def matches(self, message: AnyMessage | None, direction: str) -> bool:
        """Undecodable messages match only the wildcards."""
        name = type(message).__name__
        transfer = getattr(message, "transfer_id", None)
        return self.direction == direction and self.message in (ANY, name) and self.transfer in (ANY, transfer)

    def befalls(self, number: int) -> bool:
        """Whether it strikes the number-th match."""
        return number >= self.nth and (self.count == 0 or number < self.nth + self.count)


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rules: list[FaultRule]
    seed: int = 0


def check_testing() -> None:
    """Raises InvalidRequest unless this process was started for tests."""
    if os.environ.get("SPLITSERVE_TESTING") != "1":
        raise InvalidRequest("a fault plan is accepted only with SPLITSERVE_TESTING=1 in the environment")


def load_fault_plan(path: Path) -> FaultPlan:
    """Raises InvalidRequest when the file cannot be read as a plan, or outside of tests."""
    check_testing()
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=FaultPlan)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"fault plan {path}: {error}") from error
    for rule in plan.rules:
        if rule.kind == "bandwidth" and rule.bytes_per_s <= 0:
            raise InvalidRequest(f"fault plan {path}: bandwidth needs bytes_per_s above 0")
        if rule.kind in ("delay", "freeze") and rule.seconds <= 0:
            raise InvalidRequest(f"fault plan {path}: {rule.kind} needs seconds above 0")
    return plan


class FaultPlanFile:
    """Notices when the plan is another one. `plan` is the one that holds."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest as `load_fault_plan` does, now and whenever the file is replaced."""
        self._path = path
        self._stamp = self._read_stamp()
        self.plan = load_fault_plan(path)

    def has_changed(self) -> bool:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return False
        self._stamp, self.plan = stamp, load_fault_plan(self._path)
        return True

    def _read_stamp(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise InvalidRequest(f"fault plan {self._path}: {error}") from error
        return status.st_ino, status.st_mtime_ns
