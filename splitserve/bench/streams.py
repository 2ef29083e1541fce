"""Clients that cost as little as they can: many streams of one router, over gRPC or as server-sent events.

Each tells a `Meter` of every chunk that it reads. One event loop, which the fake workers share.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Protocol, cast

import grpc.aio
import msgspec

from splitserve.bench.words import Meter
from splitserve.client.channel import channel_options
from splitserve.service.errors import Unavailable
from splitserve.v1 import inference_pb2 as pb
from splitserve.v1 import inference_pb2_grpc as pb_grpc

_NUM_CHANNELS = 4
# More than any benchmark lasts for.
_MAX_TOKENS = 1_000_000


class Streams(Protocol):
    """A way to open streams."""

    async def open(self, prompt_ids: list[int]) -> None:
        """Returns with the stream's first token; it goes on until `close`. Raises Unavailable."""

    async def close(self) -> None:
        """Gives all of them up."""


class GrpcStreams:
    """Multiplexed over a few connections."""

    def __init__(self, target: str, meter: Meter) -> None:
        # Channels of the same arguments would share one connection.
        options = [*channel_options(target), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(target, options=options) for _ in range(_NUM_CHANNELS)]
        self._meter = meter
        self._readers: list[asyncio.Task[None]] = []

    async def open(self, prompt_ids: list[int]) -> None:
        channel = self._channels[len(self._readers) % _NUM_CHANNELS]
        stub: pb_grpc.InferenceServiceAsyncStub = pb_grpc.InferenceServiceStub(channel)
        params = pb.SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.0)
        call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt_ids), sampling_params=params))
        has_begun = asyncio.get_running_loop().create_future()
        self._readers.append(asyncio.create_task(self._read(call, has_begun)))
        await has_begun

    async def _read(
        self,
        call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]",
        has_begun: "asyncio.Future[None]",
    ) -> None:
        try:
            while isinstance(response := await call.read(), pb.GenerateResponse):
                self._meter.take_ids(response.chunk.token_ids)
                if not has_begun.done():
                    has_begun.set_result(None)
            raise Unavailable(f"a stream ended: {await call.details()}")
        except (grpc.aio.AioRpcError, Unavailable) as error:
            self._meter.fail(error)
            if not has_begun.done():
                has_begun.set_exception(Unavailable(str(error)))

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for channel in self._channels:
            await channel.close()


class _Choice(msgspec.Struct):
    text: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


class SseStreams:
    """A connection for each, as HTTP/1.1 has it."""

    def __init__(self, host: str, port: int, meter: Meter) -> None:
        self._address = host, port
        self._meter = meter
        self._connections: list[_SseConnection] = []

    async def open(self, prompt_ids: list[int]) -> None:
        request = {
            "prompt": prompt_ids,
            "max_tokens": _MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        body = json.dumps(request).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _SseConnection(self._meter, head.encode() + body, loop.create_future()), *self._address
        )
        self._connections.append(connection)
        await connection.has_begun

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()


class _SseConnection(asyncio.Protocol):
    def __init__(self, meter: Meter, request: bytes, has_begun: "asyncio.Future[None]") -> None:
        self.has_begun = has_begun
        self._meter = meter
        self._request = request
        self._held = b""
        self._decode: Callable[[bytes], _Chunk] = msgspec.json.Decoder(_Chunk).decode
        self._transport: asyncio.Transport
        self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        *events, self._held = (self._held + data).split(b"\n\n")
        for event in events:
            _, found, text = event.partition(b"data: ")  # what is before it is HTTP's
            if not found or b'"error"' in text:
                self._fail(f"a stream began with {event[:200]!r}")
                return
            self._meter.take_text(self._decode(text).choices[0].text)
            if not self.has_begun.done():
                self.has_begun.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._fail(f"a connection ended: {error}, {self._held[:200]!r}")

    def _fail(self, message: str) -> None:
        error = Unavailable(message)
        self._meter.fail(error)
        if not self.has_begun.done():
            self.has_begun.set_exception(error)

    def close(self) -> None:
        self._is_closing = True
        self._transport.abort()
