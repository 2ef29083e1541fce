"""Folds the messages of one answer into chunks and, at its end, a Generation. No I/O; a stream of a client owns one."""

from collections.abc import Callable, Iterable

from splitserve.client.types import Chunk, Generation, TokenLogprobs
from splitserve.service.errors import Cancelled, Internal, SplitserveError
from splitserve.v1 import inference_pb2

TRUNCATED_STREAM = "TRUNCATED_STREAM"


class Fold:
    """The state of one answer: open, then complete or failed, for good.

    An answer is complete only when the server said `complete` and then closed the stream without an error: anything
    else is an error, however much text has arrived.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._complete: inference_pb2.GenerateComplete | None = None
        self._request_id = ""
        self._outcome: Generation | SplitserveError | None = None

    @property
    def is_open(self) -> bool:
        return self._outcome is None

    def add(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """The chunk that `response` brings, or None where it brings none."""
        self._request_id = response.request_id
        if response.WhichOneof("response") == "complete":
            self._complete = response.complete
        elif response.WhichOneof("response") == "chunk":
            chunk = Chunk(
                text=response.chunk.text,
                token_ids=tuple(response.chunk.token_ids),
                logprobs=_logprobs(response.chunk.logprobs),
                prompt_logprobs=_logprobs(response.chunk.prompt_logprobs),
            )
            self._text.append(chunk.text)
            self._token_ids.extend(chunk.token_ids)
            self._logprobs.extend(chunk.logprobs)
            self._prompt_logprobs.extend(chunk.prompt_logprobs)
            return chunk
        return None

    def end(self) -> None:
        """The server closed the stream with status OK. Raises Internal where the answer had no end of its own."""
        if self._complete is None:
            self.fail(Internal("the stream ended before the answer was complete", reason=TRUNCATED_STREAM))
            self.result()
        else:
            self._outcome = self._generation(self._complete)

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

    def _generation(self, complete: inference_pb2.GenerateComplete) -> Generation:
        return Generation(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=complete.finish_reason,
            matched_stop=_matched_stop(complete),
            prompt_tokens=complete.prompt_tokens,
            completion_tokens=complete.completion_tokens,
            cached_tokens=complete.cached_tokens,
            seed=complete.seed,
            attempts=complete.attempts,
            request_id=self._request_id,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
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


def _matched_stop(complete: inference_pb2.GenerateComplete) -> str | int | None:
    readers: dict[str | None, Callable[[], str | int]] = {
        "matched_stop_string": lambda: complete.matched_stop_string,
        "matched_stop_token_id": lambda: complete.matched_stop_token_id,
    }
    reader = readers.get(complete.WhichOneof("matched_stop"))
    return reader() if reader else None
