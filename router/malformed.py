"""Answers a message that cannot be read with INVALID_ARGUMENT, where gRPC alone says UNKNOWN and logs a crash.

Installed by `grpc_server`. Text that is not Unicode (a lone surrogate) is the usual case: libraries never write it. A
message of millions of small parts is not read either: it would be fifty times as large in memory, and nobody else would
have a turn until it is there.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from splitserve.service.errors import InvalidRequest
from splitserve.service.grpc_errors import to_status

MALFORMED_MESSAGE = "MALFORMED_MESSAGE"

# A chat of 13,000 messages; ids of a prompt are one field, as libraries write them.
MAX_FIELDS = 40_000
# What is smaller cannot have many.
_MAX_UNCOUNTED_BYTES = 2 * MAX_FIELDS

_MAX_VARINT_BITS = 70
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context = grpc.aio.ServicerContext[Any, Any]


class MalformedMessages(grpc.aio.ServerInterceptor):
    """For the methods of one service; each of them must take one message and be a coroutine, not a generator."""

    def __init__(self, service: ServiceDescriptor) -> None:
        self._kinds = {f"/{service.full_name}/{method.name}": method.input_type for method in service.methods}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        kind = self._kinds.get(handler_call_details.method)
        if handler is None or kind is None:
            return handler
        parse, serialize = handler.request_deserializer, handler.response_serializer
        assert parse is not None
        assert serialize is not None
        parse = _catching(parse, kind)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refusing(handler.unary_stream), parse, serialize)
        return grpc.unary_unary_rpc_method_handler(_refusing(handler.unary_unary), parse, serialize)


def _catching(parse: Callable[[bytes], Any], kind: Descriptor) -> Callable[[bytes], Any]:
    def parse_or_refuse(data: bytes) -> Any:
        if len(data) > _MAX_UNCOUNTED_BYTES and has_too_many_fields(data, kind):
            return InvalidRequest(f"the message has more than {MAX_FIELDS} fields", reason=MALFORMED_MESSAGE)
        try:
            return parse(data)
        except DecodeError as error:
            return InvalidRequest(f"the message cannot be read: {error}", reason=MALFORMED_MESSAGE)

    return parse_or_refuse


def has_too_many_fields(data: bytes, kind: Descriptor) -> bool:
    """Whether a message of this kind has more than MAX_FIELDS at all its depths. Only as much is looked at.

    A part that breaks off counts up to there, and the others are counted all the same: the parser, which refuses it,
    makes what stands before it first.
    """
    num_fields = 0
    parts = [(0, len(data), kind)]
    while parts:
        at, end, kind = parts.pop()
        while at < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                return True
            try:
                tag, at = _varint(data, at)
                if tag & 7 == _VARINT:
                    at = _varint(data, at)[1]
                elif tag & 7 == _BYTES:
                    size, at = _varint(data, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        parts.append((at, min(at + size, end), field.message_type))
                    at += size
                else:
                    at += {_FIXED64: 8, _FIXED32: 4}.get(tag & 7, 0)
            except (ValueError, IndexError):
                break
    return False


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and where the next thing stands. Raises ValueError or IndexError where there is none."""
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, _MAX_VARINT_BITS, 7):
        at += 1
        value |= (data[at] & 0x7F) << shift
        if data[at] < 0x80:
            return value, at + 1
    raise ValueError("a number without end")


def _refusing(behavior: Any) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, InvalidRequest):
            await context.abort_with_status(to_status(request))
        return await behavior(request, context)

    return answer
