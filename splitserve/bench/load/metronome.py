"""A server that says a token at every tick: what a client makes of that is the client's own jitter.

`python -P -m splitserve.bench.load.metronome` is the server, a process of its own as a measured one is; `client_jitter`
starts it and listens.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from splitserve.bench.load.gaps import Spread, gaps_of, spread
from splitserve.bench.load.openai_client import connect
from splitserve.service.errors import Internal, Unavailable
from splitserve.service.http_server import serve_http
from splitserve.service.ports import LOOPBACK, claim

_READY_S = 30.0
_POLL_S = 0.05
_WARM_UP_TICKS = 20


async def client_jitter(interval_s: float, num_ticks: int) -> Spread:
    """How far the gaps that this process sees are from the metronome's, at this moment on this machine.

    The server's own lateness is in it, too: it is as busy a process as a client is. Raises Internal where it does not
    start.
    """
    port = claim({"port": 0})["port"]
    command = [sys.executable, "-P", "-m", "splitserve.bench.load.metronome", str(port), str(interval_s)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: ASYNC220, S603  # it is there at once
    try:
        url = f"http://{LOOPBACK}:{port}"
        await _until_ready(url, server)
        async with connect(url) as client:
            answer = await client.complete("", num_ticks + _WARM_UP_TICKS)
    finally:
        server.kill()
        server.wait()
    ticks = answer.arrivals[_WARM_UP_TICKS:]
    return spread([abs(gap.seconds - interval_s) for gap in gaps_of(ticks)])


async def _until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            async with connect(url):
                return
        except Unavailable:
            if server.poll() is not None or time.monotonic() > deadline:
                raise Internal(f"the metronome did not start within {_READY_S:g} s") from None
            await asyncio.sleep(_POLL_S)


def metronome(interval_s: float) -> Starlette:
    """Serves the part of OpenAI's API that a client of streams needs; `max_tokens` ticks, counted from the request."""

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "metronome"}]})

    async def complete(request: Request) -> StreamingResponse:
        num_ticks = int((await request.json())["max_tokens"])
        return StreamingResponse(_ticks(interval_s, num_ticks), media_type="text/event-stream")

    return Starlette(
        routes=[Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])],
    )


async def _ticks(interval_s: float, num_ticks: int) -> AsyncIterator[str]:
    clock = asyncio.get_running_loop().time
    began = clock()
    for number in range(num_ticks):
        await asyncio.sleep(max(began + number * interval_s - clock(), 0.0))
        yield f"data: {json.dumps({'choices': [{'text': 'tick '}]})}\n\n"
    yield "data: [DONE]\n\n"


async def _serve(port: int, interval_s: float) -> None:
    await serve_http(metronome(interval_s), LOOPBACK, port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Started by a benchmark, not by hand.")
    parser.add_argument("port", type=int)
    parser.add_argument("interval_s", type=float)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.port, arguments.interval_s))
