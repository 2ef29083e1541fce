"""A server with OpenAI's API that says what a test wants: bytes as they are, after what delay."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from splitserve.service.http_server import serve_http
from splitserve.service.ports import LOOPBACK

Reply = Callable[[dict[str, Any]], Iterable[bytes]]


@asynccontextmanager
async def scripted(reply: Reply, *, status: int = 200) -> AsyncIterator[str]:
    """The URL of a server that answers each body with the pieces of `reply`, one network write each."""

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "first"}, {"id": "second"}]})

    async def answer(request: Request) -> Response:
        pieces = reply(await request.json())
        if status != 200:
            return PlainTextResponse(b"".join(pieces), status)

        async def stream() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return StreamingResponse(stream(), media_type="text/event-stream")

    paths = ("/v1/completions", "/v1/chat/completions")
    app = Starlette(routes=[Route("/v1/models", models), *(Route(path, answer, methods=["POST"]) for path in paths)])
    server = await serve_http(app, LOOPBACK, 0)
    try:
        yield f"http://{LOOPBACK}:{server.port}"
    finally:
        await server.stop()
