"""The one exception tree, and the one table that maps it to gRPC and HTTP.

    SplitserveError
    ├── InvalidRequest      the request can never be served: do not retry
    ├── NotFound            it names something that is not here: do not retry
    ├── Overloaded          no capacity now: retry after a pause
    ├── Unavailable         nobody can serve it now: retry
    ├── DeadlineExceeded    its time ran out
    ├── Cancelled           its caller gave up
    └── Internal            our fault; whether a retry helps is unknown

Whoever refuses raises one of these; only network edges translate them.
"""

from typing import ClassVar


class SplitserveError(Exception):
    """A refusal or failure that reaches the caller.

    `message` says what and why, with the true numbers; `field` names the request field at fault, if one is;
    `reason` is a stable upper-case word for programs; `retry_after_s` is set where a retry makes sense.
    """

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str | None = None, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(SplitserveError):
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    default_reason = "INVALID_REQUEST"


class NotFound(SplitserveError):
    grpc_code = "NOT_FOUND"
    http_status = 404
    default_reason = "NOT_FOUND"


class Overloaded(SplitserveError):
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    default_reason = "OVERLOADED"


class Unavailable(SplitserveError):
    grpc_code = "UNAVAILABLE"
    http_status = 503
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(SplitserveError):
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(SplitserveError):
    grpc_code = "CANCELLED"
    http_status = 499
    default_reason = "CANCELLED"


class Internal(SplitserveError):
    pass


ERRORS_BY_GRPC_CODE: dict[str, type[SplitserveError]] = {
    cls.grpc_code: cls
    for cls in (InvalidRequest, NotFound, Overloaded, Unavailable, DeadlineExceeded, Cancelled, Internal)
}
