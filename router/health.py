"""Tells `grpc.health.v1` whether the cluster can serve. `InferenceServer` owns one and runs it beside its server."""

import asyncio

from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

# The empty name stands for the server as a whole.
SERVER = ""


class HealthReporter:
    """Holds the last word on readiness; `run` passes it on to watchers. Not serving until told otherwise."""

    def __init__(self, service_names: tuple[str, ...]) -> None:
        self.servicer = HealthServicer()
        self._service_names = (SERVER, *service_names)
        self._ready = False
        self._changed = asyncio.Event()
        self._changed.set()

    def set_ready(self, ready: bool) -> None:
        """May be called from any callback on the event loop; the same value twice is nothing new."""
        if ready != self._ready:
            self._ready = ready
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish(self._ready)

    async def shut_down(self) -> None:
        """Not serving, for good."""
        await self.servicer.enter_graceful_shutdown()

    async def _publish(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self.servicer.set(name, status.SERVING if ready else status.NOT_SERVING)
