"""A small front for two servers: one request to each in turn, or prefill at the first and decode at the second.

`python -P -m splitserve.bench.peers.proxy PORT MODE FIRST SECOND`. The second mode is how vLLM's NixlConnector is used:
the prefill server is asked for one token, and the parameters of the transfer in its answer go to the decode server.
"""

import argparse
import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from splitserve.service.http_server import serve_http
from splitserve.service.ports import LOOPBACK

MODES = ("round-robin", "prefill-decode")
_TIMEOUT_S = 600.0
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_FROM_REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")

Forward = Callable[[str, dict[str, Any]], Coroutine[Any, Any, Response]]


def proxy(mode: str, urls: Sequence[str]) -> Starlette:
    http = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=None))
    turns = itertools.cycle(urls)

    async def in_turn(path: str, body: dict[str, Any]) -> Response:
        return await _stream(http, f"{next(turns)}{path}", body, {})

    async def prefill_then_decode(path: str, body: dict[str, Any]) -> Response:
        prefill, decode = urls
        headers = {"x-request-id": uuid.uuid4().hex}
        asked = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": {**_REMOTE_DECODE, **_nowhere()}}
        asked.pop("stream_options", None)
        first = await http.post(f"{prefill}{path}", json=asked, headers=headers)
        if first.status_code != httpx.codes.OK:
            return Response(first.content, first.status_code)
        params = first.json().get("kv_transfer_params") or {}
        return await _stream(http, f"{decode}{path}", body | {"kv_transfer_params": params}, headers)

    forward: Forward = in_turn if mode == "round-robin" else prefill_then_decode

    async def complete(request: Request) -> Response:
        return await forward(request.url.path, await request.json())

    async def models(_: Request) -> Response:
        answer = await http.get(f"{urls[0]}/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route("/v1/models", models), *(Route(path, complete, methods=["POST"]) for path in paths)])


def _nowhere() -> dict[str, None]:
    return dict.fromkeys(_FROM_REMOTE)


async def _stream(http: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
    answer = await http.send(http.build_request("POST", url, json=body, headers=headers), stream=True)

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()

    return StreamingResponse(pieces(), answer.status_code, media_type=answer.headers.get("content-type"))


async def _serve(port: int, mode: str, urls: Sequence[str]) -> None:
    await serve_http(proxy(mode, urls), LOOPBACK, port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Started by `bench peers`, not by hand.")
    parser.add_argument("port", type=int)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("urls", nargs=2)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.port, arguments.mode, arguments.urls))
