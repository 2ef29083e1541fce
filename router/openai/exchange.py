"""One HTTP exchange: prompts into `serving`, its pieces out as one JSON body or as a stream of events.

`routes` makes one per request and hands it to the server, which calls it. The status is decided by the first event:
what fails before it is answered with its own status, what fails later with an event that says so and no `[DONE]`.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.http_errors import body_of, error_response
from router.long_work import LongWork
from router.openai.answers import Answer, Reply
from router.pieces import Piece
from router.request import GenerationRequest
from router.serving import ClientGoneError, Serving
from splitserve.service.errors import Internal, InvalidRequest, SplitserveError
from splitserve.v1 import inference_pb2 as pb

_DONE = b"data: [DONE]\n\n"
# A client that does not read is not waited for when all that is left to tell it is how its request has ended.
_LAST_WORD_S = 5.0

# Of one HTTP request: a token's own, and one for each of the likeliest in its place. 20 of them for each token of the
# largest contexts; until they are sent, each takes some hundred bytes.
MAX_LOGPROBS = 3_000_000

_log = structlog.get_logger(__name__)


class Exchange(Response):
    """Ends, and frees the workers, as soon as the client goes away, whether or not it was to have a stream."""

    def __init__(
        self,
        serving: Serving,
        answer: Answer,
        messages: Sequence[pb.GenerateRequest],
        *,
        long_work: LongWork,
        rename: Callable[[SplitserveError], SplitserveError],
        is_stream: bool,
        traceparent: str,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers)
        self._own_headers = headers
        self._serving = serving
        self._answer = answer
        self._messages = messages
        self._long_work = long_work
        self._rename = rename
        self._is_stream = is_stream
        self._traceparent = traceparent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Sender(send, self._own_headers, self._long_work)
        work = asyncio.create_task(self._work(reply))
        watch = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            work.cancel()  # no harm where it is done
            await asyncio.wait({work, watch})
        if work.cancelled():
            return
        error = _refusal(work.exception())
        if error is None:
            return
        error = self._rename(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                if reply.have_begun:
                    await reply.fail(error)
                else:
                    await error_response(error, self._own_headers)(scope, receive, send)

    async def _work(self, reply: "_Sender") -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._serving.request_timeout_s
        prompts = _Prompts(self._is_stream)
        async with asyncio.TaskGroup() as group:
            for index, message in enumerate(self._messages):
                client = _PromptClient(index, self._answer, reply if self._is_stream else None, prompts)
                group.create_task(self._serve(message, client, prompts))
        # All are counted, and the rest is to be read: for that there is the request's own time, and a moment at least.
        try:
            async with asyncio.timeout_at(max(deadline, clock() + _LAST_WORD_S)):
                with self._serving.calls.entered():
                    await self._finish(reply)
        except TimeoutError:
            raise ClientGoneError from None

    async def _serve(self, message: pb.GenerateRequest, client: "_PromptClient", prompts: "_Prompts") -> None:
        try:
            await self._serving.serve(message, client, traceparent=self._traceparent)
        except SplitserveError as error:
            prompts.fail(error)
            raise

    async def _finish(self, reply: "_Sender") -> None:
        if not self._is_stream:
            await reply.send_whole(self._answer.whole())
            return
        for event in self._answer.last_events():
            await reply.send(event)
        await reply.end()


class _Prompts:
    """The prompts of one request fail together: `ending` is what the first one failed with, told to the others."""

    def __init__(self, is_stream: bool) -> None:
        self.ending: SplitserveError | None = None
        self._is_stream = is_stream
        self._num_logprobs = 0

    def fail(self, error: SplitserveError) -> None:
        self.ending = self.ending or error

    def admit(self, request: GenerationRequest) -> None:
        """Counts what has to be kept of the answer: the prompt's logprobs, and in no stream those of the output.

        Raises InvalidRequest with the sum of all prompts so far, where that is too many.
        """
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:
            self._num_logprobs += len(request.prompt_ids) * (1 + sampling.prompt_logprobs)
        if sampling.logprobs is not None and not self._is_stream:
            self._num_logprobs += sampling.n * sampling.max_tokens * (1 + sampling.logprobs)
        if self._num_logprobs > MAX_LOGPROBS:
            raise InvalidRequest(
                f"this asks for up to {self._num_logprobs} logprobs at once, of tokens and of the likeliest in their "
                f"places; one request can have {MAX_LOGPROBS}: fewer tokens, prompts or samples, or for the output's a "
                "stream"
            )


class _PromptClient:
    """Who asked, as `serving` sees it, for one of the request's prompts."""

    is_gone = False  # a client that leaves cancels the task

    def __init__(self, prompt: int, answer: Answer, events: "_Sender | None", prompts: _Prompts) -> None:
        self._prompt = prompt
        self._answer = answer
        self._events = events
        self._prompts = prompts

    @property
    def ending(self) -> SplitserveError | None:
        return self._prompts.ending

    def admit(self, request: GenerationRequest) -> None:
        self._prompts.admit(request)

    async def write(self, piece: Piece) -> None:
        for event in self._answer.take(self._prompt, piece):
            if self._events is not None:
                await self._events.send(event)


class _Sender:
    """One body, or server-sent events; begins with the first of what it is told to send."""

    def __init__(self, send: Send, headers: dict[str, str], long_work: LongWork) -> None:
        self._long_work = long_work
        self._raw_send = send
        self.have_begun = False
        self._begins = asyncio.Lock()  # several prompts may have their first event at once
        self._headers = headers

    async def send(self, event: Reply) -> None:
        await self._send(b"data: " + await self._encoded(event) + b"\n\n")

    async def fail(self, error: SplitserveError) -> None:
        """The last event; that no `[DONE]` follows says the same to a client that reads no errors."""
        await self._send(b"data: " + msgspec.json.encode(body_of(error)) + b"\n\n", more=False)

    async def end(self) -> None:
        await self._send(_DONE, more=False)

    async def send_whole(self, whole: Reply) -> None:
        body = await self._encoded(whole)
        await self._begin({"content-type": "application/json", "content-length": str(len(body))})
        await self._raw_send({"type": "http.response.body", "body": body})

    async def _encoded(self, reply: Reply) -> bytes:
        if reply.is_long:
            return await self._long_work.run(lambda: msgspec.json.encode(reply.make()))
        return msgspec.json.encode(reply.make())

    async def _send(self, body: bytes, more: bool = True) -> None:
        async with self._begins:
            if not self.have_begun:
                await self._begin({"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        await self._raw_send({"type": "http.response.body", "body": body, "more_body": more})

    async def _begin(self, headers: dict[str, str]) -> None:
        listed = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers | self._headers).items()
        ]
        await self._raw_send({"type": "http.response.start", "status": 200, "headers": listed})
        self.have_begun = True


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal(error: BaseException | None) -> SplitserveError | None:
    """What the client is to be told; of several prompts' failures the first one. None where nobody is left to tell."""
    match error:
        case None | ClientGoneError() | asyncio.CancelledError():
            return None
        case SplitserveError():
            return error
        case BaseExceptionGroup():
            return _refusal(error.exceptions[0])
        case _:
            _log.error("exchange_failed", exc_info=error)
            return Internal("the router failed; its log says why")
