"""Errors over HTTP, in the shape of OpenAI's: the tree of `errors`, the server's refusals, and what nobody expected.

`http` installs the handlers; answers that are under way use `body_of`.
"""

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from splitserve.service.errors import SplitserveError

# HTTP's own refusals (no such path, wrong method) in the words of OpenAI's error bodies.
_TYPES_BY_STATUS = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}

_log = structlog.get_logger(__name__)


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of an OpenAI error."""
    kind = _TYPES_BY_STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": _sayable(message), "type": kind, "param": param and _sayable(param), "code": code}}


def _sayable(text: str) -> str:
    """It may repeat what a client sent, which may be no Unicode."""
    return text.encode(errors="replace").decode()


def body_of(error: SplitserveError) -> dict[str, Any]:
    """Any error of the tree as an OpenAI error's body."""
    return error_body(error.message, status=error.http_status, code=error.reason.lower(), param=error.field)


def error_response(error: SplitserveError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Any error of the tree as HTTP, with `headers` besides its own."""
    retry = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    return JSONResponse(body_of(error), status_code=error.http_status, headers={**retry, **(headers or {})})


def map_errors(app: FastAPI) -> None:
    """Whatever a handler raises is answered in that shape."""

    @app.exception_handler(SplitserveError)
    async def from_tree(_: Request, error: SplitserveError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def from_http(request: Request, error: HTTPException) -> JSONResponse:
        code, message = "http_error", str(error.detail)
        if error.status_code == 404:
            code, message = "not_found", f"there is no {request.url.path} here"
        elif error.status_code == 405:
            code, message = "method_not_allowed", f"{request.method} is not allowed on {request.url.path}"
        elif error.status_code == 413:
            code = "request_too_large"
        body = error_body(message, status=error.status_code, code=code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        _log.error("http_request_failed", path=request.url.path, exc_info=error)
        return JSONResponse(error_body("internal error", status=500, code="internal"), status_code=500)
