"""Answers a message that cannot be read with INVALID_ARGUMENT, where gRPC alone says UNKNOWN and logs a crash.

Installed by `grpc_server`. Text that is not Unicode (a lone surrogate) is the usual case: libraries never write it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from splitserve.service.errors import InvalidRequest
from splitserve.service.grpc_errors import to_status

MALFORMED_MESSAGE = "MALFORMED_MESSAGE"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Context = grpc.aio.ServicerContext[Any, Any]


class MalformedMessages(grpc.aio.ServerInterceptor):
    """For the methods of one service; each of them must take one message and be a coroutine, not a generator."""

    def __init__(self, service_name: str) -> None:
        self._prefix = f"/{service_name}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        parse, serialize = handler.request_deserializer, handler.response_serializer
        assert parse is not None
        assert serialize is not None
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refusing(handler.unary_stream), _catching(parse), serialize)
        return grpc.unary_unary_rpc_method_handler(_refusing(handler.unary_unary), _catching(parse), serialize)


def _catching(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_refuse(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return InvalidRequest(f"the message cannot be read: {error}", reason=MALFORMED_MESSAGE)

    return parse_or_refuse


def _refusing(behavior: Any) -> Any:
    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, InvalidRequest):
            await context.abort_with_status(to_status(request))
        return await behavior(request, context)

    return answer
