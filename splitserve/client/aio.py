"""The asyncio client. An application owns an AsyncClient, uses it on one event loop and closes it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from splitserve.client import requests
from splitserve.client.channel import channel_options, resolve_target
from splitserve.client.fold import Fold
from splitserve.client.types import Chunk, GenerateOptions, Generation, Message, ModelInfo, Prompt
from splitserve.service.grpc_errors import from_rpc_error
from splitserve.v1 import inference_pb2, inference_pb2_grpc

_T = TypeVar("_T")


class _GenerateRpc(Protocol):
    def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]: ...
    def cancel(self) -> bool: ...


class AsyncStream:
    """One answer as it arrives: iterate for chunks; `await result()` for the whole.

    Chunks of several samples are mixed, as they come; `index` tells whose. Closing it early cancels the
    request. Every method raises the SplitserveError that ended the answer, however much of it had arrived before.
    """

    def __init__(self, call: _GenerateRpc, num_samples: int = 1) -> None:
        self._call = call
        self._responses = call.__aiter__()
        self._fold = Fold(num_samples)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while self._fold.is_open:
            chunk = await self._receive()
            if chunk is not None:
                return chunk
        self._fold.result()
        raise StopAsyncIteration

    async def result(self) -> Generation:
        """Waits for the end of the answer and gives it whole, chunks already seen included."""
        while self._fold.is_open:
            await self._receive()
        return self._fold.result()

    async def aclose(self) -> None:
        """Cancels the request unless it is over. Safe to call more than once."""
        if self._fold.close():
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _receive(self) -> Chunk | None:
        try:
            return self._fold.add(await anext(self._responses))
        except StopAsyncIteration:
            self._fold.end()
        except grpc.RpcError as error:
            self._fold.fail(from_rpc_error(error))
        except asyncio.CancelledError:
            # Either this task is cancelled, or another task closed the stream: then the answer is over, not the task.
            if self._fold.is_open:
                await self.aclose()
                raise
        return None


class AsyncClient:
    """Calls one router.

    `target` is "host:port"; None means the environment's SPLITSERVE_TARGET, else localhost:50051. Every call has a
    deadline: its own `timeout`, else `timeout` given here (seconds; 600 for generations unless given, 30 for look-ups).
    Errors are the SplitserveError tree of `splitserve.service.errors`. An option of value None counts as not given.
    """

    def __init__(self, target: str | None = None, *, timeout: float | None = None) -> None:
        self.target = resolve_target(target)
        self._timeout_s = requests.deadline(timeout, requests.DEFAULT_TIMEOUT_S)
        self._lookup_timeout_s = requests.deadline(timeout, requests.LOOKUP_TIMEOUT_S)

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        # Made on first use: a channel belongs to the loop that runs when it is made.
        return grpc.aio.insecure_channel(self.target, options=channel_options(self.target))

    @cached_property
    def _stub(self) -> "inference_pb2_grpc.InferenceServiceAsyncStub":  # the name exists for type checkers only
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        async with self.stream(prompt, **options) as stream:
            return await stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Use it in an `async with` block: leaving the block cancels what has not arrived."""
        call = requests.generate_call(prompt, options, self._timeout_s)
        rpc = self._stub.Generate(call.request, timeout=call.timeout_s, metadata=call.metadata)
        return AsyncStream(rpc, call.num_samples)

    async def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> Generation:
        return await self.generate(messages, **options)

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> AsyncStream:
        return self.stream(messages, **options)

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        seconds = requests.deadline(timeout, self._lookup_timeout_s)
        call = self._stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=seconds)
        return requests.model_info(await _answer(call))

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout: float | None = None
    ) -> tuple[int, ...]:
        """The token ids that `generate` would use for this prompt."""
        seconds = requests.deadline(timeout, self._lookup_timeout_s)
        response = await _answer(self._stub.Tokenize(requests.tokenize_request(prompt, model), timeout=seconds))
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """The text of these ids; special tokens give none."""
        seconds = requests.deadline(timeout, self._lookup_timeout_s)
        request = requests.detokenize_request(token_ids, model)
        return (await _answer(self._stub.Detokenize(request, timeout=seconds))).text

    async def close(self) -> None:
        """Cancels what is running and closes the connection."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


async def _answer(call: Awaitable[_T]) -> _T:
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
