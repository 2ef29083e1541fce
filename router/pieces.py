"""An answer's pieces, as every public edge gets them from `serving` and writes them in its own form."""

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import Struct

from router.output import Finish
from router.request import PromptLogprobs, TokenEvent, TokenLogprobs
from router.stages import Timings


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The prompt itself. `text` is as it was sent, or the text of the ids that were."""

    text: str
    token_ids: tuple[int, ...]


class Delta(Struct, frozen=True, gc=False):
    """What one token adds to a sample, or several that came together: always their ids, and text that may now be
    shown. `logprobs` are the tokens', or none."""

    sample: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """The last word about a sample; counts are in tokens, `seed` is the one in force."""

    sample: int
    finish: Finish
    num_prompt_tokens: int
    num_tokens: int
    cached_tokens: int
    seed: int
    attempts: int
    timings: Timings | None
    "Up to this end, if the client asked for them."


Piece = PromptEcho | PromptLogprobs | Delta | SampleEnd
"""The prompt comes first, then its logprobs, each if asked for; after a sample's end nothing comes of it."""


class Gathered:
    """What came together and is not shown yet."""

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[TokenEvent, str]]] = {}

    def add(self, event: TokenEvent, text: str) -> None:
        self._samples.setdefault(event.sample, []).append((event, text))

    def take(self) -> Iterator[Delta]:
        """One piece for each sample."""
        samples, self._samples = self._samples, {}
        for sample, tokens in samples.items():
            yield Delta(
                sample,
                tuple(event.token_id for event, _ in tokens),
                "".join(text for _, text in tokens),
                tuple(event.logprobs for event, _ in tokens if event.logprobs is not None),
            )
