"""Carries the error tree over gRPC, in both directions.

Servers call `to_status` and end the call with `await context.abort_with_status(to_status(error))`; the client library
calls `from_rpc_error`. Holds no state.
"""

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from splitserve.service.errors import ERRORS_BY_GRPC_CODE, Internal, InvalidRequest, SplitserveError, Unavailable

ERROR_DOMAIN = "splitserve"
UNREACHABLE = "UNREACHABLE"
"""The reason of an `Unavailable` that the transport raised: no router answered, or the connection broke."""
MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"

_DETAILS_KEY = "grpc-status-details-bin"
# Trailers beyond 8 KiB make gRPC drop the whole status. The message travels three times (percent-encoded at up to three
# bytes a byte, and twice in base64), so this bound keeps the worst case at three quarters of that.
_MAX_TEXT_BYTES = 1000


def to_status(error: SplitserveError) -> grpc.Status:
    """The status that ends a call with `error`: its code, its message and google.rpc details.

    Text is cut at 1,000 bytes of UTF-8; what cannot be encoded (lone surrogates) becomes "?".
    """
    text = _wire_text(error.message)
    details: list[message.Message] = [error_details_pb2.ErrorInfo(reason=_wire_text(error.reason), domain=ERROR_DOMAIN)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_wire_text(error.field), description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = grpc.StatusCode[error.grpc_code].value[0]
    status = status_pb2.Status(code=code, message=text, details=[_packed(detail) for detail in details])
    return cast(grpc.Status, rpc_status.to_status(status))


def from_rpc_error(error: grpc.RpcError) -> SplitserveError:
    """The member of the tree that `error`, of a blocking or asyncio call, stands for; other codes are Internal."""
    code, text = error.code(), error.details() or error.code().name
    status = _rich_status(cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ()))
    if status is None:
        return _from_transport(code, text)
    reason, field, retry_after_s = None, None, None
    for detail in status.details:
        info, bad_request, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    kind = ERRORS_BY_GRPC_CODE.get(code.name, Internal)
    return kind(text, reason=reason or code.name, field=field, retry_after_s=retry_after_s)


def _from_transport(code: grpc.StatusCode, text: str) -> SplitserveError:
    """For a status that no splitserve server wrote: gRPC itself refused, lost or cut the call."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(text, reason=UNREACHABLE)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        # gRPC gives its size limit the code that means "retry later" here, where no retry can ever help.
        return InvalidRequest(text, reason=MESSAGE_TOO_LARGE)
    kind = ERRORS_BY_GRPC_CODE.get(code.name, Internal)
    return kind(text, reason=code.name)


def _rich_status(metadata: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except message.DecodeError:
                return None
    return None


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _wire_text(text: str) -> str:
    return text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES].decode("utf-8", "ignore")
