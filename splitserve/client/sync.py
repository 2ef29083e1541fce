"""The blocking client. An application owns a Client and closes it; threads may share it."""

from collections.abc import Callable, Iterator, Sequence
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
    def __next__(self) -> inference_pb2.GenerateResponse: ...
    def cancel(self) -> object: ...


class Stream:
    """One answer as it arrives: iterate for chunks; `result()` for the whole.

    Chunks of several samples are mixed, as they come; `index` tells whose. Closing it early cancels the
    request. Every method raises the SplitserveError that ended the answer, however much of it had arrived before.
    """

    def __init__(self, call: _GenerateRpc, num_samples: int = 1) -> None:
        self._call = call
        self._fold = Fold(num_samples)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while self._fold.is_open:
            chunk = self._receive()
            if chunk is not None:
                return chunk
        self._fold.result()
        raise StopIteration

    def result(self) -> Generation:
        """Waits for the end of the answer and gives it whole, chunks already seen included."""
        while self._fold.is_open:
            self._receive()
        return self._fold.result()

    def close(self) -> None:
        """Cancels the request unless it is over. Safe to call more than once, and from another thread."""
        if self._fold.close():
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _receive(self) -> Chunk | None:
        try:
            return self._fold.add(next(self._call))
        except StopIteration:
            self._fold.end()
        except grpc.RpcError as error:
            self._fold.fail(from_rpc_error(error))
        return None


class Client:
    """Calls one router.

    `target` is "host:port"; None means the environment's SPLITSERVE_TARGET, else localhost:50051. Every call has a
    deadline: its own `timeout`, else `timeout` given here (seconds; 600 for generations unless given, 30 for look-ups).
    Errors are the SplitserveError tree of `splitserve.service.errors`. An option of value None counts as not given.
    """

    def __init__(self, target: str | None = None, *, timeout: float | None = None) -> None:
        self.target = resolve_target(target)
        self._timeout_s = requests.deadline(timeout, requests.DEFAULT_TIMEOUT_S)
        self._lookup_timeout_s = requests.deadline(timeout, requests.LOOKUP_TIMEOUT_S)
        self._channel = grpc.insecure_channel(self.target, options=channel_options(self.target))
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Use it in a `with` block: leaving the block cancels what has not arrived."""
        call = requests.generate_call(prompt, options, self._timeout_s)
        rpc = self._stub.Generate(call.request, timeout=call.timeout_s, metadata=call.metadata)
        return Stream(rpc, call.num_samples)

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> Generation:
        return self.generate(messages, **options)

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> Stream:
        return self.stream(messages, **options)

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        seconds = requests.deadline(timeout, self._lookup_timeout_s)
        request = inference_pb2.GetModelInfoRequest()
        return requests.model_info(_answer(lambda: self._stub.GetModelInfo(request, timeout=seconds)))

    def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout: float | None = None
    ) -> tuple[int, ...]:
        """The token ids that `generate` would use for this prompt."""
        seconds = requests.deadline(timeout, self._lookup_timeout_s)
        request = requests.tokenize_request(prompt, model)
        return tuple(_answer(lambda: self._stub.Tokenize(request, timeout=seconds)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """The text of these ids; special tokens give none."""
        seconds = requests.deadline(timeout, self._lookup_timeout_s)
        request = requests.detokenize_request(token_ids, model)
        return _answer(lambda: self._stub.Detokenize(request, timeout=seconds)).text

    def close(self) -> None:
        """Cancels what is running and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _answer(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
