"""The router's HTTP port: the OpenAI-compatible API, health, metrics and the cluster's state.

The composition root makes the application and serves it with `splitserve.service.http_server`. Everything it shows of
the cluster is read through callbacks at the moment of the call; it holds no state.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry

from router.body_limit import BodyLimit
from router.http_errors import map_errors
from router.openai.openapi import NOT_READY, document
from splitserve.service.errors import Unavailable
from splitserve.service.limits import MAX_MESSAGE_BYTES
from splitserve.service.metrics import CONTENT_TYPE, render


def create_app(
    *,
    api: APIRouter,
    not_ready_reason: Callable[[], str | None],
    cluster: Callable[[], Mapping[str, Any]],
    registry: CollectorRegistry,
) -> FastAPI:
    """`api` is what applications call. `not_ready_reason` gives None when a prefill and decode pair can serve;
    `cluster` is the body of `/cluster`."""
    app = FastAPI(
        title="splitserve",
        summary="Prefill and decode in different processes, one API.",
        version=version("splitserve"),
        docs_url=None,
        redoc_url=None,
    )
    # FastAPI's own limit answers with a text that is no error body.
    app.add_middleware(BodyLimit, max_bytes=MAX_MESSAGE_BYTES)
    map_errors(app)
    app.include_router(api)

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready", responses=NOT_READY)
    async def ready() -> dict[str, str]:
        reason = not_ready_reason()
        if reason is not None:
            raise Unavailable(reason, reason="NOT_READY", retry_after_s=1.0)
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(render(registry), headers={"content-type": CONTENT_TYPE})

    @app.get("/cluster")
    async def cluster_state() -> JSONResponse:
        return JSONResponse(cluster())

    app.openapi = document(app)  # type: ignore[method-assign]
    return app
