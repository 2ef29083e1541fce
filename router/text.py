"""Turns one sample's token ids into text that never changes after it was shown, and finds stop strings in it.

The edge that streams to the client owns one `TextStream` per sample. Stop strings are text, workers see only ids, so
this is the one place that can find them.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class TokenDecoder(Protocol):
    """Incremental detokenization of one sample; what it gives never changes what it gave."""

    def step(self, token_id: int) -> str | None:
        """The text that this token completes; None while a character is not whole yet."""

    def flush(self) -> str | None:
        """What is left, such as the mark for a character that never became whole; what follows it begins anew."""


class Detokenizer(Protocol):
    """The part of a tokenizer that makes text from ids."""

    def decode_stream(self, skip_special_tokens: bool = True) -> TokenDecoder: ...


# Of a text, these say how the next token is to be read.
_CONTEXT_TOKENS = 16


def continued(detokenizer: Detokenizer, context: Sequence[int]) -> TokenDecoder:
    """A decoder for the tokens after those of `context`."""
    decoder = detokenizer.decode_stream()
    for token_id in context[-_CONTEXT_TOKENS:]:
        decoder.step(token_id)
    decoder.flush()  # a character that is not whole there is the context's, and broken
    return decoder


class TextDelta(Struct, frozen=True, gc=False):
    """`text` may be shown; `matched_stop` is the stop string that ends the sample, if one did."""

    text: str
    matched_stop: str | None = None


class StopMatcher:
    """Finds the first stop string to be complete, and holds text back while it could be the start of one.

    The text is read one character at a time (Knuth, Morris and Pratt), so how it was cut into pieces cannot matter.
    Of several that end at the same character, the one that starts earliest counts.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        # The earliest start is the longest string: with this order it is also the first to be found.
        self._stop = sorted(stop, key=len, reverse=True)
        self._borders = [_borders(string) for string in self._stop]
        self._matched = [0] * len(self._stop)
        self._held = ""

    def feed(self, text: str) -> TextDelta:
        """What may be shown now. After a match nothing more may be fed."""
        pending = self._held + text
        for index, character in enumerate(text, start=len(self._held)):
            matched = self._advance(character)
            if matched is not None:
                return TextDelta(pending[: index + 1 - len(matched)], matched)
        keep = len(pending) - max(self._matched, default=0)
        self._held = pending[keep:]
        return TextDelta(pending[:keep])

    def release(self) -> str:
        """The held text, which nothing can complete any more."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return held

    def _advance(self, character: str) -> str | None:
        for which, string in enumerate(self._stop):
            length = self._matched[which]
            while length and string[length] != character:
                length = self._borders[which][length - 1]
            length += string[length] == character
            self._matched[which] = length
            if length == len(string):
                return string
        return None


def _borders(string: str) -> list[int]:
    """For every prefix of `string`: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = borders[length - 1]
        length += string[index] == string[length]
        borders[index] = length
    return borders


class TextStream:
    """One sample's text. Feed every token that is to be shown, once and in order, then `finish`.

    The pieces put together are the one-shot decoding of all tokens, up to a stop string. Stop strings are not looked
    for in the text of the first tokens, while there are fewer than `min_tokens`. `context` are tokens before the first
    one, not to be shown: the pieces are their part of the decoding of all, at whose start some tokenizers drop a space.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        context: Sequence[int] = (),
    ) -> None:
        self._decoder = continued(detokenizer, context)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> TextDelta:
        self._num_tokens += 1
        return self._match(self._decoder.step(token_id))

    def finish(self) -> TextDelta:
        """The rest: bytes that never became a whole character, and text held for a stop string that did not come."""
        delta = self._match(self._decoder.flush())
        return delta if delta.matched_stop is not None else TextDelta(delta.text + self._matcher.release())

    def _match(self, text: str | None) -> TextDelta:
        if self._num_tokens < self._min_tokens:
            return TextDelta(text or "")
        return self._matcher.feed(text or "")
