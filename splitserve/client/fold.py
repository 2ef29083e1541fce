"""Folds the messages of one answer into chunks and, at its end, a Generation. No I/O; a stream of a client owns one."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from splitserve.client.types import Chunk, Generation, Sample, Timings, TokenLogprobs
from splitserve.service.errors import Cancelled, Internal, SplitserveError
from splitserve.v1 import inference_pb2

TRUNCATED_STREAM = "TRUNCATED_STREAM"
ODD_SAMPLE = "ODD_SAMPLE"


class _SampleFold:
    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self.complete: inference_pb2.GenerateComplete | None = None

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)

    def sample(self, complete: inference_pb2.GenerateComplete) -> Sample:
        return Sample(
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(token_id for chunk in self._chunks for token_id in chunk.token_ids),
            finish_reason=complete.finish_reason,
            matched_stop=_matched_stop(complete),
            completion_tokens=complete.completion_tokens,
            logprobs=tuple(entry for chunk in self._chunks for entry in chunk.logprobs),
        )


class Fold:
    """The state of one answer of `num_samples`: open, then complete or failed, for good.

    An answer is complete only when the server said `complete` of every sample and then closed the stream without an
    error: anything else is an error, however much text has arrived.
    """

    def __init__(self, num_samples: int = 1) -> None:
        self._num_samples = num_samples
        self._samples = defaultdict[int, _SampleFold](_SampleFold)
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._echo = Chunk("", ())  # the one that has the prompt
        self._request_id = ""
        self._outcome: Generation | SplitserveError | None = None

    @property
    def is_open(self) -> bool:
        return self._outcome is None

    def add(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """The chunk that `response` brings, or None where it brings none."""
        self._request_id = response.request_id
        kind = response.WhichOneof("response")
        if kind is None:
            return None
        if not 0 <= response.index < self._num_samples:
            self.fail(Internal(f"the answer has a sample {response.index}, of {self._num_samples}", reason=ODD_SAMPLE))
            return None
        sample = self._samples[response.index]
        if kind == "complete":
            sample.complete = response.complete
            return None
        chunk = Chunk(
            text=response.chunk.text,
            token_ids=tuple(response.chunk.token_ids),
            logprobs=_logprobs(response.chunk.logprobs),
            prompt_logprobs=_logprobs(response.chunk.prompt_logprobs),
            index=response.index,
            prompt_text=response.chunk.prompt_text,
            prompt_token_ids=tuple(response.chunk.prompt_token_ids),
        )
        sample.add(chunk)
        self._prompt_logprobs.extend(chunk.prompt_logprobs)
        if chunk.prompt_token_ids:
            self._echo = chunk
        return chunk

    def end(self) -> None:
        """The server closed the stream with status OK. Raises Internal where the answer had no end of its own."""
        folds = [fold for _, fold in sorted(self._samples.items())]
        completes = [fold.complete for fold in folds if fold.complete is not None]
        if len(completes) < self._num_samples:
            self.fail(Internal("the stream ended before the answer was complete", reason=TRUNCATED_STREAM))
            self.result()
        elif self.is_open:
            self._outcome = self._generation(folds, completes)

    def fail(self, error: SplitserveError) -> None:
        if self.is_open:
            self._outcome = error

    def close(self) -> bool:
        """The caller wants no more. True if that gives up an answer that was still open."""
        was_open = self.is_open
        self.fail(Cancelled("the caller closed the stream"))
        return was_open

    def result(self) -> Generation:
        """The complete answer; raises the error that ended it. Only for an answer that is no longer open."""
        assert self._outcome is not None, "the answer is still open"
        if isinstance(self._outcome, SplitserveError):
            raise self._outcome
        return self._outcome

    def _generation(
        self, folds: Sequence[_SampleFold], completes: Sequence[inference_pb2.GenerateComplete]
    ) -> Generation:
        first = completes[0]
        return Generation(
            samples=tuple(fold.sample(complete) for fold, complete in zip(folds, completes, strict=True)),
            prompt_tokens=first.prompt_tokens,
            completion_tokens=sum(complete.completion_tokens for complete in completes),
            cached_tokens=first.cached_tokens,
            seed=first.seed,
            attempts=max(complete.attempts for complete in completes),
            request_id=self._request_id,
            prompt_logprobs=tuple(self._prompt_logprobs),
            timings=_timings(completes),
            prompt_text=self._echo.prompt_text,
            prompt_token_ids=self._echo.prompt_token_ids,
        )


def _logprobs(entries: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob if entry.HasField("logprob") else None,
            top={top.token_id: top.logprob for top in entry.top},
        )
        for entry in entries
    )


def _timings(completes: Iterable[inference_pb2.GenerateComplete]) -> Timings | None:
    """Those of the sample that ended last."""
    told = [
        Timings(
            tokenize_s=complete.timings.tokenize_s,
            queue_s=complete.timings.queue_s,
            prefill_s=complete.timings.prefill_s,
            handoff_s=complete.timings.handoff_s,
            decode_s=complete.timings.decode_s,
            transfer_bytes=complete.timings.transfer_bytes,
        )
        for complete in completes
        if complete.HasField("timings")
    ]
    return max(told, key=lambda timings: timings.total_s, default=None)


def _matched_stop(complete: inference_pb2.GenerateComplete) -> str | int | None:
    readers: dict[str | None, Callable[[], str | int]] = {
        "matched_stop_string": lambda: complete.matched_stop_string,
        "matched_stop_token_id": lambda: complete.matched_stop_token_id,
    }
    reader = readers.get(complete.WhichOneof("matched_stop"))
    return reader() if reader else None
