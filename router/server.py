"""The public service over gRPC, an edge of `serving`. `grpc_server` serves it, the composition root builds it."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from router.pieces import Delta, Piece, PromptEcho, SampleEnd
from router.request import ClusterLimits, GenerationRequest, PromptLogprobs, TokenLogprobs
from router.serving import ClientGoneError, Serving, traceparent_of
from router.stages import Timings
from router.validation import RequestValidator
from splitserve.models.description import ModelDescription
from splitserve.service.errors import SplitserveError
from splitserve.service.grpc_errors import to_status
from splitserve.v1 import inference_pb2 as pb
from splitserve.v1 import inference_pb2_grpc as pb_grpc

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Implements the public contract. `limits` tells what the workers joined at this moment can take."""

    def __init__(
        self,
        serving: Serving,
        *,
        model: ModelDescription,
        validator: RequestValidator,
        limits: Callable[[], ClusterLimits],
        has_chat_template: bool = False,
    ) -> None:
        self._serving = serving
        self._model = model
        self._validator = validator
        self._limits = limits
        self._has_chat_template = has_chat_template

    # The stubs know generators only. A coroutine that writes is gRPC's other form, and the safe one: when the client
    # leaves during a write, a generator stays suspended until it is collected; here `finally` runs at once.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        client = _GrpcClient(context, request.request_id)
        try:
            await self._serving.serve(
                request, client, timeout_s=context.time_remaining(), traceparent=_traceparent(context)
            )
        except SplitserveError as error:
            await context.abort_with_status(to_status(error))
        except ClientGoneError:
            return  # gRPC knows

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

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        return await _answer(context, self._detokenize(request))

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=await self._validator.detokenize(request))


class _GrpcClient:
    """Writes pieces as messages of one call."""

    ending = None  # nobody but the client and `OpenCalls` ends a call

    def __init__(self, context: Context, request_id: str) -> None:
        self._context = context
        self._request_id = request_id

    @property
    def is_gone(self) -> bool:
        return self._context.cancelled()

    def admit(self, request: GenerationRequest) -> None:
        pass  # Of an answer nothing is kept: it leaves in pieces.

    async def write(self, piece: Piece) -> None:
        try:
            await self._context.write(self._message(piece))
        except grpc.aio.InternalError as error:
            # A write under way when the client leaves fails like this, a moment before gRPC cancels the task.
            raise ClientGoneError from error

    def _message(self, piece: Piece) -> pb.GenerateResponse:
        match piece:
            case PromptEcho():
                chunk = pb.GenerateChunk(prompt_text=piece.text, prompt_token_ids=piece.token_ids)
                return pb.GenerateResponse(chunk=chunk, request_id=self._request_id)
            case PromptLogprobs():
                chunk = pb.GenerateChunk(prompt_logprobs=map(_token_logprobs, piece.tokens))
                return pb.GenerateResponse(chunk=chunk, request_id=self._request_id)
            case Delta():
                logprobs = map(_token_logprobs, piece.logprobs)
                chunk = pb.GenerateChunk(text=piece.text, token_ids=piece.token_ids, logprobs=logprobs)
                return pb.GenerateResponse(chunk=chunk, request_id=self._request_id, index=piece.sample)
            case SampleEnd():
                complete = _complete(piece)
                return pb.GenerateResponse(complete=complete, request_id=self._request_id, index=piece.sample)


def _token_logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=top)


def _complete(end: SampleEnd) -> pb.GenerateComplete:
    complete = pb.GenerateComplete(
        finish_reason=end.finish.reason,
        prompt_tokens=end.num_prompt_tokens,
        completion_tokens=end.num_tokens,
        cached_tokens=end.cached_tokens,
        seed=end.seed,
        attempts=end.attempts,
        timings=None if end.timings is None else _timings(end.timings),
    )
    match end.finish.matched_stop:
        case str(string):
            complete.matched_stop_string = string
        case int(token_id):
            complete.matched_stop_token_id = token_id
    return complete


def _timings(timings: Timings) -> pb.Timings:
    seconds = {f"{stage}_s": spent for stage, spent in timings.seconds.items()}
    return pb.Timings(**seconds, transfer_bytes=timings.transfer_bytes)


async def _answer(context: Context, answer: Awaitable[Answer]) -> Answer:
    try:
        return await answer
    except SplitserveError as error:
        await context.abort_with_status(to_status(error))


def _traceparent(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and (found := traceparent_of(value)):
            return found
    return ""
