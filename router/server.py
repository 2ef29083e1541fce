"""The public service: gRPC in, a `Dispatcher`'s tokens out. `grpc_server` serves it, the composition root builds both.

Each Generate call is one task that owns its `Generation`: however the call ends, that task closes the generation and
counts one outcome.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import structlog

from router.calls import OpenCalls
from router.metrics import Outcome, RequestRecord, RouterMetrics
from router.output import Finish, SampleOutput
from router.request import ClusterLimits, Dispatcher, Generation, GenerationRequest, PromptLogprobs, TokenLogprobs
from router.text import Detokenizer
from router.validation import RequestValidator
from splitserve.models.description import ModelDescription
from splitserve.service.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    SplitserveError,
    Unavailable,
)
from splitserve.service.grpc_errors import to_status
from splitserve.v1 import inference_pb2 as pb
from splitserve.v1 import inference_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# A client's own deadline ends the call from its side a little before ours does: still a deadline, not a change of mind.
_DEADLINE_SLACK_S = 0.25

_log = structlog.get_logger(__name__)


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Implements the public contract. `limits` tells what the workers joined at this moment can take."""

    def __init__(
        self,
        *,
        model: ModelDescription,
        detokenizer: Detokenizer,
        validator: RequestValidator,
        dispatcher: Dispatcher,
        limits: Callable[[], ClusterLimits],
        metrics: RouterMetrics,
        request_timeout_s: float,
        has_chat_template: bool = False,
    ) -> None:
        self._model = model
        self._detokenizer = detokenizer
        self._validator = validator
        self._dispatcher = dispatcher
        self._limits = limits
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._has_chat_template = has_chat_template
        self.calls = OpenCalls()

    # The stubs know generators only. A coroutine that writes is gRPC's other form, and the safe one: when the client
    # leaves during a write, a generator stays suspended until it is collected; here `finally` runs at once.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        deadline = _deadline(context, self._request_timeout_s)
        record = self._metrics.begin(request.request_id)
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                with self.calls.entered():
                    outcome = await self._serve(request, context, deadline, record)
        except _ClientGoneError:
            record.end(_outcome_of_leaving(deadline))
        except asyncio.CancelledError:
            if self.calls.ending is not None and not context.cancelled():
                await _fail(context, record, self.calls.ending)
            if _is_being_cancelled() or context.cancelled():
                record.end(_outcome_of_leaving(deadline))
                raise
            # Something inside was cancelled, not this call: without a status the client would wait for ever.
            await _fail(context, record, Unavailable("the request was ended inside the router"))
        except SplitserveError as error:
            await _fail(context, record, error)
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                await _fail(context, record, DeadlineExceeded("the deadline passed before the output was complete"))
            _log.exception("request_failed", request_id=request.request_id)
            await _fail(context, record, Internal("the router failed; its log says why"))
        else:
            record.end(outcome)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        limits, context_len = self._limits(), self._validator.context_len
        largest = min(limits.max_prompt_tokens_prefill, limits.max_prompt_tokens_decode, context_len - 1)
        return pb.GetModelInfoResponse(
            model=self._model.name,
            revision=self._model.revision,
            vocab_size=self._model.vocab_size,
            max_model_len=context_len,
            max_prompt_tokens=largest if limits.ready else 0,
            eos_token_ids=self._model.eos_token_ids,
            ready=limits.ready,
            has_chat_template=self._has_chat_template,
        )

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Context
    ) -> pb.TokenizeResponse:
        return await _answer(context, self._tokenize(request))

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=await self._validator.tokenize(request))

    async def _serve(
        self,
        message: pb.GenerateRequest,
        context: Context,
        deadline: float,
        record: RequestRecord,
    ) -> Outcome:
        try:
            request = await self._validator.validate(message, deadline=deadline, traceparent=_traceparent(context))
            generation = self._dispatcher.submit(request)
        except (SplitserveError, asyncio.CancelledError):
            record.refuse()
            raise
        record.admit(len(request.prompt_ids))
        try:
            finish = await self._stream(request, generation, context, record)
        except (Overloaded, Unavailable, asyncio.CancelledError):
            if generation.attempts == 0:
                record.refuse()
            raise
        finally:
            await generation.aclose()
        return Outcome(finish.reason)

    async def _stream(
        self,
        request: GenerationRequest,
        generation: Generation,
        context: Context,
        record: RequestRecord,
    ) -> Finish:
        """Until every sample is finished; the last one's finish stands for the request."""
        outputs = [SampleOutput(self._detokenizer, request.sampling) for _ in range(request.sampling.n)]
        unfinished = set(range(len(outputs)))
        async for event in generation:
            if isinstance(event, PromptLogprobs):
                prompt = pb.GenerateChunk(prompt_logprobs=map(_token_logprobs, event.tokens))
                await _write(context, pb.GenerateResponse(chunk=prompt, request_id=request.request_id))
                continue
            if event.sample not in unfinished:
                continue
            record.token(event.sample)
            output = outputs[event.sample]
            delta = output.take(event)
            logprobs = [] if event.logprobs is None else [_token_logprobs(event.logprobs)]
            chunk = pb.GenerateChunk(text=delta.text, token_ids=[delta.token_id], logprobs=logprobs)
            await _write(context, pb.GenerateResponse(chunk=chunk, request_id=request.request_id, index=event.sample))
            if delta.finish is None:
                continue
            complete = _complete(delta.finish, request, output.num_tokens, generation)
            await _write(
                context, pb.GenerateResponse(complete=complete, request_id=request.request_id, index=event.sample)
            )
            unfinished.remove(event.sample)
            if not unfinished:
                return delta.finish
        raise Internal("the output ended without a finish reason")


