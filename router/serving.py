"""What every public edge does with a request: have it checked and run, make text of its tokens, count one outcome.

`server` (gRPC) and `openai` (HTTP) call it, each with a `Client` that knows how to write to who asked. Each call is one
task that owns its `Generation`: however the call ends, that task closes the generation and counts one outcome.
"""

import asyncio
import re
from typing import Protocol

import structlog

from router.calls import OpenCalls
from router.metrics import Outcome, RequestRecord, RouterMetrics
from router.output import Finish, SampleOutput
from router.pieces import Gathered, Piece, PromptEcho, SampleEnd
from router.request import Dispatcher, FinishReason, Generation, GenerationRequest, PromptLogprobs, TokenEvent
from router.text import Detokenizer
from router.validation import RequestValidator
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
from splitserve.v1 import inference_pb2 as pb

# A client's own deadline ends the call from its side a little before ours does: still a deadline, not a change of mind.
_DEADLINE_SLACK_S = 0.25

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_log = structlog.get_logger(__name__)


class ClientGoneError(Exception):
    """Nobody is left to tell anything."""


class Client(Protocol):
    """Who asked, as an edge sees it."""

    @property
    def is_gone(self) -> bool:
        """The transport itself says that the call was given up; a cancelled task says so without it."""

    @property
    def ending(self) -> SplitserveError | None:
        """What the edge itself has ended the call with, by cancelling its task."""

    def admit(self, request: GenerationRequest) -> None:
        """The request is sound and goes to the workers next. Raises InvalidRequest where its answer would be more than
        this edge makes."""

    async def write(self, piece: Piece) -> None:
        """Waits while the client does not read. Raises ClientGoneError."""


class Serving:
    """`request_timeout_s` bounds every request, from its arrival until the client has read the answer."""

    def __init__(
        self,
        *,
        detokenizer: Detokenizer,
        validator: RequestValidator,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        request_timeout_s: float,
    ) -> None:
        self._detokenizer = detokenizer
        self._validator = validator
        self._dispatcher = dispatcher
        self._metrics = metrics
        self.request_timeout_s = request_timeout_s
        self.calls = OpenCalls()

    async def serve(
        self, message: pb.GenerateRequest, client: Client, *, timeout_s: float | None = None, traceparent: str = ""
    ) -> None:
        """Writes the whole answer. `timeout_s` is the client's own limit.

        Raises SplitserveError, which the client is to be told; CancelledError or ClientGoneError when it has left. The
        outcome is counted first: the client may look at the metrics as soon as it knows.
        """
        limit = self.request_timeout_s
        deadline = _now() + (limit if timeout_s is None else min(timeout_s, limit))
        record = self._metrics.begin(message.request_id)
        scope = asyncio.timeout_at(deadline)
        try:
            async with scope:
                with self.calls.entered():
                    outcome = await self._serve(message, client, deadline, traceparent, record)
        except ClientGoneError:
            record.end(_outcome_of_leaving(deadline))
            raise
        except asyncio.CancelledError:
            ending = client.ending or self.calls.ending
            if ending is not None and not client.is_gone:
                raise _ended(record, ending) from None
            if _is_being_cancelled() or client.is_gone:
                record.end(_outcome_of_leaving(deadline))
                raise
            # Something inside was cancelled, not this call: without a status the client would wait for ever.
            raise _ended(record, Unavailable("the request was ended inside the router")) from None
        except SplitserveError as error:
            raise _ended(record, error) from None
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                late = DeadlineExceeded("the deadline passed before the output was complete")
                raise _ended(record, late) from None
            _log.exception("request_failed", request_id=message.request_id)
            raise _ended(record, Internal("the router failed; its log says why")) from None
        else:
            record.end(outcome)

    async def _serve(
        self, message: pb.GenerateRequest, client: Client, deadline: float, traceparent: str, record: RequestRecord
    ) -> Outcome:
        try:
            request = await self._validator.validate(message, deadline=deadline, traceparent=traceparent)
            client.admit(request)
            generation = self._dispatcher.submit(request, record.stages)
        except (SplitserveError, asyncio.CancelledError):
            record.refuse()
            raise
        record.admit(len(request.prompt_ids))
        try:
            finish = await self._stream(
                request,
                generation,
                client,
                record,
                wants_timings=message.timings,
                continues_text=not message.HasField("chat"),  # the answer to a chat is a text of its own
            )
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
        client: Client,
        record: RequestRecord,
        *,
        wants_timings: bool,
        continues_text: bool,
    ) -> Finish:
        """Until every sample is finished; the last one's finish stands for the request."""
        samples = _Samples(request, self._detokenizer, record, continues_text=continues_text)
        # With the first word from the workers, not before: until then the request may be refused.
        echoes = iter(() if request.echo is None else (PromptEcho(request.echo, request.prompt_ids),))
        async for event in generation:
            for echo in echoes:
                await client.write(echo)
            if isinstance(event, PromptLogprobs):
                await client.write(event)
                continue
            finish = samples.take(event)
            if finish is not None and event.finish_reason is None:
                # Ended here: the workers do not know, and the client may take its time to read it.
                generation.stop(event.sample)
            if finish is None and event.is_followed:
                continue
            for piece in samples.gathered.take():
                await client.write(piece)
            if finish is None:
                continue
            samples.unfinished.remove(event.sample)
            if not samples.unfinished:
                record.stages.end()
            await client.write(
                SampleEnd(
                    sample=event.sample,
                    finish=finish,
                    num_prompt_tokens=len(request.prompt_ids),
                    num_tokens=samples.outputs[event.sample].num_tokens,
                    cached_tokens=generation.cached_tokens,
                    seed=request.sampling.seed,
                    attempts=generation.attempts,
                    timings=record.stages.timings() if wants_timings else None,
                )
            )
            if not samples.unfinished:
                return finish
        raise Internal("the output ended without a finish reason")


class _Samples:
    """A request's samples as far as they have come: which are `unfinished`, and what is `gathered` for showing."""

    def __init__(
        self, request: GenerationRequest, detokenizer: Detokenizer, record: RequestRecord, *, continues_text: bool
    ) -> None:
        context = request.prompt_ids if continues_text else ()
        self.outputs = [SampleOutput(detokenizer, request.sampling, context) for _ in range(request.sampling.n)]
        self.unfinished = set(range(request.sampling.n))
        self.gathered = Gathered()
        self._shows_output = request.shows_output
        self._record = record

    def take(self, event: TokenEvent) -> Finish | None:
        """How the sample has ended, if it has with this token."""
        if event.sample not in self.unfinished:
            return None
        if not self._shows_output:
            return Finish(FinishReason.LENGTH)
        self._record.token(event.sample)
        delta = self.outputs[event.sample].take(event)
        self.gathered.add(event, delta.text)
        return delta.finish


def traceparent_of(header: str) -> str:
    """A W3C `traceparent` that an edge was given, if it is one, else nothing."""
    return header if _TRACEPARENT.fullmatch(header) else ""


def _ended(record: RequestRecord, error: SplitserveError) -> SplitserveError:
    record.end(_outcome_of(error, record))
    return error


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


def _outcome_of_leaving(deadline: float) -> Outcome:
    is_late = _now() > deadline - _DEADLINE_SLACK_S
    return Outcome.DEADLINE if is_late else Outcome.CANCELLED


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _now() -> float:
    return asyncio.get_running_loop().time()
