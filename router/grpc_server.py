"""Serves the public gRPC port: the inference service, health and reflection. Run by the composition root.

What every gRPC port of the router shares is here, too: its options and how it is bound.
"""

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.health import HealthReporter
from router.malformed import MalformedMessages
from splitserve.service.limits import GRPC_MESSAGE_OPTIONS
from splitserve.v1 import inference_pb2
from splitserve.v1 import inference_pb2_grpc as pb_grpc

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
INFERENCE_SERVICE: str = _SERVICE.full_name

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *GRPC_MESSAGE_OPTIONS,
    # Two routers on one port would share its clients without a word; the second has to fail.
    ("grpc.so_reuseport", 0),
    # A client that vanished without a word is found within 40 s, though its stream may be silent while it queues.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Clients may ping this often without being cut off.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def add_port(server: grpc.aio.Server, bind: str, port: int) -> int:
    """Binds `server` to a host name, an IPv4 or an IPv6 address, and returns the port, which differs from `port` where
    that is 0. OSError if the address cannot be bound."""
    address = f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error


class InferenceServer:
    """One public port. Owns the server and the reporter of its health."""

    def __init__(self, servicer: pb_grpc.InferenceServiceServicer) -> None:
        self._servicer = servicer
        self._server: grpc.aio.Server | None = None
        self._health = HealthReporter((INFERENCE_SERVICE,))
        self._health_task: asyncio.Task[None] | None = None

    async def start(self, bind: str, port: int) -> int:
        """Returns the bound port, which differs from `port` where that is 0. OSError if the address cannot be bound."""
        server = grpc.aio.server(interceptors=(MalformedMessages(_SERVICE),), options=SERVER_OPTIONS)
        pb_grpc.add_InferenceServiceServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        names = (INFERENCE_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        bound = add_port(server, bind, port)
        await server.start()
        self._server = server
        self._health_task = asyncio.create_task(self._health.run(), name="health")
        return bound

    def set_ready(self, ready: bool) -> None:
        """What health says from now on."""
        self._health.set_ready(ready)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, gives running ones `grace_s` to end, then cancels them. Idempotent."""
        if self._health_task is not None:
            self._health_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health_task
            self._health_task = None
        if self._server is not None:
            server, self._server = self._server, None
            await self._health.shut_down()
            await server.stop(grace_s)
