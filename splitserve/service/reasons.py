"""Why a worker refused or ended an attempt: one word for router, workers, logs and metrics."""

from enum import StrEnum


class Reason(StrEnum):
    NO_ROOM = "no_room"
    TOO_LARGE = "too_large"
    INVALID = "invalid"
    TRANSFER_FAILED = "transfer_failed"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    INTERNAL = "internal"
    DRAINING = "draining"
