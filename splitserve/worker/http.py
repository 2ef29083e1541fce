"""A worker's HTTP port: is it alive, has it joined, what does it measure. Served by the front."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from splitserve.service.http_server import serve_http
from splitserve.service.metrics import CONTENT_TYPE, StepMetrics, WorkerMetrics, new_registry, render
from splitserve.worker import reports
from splitserve.worker.clock import Signs

_ALONE = "no router has been joined"


class WorkerHttp:
    """`routers` names the routers that this worker has joined and `signs` are its engine's signs of life.

    It is ready while there is a router, the engine's loop turns, and nobody has asked it to drain.
    """

    def __init__(
        self,
        ready: reports.Ready,
        routers: Callable[[], Sequence[str]],
        is_draining: Callable[[], bool],
        signs: Callable[[], Signs],
        stall_timeout_s: float,
    ) -> None:
        """An engine without a sign of life for half of `stall_timeout_s`, after which the worker ends, is not ready."""
        self._ready = ready
        self._routers = routers
        self._is_draining = is_draining
        self._signs = signs
        self._patience_s = stall_timeout_s / 2
        self._registry = new_registry()
        self._metrics = WorkerMetrics(self._registry, ready.fingerprint.model)
        self._step_metrics = StepMetrics(self._registry, ready.fingerprint.model)
        self._metrics.set_start(ready.startup, msgspec.structs.asdict(ready.memory))

    @asynccontextmanager
    async def serving(self, bind: str, port: int) -> AsyncIterator[int]:
        """Serves for as long as the body runs; gives the bound port. OSError if the address cannot be bound."""
        server = await serve_http(self._app(), bind, port)
        try:
            yield server.port
        finally:
            await server.stop()

    def _app(self) -> Starlette:
        """Three pages and nothing to parse: FastAPI's import alone would be a third of a front's start."""
        pages = {"/health/live": self._live_page, "/health/ready": self._ready_page, "/metrics": self._metrics_page}
        return Starlette(routes=[Route(path, page) for path, page in pages.items()])

    async def _live_page(self, _: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready_page(self, _: Request) -> Response:
        routers = list(self._routers())
        status = "ready" if routers else _ALONE
        # The loop that takes the engine's work and computes it shows a sign at every turn, several times a second when
        # there is none, and in a step at every layer.
        standstill_s = self._signs().standstill_s
        if standstill_s > self._patience_s:
            status = f"the engine has stood still for {standstill_s:.1f} s"
        if self._is_draining():
            status = "draining"
        # It is not this worker that anything is wrong with.
        headers = {"retry-after": "1"} if status == _ALONE else None
        return JSONResponse({"status": status, "routers": routers}, 200 if status == "ready" else 503, headers)

    async def _metrics_page(self, _: Request) -> Response:
        return Response(render(self._registry), headers={"content-type": CONTENT_TYPE})

    # What the front hears

    def set_load(self, load: reports.Load) -> None:
        self._metrics.set_load(
            running=load.num_running,
            waiting=load.num_waiting,
            blocks_taken=load.blocks_in_use + load.blocks_reserved,
            blocks_total=self._ready.num_blocks,
        )
        self._metrics.set_kv_messages_dropped(load.kv_messages_dropped)

    def count(self, report: reports.Countable) -> None:
        match report:
            case reports.TransferReport():
                self._count_transfer(report)
            case reports.TransportFallback(used=used):
                wanted = self._ready.transport.split(",")[0]
                self._metrics.count_transport_fallback(wanted=wanted, used=used)
            case reports.CacheLookup(num_tokens=num_tokens, num_cached_tokens=num_cached):
                self._metrics.count_cache_lookup(num_tokens=num_tokens, num_cached_tokens=num_cached)
            case reports.Ignored(kind=kind):
                self._metrics.count_ignored(kind)
            case reports.Step():
                self._step_metrics.count_step(
                    report.seconds, report.floor_s, report.num_sequences, report.num_prompt_tokens
                )
            case reports.Slots(num_taken=num_taken, num_empty=num_empty):
                self._step_metrics.set_slots(taken=num_taken, empty=num_empty)
            case reports.FirstTokens(tokens=tokens, num_computed_tokens=num_computed):
                self._metrics.count_prompt_tokens(num_computed)
                self._metrics.count_generation_tokens(len(tokens))
            case reports.StepTokens(tokens=tokens):
                self._metrics.count_generation_tokens(len(tokens))

    def _count_transfer(self, report: reports.TransferReport) -> None:
        transport = report.transport or "none"
        if report.reason:
            self._metrics.count_transfer_failure(transport=transport, side=report.side, reason=report.reason)
        else:
            self._metrics.count_transfer(
                transport=transport, side=report.side, num_bytes=report.num_bytes, seconds=report.seconds
            )
