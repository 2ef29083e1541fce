"""One sample's output as the client sees it: token events in, chunks and the final word out. No network in here.

Made by `serving`, one for each sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from router.request import FinishReason, Sampling, TokenEvent
from router.text import Detokenizer, TextStream
from splitserve.service.errors import Internal


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sample ended, and by what, unless the model or a limit ended it."""

    reason: FinishReason
    matched_stop: str | int | None = None


class OutputDelta(Struct, frozen=True, gc=False):
    """What one token adds: always its id, and text that may now be shown."""

    token_id: int
    text: str
    finish: Finish | None


class SampleOutput:
    """Takes the sample's events in order until one gives a `finish`; tokens after that do not exist for the client.

    `context` are the tokens that its text goes on from.
    """

    def __init__(self, detokenizer: Detokenizer, sampling: Sampling, context: Sequence[int] = ()) -> None:
        self._text = TextStream(detokenizer, sampling.stop, sampling.min_tokens, context)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self.num_tokens = 0

    def take(self, event: TokenEvent) -> OutputDelta:
        """Raises Internal if a token was lost or doubled on its way."""
        if event.position != self.num_tokens:
            raise Internal(f"output token {event.position} came where {self.num_tokens} was due")
        self.num_tokens += 1
        text = ""
        # A token that stops the sample is a signal, not text.
        if event.finish_reason is not FinishReason.STOP:
            delta = self._text.push(event.token_id)
            text = delta.text
            if delta.matched_stop is not None:
                return OutputDelta(event.token_id, text, Finish(FinishReason.STOP, delta.matched_stop))
        if event.finish_reason is None:
            return OutputDelta(event.token_id, text, None)
        return self._last(event.token_id, text, event.finish_reason)

    def _last(self, token_id: int, text: str, reason: FinishReason) -> OutputDelta:
        rest = self._text.finish()
        text += rest.text
        if rest.matched_stop is not None:
            return OutputDelta(token_id, text, Finish(FinishReason.STOP, rest.matched_stop))
        is_stop_id = reason is FinishReason.STOP and token_id in self._stop_token_ids
        return OutputDelta(token_id, text, Finish(reason, token_id if is_stop_id else None))
