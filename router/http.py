"""The router's HTTP port: health, metrics and the cluster's state, with errors in OpenAI's shape.

The composition root makes the application and serves it with `splitserve.service.http_server`. Everything it shows is
read through callbacks at the moment of the call; it holds no state.
"""

from collections.abc import Callable, Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from splitserve.service.errors import InvalidRequest, SplitserveError, Unavailable
from splitserve.service.metrics import CONTENT_TYPE, render

# HTTP's own refusals (no such path, wrong method) in the words of OpenAI's error bodies.
_TYPES_BY_STATUS = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}

_log = structlog.get_logger(__name__)


def create_app(
    *,
    not_ready_reason: Callable[[], str | None],
    cluster: Callable[[], Mapping[str, Any]],
    registry: CollectorRegistry,
) -> FastAPI:
    """`not_ready_reason` gives None when a prefill and decode pair can serve; `cluster` is the body of `/cluster`."""
    app = FastAPI(title="splitserve router", docs_url=None, redoc_url=None, openapi_url=None)
    _map_errors(app)

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        reason = not_ready_reason()
        if reason is not None:
            raise Unavailable(reason, reason="NOT_READY", retry_after_s=1.0)
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render(registry), headers={"content-type": CONTENT_TYPE})

    @app.get("/cluster")
    async def cluster_state() -> JSONResponse:
        return JSONResponse(cluster())

    return app


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of an OpenAI error."""
    kind = _TYPES_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: SplitserveError) -> JSONResponse:
    """Any error of the tree as HTTP."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    body = error_body(error.message, status=error.http_status, code=error.reason.lower(), param=error.field)
    return JSONResponse(body, status_code=error.http_status, headers=headers)


def _map_errors(app: FastAPI) -> None:
    @app.exception_handler(SplitserveError)
    async def from_tree(_: Request, error: SplitserveError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def from_fastapi(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return error_response(InvalidRequest(first["msg"], field=".".join(str(part) for part in first["loc"][1:])))

    @app.exception_handler(HTTPException)
    async def from_http(request: Request, error: HTTPException) -> JSONResponse:
        code, message = "http_error", str(error.detail)
        if error.status_code == 404:
            code, message = "not_found", f"there is no {request.url.path} here"
        elif error.status_code == 405:
            code, message = "method_not_allowed", f"{request.method} is not allowed on {request.url.path}"
        body = error_body(message, status=error.status_code, code=code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        _log.error("http_request_failed", path=request.url.path, exc_info=error)
        return JSONResponse(error_body("internal error", status=500, code="internal"), status_code=500)
