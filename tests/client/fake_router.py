"""A router that answers from a script: a real gRPC server in this process, without any worker behind it.

A prompt's text, or the last turn of a chat, chooses the behaviour (`SCRIPTS`); everything that a test may want to ask
about afterwards is recorded.
"""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc

from splitserve.service.errors import InvalidRequest, Overloaded, SplitserveError, Unavailable
from splitserve.service.grpc_errors import to_status
from splitserve.v1 import inference_pb2, inference_pb2_grpc

Response = inference_pb2.GenerateResponse
WORDS = ("Washington", ", D", ".C", ".")
ECHO_IDS = (7, 8, 9)


def chunk(text: str, *ids: int) -> Response:
    return Response(request_id="echoed", chunk=inference_pb2.GenerateChunk(text=text, token_ids=ids))


def complete(**fields: Any) -> Response:
    defaults: dict[str, Any] = {"finish_reason": "length", "prompt_tokens": 3, "completion_tokens": 4, "attempts": 1}
    return Response(request_id="echoed", complete=inference_pb2.GenerateComplete(**(defaults | fields)))


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Runs on a loop of its own, so that blocking clients can be tested from the test's thread."""

    def __init__(self, *, max_message_bytes: int = 64 * 1024 * 1024) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.remaining_s: list[float] = []
        self.metadata: list[dict[str, str]] = []
        self.streaming = threading.Event()  # a "forever" answer is under way
        self.cancelled = threading.Event()  # the caller of a "forever" answer is gone
        self.target = ""
        self.has_chat_template = False
        self._max_message_bytes = max_message_bytes
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", self._max_message_bytes)])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server)
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._ready.set()
        await self._stop.wait()
        await server.stop(grace=0)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Response]:
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining())
        self.metadata.append({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        asked = request.chat.messages[-1].content if request.chat.messages else request.text
        script = SCRIPTS.get(asked, _normal)
        try:
            async for response in script(self):
                yield response
        except SplitserveError as error:
            await context.abort_with_status(to_status(error))

    async def GetModelInfo(self, request: inference_pb2.GetModelInfoRequest, context: Any) -> Any:
        return inference_pb2.GetModelInfoResponse(
            model="fake",
            revision="r1",
            vocab_size=100,
            max_model_len=64,
            max_prompt_tokens=32,
            eos_token_ids=[2],
            ready=True,
            has_chat_template=self.has_chat_template,
        )

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> Any:
        if request.text == "refuse":
            await context.abort_with_status(to_status(InvalidRequest("no", field="prompt")))
        return inference_pb2.TokenizeResponse(token_ids=ECHO_IDS)

    async def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: Any) -> Any:
        if min(request.token_ids) < 0:
            await context.abort_with_status(to_status(InvalidRequest("no", field="token_ids")))
        return inference_pb2.DetokenizeResponse(text=f"{list(request.token_ids)} of {request.model}")


async def _normal(_: FakeRouter) -> AsyncIterator[Response]:
    for index, word in enumerate(WORDS):
        yield chunk(word, index)
    yield complete(matched_stop_string="\n", finish_reason="stop", seed=2**63 + 1, cached_tokens=2, attempts=2)


async def _stop_token(_: FakeRouter) -> AsyncIterator[Response]:
    yield chunk("a", 0)
    yield complete(matched_stop_token_id=0, finish_reason="stop")


async def _timings(router: FakeRouter) -> AsyncIterator[Response]:
    """Told only to who has asked for them."""
    seconds = {"tokenize_s": 0.5, "queue_s": 1, "prefill_s": 2, "handoff_s": 4, "decode_s": 8}
    timings = inference_pb2.Timings(**seconds, transfer_bytes=4096)
    yield chunk("a", 0)
    yield complete(timings=timings if router.requests[-1].timings else None)


async def _refuse(_: FakeRouter) -> AsyncIterator[Response]:
    raise Overloaded("queue holds 64 of 64 requests", retry_after_s=1.5, reason="QUEUE_FULL")
    yield  # makes this a generator


async def _fail_midway(_: FakeRouter) -> AsyncIterator[Response]:
    yield chunk("half an ", 1, 2)
    raise Unavailable("attempt 3 of 3 failed", reason="ATTEMPTS_EXHAUSTED")


async def _truncate(_: FakeRouter) -> AsyncIterator[Response]:
    yield chunk("half an ", 1, 2)


async def _crash(_: FakeRouter) -> AsyncIterator[Response]:
    yield chunk("half an ", 1, 2)
    raise RuntimeError("a bug")


async def _forever(router: FakeRouter) -> AsyncIterator[Response]:
    try:
        yield chunk("first ", 1)
        router.streaming.set()
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        router.cancelled.set()
        raise


async def _silent(router: FakeRouter) -> AsyncIterator[Response]:
    try:
        router.streaming.set()
        await asyncio.sleep(600)
        yield complete()
    except asyncio.CancelledError:
        router.cancelled.set()
        raise


async def _logprobs(_: FakeRouter) -> AsyncIterator[Response]:
    def entry(token_id: int, logprob: float | None, top: dict[int, float]) -> inference_pb2.TokenLogprobs:
        likeliest = [inference_pb2.TopLogprob(token_id=other, logprob=value) for other, value in top.items()]
        return inference_pb2.TokenLogprobs(token_id=token_id, logprob=logprob, top=likeliest)

    for prompt in ([entry(5, None, {}), entry(6, -2.5, {0: -0.5})], [entry(7, -math.inf, {})]):
        yield Response(request_id="echoed", chunk=inference_pb2.GenerateChunk(prompt_logprobs=prompt))
    for token_id, logprob in ((1, -0.25), (2, 0.0)):
        answer = chunk("x", token_id)
        answer.chunk.logprobs.append(entry(token_id, logprob, {token_id: logprob, 9: -4.0}))
        yield answer
    yield complete()


async def _three(_: FakeRouter) -> AsyncIterator[Response]:
    def of(index: int, response: Response) -> Response:
        response.index = index
        return response

    for index in (1, 0, 2):
        yield of(index, chunk("abc"[index], index))
    yield of(1, complete(completion_tokens=1, finish_reason="stop", matched_stop_string="."))
    for index in (2, 0):
        yield of(index, chunk("abc"[index] * 2, 10 + index))
        yield of(index, complete(completion_tokens=2, attempts=index + 1))


async def _slow_prompt(_: FakeRouter) -> AsyncIterator[Response]:
    """Its logprobs come at once, the answer 0.3 s later."""
    entry = inference_pb2.TokenLogprobs(token_id=5)
    yield Response(request_id="echoed", chunk=inference_pb2.GenerateChunk(prompt_logprobs=[entry]))
    await asyncio.sleep(0.3)
    yield chunk("x", 1)
    yield complete()


async def _echo(router: FakeRouter) -> AsyncIterator[Response]:
    """Only to who has asked for it."""
    if router.requests[-1].echo:
        prompt = inference_pb2.GenerateChunk(prompt_text="echo", prompt_token_ids=[5, 6])
        yield Response(request_id="echoed", chunk=prompt)
    yield chunk("a", 0)
    yield complete()


SCRIPTS: dict[str, Callable[[FakeRouter], AsyncIterator[Response]]] = {
    "stop token": _stop_token,
    "logprobs": _logprobs,
    "three": _three,
    "timings": _timings,
    "echo": _echo,
    "slow prompt": _slow_prompt,
    "refuse": _refuse,
    "fail midway": _fail_midway,
    "truncate": _truncate,
    "crash": _crash,
    "forever": _forever,
    "silent": _silent,
}