def _token_logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)


class _ClientGoneError(Exception):
    """Nobody is left to tell anything."""


async def _write(context: Context, response: pb.GenerateResponse) -> None:
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:
        # A write under way when the client leaves fails like this, a moment before gRPC cancels the task.
        raise _ClientGoneError from error


def _complete(
    finish: Finish, request: GenerationRequest, num_tokens: int, generation: Generation
) -> pb.GenerateComplete:
    complete = pb.GenerateComplete(
        finish_reason=finish.reason,
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=num_tokens,
        cached_tokens=generation.cached_tokens,
        seed=request.sampling.seed,
        attempts=generation.attempts,
    )
    match finish.matched_stop:
        case str(string):
            complete.matched_stop_string = string
        case int(token_id):
            complete.matched_stop_token_id = token_id
    return complete


async def _fail(context: Context, record: RequestRecord, error: SplitserveError) -> NoReturn:
    """Counts first: the client may look at the metrics as soon as it has the status."""
    record.end(_outcome_of(error, record))
    await context.abort_with_status(to_status(error))


def _outcome_of(error: SplitserveError, record: RequestRecord) -> Outcome:
    match error:
        case InvalidRequest() | NotFound():
            return Outcome.REJECTED
        case Overloaded() | Unavailable() if record.is_refused:
            return Outcome.REJECTED
        case Cancelled():
            return Outcome.CANCELLED
        case DeadlineExceeded():
            return Outcome.DEADLINE
        case _:
            return Outcome.FAILED


async def _answer(context: Context, answer: Awaitable[Answer]) -> Answer:
    try:
        return await answer
    except SplitserveError as error:
        await context.abort_with_status(to_status(error))


def _outcome_of_leaving(deadline: float) -> Outcome:
    is_late = _now() > deadline - _DEADLINE_SLACK_S
    return Outcome.DEADLINE if is_late else Outcome.CANCELLED


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _now() -> float:
    return asyncio.get_running_loop().time()


def _deadline(context: Context, request_timeout_s: float) -> float:
    """The client's deadline or our own, whichever is sooner."""
    remaining: float | None = context.time_remaining()
    return _now() + (request_timeout_s if remaining is None else min(remaining, request_timeout_s))


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
            return value
    return ""
